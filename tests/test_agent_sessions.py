"""The sessions command from end to end on tiny models: what it records, how it resumes, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import fathom_eval.agent_sessions as sessions_module
from fathom_eval.agent_sessions import DecodeSettings, Unit, before_stop, evaluate, step_branches, with_controls
from fathom_eval.branches import Branch
from fathom_eval.cli import main
from fathom_eval.decode import BranchResult, decode
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method, parse_methods
from fathom_eval.prefill import prefill
from fathom_eval.run import RECORDS, Run
from fathom_eval.scoring import step_agreement
from fathom_eval.session_data import SessionData, SourceSettings, check_k, choose_bounds, prepare_sessions
from fathom_eval.tool_calls import tool_call_state
from tests.sessions.rows import chat_messages, rebench_row, write_jsonl
from tests.sessions.templates import FAILS_ON_TOOLS, WITH_TOOLS, tokenizer_with
from tests.tiny import save_tiny, tiny_model

METHODS = "fathom,sparq,landmark"
TOKENS = "500:700"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(
        tmp_path_factory.mktemp("sessions") / "model", layers=2, query_heads=4, kv_heads=2, head_dim=16, max_positions=2048, seed=1
    )


def some_rows(count: int = 6, repo: str = "owner/project") -> list[dict[str, Any]]:
    rows = []
    for number in range(count):
        messages = chat_messages(6, words=3 + number % 3)
        messages[1]["content"] = f"Fix the bug of number {number}."
        rows.append(rebench_row(messages, trajectory_id=f"t{number}", repo=repo))
    return rows


@pytest.fixture
def trajectories(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", some_rows())


@pytest.fixture
def arguments(model: Path, trajectories: Path, tmp_path: Path) -> Callable[..., list[str]]:
    def build(*flags: str, **changes: Any) -> list[str]:
        options = {
            "model": model,
            "trajectories": trajectories,
            "k": 400,
            "methods": METHODS,
            "sessions": 2,
            "session_tokens": TOKENS,
            "max_new_tokens": 24,
            "output": tmp_path / "run",
            **changes,
        }
        given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
        return ["sessions", "--offline", *given, *flags]

    return build


def records(folder: Path) -> list[dict[str, Any]]:
    return Run.load(folder).records()


def by_branch(folder: Path) -> dict[Any, dict[str, Any]]:
    return {(record["sample"], record["label"], record["k"]): record for record in records(folder)}


def count_prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    prefills: list[int] = []
    monkeypatch.setattr(
        sessions_module, "prefill", lambda loaded, ids, **options: (prefills.append(len(ids)), prefill(loaded, ids, **options))[1]
    )
    return prefills


def test_records_report_and_resume(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefills = count_prefills(monkeypatch)
    assert main(arguments()) == 0
    run = tmp_path / "run"
    first = records(run)
    labels = {record["label"] for record in first}
    assert labels == {"dense", "exact", "dense, alone", "exact, alone", *(spec.label for spec in parse_methods(METHODS))}
    assert len(first) == 2 * 7
    assert len(prefills) == 2, "one dense prefill a session"
    found = by_branch(run)
    for record in first:
        assert record["kind"] == "sessions"
        assert record["task"] == "session"
        assert record["context"] == 700
        assert 500 <= record["prompt_tokens"] <= 700
        assert record["fired"] == record["steps"] * 2
        assert record["bits"] is None if record["control"] else record["bits"] == record["declared_bits"] > 0
        assert record["control"] == (record["label"].split(",")[0] in ("dense", "exact"))
        exact, dense = found[record["sample"], "exact", 400], found[record["sample"], "dense", None]
        assert record["agreement_dense"] == step_agreement(dense["generation"], record["generation"])
        assert record["agreement_recorded"] == step_agreement(dense["recorded_step"], record["generation"])
        if record["k"] is not None:
            assert record["score"] == record["agreement_exact"] == step_agreement(exact["generation"], record["generation"])
            assert record["exact_match"] == (record["token_ids"] == exact["token_ids"])
            if (position := record["first_divergent_token"]) is None:
                assert record["exact_match"]
            else:
                assert record["token_ids"][:position] == exact["token_ids"][:position]
                assert record["token_ids"][position : position + 1] != exact["token_ids"][position : position + 1]
        assert record["recorded_tool_call"] == "valid"
        assert record["memory"]["held_bytes"] == pytest.approx(record["memory"]["estimated_held_bytes"], rel=0.02)
        assert record["memory"]["estimated_bytes"] > record["memory"]["estimated_held_bytes"]
        assert record["sources"][-1]["whole"] is False
        assert ("recorded_step" in record) == (record["label"] == "dense")
    for sample in range(2):
        exact, dense = found[sample, "exact", 400], found[sample, "dense", None]
        assert exact["dense_agreement_exact"] == step_agreement(exact["generation"], dense["generation"])
        assert found[sample, "exact, alone", 400]["token_ids"] == exact["token_ids"], "in fp32 the batch changes nothing"
    assert len({record["score"] for record in first}) > 2, "agreements that differ"
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["kind"] == "sessions"
    assert manifest["settings"]["baseline"] == "sparq r=D/8"
    output = capsys.readouterr().out
    assert "MiB (prefix" in output
    assert "beside the model" in output
    assert str(run / "report" / "report.html") in output

    # A finished run does no model work; what is added computes itself alone, and is compared with the exact step that is there.
    assert main(arguments()) == 0
    assert len(prefills) == 2
    assert main(arguments(methods=f"{METHODS},loki", k="400,420")) == 0
    assert len(prefills) == 4
    assert len(records(run)) == 2 * (2 + 2 * 2 + 2 * 4)
    assert records(run)[: len(first)] == first
    assert main(arguments(methods=f"{METHODS},loki", k="400,420", output=tmp_path / "whole")) == 0
    resumed, whole = by_branch(run), by_branch(tmp_path / "whole")
    assert resumed.keys() == whole.keys()
    compared = ("token_ids", "score", "agreement_dense", "agreement_recorded", "exact_match", "first_divergent_token", "bits")
    assert all(resumed[key][name] == whole[key][name] for key in whole for name in compared)


def test_order_and_batches_do_not_matter(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    assert main(arguments()) == 0
    assert main(arguments(output=tmp_path / "other", methods="landmark,exact,fathom,dense,sparq", batch_size=2, sessions=1)) == 0
    one, other = by_branch(tmp_path / "run"), by_branch(tmp_path / "other")
    assert {key for key in one if key[0] == 0} == other.keys()
    for key, record in other.items():
        assert [record[name] for name in ("session_id", "token_ids", "score", "rows")] == [
            one[key][name] for name in ("session_id", "token_ids", "score", "rows")
        ]


@pytest.mark.parametrize("index", ["host", "hbm"])
def test_the_timed_step_gives_the_records_of_lock_step_decoding(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], index: str
) -> None:
    methods = {"methods": f"{METHODS},quest,sparq:rerank=2"}
    assert main(arguments(**methods)) == 0
    capsys.readouterr()
    assert main(arguments(output=tmp_path / "step", runtime=index, **methods)) == 0
    assert "decoded in lock-step: dense, exact, quest" in capsys.readouterr().out
    one, other = by_branch(tmp_path / "run"), by_branch(tmp_path / "step")
    assert one.keys() == other.keys()
    timed = ("seconds", "prefill_seconds", "memory")
    for key, record in other.items():
        assert record.pop("decoded_by") == ("lock-step" if record["method"] in ("dense", "exact", "quest") else "runtime")
        assert {name: value for name, value in record.items() if name not in timed} == {
            name: value for name, value in one[key].items() if name not in timed
        }
        # Only what is decoded in lock-step has its stores in the prefix.
        memory = record["memory"]
        assert memory["held_bytes"] == pytest.approx(memory["estimated_held_bytes"], rel=0.02)
        assert memory["held_bytes"] < one[key]["memory"]["held_bytes"]
    assert main(arguments(output=tmp_path / "step", **methods)) == 2
    assert "runtime" in capsys.readouterr().err
    # An added method is compared with the steps that are there.
    assert main(arguments(output=tmp_path / "step", runtime=index, methods=f"{methods['methods']},loki")) == 0
    added = by_branch(tmp_path / "step")[0, parse_method("loki").label, 400]
    assert added["decoded_by"] == "runtime"
    assert added["score"] == step_agreement(one[0, "exact", 400]["generation"], added["generation"])


def data_of(loaded: Any, trajectories: Path, **changes: Any) -> SessionData:
    settings = SourceSettings(str(trajectories), "auto", sessions=9, low=500, high=700)
    return prepare_sessions(loaded, dataclasses.replace(settings, **changes))


def test_a_session_gives_the_same_steps_wherever_it_stands(trajectories: Path) -> None:
    loaded = tiny_model(max_positions=2048)
    data = data_of(loaded, trajectories)
    assert len(data.sessions) >= 2
    turned = dataclasses.replace(data, sessions=data.sessions[::-1])
    branches = step_branches(with_controls(parse_methods(METHODS)), [64], loaded.facts)

    def steps(of: SessionData) -> dict[Any, Any]:
        units = [Unit(index, branches) for index in range(len(of.sessions))]
        found = [record for _, unit in evaluate(loaded, of, units, DecodeSettings(8, 64)) for record in unit]
        return {(record["session_id"], record["label"]): (record["token_ids"], record["bits"]) for record in found}

    assert steps(data) == steps(turned)
    other_seed = {session.id for session in data_of(loaded, trajectories, seed=1).sessions}
    assert other_seed != {session.id for session in data.sessions}


@pytest.mark.parametrize("add_bos", [True, False])
def test_dense_equals_generate_with_stop_strings(trajectories: Path, add_bos: bool) -> None:
    loaded = tiny_model(max_positions=2048, add_bos=add_bos)
    prompt = data_of(loaded, trajectories).sessions[0].prompt_ids
    dense = [Branch(parse_method("dense"), None)]
    [free] = decode(loaded, prefill(loaded, prompt), dense, 40)
    text = loaded.tokenizer.decode(free.token_ids)
    first, second = re.findall(r"[ -~]{5,}", text)[:2]
    # Stop strings out of what the model writes: across tokens, within one, one that begins in the prompt, one that never comes.
    stops = [(first[2:5], "never this"), (second[-4:], second[-3:-1]), (f":\n{text[0]}", "no"), ("no such text",)]
    ends = set()
    for stop_strings in stops:
        [ours] = decode(loaded, prefill(loaded, prompt), dense, 40, stop_strings=stop_strings)
        loaded.model.set_attn_implementation("eager")
        theirs = loaded.model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),  # else the BOS is taken for padding
            max_new_tokens=40,
            do_sample=False,
            stop_strings=list(stop_strings),
            tokenizer=loaded.tokenizer,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        assert list(ours.token_ids) == theirs
        assert ours.finish == ("stop" if len(theirs) < 40 else "length")
        assert ours.steps == len(theirs)
        ends.add(ours.finish)
    assert ends == {"stop", "length"}


def test_rows_stop_by_themselves(trajectories: Path) -> None:
    loaded = tiny_model(max_positions=2048)
    prefix = prefill(loaded, data_of(loaded, trajectories).sessions[0].prompt_ids)
    branches = [Branch(parse_method("dense"), None), Branch(parse_method("exact"), 64), Branch(parse_method("landmark"), 40)]
    free = decode(loaded, prefix, branches, 30)
    stop = loaded.tokenizer.decode(free[2].token_ids)[4:9]
    together = decode(loaded, prefix, branches, 30, stop_strings=(stop,))
    for branch, result, unstopped in zip(branches, together, free, strict=True):
        [alone] = decode(loaded, prefix, [branch], 30, stop_strings=(stop,))
        assert (result.token_ids, result.finish, result.steps, result.bits) == (alone.token_ids, alone.finish, alone.steps, alone.bits)
        assert result.token_ids == unstopped.token_ids[: len(result.token_ids)]
    assert together[2].finish == "stop"


def test_what_is_compared_with_what(trajectories: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model(max_positions=2048)
    data = data_of(loaded, trajectories)
    data.sessions[0] = dataclasses.replace(data.sessions[0], target_text="t i d e s")
    said = {"dense": "d i e", "exact": "t i d e", "sparq": "d i e t\n\n### User:\n", "landmark": "t i d e", "loki": ""}

    def canned(loaded: Any, prefix: Any, branches: list[Branch], *_: Any, **options: Any) -> list[BranchResult]:
        assert options["stop_strings"] == data.renderer.stop_strings
        results = []
        for branch in branches:
            name = branch.spec.method.name
            finish = {"sparq": "stop", "loki": "error"}.get(name, "length")
            ids = tuple(loaded.tokenizer(said[name], add_special_tokens=False).input_ids)
            results.append(BranchResult(branch, ids, finish, "broken" if name == "loki" else None, 1, 2, None, None, None, 1.0, 0.0))
        return results

    monkeypatch.setattr(sessions_module, "decode", canned)
    branches = step_branches(with_controls(parse_methods("sparq,landmark,loki")), [64], loaded.facts)
    [(_, found)] = list(evaluate(loaded, data, [Unit(0, branches)], DecodeSettings(8, 64)))
    by_method = {record["method"]: record for record in found if "batch" not in record["options"]}
    # The ratio is not symmetric: the step compared with stands first. ratio(tide, diet) is 0.25, ratio(diet, tide) is 0.5.
    assert step_agreement("t i d e", "d i e t") != step_agreement("d i e t", "t i d e")
    sparq = by_method["sparq"]
    assert sparq["generation"] == "d i e t"
    assert sparq["score"] == sparq["agreement_exact"] == step_agreement("t i d e", "d i e t")
    assert sparq["agreement_dense"] == step_agreement("d i e", "d i e t")
    assert sparq["agreement_recorded"] == step_agreement("t i d e s", "d i e t")
    assert (sparq["exact_match"], sparq["first_divergent_token"]) == (False, 0)
    assert by_method["exact"]["dense_agreement_exact"] == step_agreement("t i d e", "d i e")
    assert by_method["dense"]["agreement_exact"] is None
    landmark = by_method["landmark"]
    assert (landmark["score"], landmark["exact_match"], landmark["first_divergent_token"]) == (1.0, True, None)
    loki = by_method["loki"]
    assert [loki[name] for name in ("score", "agreement_dense", "agreement_recorded", "exact_match", "tool_call")] == [None] * 5
    assert loki["error"] == "broken"


def test_text_ends_before_the_stop_string() -> None:
    stops = ("\n\n### User:\n", "\n\n### Tool result (")
    assert before_stop("done\n\n### Tool result (", stops, "stop") == "done"
    assert before_stop("a\n\n### Tool result (x\n\n### User:\n", stops, "stop") == "a"
    assert before_stop("\n### User:\n", stops, "stop") == "", "the stop string began in the prompt"
    assert before_stop("talks of\n\n### User:\n", stops, "length") == "talks of\n\n### User:\n"


CALL = '<tool_call>\n{"name": "execute_bash", "arguments": {"command": "ls"}}\n</tool_call>'


@pytest.mark.parametrize(
    ("text", "plain", "cut", "state"),
    [
        (f"Look.\n{CALL}", True, False, "valid"),
        (f"{CALL}\n{CALL}", True, False, "valid"),
        (CALL.replace("execute_bash", "rm_all"), True, False, "unknown tool"),
        (f"{CALL}\n{CALL.replace('execute_bash', 'rm_all')}", True, False, "unknown tool"),
        (CALL.replace('"ls"}', '"ls"'), True, False, "broken"),
        (CALL.replace('{"command": "ls"}', "5"), True, False, "broken"),
        ("<tool_call>\n[1]\n</tool_call>", True, False, "broken"),
        (CALL[:40], True, True, "unfinished"),
        (CALL[:40], True, False, "broken"),
        ("I am done.", True, False, "none"),
        ('{"name": "execute_bash", "arguments": {}}', True, False, "none"),
        ('{"name": "execute_bash", "parameters": {"command": "ls"}}', False, False, "valid"),
        ('[TOOL_CALLS][{"name": "execute_bash", "arguments": "{\\"command\\": 1}"}]', False, False, "valid"),
        ("<function=execute_bash>\n<parameter=command>ls</parameter></function>", False, False, "valid"),
        ("<function=other>", False, False, "unknown tool"),
        ('[TOOL_CALLS][{"name": "exec', False, True, "unfinished"),
        ("{" * 5000 + CALL, False, False, "broken"),
        ('{"name": "a name in data"}', False, False, "none"),
    ],
)
def test_tool_calls(text: str, plain: bool, cut: bool, state: str) -> None:
    assert tool_call_state(text, {"execute_bash", "finish"}, plain=plain, cut=cut) == state


def test_a_model_with_a_template_uses_it(tmp_path: Path, trajectories: Path) -> None:
    tokenizer = tokenizer_with(WITH_TOOLS)
    loaded = dataclasses.replace(tiny_model(max_positions=2048, vocab=len(tokenizer)), tokenizer=tokenizer)
    data = data_of(loaded, trajectories)
    assert data.rendering == "the tokenizer's chat template"
    assert data.sessions[0].tools == {"execute_bash"}
    branches = step_branches(with_controls([]), [64], loaded.facts)
    [(_, found)] = list(evaluate(loaded, data, [Unit(0, branches)], DecodeSettings(6, 64)))
    assert len(found) == 4
    broken = dataclasses.replace(loaded, tokenizer=tokenizer_with(FAILS_ON_TOOLS))
    with pytest.raises(UserError, match="fails on tools"):
        data_of(broken, trajectories, rendering="template")
    assert "fails on tools" in data_of(broken, trajectories).rendering


def test_bounds_follow_the_model_and_the_set() -> None:
    facts = tiny_model(max_positions=8192).facts
    assert choose_bounds(None, facts, 256, is_builtin=True)[:2] == (6000, 7500)
    long = dataclasses.replace(facts, max_positions=131072)
    assert choose_bounds(None, long, 256, is_builtin=False) == (80_000, 100_000, "the full length")
    low, high, why = choose_bounds(None, long, 256, is_builtin=True)
    assert (low, high) == (9600, 12000)
    assert "built-in" in why
    assert choose_bounds("500:900", facts, 256, is_builtin=False) == (500, 900, "as asked")
    with pytest.raises(UserError, match=r"holds 8,192; give --session-tokens up to 7,936 or --rope-scaling yarn:13$"):
        choose_bounds("80000:100000", facts, 256, is_builtin=False)
    with pytest.raises(UserError, match=r"yarn:8$"):
        choose_bounds("30000:60000", dataclasses.replace(facts, max_positions=4 * 8192), 256, is_builtin=False, scaling=4)
    with pytest.raises(UserError, match="too few for a session"):
        choose_bounds(None, facts, 8000, is_builtin=True)
    with pytest.raises(UserError, match="k=6,000 is no selection from sessions of 6,000 to 7,500 tokens"):
        check_k([512, 6000], 6000, 7500, facts)


def test_an_interrupted_run_goes_on_where_it_stopped(
    arguments: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = sessions_module.decode, []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(sessions_module, "decode", interrupted)
    assert main(arguments()) == 130
    done = records(tmp_path / "run")
    assert len(done) == 7
    assert main(arguments()) == 0
    assert len(calls) == 3 + 2 + 3
    assert records(tmp_path / "run")[:7] == done
    assert len(records(tmp_path / "run")) == 14


def test_text_is_left_out_on_request(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    assert main(arguments(methods="sparq", sessions=1)) == 0
    recorded = next(record["recorded_step"] for record in records(tmp_path / "run") if record["label"] == "dense")
    assert "thought" in recorded
    assert main(arguments("--no-recorded-text", methods="sparq", sessions=1, output=tmp_path / "published")) == 0
    assert main(arguments("--no-text", methods="sparq", sessions=1, output=tmp_path / "bare")) == 0
    published, bare = records(tmp_path / "published"), records(tmp_path / "bare")
    assert all(record["generation"] for record in published)
    assert all(record["generation"] is None and record["token_ids"] for record in bare)
    assert [record["score"] for record in bare] == [record["score"] for record in records(tmp_path / "run")]
    for folder in ("published", "bare"):
        for path in (tmp_path / folder).rglob("*"):
            if path.is_file() and path.suffix != ".png":
                text = path.read_text(encoding="utf-8")
                assert json.dumps(recorded)[1:40] not in text, path
                assert "recorded_step" not in text or path.name == "steps.csv", path
    # Without texts, methods that are added are compared all the same.
    assert main(arguments("--no-text", methods="sparq,landmark", sessions=1, output=tmp_path / "bare")) == 0
    assert main(arguments(methods="sparq,landmark", sessions=1)) == 0
    scores = [by_branch(tmp_path / folder)[0, parse_method("landmark").label, 400]["score"] for folder in ("bare", "run")]
    assert scores[0] == scores[1]


def test_prompts_are_kept_on_request(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    assert main(arguments("--log-samples", methods="dense", sessions=1)) == 0
    [sample] = (tmp_path / "run" / "samples").iterdir()
    assert sample.read_text(encoding="utf-8").endswith("### Assistant:\n")


def test_json_is_one_document(arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments("--json", methods="sparq", sessions=1)) == 0
    document = json.loads(capsys.readouterr().out)
    assert Path(document["html"]).exists()
    assert {row["method"] for row in document["table"]} >= {"dense", "exact", "exact, alone", "sparq r=D/8"}


def test_the_built_in_trajectories_are_the_default_and_are_called_scripted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = save_tiny(tmp_path / "long", layers=1, query_heads=2, kv_heads=1, head_dim=16, max_positions=8192)
    given = ("--sessions=1", "--max-new-tokens=3", "--methods=sparq:r=8", "--offline", f"--output={tmp_path / 'run'}")
    assert main(["sessions", "--k=2048", f"--model={folder}", *given]) == 0
    out = capsys.readouterr().out
    assert "sessions of 6,400 to 8,000 tokens, scaled down from 80,000 to 100,000, since" in out
    assert "holds 8,192" in out
    assert "trajectories: built-in, scripted;" in out
    assert "The trajectories are scripted" in out
    [manifest] = tmp_path.glob("run/manifest.json")
    assert json.loads(manifest.read_text())["trajectories"] == {"name": "built-in, scripted", "scripted": True}
    assert "The trajectories are scripted" in (tmp_path / "run" / "report" / "report.html").read_text(encoding="utf-8")


def test_fewer_sessions_than_asked_is_said(arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(methods="dense", sessions=500, max_new_tokens=2)) == 0
    assert "500 sessions were asked for; the trajectories give" in capsys.readouterr().err


def test_a_lack_of_memory_is_seen_before_the_prefill(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "prefill", lambda *_: pytest.fail("a prefill was started"))
    monkeypatch.setattr("fathom_eval.memory.free_bytes", lambda device: 1000)
    assert main(arguments()) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: session 0 (owner/project, ")
    assert "are free on cpu: give shorter sessions" in error
    assert not (tmp_path / "run" / RECORDS).exists()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"methods": "fathm"}, "unknown method 'fathm'; did you mean 'fathom'"),
    ({"k": "36"}, "k=36 leaves nothing to select"),
    ({"k": "64,500"}, "k=500 is no selection from sessions of 500 to 700 tokens"),
    ({"sessions": "0"}, "--sessions 0 must be at least 1"),
    ({"max_new_tokens": "0"}, "--max-new-tokens 0 must be at least 1"),
    ({"session_tokens": "9:1"}, "the form is LOW:HIGH"),
    ({"session_tokens": "3000:4000"}, "holds 2,048; give --session-tokens up to 2,024 or --rope-scaling yarn:2"),
    ({"session_tokens": None, "max_new_tokens": 1900}, "too few for a session"),
    ({"session_tokens": "1999:2000", "repo": "owner/project"}, "no repository of rows.jsonl gives a session of 1,999 to 2,000 tokens"),
    ({"trajectories": "/no/such/file.jsonl"}, "there is no file or folder '/no/such/file.jsonl'"),
    ({"trajectories": "no-such/set"}, "--offline forbids"),
    ({"format": "openhand-v0"}, "did you mean 'openhands-v0'"),
    ({"format": "openhands-v0"}, "holds no trajectory of format openhands-v0"),
    ({"condensation": "none"}, "unknown condensation 'none'"),
    ({"repo": "owner/projekt"}, "no trajectory is of repository 'owner/projekt'; did you mean 'owner/project'"),
    ({"baseline": "loki"}, "the baseline 'loki' is not measured"),
    ({"trajectories": None, "trajectories_revision": "main"}, "--trajectories-revision goes with"),
    ({"rope_scaling": "linear:4"}, "unknown rope scaling"),
    ({"runtime": "gpu"}, "--runtime gpu: the index lies in 'host' or in 'hbm'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_one_line_and_exit_code_2_before_any_prefill(
    arguments: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(sessions_module, "prefill", lambda *_: pytest.fail("a prefill was started"))
    assert main(arguments(**changes)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "run").exists(), "a run that could not start leaves no folder"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b'{"x": 1}\n', "has no known format"),
        (b'{"instance_id": "a__b-1", "trajectory": []}\n', "holds no usable trajectory"),
    ],
)
def test_files_without_trajectories(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    (tmp_path / "file.jsonl").write_bytes(content)
    assert main(arguments(trajectories=tmp_path / "file.jsonl", model="/nowhere")) == 2
    assert message in capsys.readouterr().err


def test_a_broken_line_is_named_and_the_rest_is_used(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + '{"broken": \n', encoding="utf-8")
    assert main(arguments(methods="dense", sessions=1, max_new_tokens=2)) == 0
    assert "rows.jsonl, line 7" in capsys.readouterr().out


def late_row(number: int, turns: int) -> dict[str, Any]:
    """A long task before the first step that could be a target."""
    messages = chat_messages(turns)
    messages[1]["content"] = " ".join(f"Fault {number} is seen at line {line}." for line in range(60))
    return rebench_row(messages, trajectory_id=f"late{number}", repo="owner/project")


def test_a_refusal_names_its_cause_after_what_was_skipped(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_jsonl(tmp_path / "late.jsonl", [late_row(number, 4) for number in range(3)])
    path.write_text(path.read_text(encoding="utf-8") + '{"broken": \n', encoding="utf-8")
    assert main(arguments(trajectories=path)) == 2
    out, err = capsys.readouterr()
    assert "skipped (1):\n  late.jsonl, line 4: broken JSON" in out
    cause = (
        r"text is not lacking \(owner/project has [\d,]+ tokens\), but all its trajectories are longer and without a usable target in the"
    )
    found = re.search(cause + r" first 700 tokens; the earliest comes after ([\d,]+): give longer --session-tokens", err)
    assert found
    enough = int(found[1].replace(",", ""))
    assert enough > 700
    fits = {"methods": "dense", "sessions": 1, "max_new_tokens": 2, "session_tokens": f"{enough}:{enough}"}
    assert main(arguments(trajectories=path, **fits)) == 0, "what the refusal says is enough"

    mixed = write_jsonl(
        tmp_path / "mixed.jsonl", [*(late_row(number, 4) for number in range(2)), rebench_row(chat_messages(1), repo="owner/project")]
    )
    assert main(arguments(trajectories=mixed)) == 2
    assert "but no choice of trajectories ends before a usable target at that length; 2 of 3 are longer" in capsys.readouterr().err


def test_an_unrendered_repository_needs_a_name(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [dict(row, repo=None, instance_id=None) for row in some_rows()]
    path = write_jsonl(tmp_path / "nameless.jsonl", rows)
    assert main(arguments(trajectories=path)) == 2
    assert "names a repository: name it with --default-repo" in capsys.readouterr().err
    assert main(arguments(trajectories=path, default_repo="x/y", methods="dense", sessions=1, max_new_tokens=2)) == 0


def test_hostile_text_reaches_no_terminal(arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\u202e<script>"
    rows = some_rows(repo=f"owner/{evil}")
    for row in rows:
        row["trajectory_id"] += evil
        row["trajectory"][2]["content"] = evil * 3
    path = write_jsonl(tmp_path / "evil.jsonl", rows)
    assert main(arguments(trajectories=path, sessions=1)) == 0
    out, err = capsys.readouterr()
    assert all(character.isprintable() or character == "\n" for character in out + err)
    page = (tmp_path / "run" / "report" / "report.html").read_text(encoding="utf-8")
    assert not re.search("(owned|owner/).{0,40}<script", page, re.DOTALL)  # the page has a script of its own
    assert "\x1b" not in page
    assert "\u202e" not in page
