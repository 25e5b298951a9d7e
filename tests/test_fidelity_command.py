"""The fidelity command from end to end on a tiny model: what it records, how it resumes, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fathom_eval.fidelity as fidelity_module
import fathom_eval.methods as methods_module
from fathom_eval import cli
from fathom_eval.errors import UserError
from fathom_eval.fidelity import METRICS
from fathom_eval.fidelity_windows import Windows
from fathom_eval.methods.sparq import SparQ
from fathom_eval.methods.uniform import Thumbnail
from fathom_eval.models import ModelFacts
from fathom_eval.planes import PlaneStore
from fathom_eval.reads import Reads
from fathom_eval.run import Run
from fathom_eval.stores import StoreSpec
from fathom_eval.tasks.haystack import Haystack, load_haystack
from tests.sessions.rows import chat_messages, rebench_row, write_jsonl
from tests.tiny import save_tiny, tiny_tokenizer


def haystack(words: int) -> Haystack:
    return Haystack.of("file", "prose.txt", [f" The boat number {word} left the old harbour." for word in range(words)])


@pytest.mark.parametrize("add_bos", [True, False])
def test_windows_are_disjoint_seeded_and_the_same_whatever_else_is_asked_for(add_bos: bool) -> None:
    tokenizer = tiny_tokenizer(add_bos=add_bos)
    windows = Windows(tokenizer, haystack(100), seed=3)
    text = tokenizer.encode(haystack(100).text, add_special_tokens=False)
    length = 200 - add_bos
    fit = len(text) // length
    starts = [windows.start(200, index) for index in range(fit)]
    assert all(b - a >= length for a, b in zip(sorted(starts), sorted(starts)[1:], strict=False))
    assert starts != sorted(starts)
    for index in (0, fit - 1):
        ids = windows.token_ids(200, index)
        assert len(ids) == 200
        assert ids.count(tokenizer.bos_token_id) == add_bos
        assert ids[add_bos:] == text[starts[index] : starts[index] + length]
    assert [Windows(tokenizer, haystack(100), seed=3).start(200, 1), windows.start(200, 1)] == [starts[1]] * 2
    assert [Windows(tokenizer, haystack(100), seed=4).start(200, index) for index in range(fit)] != starts
    windows.check(200, fit)
    with pytest.raises(UserError, match=f"{fit + 1} windows of 200 tokens do not fit: .* enough for {fit};"):
        windows.check(200, fit + 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("fidelity") / "model", layers=2, query_heads=4, kv_heads=2, head_dim=16, max_positions=2048)


@pytest.fixture
def arguments(model: Path, tmp_path: Path) -> Callable[..., list[str]]:
    text = tmp_path / "prose.txt"
    text.write_text(haystack(150).text, encoding="utf-8")

    def build(**changes: Any) -> list[str]:
        options = {
            "model": model,
            "haystack": text,
            "context": 300,
            "k": "48,64",
            "methods": "dense,exact,fathom,sparq,landmark",
            "windows": 2,
            "positions": 12,
            "output": tmp_path / "run",
            **changes,
        }
        return ["fidelity", "--offline", *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]

    return build


def test_records_report_and_resume(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    captured: list[int] = []
    original = fidelity_module.capture
    monkeypatch.setattr(
        fidelity_module,
        "capture",
        lambda loaded, ids, *rest, **options: (captured.append(len(ids)), original(loaded, ids, *rest, **options))[1],
    )
    assert cli.main(arguments()) == 0
    run = tmp_path / "run"
    first = Run.load(run).records()
    assert len(first) == 2 * (1 + 4 * 2)
    assert captured == [300, 300], "one dense prefill a window"
    for record in first:
        assert record["kind"] == record["task"] == "fidelity"
        assert record["finish"] == "complete"
        assert (record["k"] is None) == (record["method"] == "dense")
        assert record["bits"] is None if record["control"] else record["bits"] == record["declared_bits"] > 0
        assert len(record["layers"]["error_dense"]) == 2
        assert record["error_dense"] == pytest.approx(sum(record["layers"]["error_dense"]) / 2)
        if record["method"] == "exact":
            assert record["excess"] == record["squared_excess"] == record["error_exact"] == 0
            assert record["recall"] == 1
        elif record["method"] == "dense":
            assert record["error_dense"] == 0
            assert record["error_exact"] is None
        else:
            assert all(record[name] > 0 for name in METRICS if "excess" not in name)
            assert 0 < record["recall"] < 1
            assert record["k"] <= record["rows"] <= 2 * record["k"]
    output = capsys.readouterr().out
    assert "error to dense" in output
    assert "k∪" in output
    assert f"csv: {run / 'report' / 'results.csv'}" in output
    assert list((run / "report" / "figures").glob("fidelity-*.svg"))
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["kind"] == "fidelity"
    assert manifest["settings"]["positions"] == 12

    assert cli.main(arguments()) == 0
    assert len(captured) == 2, "a finished run does no model work"
    assert cli.main(arguments(methods="exact,loki")) == 0
    assert cli.main(arguments(k="64,80", windows=3)) == 0
    assert len(captured) == 2 + 2 + 3
    kept = {json.dumps(record, sort_keys=True) for record in Run.load(run).records()}
    assert all(json.dumps(record, sort_keys=True) in kept for record in first), "what was measured is left as it was"


def test_what_was_added_later_is_what_it_would_have_been(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    assert cli.main(arguments(methods="landmark", windows=1)) == 0
    assert cli.main(arguments()) == 0
    assert cli.main(arguments(output=tmp_path / "other", methods="sparq,landmark,exact,dense,fathom")) == 0

    def results(folder: Path) -> dict[Any, Any]:
        dropped = ("seconds",)
        return {
            (record["sample"], record["k"], record["label"]): {name: value for name, value in record.items() if name not in dropped}
            for record in Run.load(folder).records()
        }

    assert results(tmp_path / "run") == results(tmp_path / "other")


def test_an_interrupted_run_goes_on_where_it_stopped(
    arguments: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, calls = fidelity_module.capture, []

    def interrupted(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(*args, **options)

    monkeypatch.setattr(fidelity_module, "capture", interrupted)
    assert cli.main(arguments()) == 130
    assert len(Run.load(tmp_path / "run").records()) == 9
    assert cli.main(arguments()) == 0
    assert len(calls) == 3
    assert len(Run.load(tmp_path / "run").records()) == 18


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ("--positions=13", "--positions 12 there, --positions 13 now"),
        ("--full-window", "no --full-window there, --full-window now"),
        ("--seed=1", "--seed 0 there, --seed 1 now"),
    ],
)
def test_another_identity_is_refused(
    arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str], change: str, named: str
) -> None:
    assert cli.main(arguments(methods="dense", windows=1)) == 0
    assert cli.main([*arguments(methods="dense", windows=1), change]) == 2
    assert f"holds another run: {named}; give another folder" in capsys.readouterr().err


def test_the_whole_window_variant_runs_and_says_so(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    assert cli.main([*arguments(windows=1), "--full-window"]) == 0
    records = Run.load(tmp_path / "run").records()
    assert all(record["full_window"] for record in records)
    assert all(record["bits"] == record["declared_bits"] for record in records)


def test_json_is_one_document(arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*arguments(methods="exact,sparq", windows=1), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert Path(document["csv"]).exists()
    assert [row["method"] for row in document["table"]] == ["exact", "sparq r=D/8"] * 2


BAD: list[tuple[dict[str, Any], str]] = [
    ({"k": "36"}, "k=36 leaves nothing to select"),
    ({"k": "64,36"}, "k=36 leaves nothing to select"),
    ({"methods": "sparq:keep_tail=true"}, "k=48 leaves nothing to select; it must be above sink + local + the unsealed tail"),
    ({"k": "x"}, "--k: 'x' is not a whole number"),
    ({"windows": "0"}, "--windows 0 must be at least 1"),
    ({"windows": "400"}, "400 windows of 300 tokens do not fit"),
    ({"positions": "0"}, "--positions 0 must be at least 1"),
    ({"positions": "299"}, "299 positions do not fit into a context of 300"),
    ({"positions": "301"}, "301 positions do not fit into a context of 300"),
    ({"context": "2049"}, "context 2049 exceeds the 2048 positions"),
    ({"context": "1"}, "positions do not fit into a context of 1"),
    ({"methods": "fathm"}, "did you mean 'fathom'"),
    ({"methods": "sparq:r=D/7"}, "head_dim 16 is not a multiple of 7"),
    ({"methods": "sparq:dense_layers=5"}, "dense layer 5 is not in 0..1"),
    ({"haystack": "/no/such/file.txt"}, "/no/such/file.txt"),
    ({"device": "tpu"}, "tpu"),
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
    monkeypatch.setattr(fidelity_module, "capture", lambda *_, **__: pytest.fail("a prefill was started"))
    assert cli.main(arguments(**changes)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "run").exists(), "a run that could not start leaves no folder"


def test_a_k_that_selects_every_key_is_said(arguments: Callable[..., list[str]], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(arguments(context="60,64,100", k="48,64", methods="exact", windows=1, positions=4)) == 0
    said = "k=64 selects every key of a context of 60 and 64: what a method would select makes no difference there"
    assert [line for line in capsys.readouterr().err.splitlines() if line.startswith("warning:")] == [f"warning: {said}"]


# Methods that fail


class Raising(SparQ):
    """Raises in the second layer it sees."""

    name: ClassVar[str] = "raising"

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        raise RuntimeError("no plan\nat all")


class Boasting(Thumbnail):
    """Declares fewer bits than it reads."""

    name: ClassVar[str] = "boasting"

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> Tensor | float:
        return 3.0


class Undefined(SparQ):
    """Its store gives NaN."""

    name: ClassVar[str] = "undefined"

    def store(self, facts: ModelFacts) -> Any:
        return UndefinedSpec()


@dataclasses.dataclass(frozen=True)
class UndefinedSpec(StoreSpec):
    def build(self, layer: Any, tokens: int) -> Any:
        store = UndefinedStore((layer.keys.shape[0],), layer.keys.shape[2])
        store.append(layer.keys[:, :tokens])
        return store


class UndefinedStore(PlaneStore):
    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Reads]:
        scores, reads = super().scan(query, projected, plan)
        scores[..., 70] = torch.nan
        return scores, reads


class Misshapen(SparQ):
    """Its store forgets a block."""

    name: ClassVar[str] = "misshapen"

    def store(self, facts: ModelFacts) -> Any:
        return MisshapenSpec()


@dataclasses.dataclass(frozen=True)
class MisshapenSpec(UndefinedSpec):
    def build(self, layer: Any, tokens: int) -> Any:
        store = super().build(layer, tokens)
        store.scan = lambda *call: (PlaneStore.scan(store, *call)[0][..., 64:], PlaneStore.scan(store, *call)[1])
        return store


BROKEN = {
    "raising": "layer 0: RuntimeError: no plan at all",
    "boasting": "layer 0: it declares 3 bits per token and reads 36",
    "undefined": "layer 0: scores that are not a number",
    "misshapen": "layer 0: ValueError: its store gave scores of shape",
}


@pytest.fixture
def broken_methods(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods_module, "BUILT_IN", (*methods_module.BUILT_IN, Raising, Boasting, Undefined, Misshapen))


@pytest.mark.usefixtures("broken_methods")
def test_a_method_that_fails_is_named_and_the_rest_goes_on(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(methods=f"exact,{','.join(BROKEN)},sparq", windows=1)) == 0
    found = {record["method"]: record for record in Run.load(tmp_path / "run").records()}
    for name, problem in BROKEN.items():
        assert found[name]["finish"] == "error"
        assert found[name]["error"].startswith(problem)
        assert "error_dense" not in found[name]
    assert found["sparq"]["finish"] == found["exact"]["finish"] == "complete"
    assert found["sparq"]["bits"] == 8.5
    output = capsys.readouterr()
    for problem in BROKEN.values():
        assert f"failed in 1 window: {problem}" in output.err
    assert "failed" in output.out


def test_the_plan_names_the_text_and_counts_one_window(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments(windows=1, methods="exact", k="64")) == 0
    assert ", prose.txt: 1 window to do, the last 12 positions of each" in capsys.readouterr().out
    manifest = Run.load(tmp_path / "run").manifest
    assert manifest["haystack"] == {"name": "prose.txt", "origin": "prose.txt"}
    assert manifest["identity"]["haystack"] == load_haystack(str(tmp_path / "prose.txt")).sha256


def test_report_writes_the_tables_of_a_fidelity_run(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments()) == 0
    run = next(word.partition("=")[2] for word in arguments() if word.startswith("--output="))
    capsys.readouterr()
    assert cli.main(["report", run, "--output", str(tmp_path / "tables"), "--quiet"]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "tables" / "report.html")
    assert (tmp_path / "tables" / "results.csv").exists()
    assert (tmp_path / "tables" / "pairs.csv").exists()


def test_windows_of_agent_sessions(arguments: Callable[..., list[str]], tmp_path: Path) -> None:
    command = [word for word in arguments(context=2000, windows=2, methods="exact,fathom", k=64) if not word.startswith("--haystack")]
    assert cli.main([*command, "--trajectories=builtin", f"--output={tmp_path / 'agents'}"]) == 0
    found = Run.load(tmp_path / "agents").records()
    assert len({record["session"] for record in found}) == 2
    assert all(record["repo"].startswith("fathom-examples/") for record in found)
    assert "trajectories_sha256" in Run.load(tmp_path / "agents").manifest["identity"]


def test_windows_are_cut_from_trajectories_that_are_all_much_longer(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = []
    for number in range(5):
        messages = chat_messages(4)
        # The first step that could be a target comes after far more than 1.25 times the context.
        messages[1]["content"] = " ".join(f"Fault {number} is seen at line {line}." for line in range(60))
        rows.append(rebench_row(messages, trajectory_id=f"t{number}", repo="owner/project"))
    source = write_jsonl(tmp_path / "rows.jsonl", rows)

    def windows_of(count: int, output: str, context: int = 300) -> dict[int, str]:
        command = arguments(windows=count, methods="exact", k=64, context=context, output=tmp_path / output)
        assert cli.main([*(word for word in command if not word.startswith("--haystack")), f"--trajectories={source}"]) == 0
        return {record["sample"]: record["session"] for record in Run.load(tmp_path / output).records()}

    two, three = windows_of(2, "two"), windows_of(3, "three")
    assert len(set(three.values())) == 3
    assert two == {sample: session for sample, session in three.items() if sample < 2}
    identities = [Run.load(tmp_path / output).manifest["identity"] for output in ("two", "three")]
    assert identities[0] == identities[1]
    assert identities[0]["ends_of_longer"] == [300]
    assert windows_of(3, "two") == three, "more windows can be added to a run"
    windows_of(1, "fits", context=1900)
    assert "ends_of_longer" not in Run.load(tmp_path / "fits").manifest["identity"]


def test_a_text_and_trajectories_exclude_each_other(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*arguments(), "--trajectories=builtin", f"--output={tmp_path / 'both'}"]) == 2
    assert "give one of them" in capsys.readouterr().err
