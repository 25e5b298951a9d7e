"""Times at equal error as a section shows them: what ``bench equal-error`` wrote beside the steps of a run, nothing computed again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fathom_eval.errors import UserError
from fathom_eval.offload.bench.equal_error import SAME_BITS, EqualError, read_table, tables_of
from fathom_eval.reports.canvas import slug
from fathom_eval.reports.document import Block, Column, Entry, Row, Table, entry
from fathom_eval.reports.timing_steps import APART
from fathom_eval.reports.wording import number, setting

_FATHOM = "fathom"
_COLUMNS = (
    Column("errors", "tokens"),
    Column("reference", text=True),
    Column("its error"),
    Column("Fathom in a basis", text=True),
    Column("error"),
    Column("below in"),
    Column("ms"),
    Column("speed"),
    Column("raw channels", text=True),
    Column("raw channels: speed"),
)
_TEXT = (
    "Errors of a fidelity run beside the times of this one: of the timed reads of Fathom whose mean error is no larger than the "
    "reference's, the fastest. A configuration of the errors stands for a step where method, k, rerank, what heads attend to, named "
    f"budgets and numbers of channels as shares of head_dim and, within {100 * SAME_BITS:g} %, the bits a channel agree. The models of "
    "the two runs may differ: each table names them."
)


@dataclass(frozen=True)
class EqualErrors:
    """One table that the command wrote, by the name of its file."""

    file: str
    rows: Sequence[EqualError]


def equal_errors(folder: Path) -> tuple[list[EqualErrors], list[str]]:
    """The tables beside the steps of a run, and a line for each that cannot be shown."""
    found, problems = [], []
    for path in tables_of(folder):
        try:
            rows = read_table(path)
        except UserError as error:
            problems.append(str(error))
            continue
        found += [EqualErrors(path.name, rows)] if rows else []
    return found, problems


def equal_error_block(tables: Sequence[EqualErrors], anchor: str, steps: str, device: str) -> Block | None:
    """A table for each file and setting of the steps; None without any.

    Args:
        steps: Name of the run of the steps.
    """
    taken: set[str] = set()
    items = [
        _table(one.file, rows, slug(f"equal-error-{Path(one.file).stem.removeprefix('equal-error-')}", taken), steps, device)
        for one in tables
        for rows in _by_setting(one.rows)
    ]
    return Block(f"{anchor}-equal-error", "Time at equal error", items, _TEXT) if items else None


def _by_setting(rows: Sequence[EqualError]) -> list[list[EqualError]]:
    groups: dict[tuple[object, ...], list[EqualError]] = {}
    for row in rows:
        groups.setdefault((row.step_context, row.step_k, row.step_index, row.step_model), []).append(row)
    return list(groups.values())


def _table(file: str, rows: Sequence[EqualError], name: str, steps: str, device: str) -> Table:
    first = rows[0]
    references: dict[tuple[int, str], dict[str, EqualError]] = {}
    errors: dict[tuple[int, str], float] = {}
    for row in rows:
        key = row.error_context, row.reference
        errors[key] = row.reference_error
        own = references.setdefault(key, {})
        # Of what a record calls no basis, such as the automatic one, the scan that was timed says which it is.
        basis = row.basis if row.basis in ("klt", "raw") else row.step_basis
        if row.method == _FATHOM and (basis not in own or row.step_ms < own[basis].step_ms):
            own[basis] = row
    lines = [Row(_entries(context, label, errors[context, label], own)) for (context, label), own in references.items()]
    where = {"host": "index in host memory", "hbm": "index in HBM"}.get(first.step_index, f"index: {first.step_index}")
    place = f"{setting(first.step_context, first.step_k)}, {where}"
    source = ", ".join(part for part in (first.errors_model, f"head_dim {first.error_head_dim}", first.errors_text) if part)
    origin = f"errors: run {first.errors_run or 'unknown'}, {source}, {_windows(rows)} · times: run {steps}, {first.step_model}, {place}"
    legend = (
        "ms: time of a step, on a GPU its GPU time; speed: the reference's time over it, in brackets by wall time; below in: windows in "
        f"which the error is below the reference's; none: no timed budget reaches the error; {APART} did not take turns with the "
        f"reference, or that is not recorded; {file} beside the run's records has other methods at these errors too"
    )
    origin = " · ".join(part for part in (origin, device) if part)
    return Table(name, f"Time at equal error, {place}: {file}", origin, _COLUMNS, tuple(lines), legend)


def _windows(rows: Sequence[EqualError]) -> str:
    amounts = sorted({row.windows for row in rows})
    noun = "window" if amounts == [1] else "windows"
    return f"{' to '.join(f'{amount:,}' for amount in dict.fromkeys((amounts[0], amounts[-1])))} {noun}"


def _entries(context: int, reference: str, error: float, own: Mapping[str, EqualError]) -> tuple[Entry, ...]:
    turned, raw = own.get("klt"), own.get("raw")
    return (
        Entry(f"{context:,}", context),
        Entry(reference),
        entry(error, 3),
        _label(turned, "klt"),
        entry(None if turned is None else turned.error, 3),
        Entry("–" if turned is None else f"{turned.windows_below} of {turned.windows_shared}"),
        entry(None if turned is None else turned.step_ms, 2),
        _speed(turned),
        _label(raw, "raw"),
        _speed(raw),
    )


def _label(row: EqualError | None, basis: str) -> Entry:
    return Entry("none" if row is None else row.label.replace(f" basis={basis}", "").removeprefix(f"{_FATHOM} "))


def _speed(row: EqualError | None) -> Entry:
    if row is None:
        return Entry("–")
    wall = f" ({number(row.reference_wall_ms / row.step_wall_ms, 2)})" if row.step_wall_ms else ""
    return Entry(f"{number(row.ratio, 2)}{wall}{'' if row.same_round else f' {APART}'}", row.ratio)
