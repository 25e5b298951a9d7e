"""Methods of a list that cannot run at some k, or with a model: left out there alone, with the reason said and recorded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import fathom_eval.methods as methods_module
from fathom_eval import cli
from fathom_eval.errors import UserError
from fathom_eval.methods import MethodSpec, parse_methods
from fathom_eval.methods.possible import Impossible, Possible
from fathom_eval.methods.sparq import SparQ
from fathom_eval.reports.gaps import planned
from fathom_eval.ruler import all_branches
from fathom_eval.run import Run
from tests.method_matrix import facts_of
from tests.sessions.rows import TOKENS, some_rows, write_jsonl
from tests.tiny import save_tiny

LIST = ("dense", "exact", "sparq", "shadowkv:outlier=4", "infllm_published", "sparq:r=D/3")


def checked(monkeypatch: pytest.MonkeyPatch, k_values: list[int], text: str = "all") -> tuple[Possible, list[str]]:
    monkeypatch.setattr(methods_module, "_NAMED", {"all": LIST})
    possible, said, facts = Possible(parse_methods(text)), list[str](), facts_of(2, 16)
    possible.keep(k_values, MethodSpec.check_k, said.append)
    possible.keep(k_values, lambda spec, at: spec.check(facts, at), said.append)
    return possible, said


def test_a_k_that_is_too_small_costs_a_method_that_k_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    possible, said = checked(monkeypatch, [64, 100, 5000])
    found = [(branch.spec.method.name, branch.k) for branch in all_branches(possible.specs, [64, 100, 5000], facts_of(2, 16))]
    everywhere = [(name, k) for name in ("exact", "sparq") for k in (64, 100, 5000)]
    assert found == [("dense", None), *everywhere, ("shadowkv", 100), ("shadowkv", 5000), ("infllm_published", 5000)]
    assert [(one.label.split()[0], one.k) for one in possible.left_out] == [
        ("shadowkv", 64),
        ("infllm_published", 64),
        ("infllm_published", 100),
        ("sparq", None),
    ]
    assert possible.left_out[-1].reason == "sparq: r=D/3: head_dim 16 is not a multiple of 3"
    assert len(said) == 4
    assert said[0].startswith("left out at k=64: shadowkv")
    assert said[3] == "left out: sparq: r=D/3: head_dim 16 is not a multiple of 3"


def test_a_method_that_can_run_at_none_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    possible, said = checked(monkeypatch, [64, 100])
    assert "infllm_published" not in {spec.method.name for spec in possible.specs}
    assert [one.k for one in possible.left_out if one.label.startswith("infllm")] == [64, 100]
    assert sum("infllm_published" in line for line in said) == 1


def test_a_method_that_is_named_must_run_at_every_k(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="shadowkv size=8 outlier=4: k=64 leaves nothing to select"):
        checked(monkeypatch, [64, 100], "all,shadowkv:outlier=4")


def test_what_is_left_out_is_no_part_of_a_methods_identity() -> None:
    [spec] = parse_methods("sparq")
    possible = Possible([MethodSpec(spec.method, spec.policy, optional=True)])

    def refuse(spec: MethodSpec, at: Any) -> None:
        if 7 in at:
            raise UserError("no 7")

    possible.keep([7, 8], refuse, lambda line: None)
    assert possible.specs == [spec]
    assert hash(possible.specs[0]) == hash(spec)
    assert possible.specs[0].impossible == {7}
    assert possible.left_out == [Impossible(spec.label, 7, "no 7")]


def test_what_fails_at_several_k_together_alone_is_left_out_at_each() -> None:
    [spec] = parse_methods("sparq")
    possible = Possible([MethodSpec(spec.method, spec.policy, optional=True)])

    def refuse(spec: MethodSpec, at: Any) -> None:
        if len(at) > 1:
            raise UserError("not together")

    possible.keep([7, 8], refuse, lambda line: None)
    assert possible.specs == []
    assert possible.left_out == [Impossible(spec.label, None, "not together")]


def test_a_line_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods_module, "_NAMED", {"all": ("dense", "sparq:r=D/3", "sparq:r=D/3:rerank=2", "sparq:r=D/3:share=group_sum")})
    possible, said, facts = Possible(parse_methods("all")), list[str](), facts_of(2, 16)
    for _ in range(2):
        possible.keep([64], lambda spec, at: spec.check(facts, at), said.append)
    assert said == ["left out: sparq: r=D/3: head_dim 16 is not a multiple of 3"]
    assert len({one.label for one in possible.left_out}) == 3


@pytest.mark.parametrize("command", ["fidelity", "ruler", "sessions"])
@pytest.mark.parametrize("methods", ["", " ", ","])
def test_an_empty_list_is_refused(
    command: str, methods: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))
    assert cli.main([command, f"--methods={methods}", f"--output={tmp_path / 'run'}", "--offline"]) == 2
    assert capsys.readouterr().err.splitlines() == [
        "error: the list of methods is empty: name some, as in sparq,quest, or give paper or all"
    ]
    assert not (tmp_path / "run").exists()


class Ending(SparQ):
    name = "ending"

    def plan(self, query: Any, index: Any) -> Any:
        raise SystemExit(3)


@pytest.mark.parametrize("command", ["fidelity", "ruler", "sessions"])
def test_a_method_that_fails_is_named_with_its_reason_and_has_no_bits(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(methods_module, "BUILT_IN", (*methods_module.BUILT_IN, Ending))
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main([*tiny_run(command, tmp_path), "--k=64", "--methods=ending"]) == 0
    said, noun = capsys.readouterr(), {"fidelity": "window", "ruler": "sample", "sessions": "session"}[command]
    label = parse_methods("ending")[0].label
    failures = [line for line in said.err.splitlines() if " failed in " in line]
    [failure] = failures
    assert re.fullmatch(rf"warning: {label} at k=64 failed in 1 {noun}: layer 0: SystemExit: 3 \(test_possible\.py, line \d+\)", failure)
    [row] = [line for line in said.out.splitlines() if line.removeprefix("64").lstrip().startswith(label)]
    assert row.partition(label)[2].split()[0] == "failed", "and no bits before it"
    if command == "sessions":
        assert "1 step failed and is in no mean; steps.csv names it." in said.out


def tiny_run(command: str, folder: Path) -> list[str]:
    """Arguments of a run of one window, sample or session of a tiny model, written to ``run`` in the folder."""
    model = save_tiny(folder / "model", layers=2, query_heads=4, kv_heads=2, head_dim=16, max_positions=8192)
    text = folder / "prose.txt"
    text.write_text("\n".join(f"The boat number {word} left the old harbour." for word in range(400)), encoding="utf-8")
    own = {
        "fidelity": [f"--haystack={text}", "--context=300", "--windows=1", "--positions=4"],
        "ruler": [f"--haystack={text}", "--context=900", "--limit=1", "--tasks=niah_single"],
        "sessions": [
            f"--trajectories={write_jsonl(folder / 'rows.jsonl', some_rows())}",
            f"--session-tokens={TOKENS}",
            "--sessions=1",
            "--max-new-tokens=2",
        ],
    }[command]
    return [command, "--offline", f"--model={model}", *own, f"--output={folder / 'run'}"]


@pytest.mark.parametrize("command", ["fidelity", "ruler", "sessions"])
def test_a_run_goes_on_without_them_records_them_and_is_complete(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(methods_module, "_NAMED", {"all": LIST})
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))
    run = tmp_path / "run"
    arguments = [*tiny_run(command, tmp_path), "--k=64,100", "--methods=all"]
    assert cli.main(arguments) == 0
    assert "left out at k=64: shadowkv" in capsys.readouterr().out
    records = Run.load(run).records()
    assert {(record["method"], record["k"]) for record in records} == {
        ("dense", None),
        *((name, k) for name in ("exact", "sparq") for k in (64, 100)),
        ("shadowkv", 100),
    }
    assert all(record["finish"] != "error" for record in records)
    settings = json.loads((run / "manifest.json").read_text())["invocations"][-1]["settings"]
    assert {(one["method"].split()[0], one["k"]) for one in settings["impossible"]} == {
        ("shadowkv", 64),
        ("infllm_published", 64),
        ("infllm_published", 100),
        ("sparq", None),
    }
    asked = planned(settings, command, {record["context"] for record in records})
    assert {cell[2:] for cell in asked} == {(record["k"], record["label"]) for record in records if "alone" not in record["label"]}
    page = (run / "report" / "report.html").read_text(encoding="utf-8")
    assert "Left out at k=64: shadowkv size=8 outlier=4: k=64 leaves nothing to select" in page
