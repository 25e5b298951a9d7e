"""Fidelity records as tables and a figure."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fathom_eval.errors import UserError
from fathom_eval.fidelity import METRICS
from fathom_eval.reports.fidelity import build_fidelity_report, draw_fidelity, fidelity_frame, fidelity_table, pairs_frame
from fathom_eval.run import Run


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
    assert draw_fidelity(fidelity_frame(records)) is not None


def test_the_figure_is_the_same_for_the_same_records_and_absent_without_scans(tmp_path: Path) -> None:
    records = [
        made_record(window, name, k, 0.1 + window / 100, bits=bits, family=name[0], label=name)
        for window in range(2)
        for k in (64, 128)
        for name, bits in (("s1", 17.0), ("s2", 34.0), ("f1", 28.0))
    ]
    first, second = draw_fidelity(fidelity_frame(records), "model"), draw_fidelity(fidelity_frame(records), "model")
    assert first is not None
    assert first == second
    assert first[1].startswith(b"\x89PNG")
    assert "k = 128" in first[0]
    assert draw_fidelity(fidelity_frame([made_record(0, "dense", None, 0.0, control=True, bits=None)])) is None
    with Run.open(tmp_path / "run", identity={}, details={"kind": "fidelity"}), pytest.raises(UserError, match="no fidelity records yet"):
        build_fidelity_report(tmp_path / "run", tmp_path / "report")
