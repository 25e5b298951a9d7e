"""RULER-style results as pandas frames, as CSV files that no spreadsheet can be tricked with, and as the table that a run prints."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from fathom_eval.console import csv_safe
from fathom_eval.reports.cells import (
    ALL_TASKS,
    CEILING_NOTE,
    NOT_DISCRIMINATIVE,
    Cell,
    compute_cells,
    compute_overview,
    read_points,
    sort_key,
    tasks_of,
)
from fathom_eval.reports.coverage import coverage_legend, covered
from fathom_eval.reports.decoding import COLUMN
from fathom_eval.reports.narrative import interval, with_error
from fathom_eval.reports.ruler_source import Source
from fathom_eval.reports.wording import number
from fathom_eval.run import canonical_json

LEGEND = (
    "score ± standard error; ▼ below and ▲ above exact top-k at the same k by a paired 95 % interval; "
    "≈ not discriminative, dense itself is at the floor: left out of all tasks; ≡ at the ceiling, where every scan succeeds"
)

# fmt: off
SAMPLE_COLUMNS = (
    "run", "task", "context", "sample", "k", "label", "method", "options", "method_version", "family", "control", "score", "hits", "gold",
    "generation", "new_tokens", "finish", "error", "prompt_tokens", "depths", "head_dim", "bits", "declared_bits", "active_channels",
    "rows", "candidate_rows", "fired", "steps", "seconds", "first_divergence",
)
# fmt: on
WHOLE = (
    "context",
    "k",
    "sessions",
    "expected_sessions",
    "samples",
    "windows",
    "pairs",
    "wins",
    "ties",
    "losses",
    "failures",
    "expected_samples",
    "tasks",
    "expected_tasks",
)


def results_frame(source: Source, cells: Sequence[Cell]) -> pd.DataFrame:
    """One row a cell, with everything known about it; numbers unrounded. Means over tasks say of how many they are."""
    frame = pd.DataFrame([_row(source.name, cell) for cell in cells], columns=list(_row(source.name, cells[0])) if cells else None)
    if any(cell.task == ALL_TASKS for cell in cells):
        frame = frame.assign(tasks=[len(cell.tasks) for cell in cells], expected_tasks=[cell.expected_tasks for cell in cells])
    return frame.assign(**{COLUMN: [cell.decoded_by for cell in cells]}) if source.decoded and cells else frame


def lacks_tasks(cells: Sequence[Cell]) -> bool:
    """Whether some scores are means over fewer tasks than those beside them."""
    return any(cell.score is not None and not cell.whole for cell in cells)


def _row(run: str, cell: Cell) -> dict[str, Any]:
    exact, dense = cell.against_exact, cell.against_dense
    return {
        "run": run,
        "task": cell.task,
        "context": cell.context,
        "k": cell.k,
        "method": cell.method.label,
        "family": cell.method.family,
        "samples": cell.samples,
        "score": cell.score,
        "standard_error": cell.standard_error,
        "dense_score": cell.dense_score,
        "exact_top_k_score": cell.exact_score,
        "pairs": exact.pairs if exact else None,
        "minus_exact_top_k": exact.mean if exact else None,
        "minus_exact_top_k_low": exact.low if exact else None,
        "minus_exact_top_k_high": exact.high if exact else None,
        "wins": exact.wins if exact else None,
        "ties": exact.ties if exact else None,
        "losses": exact.losses if exact else None,
        "minus_dense": dense.mean if dense else None,
        "minus_dense_low": dense.low if dense else None,
        "minus_dense_high": dense.high if dense else None,
        "bits": cell.bits,
        "declared_bits": cell.declared_bits,
        "bits_per_channel": cell.bits_per_channel,
        "active_channels": cell.active_channels,
        "rows": cell.rows,
        "failures": cell.failures,
        "expected_samples": cell.expected,
        "notes": "; ".join(cell.notes),
    }


def results_csv(frames: Sequence[pd.DataFrame]) -> str:
    """Rows as CSV text. Whole numbers stay whole although some rows lack them, and no text is a formula."""
    frame = pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)
    frame = frame.astype({name: "Int64" for name in WHOLE if name in frame})
    for name in frame.columns:
        if not pd.api.types.is_numeric_dtype(frame[name]):
            frame[name] = [None if value is None or value != value else csv_safe(value) for value in frame[name]]
    return str(frame.to_csv(index=False, lineterminator="\n"))


def write_results_csv(path: Path, source: Source, cells: Sequence[Cell]) -> None:
    """One row a cell."""
    path.write_text(results_csv([results_frame(source, cells)]), encoding="utf-8")


def write_samples_csv(path: Path, source: Source) -> None:
    """One row a record, written as the records are read, so that a big run needs no more memory than a small one."""
    dense = _dense_tokens(source)
    columns = (*SAMPLE_COLUMNS, *([COLUMN] if source.decoded else []))
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(columns)
        for record in source.run.iter_records():
            row = {"run": source.name, **record}
            row.setdefault("first_divergence", _first_divergence(record, dense))
            writer.writerow([csv_cell(row.get(name)) for name in columns])


def _dense_tokens(source: Source) -> dict[tuple[Any, ...], Sequence[int]]:
    """The tokens that dense attention generated, by task, context and sample."""
    return {
        _sample_key(record): record["token_ids"]
        for record in source.run.iter_records()
        if record.get("control") and record["k"] is None and isinstance(record.get("token_ids"), list)
    }


def _sample_key(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["task"], record["context"], record["sample"]


def _first_divergence(record: Mapping[str, Any], dense: Mapping[tuple[Any, ...], Sequence[int]]) -> int | None:
    """Position of the first token that differs from the dense generation; None where all agree or either is unknown."""
    own, reference = record.get("token_ids"), dense.get(_sample_key(record))
    if not isinstance(own, list) or reference is None or own == reference:
        return None
    pairs = enumerate(zip(own, reference, strict=False))
    return next((position for position, (a, b) in pairs if a != b), min(len(own), len(reference)))


def csv_cell(value: object) -> object:
    """A value as a CSV file holds it: numbers as they are, texts that no spreadsheet takes for a formula, the rest as JSON."""
    if value is None or isinstance(value, (int, float)):
        return value
    return csv_safe(value if isinstance(value, str) else canonical_json(value))


def mark(cell: Cell) -> str:
    """The sign that stands beside a score; readable without colour."""
    if NOT_DISCRIMINATIVE in cell.notes:
        return "≈"
    found = cell.compared
    if found is not None and (found.below or found.above):
        return "▼" if found.below else "▲"
    return "≡" if CEILING_NOTE in cell.notes else ""


def summary_table(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Method × task with standard errors, dense and exact top-k first: what the ``ruler`` command prints at its end.

    Texts, ready to print, to two decimals so that a terminal holds them. ``attrs["note"]`` explains the marks.
    """
    points, _ = read_points(records)
    cells = compute_cells(points)
    overview = compute_overview(points, cells)
    frame = _matrix(cells, overview, tasks_of(points), digits=2)
    for column in ("context", "k"):
        if frame[column].nunique() <= 1:
            frame = frame.drop(columns=column)
    frame.attrs["note"] = LEGEND + coverage_legend([*cells, *overview])
    return frame


def _matrix(cells: Sequence[Cell], overview: Sequence[Cell], tasks: Sequence[str], digits: int) -> pd.DataFrame:
    columns = ["context", "k", "method", "bits", *tasks, *([ALL_TASKS] if len(tasks) > 1 else []), "minus exact top-k"]
    several = {(cell.context, cell.k, cell.method): cell for cell in overview}
    rows = []
    ordered = sorted(cells, key=lambda cell: (cell.context, *sort_key(cell)))
    for key in dict.fromkeys((cell.context, cell.k, cell.method) for cell in ordered):
        own = {cell.task: cell for cell in cells if (cell.context, cell.k, cell.method) == key}
        bits = [cell.bits for cell in own.values() if cell.bits is not None]
        row = {"context": f"{key[0]:,}", "k": "" if key[1] is None else f"{key[1]:,}", "method": key[2].label}
        row["bits"] = number(sum(bits) / len(bits), 1) if bits else ""
        row |= {task: _score(own.get(task), digits) for task in tasks}
        total = several.get(key)
        row[ALL_TASKS] = _score(total, digits)
        row["minus exact top-k"] = interval(total, digits) if total else ""
        rows.append([row[column] for column in columns])
    return pd.DataFrame(rows, columns=columns)


def _score(cell: Cell | None, digits: int) -> str:
    if cell is None:
        return ""
    parts = ("failed",) if cell.failed else (with_error(cell, digits), covered(cell), mark(cell))
    return " ".join(part for part in parts if part)
