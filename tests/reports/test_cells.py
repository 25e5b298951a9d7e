"""The numbers of a report: pairing, floors, flags, gaps, failures, versions."""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean, stdev
from typing import Any

import pytest

from fathom_eval.reports.cells import ALL_TASKS, Cell, Role, compute_cells, compute_overview, read_points
from fathom_eval.reports.tables import mark

Records = list[dict[str, Any]]
MakeRecords = Callable[..., Records]


def cells_of(records: Records) -> list[Cell]:
    return compute_cells(read_points(records)[0])


def find(cells: list[Cell], method: str, task: str = "vt", k: int | None = 128) -> Cell:
    (found,) = [cell for cell in cells if cell.method.label == method and cell.task == task and cell.k == k]
    return found


def scores(records: Records, label: str, task: str = "vt", k: int | None = 128) -> dict[int, float]:
    return {
        r["sample"]: r["score"] for r in records if r["label"] == label and r["task"] == task and r["k"] == k and r["finish"] != "error"
    }


def test_cell_is_the_mean_of_its_records(make_records: MakeRecords) -> None:
    records = make_records(ks=(64, 128))
    own, exact = scores(records, "sparq r=8"), scores(records, "exact top-k")
    dense = scores(records, "dense", k=None)
    cell = find(cells_of(records), "sparq r=8")
    assert cell.samples == cell.expected == 24
    assert cell.score == pytest.approx(fmean(own.values()))
    assert cell.standard_error == pytest.approx(stdev(own.values()) / 24**0.5)
    assert cell.exact_score == pytest.approx(fmean(exact.values()))
    assert cell.dense_score == pytest.approx(fmean(dense.values()))
    assert cell.against_exact is not None
    assert cell.against_exact.mean == pytest.approx(fmean(own[sample] - exact[sample] for sample in own))
    assert cell.against_exact.losses == sum(own[sample] < exact[sample] for sample in own)
    assert cell.against_exact.wins + cell.against_exact.ties + cell.against_exact.losses == cell.against_exact.pairs == 24
    assert cell.against_exact.below
    assert cell.bits == 34.0
    assert cell.bits_per_channel == pytest.approx(34.0 / 64)
    assert cell.rows == pytest.approx(1.57 * 128)
    assert cell.notes == ()


def test_each_k_has_its_own_oracle_and_dense_serves_all(make_records: MakeRecords) -> None:
    records = make_records(ks=(64, 128))
    cells = cells_of(records)
    small, large = find(cells, "landmark block=8", k=64), find(cells, "landmark block=8", k=128)
    assert small.exact_score == pytest.approx(fmean(scores(records, "exact top-k", k=64).values()))
    assert large.exact_score == pytest.approx(fmean(scores(records, "exact top-k", k=128).values()))
    assert small.exact_score != large.exact_score
    assert small.dense_score == large.dense_score
    assert len([cell for cell in cells if cell.method.role is Role.DENSE and cell.task == "vt"]) == 1


def test_order_of_records_changes_nothing(make_records: MakeRecords) -> None:
    records = make_records()
    assert sorted(cells_of(records), key=repr) == sorted(cells_of(records[::-1]), key=repr)


def test_controls_come_first_then_bits(make_records: MakeRecords) -> None:
    cells = [cell for cell in cells_of(make_records()[::-1]) if cell.task == "vt"]
    assert [cell.method.label for cell in cells[:2]] == ["dense", "exact top-k"]
    bits = [cell.bits for cell in cells[2:]]
    assert bits == sorted(bits, key=lambda value: value or 0.0)


def test_uneven_samples_are_compared_on_those_both_have(make_records: MakeRecords) -> None:
    records = [r for r in make_records() if not (r["label"] == "sparq r=8" and r["sample"] >= 10)]
    cell = find(cells_of(records), "sparq r=8")
    exact = scores(records, "exact top-k")
    assert cell.samples == 10
    assert cell.expected == 24
    assert "10 of 24 samples" in cell.notes
    assert cell.exact_score == pytest.approx(fmean(exact[sample] for sample in range(10)))
    assert cell.against_exact is not None
    assert cell.against_exact.pairs == 10
    assert find(cells_of(records), "dense", k=None).notes == ()


def test_failures_are_counted_and_not_averaged(make_records: MakeRecords) -> None:
    records = make_records()
    for record in records:
        if record["label"] == "sparq r=8" and record["sample"] < 4:
            record.update(finish="error", error="boom", score=None if record["sample"] % 2 else 0.0)
    cell = find(cells_of(records), "sparq r=8")
    assert (cell.samples, cell.failures) == (20, 4)
    assert cell.score == pytest.approx(fmean(scores(records, "sparq r=8").values()))
    assert cell.notes == ("4 failed",)


def test_all_failed_is_no_score(make_records: MakeRecords) -> None:
    records = make_records(samples=8)
    for record in records:
        if record["label"] == "sparq r=8":
            record.update(finish="error", error="boom", score=None)
    cell = find(cells_of(records), "sparq r=8")
    assert (cell.score, cell.standard_error, cell.against_exact) == (None, None, None)


def test_floor_is_marked_and_left_out_of_all_tasks(make_records: MakeRecords) -> None:
    points, _ = read_points(make_records(dense_at_floor=("vt",)))
    cells = compute_cells(points)
    assert all(("not discriminative" in cell.notes) == (cell.task == "vt") for cell in cells)
    overview = compute_overview(points, cells)
    assert {cell.task for cell in overview} == {ALL_TASKS}
    assert find(overview, "sparq r=8", task=ALL_TASKS).samples == 48


def test_overview_averages_over_samples_of_all_tasks(make_records: MakeRecords) -> None:
    records = make_records()
    points, _ = read_points(records)
    cell = find(compute_overview(points, compute_cells(points)), "sparq r=8", task=ALL_TASKS)
    own = [score for task in ("niah_single", "niah_multikey", "vt") for score in scores(records, "sparq r=8", task).values()]
    assert cell.samples == 72
    assert cell.score == pytest.approx(fmean(own))


def test_scan_above_dense_is_flagged(make_records: MakeRecords) -> None:
    records = make_records()
    for record in records:
        if record["label"] == "dense":
            record["score"] = 0.5
        if record["label"] == "loki r=32":
            record["score"] = 1.0
    assert "above dense" in find(cells_of(records), "loki r=32").notes
    assert "above dense" not in find(cells_of(records), "landmark block=8").notes


def test_few_pairs_never_separate(make_records: MakeRecords) -> None:
    for samples, separated in ((1, False), (5, False), (6, True)):
        records = make_records(samples=samples)
        for record in records:
            record["score"] = 0.0 if record["label"] == "sparq r=8" else 1.0
        cell = find(cells_of(records), "sparq r=8")
        assert cell.against_exact is not None
        assert cell.against_exact.below is separated


def test_one_sample_has_no_standard_error(make_records: MakeRecords) -> None:
    assert find(cells_of(make_records(samples=1)), "dense", k=None).standard_error is None


def test_silent_method_is_noted(make_records: MakeRecords) -> None:
    records = make_records()
    for record in records:
        if record["label"] == "loki r=16":
            record["fired"] = 0
        if record["label"] == "loki r=32" and record["sample"] > 0:
            record["fired"] = 30
    cells = cells_of(records)
    assert find(cells, "loki r=16").notes == ("never fired",)
    assert find(cells, "loki r=32").notes == ("fired less often in 23 samples",)
    assert find(cells, "dense", k=None).notes == ()


def test_versions_of_a_method_are_never_averaged(make_records: MakeRecords) -> None:
    records = make_records(samples=6)
    newer = [{**r, "method_version": 2, "score": 0.25} for r in records if r["label"] == "sparq r=8" and r["sample"] < 3]
    points, remarks = read_points([*newer, *records])
    cell = find(compute_cells(points), "sparq r=8")
    assert (cell.samples, cell.score) == (3, 0.25)
    assert "3 of 6 samples" in cell.notes
    assert remarks == ["18 records of an older version of sparq r=8 are left out"]


def test_missing_controls_leave_gaps_not_errors(make_records: MakeRecords) -> None:
    records = [r for r in make_records() if not r["control"]]
    cell = find(cells_of(records), "sparq r=8")
    assert (cell.dense_score, cell.exact_score, cell.against_exact, cell.against_dense) == (None, None, None, None)
    assert cell.notes == ("no exact top-k at this k",)


def test_oracle_with_options_is_compared_with_the_plain_one(make_records: MakeRecords) -> None:
    records = make_records()
    shared = [
        {**r, "options": {"share": "group_sum"}, "label": "exact share=group_sum", "score": 0.5} for r in records if r["k"] and r["control"]
    ]
    cells = cells_of(records + shared)
    cell = find(cells, "exact share=group_sum")
    assert cell.method.role is Role.SCAN
    assert cell.against_exact is not None
    assert cell.against_exact.below
    assert find(cells, "sparq r=8") == find(cells_of(records), "sparq r=8")
    # Where it is the only oracle, it is the reference.
    alone = cells_of([r for r in records if r["label"] != "exact top-k"] + shared)
    assert find(alone, "sparq r=8").exact_score == 0.5


def test_options_tell_methods_apart_even_under_one_label(make_records: MakeRecords) -> None:
    records = make_records()
    for record in records:
        if record["method"] == "sparq":
            record["label"] = "sparq"
    assert len([cell for cell in cells_of(records) if cell.method.label == "sparq" and cell.task == "vt"]) == 2


def test_over_all_tasks_the_difference_is_that_of_the_scores(make_records: MakeRecords) -> None:
    # One task has far fewer samples: a difference that counted samples alike would not be that of the means.
    records = [r for r in make_records(tasks=("niah_multikey", "vt")) if r["task"] == "vt" or r["sample"] < 4]
    cells = cells_of(records)
    overview = compute_overview(read_points(records)[0], cells)
    compared = [cell for cell in overview if cell.against_exact is not None]
    assert compared
    for cell in compared:
        assert cell.score is not None
        assert cell.exact_score is not None
        assert cell.against_exact is not None
        assert cell.against_exact.mean == pytest.approx(cell.score - cell.exact_score)
        assert cell.against_exact.low <= cell.against_exact.mean <= cell.against_exact.high


def test_a_task_that_every_scan_solves_is_marked(make_records: MakeRecords) -> None:
    records = [{**r, "score": 1.0} if r["task"] == "vt" else r for r in make_records(ks=(64, 128))]
    cells = cells_of(records)
    assert "at the ceiling" in find(cells, "sparq r=8").notes
    assert "at the ceiling" not in find(cells, "sparq r=8", task="niah_multikey").notes
    records = [{**r, "score": 0.0} if (r["label"], r["k"]) == ("sparq r=8", 64) else r for r in records]
    assert "at the ceiling" not in find(cells_of(records), "loki r=16", k=64).notes
    assert "at the ceiling" in find(cells_of(records), "loki r=16", k=128).notes


def test_a_score_below_the_ceiling_is_not_marked_and_the_mark_hides_no_difference(make_records: MakeRecords) -> None:
    records = [{**r, "score": 1.0} if not r["control"] else r for r in make_records(tasks=("vt",))]
    records = [{**r, "score": 0.75} if r["method"] == "exact_topk" else r for r in records]
    cells = cells_of(records)
    assert "at the ceiling" not in find(cells, "exact top-k").notes
    assert "at the ceiling" in find(cells, "sparq r=8").notes
    assert mark(find(cells, "exact top-k")) == ""
    assert mark(find(cells, "sparq r=8")) == "▲"
    solved = cells_of([{**r, "score": 1.0} for r in records])
    assert {mark(find(solved, label)) for label in ("exact top-k", "sparq r=8")} == {"≡"}
