"""Comparison at equal bytes: a method may read fewer scan bits and more rows, so only all that a step reads tells what is cheaper."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from fathom_eval.kernels.pack import BLOCK

ELEMENT_BYTES = 2
"""Of a K/V cache in half precision, whatever a run computes in."""


def step_bytes(record: Mapping[str, Any], element_bytes: int = ELEMENT_BYTES) -> float | None:
    """Bytes that one step reads for one KV head of one layer: the scan, and the rows.

    Scan bits of every sealed token, K and V of the rows that are attended to, and K of those that were fetched for reranking only.
    Tokens that are not sealed cost no scan, as everywhere.

    Args:
        record: Of a fidelity run, a task or a session; what was scanned is counted in it, or taken from its context.

    Returns:
        None for a control that selects, since what it scans is not counted, and for a record without counts.
    """
    rows = record.get("rows")
    if rows is None or (record["control"] and record["k"] is not None):
        return None
    scan = record.get("scan_bytes")
    if scan is None:
        scan = (record.get("bits") or 0.0) / 8 * (_tokens(record) // BLOCK * BLOCK)
    fetched = 2 * rows + (record.get("candidate_rows") or 0.0)
    return float(scan + fetched * record["head_dim"] * element_bytes)


def _tokens(record: Mapping[str, Any]) -> int:
    return int(record.get("prompt_tokens") or record["context"])


@dataclass(frozen=True)
class Comparison:
    """One method at one context and k.

    Attributes:
        bytes: Of a step, KV head and layer.
        errors: By the name of the metric, means over windows.
        plain: The plain line's error at the same bytes; None outside the bytes that the line covers, or without a count.
    """

    context: int
    k: int | None
    method: str
    bits: float | None
    channels: float | None
    candidate_rows: float | None
    bytes: float | None
    errors: dict[str, float]
    plain: dict[str, float | None]


def compare_at_equal_bytes(
    records: Iterable[Mapping[str, Any]], plain: Sequence[str], metrics: Sequence[str] = ("error_dense", "error_exact")
) -> list[Comparison]:
    """Every method beside the plain line at the bytes that the method reads.

    Between two methods of the line, errors are interpolated in the logarithms of bytes and error.

    Args:
        records: Complete ones of a fidelity run; others are left out.
        plain: Labels of the methods that make up the line.
    """
    cells: dict[tuple[int, int | None, str], list[Mapping[str, Any]]] = {}
    for record in records:
        if record["finish"] == "complete":
            cells.setdefault((record["context"], record["k"], record["label"]), []).append(record)
    found = {cell: _measured(cell, members, metrics) for cell, members in cells.items()}
    result = []
    for (context, k, label), row in found.items():
        line = [found[context, k, name] for name in plain if (context, k, name) in found and name != label]
        if label in plain:
            result.append(row)
            continue
        at = {metric: _interpolated(row.bytes, [(point.bytes, point.errors.get(metric)) for point in line]) for metric in metrics}
        result.append(Comparison(**{**vars(row), "plain": at}))
    result.sort(key=lambda row: (row.context, row.k or 0, row.bytes is None, row.bytes or 0.0, row.method))
    return result


def _measured(cell: tuple[int, int | None, str], members: Sequence[Mapping[str, Any]], metrics: Sequence[str]) -> Comparison:
    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) / len(known) if known else None

    errors = {metric: mean([record.get(metric) for record in members]) for metric in metrics}
    return Comparison(
        context=cell[0],
        k=cell[1],
        method=cell[2],
        bits=mean([record.get("bits") for record in members]),
        channels=mean([record.get("active_channels") for record in members]),
        candidate_rows=mean([record.get("candidate_rows") for record in members]),
        bytes=mean([step_bytes(record) for record in members]),
        errors={metric: value for metric, value in errors.items() if value is not None},
        plain=dict.fromkeys(metrics),
    )


def _interpolated(at: float | None, points: Sequence[tuple[float | None, float | None]]) -> float | None:
    line = sorted((count, error) for count, error in points if count is not None and error is not None and error > 0)
    if at is None or not line or not line[0][0] <= at <= line[-1][0]:
        return None
    for (left, low), (right, high) in pairwise(line):
        if left <= at <= right:
            share = 0.0 if right == left else math.log(at / left) / math.log(right / left)
            return math.exp(math.log(low) + share * (math.log(high) - math.log(low)))
    return line[0][1]  # a line of one method, read at its own bytes


def comparison_values(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Numbers for a CSV file: ``plain_…`` is the plain line's error at the bytes of the method."""
    rows = []
    for row in comparisons:
        counts = {"bits": row.bits, "channels": row.channels, "candidate_rows": row.candidate_rows, "bytes": row.bytes}
        plain = {f"plain_{metric}": row.plain.get(metric) for metric in row.plain}
        rows.append({"context": row.context, "k": row.k, "method": row.method, **counts, **dict.fromkeys(row.plain), **row.errors, **plain})
    return rows


def comparison_rows(comparisons: Sequence[Comparison]) -> list[dict[str, str]]:
    """Texts for a table: each error, and its ratio to the plain line's at equal bytes (below 1 is better than the line)."""

    def text(value: float | None, form: str = ".4g") -> str:
        return "" if value is None else format(value, form)

    rows = []
    for row in comparisons:
        cells = {
            "context": f"{row.context:,}",
            "k": "" if row.k is None else f"{row.k:,}",
            "method": row.method,
            "bits": text(row.bits, ".1f"),
            "channels": text(row.channels, ".1f"),
            "further K rows": text(row.candidate_rows, ".1f"),
            "bytes": text(row.bytes, ",.0f"),
        }
        for metric, title in (("error_dense", "to dense"), ("error_exact", "to exact top-k")):
            error, plain = row.errors.get(metric), row.plain.get(metric)
            cells[f"error {title}"] = text(error)
            cells[f"× plain {title}"] = text(error / plain, ".2f") if error is not None and plain else ""
        rows.append(cells)
    return rows


LEGEND = (
    "bytes of a step, KV head and layer: scan bits, K and V of the rows attended to, K of rows fetched for reranking, in half precision; "
    "× plain: error over that of the plain line at the same bytes, below 1 is better; empty for the line itself and where it does not reach"
)
