"""A run of agent sessions as a section of a report: agreement with exact top-k, paired differences, and the steps themselves."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from fathom_eval.console import printable
from fathom_eval.reports.canvas import Style
from fathom_eval.reports.cells import Comparison
from fathom_eval.reports.curves import FIXED_DEPTH, Panel, Point, Reference, draw_panels, how_to_read
from fathom_eval.reports.decoding import COLUMN
from fathom_eval.reports.document import (
    Block,
    Column,
    Drawing,
    Entry,
    Fact,
    Item,
    Measure,
    Row,
    Section,
    Table,
    difference,
    entry,
    explained,
)
from fathom_eval.reports.facts import devices_of, provenance_of, starts_of
from fathom_eval.reports.glossary import glossary
from fathom_eval.reports.session_cells import Role, SessionCell
from fathom_eval.reports.session_source import SessionSource, answer, mark, session_remarks, session_source, subject
from fathom_eval.reports.session_steps import session_steps
from fathom_eval.reports.tables import csv_cell, results_csv
from fathom_eval.reports.wording import number, signed, spread
from fathom_eval.run import Run

LEGEND = (
    "agreement: word-level ratio with the step of exact top-k at the same k, mean over sessions ± standard error; "
    "▼ below and ▲ above the baseline by a paired 95 % interval; alone: the same branch once more in its own batch, compared with itself"
)
# fmt: off
STEP_COLUMNS = (
    "run", "sample", "session_id", "repo", "prompt_tokens", "k", "label", "method", "options", "method_version", "family", "control",
    "agreement_exact", "agreement_dense", "agreement_recorded", "dense_agreement_exact", "exact_match", "first_divergent_token", "finish",
    "error", "tool_call", "recorded_tool_call", "new_tokens", "bits", "declared_bits", "active_channels", "rows", "candidate_rows", "fired",
    "steps", "seconds", "prefill_seconds", "memory", "sources", "generation", "recorded_step",
)
# fmt: on
_MAX_FAILURES = 200
READING = how_to_read(
    "higher",
    "the agent's step is closer to the one of exact top-k",
    "The dashed line is exact top-k itself, the solid one dense attention.",
)


def session_section(source: SessionSource, anchor: str, styles: dict[str, Style]) -> Section:
    """The run with everything that a report shows of it."""
    blocks = []
    for k in source.k_values:
        cells = [cell for cell in source.cells if cell.k == k]
        title = "dense attention" if k is None else f"k = {k:,}"
        items: list[Item] = [_agreement(source, k, cells), *_figure(source, k, cells, styles), *_pairs(source, k, cells)]
        blocks.append(Block(f"{anchor}-k{k}", title, items))
    blocks = explained(blocks, READING)
    failures = _failures(source)
    if failures is not None:
        blocks.append(Block(f"{anchor}-failures", "Failed steps", [failures]))
    steps = session_steps(source, f"{anchor}-steps")
    if steps is not None:
        text = (
            "Each method's step beside that of exact top-k at the same k. Words that the other lacks are underlined, with a solid line on "
            "the left and a dashed one on the right, the first of them framed. Steps are shown as text: nothing in them acts on this page."
        )
        blocks.append(Block(f"{anchor}-steps", "Steps", [steps], text))
    return Section(
        anchor=anchor,
        name=source.name,
        kind="sessions",
        model=source.model,
        device=", ".join(devices_of(source.run.manifest)),
        subject=subject(source),
        answer=answer(source),
        remarks=session_remarks(source),
        blocks=blocks,
        missing=source.missing,
        measures=_measures(source),
        facts=_facts(source),
        glossary=glossary("sessions"),
        provenance=provenance_of(source.run.manifest),
        starts=starts_of(source.run.manifest),
        identity=str(source.run.manifest.get("identity_sha256", "")),
        manifest=source.run.manifest,
        data={
            "results.csv": partial(_write_results, source=source),
            "paired.csv": partial(_write_paired, source=source),
            "steps.csv": partial(_write_steps, source=source),
        },
    )


def summary_table(run: Run) -> pd.DataFrame:
    """The table that the ``sessions`` command prints at its end: texts, to two decimals so that a terminal holds them."""
    source = session_source(run, run.path.name)
    against = f"minus {source.baseline}" if source.baseline else "difference"
    rows = []
    for cell in source.cells:
        found = cell.against_baseline
        error = "" if cell.standard_error is None else f" ± {number(cell.standard_error, 2)}"
        rows.append(
            {
                "k": "" if cell.k is None else f"{cell.k:,}",
                "method": cell.method.label,
                "bits": "" if cell.bits is None else number(cell.bits, 1),
                "agreement": "failed" if cell.failed else f"{number(cell.agreement, 2)}{error} {mark(cell)}".rstrip(),
                against: _interval(found),
                "w/t/l": "" if found is None else f"{found.wins}/{found.ties}/{found.losses}",
                "exact match": number(cell.exact_match, 2),
                "first difference": number(cell.first_divergence, 0),
                "with dense": number(cell.agreement_dense, 2),
                "with recorded": number(cell.agreement_recorded, 2),
                "valid calls": number(cell.valid_calls, 2),
            }
        )
    frame = pd.DataFrame(rows)
    if len(source.k_values) == 1:
        frame = frame.drop(columns="k")
    frame.attrs["note"] = "\n".join([LEGEND, *(f"{'warning' if one.grave else 'note'}: {one.text}" for one in session_remarks(source))])
    return frame


def session_results(run: Run) -> list[dict[str, Any]]:
    """The rows of results.csv as plain values, for a machine."""
    rows = results_frame(session_source(run, run.path.name)).to_dict(orient="records")
    return [{str(name): None if value is None or value != value else value for name, value in row.items()} for row in rows]


def _interval(found: Comparison | None) -> str:
    if found is None:
        return ""
    # The interval of a single pair is no number.
    mean = signed(found.mean, 2)
    return mean if found.low != found.low else f"{mean} [{signed(found.low, 2)}, {signed(found.high, 2)}]"


def _origin(source: SessionSource, k: int | None, cells: Sequence[SessionCell]) -> str:
    length = f"{source.tokens} tokens" if source.tokens else ""
    sessions = spread([cell.sessions for cell in cells if cell.sessions], "session")
    at = "" if k is None else f"k = {k:,}"
    devices = ", ".join(devices_of(source.run.manifest))
    return " · ".join(part for part in (f"run {source.name}", source.model, length, at, devices, sessions) if part)


def _agreement(source: SessionSource, k: int | None, cells: Sequence[SessionCell]) -> Table:
    # Keys that a rerank reads are no scan bits, and a table that left them out would show it for nothing.
    rescores = any(cell.rescored for cell in cells)
    columns = (
        Column("method"),
        Column("agreement with exact top-k"),
        Column(f"minus {source.baseline or 'baseline'}", "wins / ties / losses"),
        Column("bits"),
        *map(Column, ("exact match", "first difference", "with dense", "with recorded", "valid calls", "rows")),
        *([Column("keys rescored")] if rescores else []),
        Column("sessions"),
    )
    rows = []
    for cell in cells:
        found = cell.against_baseline
        sign = mark(cell)
        against = Entry()
        if found is not None:
            against = difference(found.mean, found.low, found.high, small=(f"{found.wins} / {found.ties} / {found.losses}",))
        role = cell.method.role
        entries = (
            Entry(cell.method.label, small=() if role is Role.SCAN or role.value == cell.method.label else (role.value,)),
            Entry("failed")
            if cell.failed
            else entry(cell.agreement, 3, error=cell.standard_error, mark=sign, style={"▼": "below", "▲": "above"}.get(sign, "")),
            against,
            entry(cell.bits, 1) if cell.bits is not None else Entry(),
            entry(cell.exact_match, 2),
            entry(cell.first_divergence, 0),
            entry(cell.agreement_dense),
            entry(cell.agreement_recorded),
            entry(cell.valid_calls, 2),
            entry(cell.rows, 1),
            *([entry(cell.rescored, 1) if cell.rescored else Entry()] if rescores else []),
            Entry(f"{cell.sessions}", cell.sessions),
        )
        rows.append(Row(entries, control=role is not Role.SCAN))
    title = "Agreement" + ("" if k is None else f" at k = {k:,}")
    where, caution = _origin(source, k, cells), source.absent(k)
    return Table(f"agreement-k{k}", title, where, columns, tuple(rows), LEGEND, caution=caution)


def _figure(source: SessionSource, k: int | None, cells: Sequence[SessionCell], styles: dict[str, Style]) -> list[Drawing]:
    points = [
        Point(
            cell.method.family,
            cell.bits,
            cell.agreement,
            cell.standard_error,
            f"{cell.method.label}: {number(cell.agreement)} ± {number(cell.standard_error)} at {number(cell.bits, 1)} bits",
            cell.method.name not in FIXED_DEPTH,
        )
        for cell in cells
        if cell.method.role is Role.SCAN and cell.bits is not None and cell.agreement is not None
    ]
    references = [
        Reference(
            cell.method.role.value,
            cell.agreement,
            cell.method.role is Role.EXACT,
            f"{cell.method.role.value}: {number(cell.agreement)}",
        )
        for cell in cells
        if cell.method.role in (Role.DENSE, Role.EXACT) and cell.agreement is not None
    ]
    if k is None:
        return []
    title = f"agent sessions, k = {k:,}"
    description = f"Step agreement with exact top-k against scan bits per token at k = {k:,}. The numbers are in the table above."
    panel = Panel("", points, references, "agreement with exact top-k", y_range=(-0.04, 1.06))
    drawing = draw_panels(f"agreement-k{k}", title, description, _origin(source, k, cells), [panel], styles)
    return [] if drawing is None else [drawing]


def _pairs(source: SessionSource, k: int | None, cells: Sequence[SessionCell]) -> list[Table]:
    pairs = [pair for pair in source.pairs if pair.k == k]
    if not pairs:
        return []
    columns = (Column("method"), Column("minus", text=True), Column("difference"), Column("wins / ties / losses"), Column("pairs"))
    rows = []
    for pair in pairs:
        found = pair.comparison
        entries = (
            Entry(pair.method.label),
            Entry(pair.other.label),
            difference(found.mean, found.low, found.high, style="above" if found.above else "below" if found.below else ""),
            Entry(f"{found.wins} / {found.ties} / {found.losses}"),
            Entry(f"{found.pairs}", found.pairs),
        )
        rows.append(Row(entries))
    at = "" if k is None else f" at k = {k:,}"
    legend = "coloured where the interval excludes zero and there are pairs enough"
    return [Table(f"pairs-k{k}", f"Every two methods{at}", _origin(source, k, cells), columns, tuple(rows), legend, collapsed=True)]


def _failures(source: SessionSource) -> Table | None:
    found = [record for record in source.run.iter_records() if record.get("finish") == "error"]
    if not found:
        return None
    columns = (Column("method"), Column("session"), Column("error", text=True))
    rows = [
        Row(
            (
                Entry(printable(record.get("label"))),
                Entry(f"{record.get('sample')}"),
                Entry(printable(str(record.get("error") or "no reason recorded")[:500])),
            )
        )
        for record in found[:_MAX_FAILURES]
    ]
    legend = f"{len(found) - _MAX_FAILURES} more are in steps.csv" if len(found) > _MAX_FAILURES else ""
    return Table("failures", "Failed steps", f"run {source.name} · {source.model}", columns, tuple(rows), legend)


def _measures(source: SessionSource) -> list[Measure]:
    found = []
    for cell in source.cells:
        if cell.agreement is None or cell.method.role is Role.NOISE:
            continue
        samples = {
            step.session: step.agreement
            for step in source.steps
            if step.method == cell.method and step.k == cell.k and step.agreement is not None
        }
        where = f"k = {cell.k:,}" if cell.k is not None else "dense"
        found.append(Measure(where, cell.method.label, "agreement with exact top-k", cell.agreement, cell.standard_error, samples))
    return found


def _facts(source: SessionSource) -> list[Fact]:
    return [
        Fact("agreement", "", cell.method.label, None, cell.k, cell.agreement, cell.standard_error)
        for cell in source.cells
        if cell.agreement is not None and cell.method.role is Role.SCAN
    ]


def results_frame(source: SessionSource) -> pd.DataFrame:
    """One row a cell, numbers unrounded."""
    rows = []
    for cell in source.cells:
        rows.append(
            {
                "run": source.name,
                "k": cell.k,
                "method": cell.method.label,
                "family": cell.method.family,
                "role": cell.method.role.value,
                "sessions": cell.sessions,
                "agreement": cell.agreement,
                "standard_error": cell.standard_error,
                "baseline": source.baseline,
                **_comparison_columns(cell.against_baseline),
                "exact_match": cell.exact_match,
                "first_divergent_token": cell.first_divergence,
                "agreement_dense": cell.agreement_dense,
                "agreement_recorded": cell.agreement_recorded,
                "valid_tool_calls": cell.valid_calls,
                "bits": cell.bits,
                "rows": cell.rows,
                "candidate_rows": cell.rescored,
                "failures": cell.failures,
                "expected_sessions": cell.expected,
                **({COLUMN: cell.decoded_by} if source.decoded else {}),
            }
        )
    return pd.DataFrame(rows)


def _comparison_columns(found: Comparison | None) -> dict[str, Any]:
    return {
        "pairs": found.pairs if found else None,
        "difference": found.mean if found else None,
        "difference_low": found.low if found else None,
        "difference_high": found.high if found else None,
        "wins": found.wins if found else None,
        "ties": found.ties if found else None,
        "losses": found.losses if found else None,
    }


def _write_results(path: Path, source: SessionSource) -> None:
    path.write_text(results_csv([results_frame(source)]), encoding="utf-8")


def _write_paired(path: Path, source: SessionSource) -> None:
    """One row for every two methods at each k."""
    names = ["run", "k", "method", "other", *_comparison_columns(None)]
    rows = [
        {"run": source.name, "k": pair.k, "method": pair.method.label, "other": pair.other.label, **_comparison_columns(pair.comparison)}
        for pair in source.pairs
    ]
    path.write_text(results_csv([pd.DataFrame(rows, columns=names)]), encoding="utf-8")


def _write_steps(path: Path, source: SessionSource) -> None:
    columns = (*STEP_COLUMNS, *([COLUMN] if source.decoded else []))
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(columns)
        for record in source.run.iter_records():
            writer.writerow([csv_cell({"run": source.name, **record}.get(name)) for name in columns])
