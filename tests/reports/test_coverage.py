"""Means over fewer tasks, or fewer samples, than those beside them: marked everywhere, compared nowhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.reports import build_report, summary_table
from fathom_eval.reports.cells import ALL_TASKS, Cell, compute_cells, compute_overview, read_points
from fathom_eval.reports.document import entry
from tests.reports.conftest import METHODS
from tests.reports.made_records import write_run
from tests.reports.pages import data, read_page, table

Records = list[dict[str, Any]]
MakeRecords = Callable[..., Records]
FEW = [method for method in METHODS if method[0] in ("dense", "exact top-k", "sparq r=8", "landmark block=8")]


def part(records: Records, label: str, tasks: Sequence[str], samples: int = 1000) -> Records:
    """The records, of one method only those of some tasks and of the first samples."""
    return [one for one in records if one["label"] != label or (one["task"] in tasks and one["sample"] < samples)]


def overview_of(records: Records) -> dict[str, Cell]:
    points, _ = read_points(records)
    return {cell.method.label: cell for cell in compute_overview(points, compute_cells(points))}


@pytest.fixture
def lacking(make_records: MakeRecords) -> Records:
    return part(make_records(tasks=("niah_single", "vt"), samples=8, methods=FEW), "sparq r=8", ["niah_single"])


def test_a_mean_over_fewer_tasks_is_known_as_one(lacking: Records) -> None:
    found = overview_of(lacking)
    assert (found["sparq r=8"].tasks, found["sparq r=8"].expected_tasks) == (("niah_single",), 2)
    assert [label for label, cell in found.items() if not cell.whole] == ["sparq r=8"]
    assert found["sparq r=8"].against_exact is not None
    assert found["sparq r=8"].compared is None
    assert found["landmark block=8"].compared is found["landmark block=8"].against_exact is not None


def test_failed_samples_cover_no_task(make_records: MakeRecords) -> None:
    records = make_records(tasks=("niah_single", "vt"), samples=8, methods=FEW)
    for one in records:
        if (one["label"], one["task"]) == ("sparq r=8", "vt"):
            one |= {"score": None, "finish": "error", "error": "out of memory"}
    assert not overview_of(records)["sparq r=8"].whole


def test_the_table_of_a_terminal_counts_the_tasks(lacking: Records, make_records: MakeRecords) -> None:
    frame = summary_table(lacking).set_index("method")
    assert frame.loc["sparq r=8", ALL_TASKS].endswith("(1 of 2 tasks)")
    assert frame.loc["sparq r=8", "minus exact top-k"].endswith("(1 of 2 tasks)")
    assert "of 2 tasks" not in frame.loc[["dense", "exact top-k", "landmark block=8"]].to_string()
    assert "(n of m tasks): a mean" in frame.attrs["note"]
    complete = summary_table(make_records(tasks=("niah_single", "vt"), samples=8, methods=FEW))
    assert " of " not in complete.to_string()
    assert "n of m" not in complete.attrs["note"]
    assert "same samples" not in complete.attrs["note"]


def test_a_report_marks_it_and_leaves_it_out_of_sentences_and_figures(lacking: Records, tmp_path: Path) -> None:
    files = build_report([write_run(tmp_path / "run", lacking, kind="ruler")], tmp_path / "out")
    text = files.markdown.read_text(encoding="utf-8")
    [row] = [line for line in text.splitlines() if line.startswith("| sparq r=8 |") and "of 2 tasks" in line]
    assert row.split(" | ")[1].endswith("(1 of 2 tasks)")
    assert row.split(" | ")[2] == "1"
    assert row.split(" | ")[3].endswith("(1 of 2 tasks)")
    page = read_page(files)
    assert "1 of 1 scan separate from exact top-k" in page.words
    assert "Left out here, since their means over all tasks lack some: sparq r=8 (1 of 2 tasks)." in page.words
    [drawn] = [path for path in files.figures if path.stem.startswith("score-all-tasks") and path.suffix == ".svg"]
    assert "landmark block=8: " in drawn.read_text(encoding="utf-8")
    assert "sparq r=8: " not in drawn.read_text(encoding="utf-8")
    rows = {row["method"]: row for row in data(files, "overview.csv")}
    assert (rows["sparq r=8"]["tasks"], rows["sparq r=8"]["expected_tasks"], rows["dense"]["tasks"]) == ("1", "2", "2")
    assert float(rows["sparq r=8"]["score"]) >= 0
    assert {row["method"]: row["tasks"] for row in table(files, "scores-2048-k128")}["sparq r=8"] == "1"


def test_without_the_baseline_on_one_task_no_scan_is_ranked_over_all(make_records: MakeRecords, tmp_path: Path) -> None:
    records = part(make_records(tasks=("niah_single", "vt"), ks=(64, 128), samples=8, methods=FEW), "exact top-k", ["vt"])
    words = read_page(build_report([write_run(tmp_path / "run", records, kind="ruler")], tmp_path / "out")).words
    assert "Left out here, since their means over all tasks lack some: exact top-k (1 of 2 tasks)." in words
    assert "exact top-k scores" not in words
    assert "separate from exact top-k by their paired interval and" not in words
    assert "Below exact top-k at every context" not in words
    assert "(1 of 2 tasks)" in summary_table(records).set_index("method").loc["landmark block=8", "minus exact top-k"].to_string()


def test_a_mean_over_fewer_samples_says_so_and_how_the_difference_is_taken(make_records: MakeRecords, tmp_path: Path) -> None:
    records = part(make_records(tasks=("vt",), samples=8, methods=FEW), "sparq r=8", ["vt"], samples=3)
    frame = summary_table(records)
    assert "(3 of 8 samples)" in frame.set_index("method").loc["sparq r=8", "vt"]
    assert "a difference over those that the row and exact top-k both have" in frame.attrs["note"]
    files = build_report([write_run(tmp_path / "run", records, kind="ruler")], tmp_path / "out")
    assert "(3 of 8 samples)" in files.markdown.read_text(encoding="utf-8")
    page = read_page(files)
    assert "a difference over those that the row and exact top-k both have" in page.words
    assert page.source.split("<table data-sort>")[1].count("3 of 8 samples") == 1, "once in a cell"


def test_dense_with_samples_that_a_k_was_not_asked_for(make_records: MakeRecords) -> None:
    records = [one for one in make_records(tasks=("vt",), samples=8, methods=FEW) if one["k"] is None or one["sample"] < 4]
    frame = summary_table(records)
    assert "n of m" not in frame.attrs["note"]
    assert "not all rows have the same samples" in frame.attrs["note"]


def test_means_over_other_tasks_are_no_change_between_runs(make_records: MakeRecords, tmp_path: Path) -> None:
    first = write_run(tmp_path / "first", make_records(tasks=("niah_single", "vt"), samples=4, methods=FEW), kind="ruler")
    second = write_run(tmp_path / "second", make_records(tasks=("niah_single", "fwe"), samples=4, methods=FEW), kind="ruler")
    files = build_report([first, second], tmp_path / "out")
    places = {row["where"] for row in table(files, "change-run-1-run-2")}
    assert places == {"niah_single, 2,048 tokens", "niah_single, 2,048 tokens, k = 128"}


def test_a_measured_zero_has_its_error_and_a_zero_by_construction_none() -> None:
    assert entry(0.0, 3, error=0.0).text == "0.000 ± 0.000"
    assert entry(0.0, None, error=0.0).text == "0"


def test_depths_of_a_k_are_shown_at_its_contexts(make_records: MakeRecords, tmp_path: Path) -> None:
    records = [
        one
        for one in make_records(tasks=("niah_single",), contexts=(1024, 2048, 4096), ks=(64, 128), samples=2, methods=FEW)
        if one["k"] is None or one["context"] == {64: 1024, 128: 2048}[one["k"]]
    ]
    files = build_report([write_run(tmp_path / "run", records, kind="ruler")], tmp_path / "out")
    for name, context, methods in (("depth-k64", "1,024", 4), ("depth-k128", "2,048", 4), ("depth-dense", "4,096", 1)):
        rows = table(files, name)
        assert len(rows) == methods
        assert {column.split(" ")[0] for column in rows[0]} == {"method", context}
