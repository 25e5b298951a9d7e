"""The sessions command from end to end on tiny models: what it records and prints, and how it resumes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fathom_eval.agent_sessions as sessions_module
from fathom_eval.cli import main
from fathom_eval.methods import parse_method, parse_methods
from fathom_eval.prefill import prefill
from fathom_eval.scoring import step_agreement
from tests.agent_sessions.conftest import Arguments
from tests.agent_sessions.runs import METHODS, by_branch, records
from tests.tiny import save_tiny


def count_prefills(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    prefills: list[int] = []
    monkeypatch.setattr(
        sessions_module, "prefill", lambda loaded, ids, **options: (prefills.append(len(ids)), prefill(loaded, ids, **options))[1]
    )
    return prefills


def test_records_report_and_resume(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
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


def test_order_and_batches_do_not_matter(arguments: Arguments, tmp_path: Path) -> None:
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
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str], index: str
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
    other = "hbm" if index == "host" else "host"
    assert main(arguments(output=tmp_path / "step", runtime=other, **methods)) == 2
    assert f"--runtime {index} there, --runtime {other} now" in capsys.readouterr().err
    assert main(arguments(output=tmp_path / "step", **methods)) == 0
    assert f"as in {tmp_path / 'step'}: --runtime {index}\n" in capsys.readouterr().out
    # An added method is compared with the steps that are there.
    assert main(arguments(output=tmp_path / "step", runtime=index, methods=f"{methods['methods']},loki")) == 0
    added = by_branch(tmp_path / "step")[0, parse_method("loki").label, 400]
    assert added["decoded_by"] == "runtime"
    assert added["score"] == step_agreement(one[0, "exact", 400]["generation"], added["generation"])


def test_an_interrupted_run_goes_on_where_it_stopped(arguments: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_text_is_left_out_on_request(arguments: Arguments, tmp_path: Path) -> None:
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


def test_prompts_are_kept_on_request(arguments: Arguments, tmp_path: Path) -> None:
    assert main(arguments("--log-samples", methods="dense", sessions=1)) == 0
    [sample] = (tmp_path / "run" / "samples").iterdir()
    assert sample.read_text(encoding="utf-8").endswith("### Assistant:\n")


def test_json_is_one_document(arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
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


def test_fewer_sessions_than_asked_is_said(arguments: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments(methods="dense", sessions=500, max_new_tokens=2)) == 0
    assert "500 sessions were asked for; the trajectories give" in capsys.readouterr().err
