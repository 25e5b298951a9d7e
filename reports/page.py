"""The HTML page: everything in one file, nothing fetched, every text escaped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathom_eval import __version__
from fathom_eval.console import printable
from fathom_eval.reports.cells import ALL_TASKS, FLOOR, MINIMUM_PAIRS, NOT_DISCRIMINATIVE, Cell, Method, sort_key
from fathom_eval.reports.figures import Drawing
from fathom_eval.reports.narrative import Remark, answer, finding, interval, missing, number, remarks, setting, subject, with_error
from fathom_eval.reports.source import Source, differing_facts, flatten
from fathom_eval.reports.tables import mark

# A report of thousands of failures names the first ones; samples.csv has them all.
MAX_LISTED = 200


@dataclass(frozen=True)
class Row:
    """One method's line of the task × method table."""

    method: Method
    bits: float | None
    bits_per_channel: float | None
    cells: list[Cell | None]
    total: Cell | None


@dataclass(frozen=True)
class Block:
    """One context and k: a table and its figures."""

    anchor: str
    title: str
    finding: str
    columns: list[str]
    rows: list[Row]
    details: list[Cell]
    drawings: list[Drawing]


@dataclass(frozen=True)
class Section:
    """One run on the page."""

    anchor: str
    name: str
    subject: str
    answer: str
    remarks: list[Remark]
    blocks: list[Block]
    missing: list[str]
    failures: list[tuple[str, str, int, str, str]]
    failure_count: int
    provenance: list[tuple[str, str]]
    starts: list[tuple[str, str]]


def render(sources: Sequence[Source], drawings: Mapping[str, Sequence[Drawing]]) -> str:
    """The page of these runs as one HTML document."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, with_error=with_error, mark=mark, interval=interval, verdict=_verdict)
    return environment.get_template("report.html").render(
        sections=[_section(source, index, drawings[source.name]) for index, source in enumerate(sources, start=1)],
        differences=differing_facts(sources) if len(sources) > 1 else [],
        all_tasks=ALL_TASKS,
        floor=FLOOR,
        minimum_pairs=MINIMUM_PAIRS,
        not_discriminative=NOT_DISCRIMINATIVE,
        version=__version__,
        max_listed=MAX_LISTED,
        # matplotlib escaped every text within the drawing.
        inline=lambda drawing: Markup(drawing.inline()),
    )


def _section(source: Source, index: int, drawings: Sequence[Drawing]) -> Section:
    failures = [
        (point.method.label, point.task, point.sample, setting(point.context, point.k), point.error[:500])
        for point in source.failures[:MAX_LISTED]
    ]
    manifest = {name: value for name, value in source.run.manifest.items() if name != "invocations"}
    anchor = f"run-{index}"
    return Section(
        anchor=anchor,
        name=source.name,
        subject=subject(source),
        answer=answer(source),
        remarks=remarks(source),
        blocks=[_block(source, anchor, context, k, drawings) for context, k in source.settings()],
        missing=missing(source),
        failures=failures,
        failure_count=len(source.failures),
        provenance=list(flatten(manifest)),
        starts=_starts(source.run.manifest),
    )


def _block(source: Source, anchor: str, context: int, k: int | None, drawings: Sequence[Drawing]) -> Block:
    kept = sorted((cell for cell in source.cells if cell.context == context and cell.k in (None, k)), key=sort_key)
    totals = {cell.method: cell for cell in source.overview if cell.context == context and cell.k in (None, k)}
    tasks = [task for task in source.tasks if any(cell.task == task for cell in kept)]
    rows = []
    for method in dict.fromkeys(cell.method for cell in kept):
        own = {cell.task: cell for cell in kept if cell.method == method}
        first = next(iter(own.values()))
        rows.append(Row(method, first.bits, first.bits_per_channel, [own.get(task) for task in tasks], totals.get(method)))
    titles = {f"{task}, {setting(context, k)}" for task in tasks}
    return Block(
        anchor=f"{anchor}-{context}-{k}",
        title=setting(context, k),
        finding=finding(source, context, k),
        columns=tasks,
        rows=rows,
        details=kept,
        drawings=[drawing for drawing in drawings if drawing.title in titles],
    )


def _verdict(cell: Cell) -> str:
    """Style class of a score; the sign beside it says the same without colour."""
    return {"≈": "floor", "▼": "below", "▲": "above"}.get(mark(cell), "")


def _starts(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Time of every start of the run, and the facts in which it differed from the one before."""
    starts, before = [], None
    invocations = manifest.get("invocations")
    for start in invocations if isinstance(invocations, list) else []:
        if not isinstance(start, dict):
            continue
        facts = dict(flatten({name: value for name, value in start.items() if name != "time"}))
        if before is None:
            changes = "first start"
        else:
            changed = [name for name in {**before, **facts} if before.get(name) != facts.get(name)]
            changes = "; ".join(f"{name}: {facts.get(name, 'absent')}" for name in changed) or "as before"
        starts.append((printable(start.get("time", "unknown time")), changes))
        before = facts
    return starts
