"""The paper's numbers: complete, consistent with one another, matched only where they belong, and the page of counterparts."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path

import pytest

from fathom_eval.cli import COMMANDS, build_parser
from fathom_eval.methods import parse_method
from fathom_eval.reports import build_report
from fathom_eval.reports.paper import paper_markdown, paper_tables, paper_values, same_model
from tests.reports.made_records import fidelity_records, write_run
from tests.reports.pages import table

ROOT = Path(__file__).parents[2]


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
    assert labels <= {parse_method(name).label for name in known}


def test_every_command_is_one_that_the_parser_takes() -> None:
    checked = 0
    for one in paper_tables():
        for command in one.commands:
            words = shlex.split(command)
            assert words[0] == "fathom-eval"
            if words[1] in COMMANDS:
                build_parser().parse_args(words[1:])
                checked += 1
    assert checked >= 20


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


def test_matches_are_marked_and_others_are_named(tmp_path: Path) -> None:
    records = fidelity_records(contexts=(16384,), ks=(256,), windows=2)
    own = build_report([write_run(tmp_path / "own", records, kind="fidelity", model="Qwen/Qwen3-8B")], tmp_path / "out")
    rows = {(row["method"], row["quantity"], row["table"]): row for row in table(own, "paper")}
    row = rows["fathom budget=48 basis=raw", "error to dense", "14"]
    assert (float(row["paper"]), row["match"]) == (0.0052, "same model and setting")
    assert float(rows["fathom budget=48 basis=raw", "active channels", "21"]["paper"]) == 31
    assert rows["sparq r=D/8", "error to dense", "5"]["match"] == "same model and setting"
    longer = build_report(
        [write_run(tmp_path / "longer", fidelity_records(contexts=(65536,), ks=(256,), windows=2), kind="fidelity", model="Qwen3-8B")],
        tmp_path / "out",
    )
    assert {row["match"] for row in table(longer, "paper")} == {"other context or k", "other model"}
    other = build_report([write_run(tmp_path / "other", records, kind="fidelity", model="smollm2")], tmp_path / "out")
    rows = {(row["method"], row["quantity"], row["table"]): row for row in table(other, "paper")}
    assert {row["match"] for row in rows.values()} == {"other model"}
    assert rows["sparq r=D/8", "error to dense", "14"]["paper"] == "0.00770 to 0.00800"
