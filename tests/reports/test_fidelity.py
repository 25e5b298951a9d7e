"""Fidelity records as tables, and the section that a report makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fathom_eval.errors import UserError
from fathom_eval.fidelity import METRICS
from fathom_eval.reports import build_report
from fathom_eval.reports.fidelity import fidelity_frame, fidelity_results, fidelity_table, pairs_frame
from fathom_eval.reports.fidelity_words import equal_error, frontier
from fathom_eval.reports.protocols import line_of
from fathom_eval.reports.wording import significant
from tests.reports.made_records import fidelity_records, write_run
from tests.reports.pages import data, every_file, read_page, table

PUBLISHED = Path(__file__).parents[2] / "reports" / "published"
UNION, DOCUMENT = PUBLISHED / "fidelity-qwen-coder-32k-union", PUBLISHED.parents[1] / "docs" / "fidelity.md"


def made_record(window: int, method: str, k: int | None, value: float, **changes: Any) -> dict[str, Any]:
    base = {"kind": "fidelity", "task": "fidelity", "context": 300, "sample": window, "k": k, "method": method, "options": {}}
    numbers = dict.fromkeys(METRICS, value) | {"recall": 1 - value, "rows": 60.0, "candidate_rows": 0.0}
    scan = {"bits": 34.0, "declared_bits": 34.0, "active_channels": 8.0}
    facts = {"method_version": 1, "label": method, "family": method, "control": False, "finish": "complete", "error": None, "head_dim": 64}
    return {**base, **facts, **numbers, **scan, **changes}


def test_tables_hold_means_standard_errors_and_paired_differences() -> None:
    records = [made_record(window, "a", 64, error) for window, error in enumerate((0.1, 0.2, 0.3))]
    records += [made_record(window, "b", 64, error + 0.05) for window, error in enumerate((0.1, 0.2, 0.3))]
    records += [made_record(0, "c", 64, 0.5, finish="error", error="layer 3: it broke"), made_record(1, "c", 64, 0.5)]
    records.append(made_record(0, "dense", None, 0.0, control=True, bits=None, declared_bits=None, active_channels=None))
    frame = fidelity_frame(records).set_index("method")
    assert list(frame.index) == ["dense", "a", "b", "c"]
    assert frame.loc["a", "error_dense"] == pytest.approx(0.2)
    assert frame.loc["a", "error_dense_se"] == pytest.approx(0.1 / 3**0.5)
    assert frame.loc["c", ["windows", "failures", "failure"]].tolist() == [1, 1, "layer 3: it broke"]
    assert frame.loc["c", "error_dense_se"] != frame.loc["c", "error_dense_se"], "a single window has no standard error"
    pairs = pairs_frame(records)
    assert pairs[["method", "other", "metric", "windows", "lower", "higher"]].values.tolist() == [
        ["a", "b", "error_dense", 3, 3, 0],
        ["a", "b", "error_exact", 3, 3, 0],
    ]
    assert pairs["difference"].tolist() == pytest.approx([-0.05, -0.05])
    table = fidelity_table(fidelity_frame(records))
    assert list(table["method"]) == ["dense", "a", "b", "c"]
    assert table["error to dense"][1] == "0.2000 ± 0.0577"
    assert table["÷ D"][1] == "0.53"


def test_a_method_that_failed_everywhere_is_in_every_table() -> None:
    records = [{**made_record(0, "a", 64, 0.1)}, {**made_record(0, "b", 64, 0.1), "finish": "error", "error": "no"}]
    for name in (*METRICS, "recall", "rows", "bits"):
        records[1].pop(name)
    table = fidelity_table(fidelity_frame(records)).set_index("method")
    assert table.loc["b", "error to dense"] == "failed"
    assert fidelity_results(fidelity_frame(records))[1]["failures"] == 1


def test_results_for_a_machine_are_numbers() -> None:
    records = [made_record(window, "a", 64, 0.1) for window in range(2)]
    records.append(made_record(0, "dense", None, 0.0, control=True, bits=None))
    dense, scan = fidelity_results(fidelity_frame(records))
    assert (scan["method"], scan["k"], scan["error_dense"], scan["windows"]) == ("a", 64, pytest.approx(0.1), 2)
    assert (dense["k"], dense["bits"]) == (None, None)


def test_a_page_with_both_errors_their_intervals_and_the_bits_at_equal_error(tmp_path: Path) -> None:
    settings = {"windows": 8, "context": [2048], "k": [64, 128], "methods": ["dense", "exact", "sparq r=D/8"], "positions": 128}
    run = write_run(tmp_path / "error", fidelity_records(), kind="fidelity", haystack={"name": "wikitext"}, settings=settings)
    files = build_report([run], tmp_path / "out")
    assert {path for path in (tmp_path / "out").rglob("*") if path.is_file()} == every_file(files)
    page = read_page(files)
    page.check()
    assert "12 scans of smollm2 on a CPU: the relative error of attention outputs" in page.words
    assert "fathom budget=32 basis=raw (19.0 bits, 0.0663)" in page.words
    [row] = [row for row in table(files, "errors-2048-k64") if row["method"] == "sparq r=D/8"]
    assert float(row["error to dense"]) == pytest.approx(float(row["excess"]) + 0.0534, abs=1e-3)
    assert set(row) >= {"error to dense standard error", "error to exact top-k", "recall", "k∪"}
    assert {"squared_error_dense", "squared_error_exact", "squared_excess"} <= set(data(files, "results.csv")[0])
    [equal] = [row for row in table(files, "equal-error-2048-k64") if row["scan"] == "sparq r=D/4"]
    assert (equal["reached by"], float(equal["bits ÷ its bits"])) == ("fathom budget=64 basis=klt", pytest.approx(68 / 37.6))
    [full] = [row for row in table(files, "equal-error-2048-k64") if row["scan"] == "full 4-bit"]
    assert full["reached by"] == "none"
    assert [path.name for path in files.figures] == [f"fidelity-2048-k{k}.{ending}" for k in (64, 128) for ending in ("svg", "png")]
    figure = files.figures[0].read_text(encoding="utf-8")
    assert "<title>landmark size=8: error to dense 0.267 ± 0.018 at 128.0 bits</title>" in figure
    assert len(data(files, "pairs.csv")) == 2 * 2 * 13 * 12 // 2


def test_a_single_window_of_a_file_is_named_as_such(tmp_path: Path) -> None:
    text = {"name": "file", "origin": "some/where/wiki.test.raw"}
    run = write_run(tmp_path / "error", fidelity_records(ks=(64,), windows=1), kind="fidelity", haystack=text)
    files = build_report([run], tmp_path / "out")
    words = read_page(files).words
    assert "of 1 window of wiki.test.raw." in words
    assert "a CPU · 1 window · " in words
    for file in (files.html, files.markdown, files.latex, *(path for path in files.figures if path.suffix == ".svg")):
        assert "1 windows" not in file.read_text(encoding="utf-8")


def test_ablations_set_neighbouring_values_of_one_option_side_by_side(tmp_path: Path) -> None:
    run = write_run(tmp_path / "error", fidelity_records(ks=(64,)), kind="fidelity")
    files = build_report([run], tmp_path / "out")
    rows = table(files, "ablation-basis")
    assert [(row["method"], row["basis"]) for row in rows] == [
        ("fathom budget=48 basis=raw", "raw → klt"),
        ("fathom budget=64 basis=raw", "raw → klt"),
    ]
    assert float(rows[0]["difference high"]) < 0, "the rotated planes have the lower error in these records"
    budgets = [row["budget"] for row in table(files, "ablation-budget")]
    assert budgets == ["32 → 48", "48 → 64", "48 → 64"]


def test_a_suite_is_shown_at_equal_bytes(tmp_path: Path) -> None:
    run = write_run(tmp_path / "error", fidelity_records(), kind="fidelity", settings={"suite": "basis"})
    files = build_report([run], tmp_path / "out")
    assert "Ablations: suite basis" in read_page(files).words
    assert {row["method"] for row in table(files, "equal-bytes-basis")} >= {"fathom budget=48 basis=klt", "sparq r=D/4"}


def test_what_an_interrupted_run_lacks_is_named(tmp_path: Path) -> None:
    settings = {"windows": 8, "context": [2048, 4096], "k": [64], "methods": ["dense", "exact", "sparq r=D/8", "quest"]}
    records = [record for record in fidelity_records(ks=(64,), windows=3) if record["method"] in ("dense", "exact", "sparq")]
    files = build_report([write_run(tmp_path / "run", records, kind="fidelity", settings=settings)], tmp_path / "out")
    words = read_page(files).words
    assert "sparq r=D/8 at 2,048 tokens, k = 64: 3 of 8 windows" in words
    assert "quest at 2,048 tokens, k = 64: 0 of 8 windows" in words
    assert "every method at 4,096 tokens, k = 64: 0 of 8 windows" in words
    assert "fewer than 6 separate no two methods" in words
    assert any(path.name == "missing.csv" for path in files.data)


def test_records_of_another_kind_are_refused(tmp_path: Path) -> None:
    record = {"kind": "fidelity", "task": "x", "context": 1, "sample": 0, "k": 1, "method": "m", "options": {}, "method_version": 1}
    with pytest.raises(UserError, match="no record of kind 'fidelity'"):
        build_report([write_run(tmp_path / "run", [record], kind="fidelity")], tmp_path / "out")


def test_a_method_that_takes_more_than_k_tokens_stands_outside_the_frontier() -> None:
    row = {"control": False, "bits": 10.0, "error_dense": 0.3, "protocol": ""}
    rows = [{**row, "method": "plain"}, {**row, "method": "sampled (k: of the oracle only)", "bits": 5.0, "error_dense": 0.1}]
    rows.append({**row, "method": "worse", "error_dense": 0.4})
    rows.append({**row, "method": "plain rerank=2", "error_dense": 0.1, "protocol": "rerank=2"})
    assert [one["method"] for one in frontier(rows)] == ["plain"]


def test_equal_error_sets_only_reads_of_one_policy_against_each_other() -> None:
    scan = {"control": False, "name": "sparq", "method": "sparq", "bits": 68.0, "error_dense": 0.14, "protocol": ""}
    union = {**scan, "name": "fathom", "method": "fathom union", "bits": 28.0, "error_dense": 0.13, "protocol": "attend=union"}
    plain = {**union, "method": "fathom", "bits": 73.0, "protocol": ""}
    assert equal_error([scan, union]) == []
    assert equal_error([scan, union, plain]) == [(scan, plain)]
    reranked = {**scan, "method": "sparq union", "protocol": "attend=union"}
    assert equal_error([reranked, union, plain]) == [(reranked, union)]


def test_variants_that_no_budget_leads_to_are_lines_of_their_own() -> None:
    record = {"method": "fathom", "family": "Fathom", "label": "fathom", "options": {"budget": 64, "basis": "klt"}}
    assert line_of(record) == "Fathom klt"
    assert line_of({**record, "options": {"basis": "klt", "rerank": 2.0}}) == "Fathom klt rerank=2.0"
    assert line_of({**record, "options": {}}) == "Fathom auto"
    assert line_of({"method": "sparq", "family": "SparQ", "label": "sparq r=D/4", "options": {"r": "D/4"}}) == "SparQ"


def test_the_lead_is_the_longest_context_at_its_first_k_and_short(tmp_path: Path) -> None:
    """Twelve methods, each a little better and dearer than the one before: of which three at a time are alike."""
    records = []
    for context in (300, 600):
        for window in range(8):
            for place in range(12):
                # Pairs of methods differ in one window alone, so that no interval separates them.
                error = 1.0 - 0.05 * (place // 3) - (0.001 * (place % 3) if window == 0 else 0)
                records.append(made_record(window, f"scan {place}", 64, error, context=context, bits=10.0 + place, error_dense=error))
    files = build_report([write_run(tmp_path / "run", records, kind="fidelity")], tmp_path / "out")
    lead, *sections = files.markdown.read_text(encoding="utf-8").split("### ")
    assert "At 600 tokens, k = 64" in lead
    assert "At 300 tokens" not in lead
    assert "scan 4 (14.0 bits, 0.950), 6 more and scan 11 (21.0 bits, 0.850)." in lead
    assert "The other setting stands below." in lead
    assert len(lead.split("dense attention", 1)[1]) < 900
    chains = "neighbours are not separated in error: scan 0 … scan 2; scan 3 … scan 5; scan 6 … scan 8; scan 9 … scan 11."
    own = {section.split("\n")[0]: section for section in sections}
    assert all(chains in own[title] and "scan 7 (17.0 bits" in own[title] for title in ("300 tokens, k = 64", "600 tokens, k = 64"))


def test_a_row_with_union_is_set_against_exact_top_k_with_union(tmp_path: Path) -> None:
    """In published records excess is what is left of the error beyond exact top-k of the same attend, and the page and document say so."""
    files = build_report([UNION], tmp_path / "out")
    rows = {row["method"]: row for row in data(files, "results.csv")}
    plain, union = (float(rows[name]["error_dense"]) for name in ("exact", "exact attend=union"))
    assert union < plain, "so that no sentence may say that nothing comes below the dashed line"
    for label, oracle in (("fathom budget=24 basis=auto attend=union", union), ("fathom budget=24 basis=auto", plain)):
        assert float(rows[label]["error_dense"]) - float(rows[label]["excess"]) == pytest.approx(oracle)
    page = read_page(files)
    assert "exact top-k at the same k and with the same attend as the reference" in page.words
    assert "with exact top-k at the same k and with the same `attend` as the reference" in " ".join(
        DOCUMENT.read_text(encoding="utf-8").split()
    )
    figure = next(path for path in files.figures if path.suffix == ".svg").read_text(encoding="utf-8")
    assert f"<title>exact top-k, own winners: error to dense {significant(plain)}</title>" in figure
    assert f"<title>exact top-k, attend=union: error to dense {significant(union)}</title>" in figure
    assert all(f">{name}</text>" in figure for name in ("exact top-k, own winners", "exact top-k, attend=union"))
    assert "below it no choice of k tokens a head by score is expected to come. Scans with attend=union attend to more" in page.words
    assert "Scans with attend=union attend to more tokens than k and may lie below it" in page.words


def test_without_union_the_figure_has_one_line(tmp_path: Path) -> None:
    files = build_report([write_run(tmp_path / "error", fidelity_records(ks=(64,)), kind="fidelity")], tmp_path / "out")
    figure = next(path for path in files.figures if path.suffix == ".svg").read_text(encoding="utf-8")
    assert ">exact top-k, own winners</text>" in figure
    assert "attend=union" not in figure


def test_the_lead_rounds_bits_as_the_table_does(tmp_path: Path) -> None:
    files = build_report([write_run(tmp_path / "error", fidelity_records(ks=(64,)), kind="fidelity")], tmp_path / "out")
    text = files.markdown.read_text(encoding="utf-8")
    assert "fathom budget=64 basis=klt (37.6 bits," in text.split("### ")[0]
    assert "| fathom budget=64 basis=klt | 37.6 |" in text
