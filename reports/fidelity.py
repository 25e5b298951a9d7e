"""Fidelity records as frames: the error of attention outputs, the differences between any two methods, and the table that a run prints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

import pandas as pd

from fathom_eval.console import printable
from fathom_eval.reports.protocols import line_of, protocol
from fathom_eval.reports.wording import number
from fathom_eval.run import canonical_json
from fathom_eval.stats import mean_and_standard_error, paired_difference

ESTIMATED = ("error_dense", "error_exact", "excess", "squared_error_dense", "squared_error_exact", "squared_excess", "recall")
COUNTED = ("bits", "declared_bits", "active_channels", "rows", "candidate_rows", "near_ties")
COMPARED = ("error_dense", "error_exact")
LEGEND = (
    "mean over positions, layers, query heads and windows ± standard error over windows; error: ‖o − o_ref‖ / ‖o_ref‖ with dense "
    "attention or exact top-k at the same k and with the same attend as the reference; excess: error to dense beyond that of this exact "
    "top-k, so of a row with attend=union beyond that of exact attend=union"
)
_BOOTSTRAP_SEED = 0


def fidelity_frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row a context, k and method: means over windows with standard errors (``_se``, missing for a single window); unrounded.

    ``failures`` counts windows in which the method failed, ``failure`` is what the first of them said.
    """
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        cells.setdefault(_cell(record), []).append(record)
    rows = [_row(members) for members in cells.values()]
    rows.sort(key=lambda row: (row["context"], row["k"] or 0, not row["control"], row["bits"] is None, row["bits"] or 0, row["method"]))
    return pd.DataFrame(rows)


def pairs_frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Differences between any two methods at one context and k, paired by window, for pairs that share at least two.

    ``difference`` is the error of ``method`` minus that of ``other`` with its bootstrap interval; ``lower`` and ``higher`` count windows.
    """
    cells: dict[tuple[Any, ...], dict[str, dict[int, Mapping[str, Any]]]] = {}
    for record in records:
        if record["k"] is not None and record["finish"] == "complete":
            methods = cells.setdefault((record["context"], record["k"]), {})
            methods.setdefault(printable(record["label"]), {})[record["sample"]] = record
    columns = ["context", "k", "metric", "method", "other", "windows", "difference", "low", "high", "lower", "ties", "higher"]
    rows = []
    for (context, k), methods in sorted(cells.items()):
        for (first, a), (second, b) in combinations(methods.items(), 2):
            shared = [window for window in a if window in b]
            if len(shared) < 2:
                continue
            for metric in COMPARED:
                found = paired_difference([a[w][metric] for w in shared], [b[w][metric] for w in shared], seed=_BOOTSTRAP_SEED)
                interval = (found.mean, found.low, found.high, found.losses, found.ties, found.wins)
                rows.append((context, k, metric, first, second, found.n, *interval))
    return pd.DataFrame(rows, columns=columns)


def fidelity_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of :func:`fidelity_frame` as texts for a terminal; ``attrs["note"]`` explains them."""
    rows = []
    for row in frame.to_dict(orient="records"):
        bits = None if pd.isna(row["bits"]) else row["bits"]
        rows.append(
            {
                "context": f"{row['context']:,}",
                "k": "" if pd.isna(row["k"]) else f"{int(row['k']):,}",
                "method": row["method"],
                "bits": "" if bits is None else number(bits, 1),
                "÷ D": "" if bits is None else number(bits / row["head_dim"], 2),
                "error to dense": "failed" if row["windows"] == 0 else _estimate(row, "error_dense"),
                "to exact top-k": _estimate(row, "error_exact"),
                "excess": _estimate(row, "excess"),
                "recall": _estimate(row, "recall", digits=3),
                "k∪": "" if pd.isna(row["rows"]) else number(row["rows"], 1),
            }
        )
    table = pd.DataFrame(rows)
    for column in ("context", "k"):
        if len(set(table[column]) - {""}) <= 1:
            table = table.drop(columns=column)
    table.attrs["note"] = LEGEND
    return table


def fidelity_results(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of :func:`fidelity_frame` as plain values, for a machine; what is unknown is None."""
    rows: list[dict[str, Any]] = json.loads(frame.to_json(orient="records"))
    for row in rows:
        row["k"] = None if row["k"] is None else int(row["k"])
    return rows


def _cell(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["context"], record["k"], record["method"], canonical_json(record["options"]), record["method_version"]


def _row(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = members[0]
    complete = [record for record in members if record["finish"] == "complete"]
    failed = [str(record.get("error")) for record in members if record["finish"] != "complete"]
    row: dict[str, Any] = {
        "context": first["context"],
        "k": first["k"],
        "method": printable(first["label"]),
        "name": printable(first["method"]),
        "options": canonical_json(first["options"]),
        "family": printable(first["family"]),
        "line": printable(line_of(first)),
        "protocol": " ".join(protocol(first["options"])),
        "control": first["control"],
        "head_dim": first.get("head_dim"),
        "windows": len(complete),
        "failures": len(failed),
    }
    for name in (*ESTIMATED, *COUNTED):
        values = [float(record[name]) for record in complete if record.get(name) is not None]
        estimate = mean_and_standard_error(values) if values else None
        row[name] = estimate.mean if estimate else None
        if name in ESTIMATED:
            row[f"{name}_se"] = estimate.standard_error if estimate and estimate.n > 1 else None
    row["failure"] = printable(failed[0]) if failed else None
    return row


def _estimate(row: Mapping[str, Any], name: str, digits: int = 4) -> str:
    if pd.isna(row[name]):
        return ""
    error = row[f"{name}_se"]
    return number(row[name], digits) if pd.isna(error) else f"{number(row[name], digits)} ± {number(error, digits)}"
