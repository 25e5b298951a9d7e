"""The paper's numbers: complete, consistent with one another, matched only where they belong, and the page of counterparts."""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import pytest

from fathom_eval.cli import build_parser, main
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method, registry
from fathom_eval.reports import build_report
from fathom_eval.reports.paper import CALIBRATED, paper_markdown, paper_tables, paper_values, same_model
from fathom_eval.suites import SUITES, find_suite
from tests.reports.conftest import METHODS
from tests.reports.made_records import fidelity_records, step_records, write_run
from tests.reports.pages import read_page, table

ROOT = Path(__file__).parents[2]
SIX = ("niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt", "fwe")


def test_every_table_is_there_with_its_numbers() -> None:
    assert [one.table for one in paper_tables()] == list(range(1, 24))
    counts = Counter(value.table for value in paper_values())
    assert set(counts) == set(range(1, 24))
    assert (counts[2], counts[3], counts[4], counts[12], counts[18], counts[21]) == (63, 48, 56, 60, 44, 35)


def find(number: int, method: str, quantity: str = "error_dense", **where: object) -> float:
    [value] = [
        value
        for value in paper_values()
        if value.table == number
        and value.method == method
        and value.quantity == quantity
        and all(getattr(value, name) == wanted for name, wanted in where.items())
    ]
    return value.value


def test_tables_that_repeat_a_number_agree() -> None:
    for number, method in ((5, "Fathom 48 flat"), (10, "Fathom 48 flat"), (11, "Fathom 48 raw"), (14, "Fathom flat 48")):
        assert find(number, method, model="Qwen3-8B", context=32768, k=512) == 0.0081
    assert find(18, "SparQ r=32", model="Qwen2.5-7B-Instruct-1M", context=131072, k=2048) == find(16, "SparQ r=32", k=2048) == 0.0011
    # The mean of Table 12's tasks is the score of Table 7.
    for method in ("dense", "Fathom 48", "block landmark"):
        tasks = [value.value for value in paper_values() if value.table == 12 and value.method == method]
        assert sum(tasks) / 6 == pytest.approx(find(7, method, "score", model="Qwen3-8B"), abs=6e-4)
    # Components of Table 4 make up the step of Table 2.
    for method in ("Fathom 48", "32-channel scan", "block landmark"):
        parts = {value.task: value.value for value in paper_values() if value.table == 4 and value.method == method}
        step = parts.pop("step")
        assert parts.pop("scan total") == pytest.approx(parts["scan transfer"] + parts["scan kernel"], abs=1.1)
        assert sum(parts.values()) == pytest.approx(step, abs=3)
        assert step == find(2, method, "gpu_ms", context=1048576)


def test_labels_are_those_of_methods_here() -> None:
    timed = {"gpu_ms", "wall_ms", "part_ms", "link_gb", "wall_ratio", "gpu_ratio", "scan_ms", "scan_gb_s"}
    labels = {value.ours for value in paper_values() if value.ours and value.quantity not in timed}
    known = ["dense", "exact", "thumbnail", "full", "landmark", "double_sparsity", "loki:r=D/4", "loki:r=D/2"]
    known += [f"sparq:r={r}{more}" for r in ("D/8", "D/4") for more in ("", ":per_head=true")]
    known += [f"fathom:budget={budget}:basis={basis}" for budget in (32, 40, 48, 64, 80, 128) for basis in ("raw", "klt")]
    known += [f"fathom:budget={budget}:basis=raw:codes={codes}" for budget in (48, 64, 80) for codes in ("8bit", "allocated")]
    known += ["loki:r=D/4:bits=16"]
    assert labels <= {parse_method(name).label for name in known}


COMMANDS_OF_THE_PAGE = re.findall(r"`(fathom-eval (?:bench|fidelity|report|ruler|sessions) [^`]*)`", paper_markdown())


@pytest.mark.parametrize("command", COMMANDS_OF_THE_PAGE)
def test_every_command_of_the_page_is_taken_up_to_the_model(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Options, methods, suites, k and contexts are checked as in a real start, which ends where the model would be loaded."""
    words = shlex.split(command)[1:]
    build_parser().parse_args(words)
    if words[0] == "report" or "--list-suites" in words:
        return

    def stop(*_: object, **__: object) -> NoReturn:
        raise UserError("this is where the model is loaded")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fathom_eval.workers.ModelRequest.load", stop)
    monkeypatch.setattr("fathom_eval.devices.resolve_device", stop)
    monkeypatch.setattr("fathom_eval.commands.sessions._check_source", lambda args: None)
    for module in ("fathom", "double_sparsity", "loki"):
        # A calibration of each name is taken to be there.
        monkeypatch.setattr(f"fathom_eval.methods.{module}.resolve", lambda text, option, session=True: text)
    assert main(words) == 2
    assert capsys.readouterr().err.endswith("error: this is where the model is loaded\n")


def test_commands_that_name_a_suite_measure_what_the_table_shows() -> None:
    named = {one.table: one.commands for one in paper_tables()}
    for suite in SUITES:
        for number in map(int, re.findall(r"\d+", suite.source.partition("Table")[2].partition("(")[0])):
            if number in (15, 23):  # of other models, and of sessions
                continue
            assert any(f"--suite {suite.name} " in f"{command} " for command in named[number]) or number == 14, (suite.name, number)
    # Every label of the paper's table that has a counterpart is one that its suite measures.
    for number, name in ((19, "store-precision"), (20, "loki-rank"), (11, "basis"), (21, "active-channels")):
        assert f"--suite {name} " in f"{named[number][0]} "
        measured = {parse_method(method).label.replace("basis=auto", "basis=raw") for method in find_suite(name).methods}
        wanted = {value.ours for value in paper_values() if value.table == number and value.model == "Qwen3-8B" and value.ours}
        assert wanted
        assert wanted <= measured, (number, wanted - measured)
    contexts = {value.context for value in paper_values() if value.table == 20}
    assert {int(context) for command in named[20] for context in re.findall(r"--context (\d+)", command)} == contexts


def test_the_page_of_counterparts_is_printed_from_the_data() -> None:
    assert (ROOT / "docs" / "paper.md").read_text(encoding="utf-8") == paper_markdown()


@pytest.mark.parametrize(
    ("own", "paper", "same"),
    [
        ("Qwen/Qwen3-8B", "Qwen3-8B", True),
        ("/models/qwen3-8b/", "Qwen3-8B", True),
        ("Qwen/Qwen3-8B-Base", "Qwen3-8B", False),
        ("Qwen/Qwen2.5-7B", "Qwen2.5-7B-Instruct-1M", False),
    ],
)
def test_models_are_told_apart(own: str, paper: str, same: bool) -> None:
    assert same_model(own, paper) is same


def test_methods_with_statistics_are_known() -> None:
    assert {name for name, kind in registry().items() if "statistics" in {field.name for field in dataclasses.fields(kind)}} == CALIBRATED


def test_matches_are_marked_and_others_are_named(tmp_path: Path) -> None:
    records = fidelity_records(contexts=(16384,), ks=(256,), windows=2)
    own = build_report([write_run(tmp_path / "own", records, kind="fidelity", model="Qwen/Qwen3-8B")], tmp_path / "out")
    rows = {(row["method"], row["quantity"], row["table"]): row for row in table(own, "paper")}
    row = rows["fathom budget=48 basis=raw", "error to dense", "14"]
    # The paper calibrates ahead on text, the records have statistics of the prefix's own keys; SparQ has none.
    assert (float(row["paper"]), row["match"]) == (0.0052, "other statistics")
    assert float(rows["fathom budget=48 basis=raw", "active channels", "21"]["paper"]) == 31
    assert rows["sparq r=D/8", "error to dense", "5"]["match"] == "same model and setting"
    words = read_page(own).words
    assert "the paper calibrates its methods ahead on text" in words
    assert "No row here has that mark." not in words
    other = build_report([write_run(tmp_path / "other", records, kind="fidelity", model="smollm2")], tmp_path / "out")
    rows = {(row["method"], row["quantity"], row["table"]): row for row in table(other, "paper")}
    assert {row["match"] for row in rows.values()} == {
        "other model",
        "other model, other statistics",
        "other model, other context, other statistics",
    }
    # The nearest of the table's settings; where none is nearer than another, their range.
    assert float(rows["sparq r=D/8", "error to dense", "14"]["paper"]) == 0.0077
    far = fidelity_records(contexts=(8192,), ks=(100,), windows=2)
    distant = build_report([write_run(tmp_path / "far", far, kind="fidelity")], tmp_path / "out")
    [row] = [row for row in table(distant, "paper") if (row["method"], row["table"]) == ("sparq r=D/8", "14")]
    assert (row["paper"], row["match"]) == ("0.00770 to 0.00800", "other model, other k, other context")
    assert "No row here has that mark." in read_page(other).words


@pytest.mark.parametrize(
    ("context", "k", "match", "paper"),
    [
        (16384, 256, "same model and setting", "k = 256"),
        # A k of the paper's share of the context is its k at that context.
        (65536, 1024, "other context", "16k k = 256"),
        # The same share as at 32k tokens and k = 512 in Table 14; 512 itself at 64k is another share, and the paper's k at another context.
        (65536, 512, "other context", "k = 512"),
        (16384, 200, "other k", "16k k = 256"),
        (65536, 300, "other k, other context", ""),
    ],
)
def test_a_k_that_is_not_the_papers_is_marked(context: int, k: int, match: str, paper: str, tmp_path: Path) -> None:
    records = fidelity_records(contexts=(context,), ks=(k,), windows=2)
    files = build_report([write_run(tmp_path / "run", records, kind="fidelity", model="Qwen3-8B")], tmp_path / "out")
    rows = [row for row in table(files, "paper") if row["method"] == "sparq r=D/8"]
    assert {row["match"] for row in rows} == {match}
    assert all(paper in row["paper's setting"] for row in rows)


@pytest.mark.parametrize(("tasks", "match"), [(SIX, "same model and setting"), (("niah_single", "vt"), "other tasks")])
def test_a_mean_over_other_tasks_is_marked(tasks: tuple[str, ...], match: str, make_records: Any, tmp_path: Path) -> None:
    sparq = ("sparq r=D/8", "sparq", "SparQ", False, {}, 68.0, 0.9)
    records = make_records(tasks=tasks, contexts=(32768,), samples=6, methods=[*METHODS[:2], sparq])
    files = build_report([write_run(tmp_path / "run", records, kind="ruler", model="Qwen3-8B")], tmp_path / "out")
    rows = {(row["method"], row["quantity"]): row["match"] for row in table(files, "paper")}
    assert rows["sparq r=D/8", "score all tasks"] == match
    assert rows["sparq r=D/8", "score vt"] == "same model and setting"


def test_statistics_made_ahead_are_those_of_the_paper(tmp_path: Path) -> None:
    ahead = [
        {
            **record,
            "label": f"{record['label']} statistics=wiki@0123456789ab",
            "options": {**record["options"], "statistics": "wiki@0123456789ab"},
        }
        for record in fidelity_records(contexts=(16384,), ks=(256,), windows=2)
        if record["method"] == "fathom"
    ]
    files = build_report([write_run(tmp_path / "run", ahead, kind="fidelity", model="Qwen3-8B")], tmp_path / "out")
    rows = {(row["method"], row["quantity"], row["table"]): row for row in table(files, "paper")}
    assert rows["fathom budget=48 basis=raw statistics=wiki@0123456789ab", "error to dense", "14"]["match"] == "same model and setting"


def test_the_papers_session_calibrated_methods_are_those_of_a_plain_run(tmp_path: Path) -> None:
    records = [{**record, "label": "fathom budget=48 basis=klt"} for record in step_records() if record["method"] == "fathom"]
    run = write_run(tmp_path / "run", records, kind="sessions", model="Qwen/Qwen2.5-7B-Instruct-1M")
    rows = table(build_report([run], tmp_path / "out"), "paper")
    assert [(row["table"], float(row["paper"]), row["match"]) for row in rows] == [("23", 0.57, "same model and setting")]
