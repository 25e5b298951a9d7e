"""A run of RULER-style tasks as a section of a report: task × method tables, score against bits, needle depth against context."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fathom_eval.reports.canvas import Style, slug
from fathom_eval.reports.cells import ALL_TASKS, NO_EXACT_NOTE, NOT_DISCRIMINATIVE, Cell, Method, Role, sort_key
from fathom_eval.reports.coverage import coverage_legend, covered, left_out_words, pairs_covered
from fathom_eval.reports.curves import FIXED_DEPTH, Panel, Point, Reference, draw_panels, how_to_read
from fathom_eval.reports.depths import depth_items
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
from fathom_eval.reports.facts import provenance_of, starts_of
from fathom_eval.reports.glossary import glossary
from fathom_eval.reports.narrative import answer, finding, remarks, subject, with_error
from fathom_eval.reports.ruler_source import Source, is_scan
from fathom_eval.reports.tables import LEGEND, lacks_tasks, mark, write_results_csv, write_samples_csv
from fathom_eval.reports.wording import number, setting, spread

MAX_FAILURES = 200
"""A report of thousands of failures names the first ones; samples.csv has them all."""


READING = how_to_read(
    "higher",
    "more of what was hidden in the text is found",
    "The solid line is dense attention, which attends to every token; the dashed one exact top-k, which scans try to reach.",
)


def ruler_section(source: Source, anchor: str, styles: dict[str, Style]) -> Section:
    """The run with everything that a report shows of it."""
    taken: set[str] = set()
    blocks = []
    for context, k in source.settings:
        items: list[Item] = [_matrix(source, context, k), *_figures(source, context, k, styles, taken), _details(source, context, k)]
        text = finding(source, context, k) if len(source.settings) > 1 else ""
        blocks.append(Block(f"{anchor}-{context}-{k}", setting(context, k), items, text))
    blocks = explained(blocks, READING)
    depths = depth_items(source)
    if depths:
        text = "Share of gold strings found, by where in the haystack their needle stands: 0 is the beginning, 1 the end."
        blocks.append(Block(f"{anchor}-depth", "Needle depth and context", depths, text))
    if source.failures:
        blocks.append(Block(f"{anchor}-failures", "Failed samples", [_failures(source)]))
    return Section(
        anchor=anchor,
        name=source.name,
        kind="ruler",
        model=source.model,
        device=", ".join(source.devices),
        subject=subject(source),
        answer=answer(source),
        remarks=remarks(source),
        blocks=blocks,
        missing=source.missing,
        measures=_measures(source),
        facts=_facts(source),
        glossary=glossary("ruler"),
        provenance=provenance_of(source.run.manifest),
        starts=starts_of(source.run.manifest),
        identity=str(source.run.manifest.get("identity_sha256", "")),
        manifest=source.run.manifest,
        data={
            "results.csv": partial(write_results_csv, source=source, cells=source.cells),
            "overview.csv": partial(write_results_csv, source=source, cells=source.overview),
            "samples.csv": partial(write_samples_csv, source=source),
        },
    )


def origin(source: Source, context: int, k: int | None, cells: Sequence[Cell]) -> str:
    """Where the numbers of a table or figure come from."""
    samples = spread([cell.samples for cell in cells if cell.samples], "sample")
    parts = [
        f"run {source.name}",
        source.model,
        setting(context, k),
        ", ".join(source.devices),
        f"{samples} a task" if samples else "",
    ]
    return " · ".join(part for part in parts if part)


def _here(source: Source, context: int, k: int | None) -> list[Cell]:
    return sorted((cell for cell in source.cells if cell.context == context and cell.k in (None, k)), key=sort_key)


def _tasks(source: Source, cells: Sequence[Cell]) -> list[str]:
    return [task for task in source.tasks if any(cell.task == task for cell in cells)]


def _matrix(source: Source, context: int, k: int | None) -> Table:
    cells = _here(source, context, k)
    tasks = _tasks(source, cells)
    totals = {cell.method: cell for cell in source.overview if cell.context == context and cell.k in (None, k)}
    several = len(source.tasks) > 1
    # The answer first: the score, how it differs from exact top-k, and at what cost; then task by task.
    columns = [Column("method"), *([Column(ALL_TASKS)] if several else map(Column, tasks))]
    counted = several and lacks_tasks(list(totals.values()))
    columns += [Column("tasks")] if counted else []
    columns += [Column("minus exact top-k", "wins / ties / losses"), Column("bits", "a channel")]
    columns += map(Column, tasks) if several else []
    rows = []
    for method in dict.fromkeys(cell.method for cell in cells):
        own = {cell.task: cell for cell in cells if cell.method == method}
        total = totals.get(method)
        scores = [_score(own.get(task)) for task in tasks]
        lead, rest = ([_score(total, "total")], scores) if several else (scores, [])
        lead += [_tasks_counted(total)] if counted else []
        entries = (_name(method), *lead, _against(total), _bits(list(own.values())), *rest)
        rows.append(Row(entries, control=method.role is not Role.SCAN))
    title, where = f"Scores at {setting(context, k)}", origin(source, context, k, cells)
    caution = source.absent(context, k)
    legend = LEGEND + coverage_legend([*cells, *totals.values()])
    return Table(f"scores-{context}-k{k}", title, where, tuple(columns), tuple(rows), legend, caution=caution)


def _tasks_counted(cell: Cell | None) -> Entry:
    return Entry() if cell is None else Entry(f"{len(cell.tasks)}", len(cell.tasks))


def _name(method: Method) -> Entry:
    role = () if method.role.value in ("scan", method.label) else (method.role.value,)
    return Entry(method.label, small=role)


def _bits(cells: Sequence[Cell]) -> Entry:
    known = [cell.bits for cell in cells if cell.bits is not None]
    if not known:
        return Entry()
    bits = sum(known) / len(known)
    head_dim = next((cell.head_dim for cell in cells if cell.head_dim), None)
    return entry(bits, 1, small=(number(bits / head_dim, 2),) if head_dim else ())


def _score(cell: Cell | None, style: str = "") -> Entry:
    if cell is None:
        return Entry()
    sign = mark(cell)
    found = {"≈": "floor", "▼": "below", "▲": "above", "≡": "floor"}.get(sign, "")
    # A sign says the one, a warning above the table the other.
    notes = tuple(note for note in cell.notes if note not in (NOT_DISCRIMINATIVE, NO_EXACT_NOTE))
    if cell.failed:
        return Entry("failed", small=notes, style=style)
    of = covered(cell)
    notes = tuple(note for note in notes if f"({note})" != of)
    return entry(cell.score, 3, error=cell.standard_error, mark=f"{of} {sign}".strip(), small=notes, style=f"{found} {style}".strip())


def _against(cell: Cell | None, digits: int = 3) -> Entry:
    found = None if cell is None else cell.against_exact
    if cell is None or found is None:
        return Entry()
    shown = difference(found.mean, found.low, found.high, digits, small=(f"{found.wins} / {found.ties} / {found.losses}",))
    return replace(shown, text=f"{shown.text} {pairs_covered(cell)}".rstrip())


def _figures(source: Source, context: int, k: int | None, styles: dict[str, Style], taken: set[str]) -> list[Drawing]:
    drawings = []
    here = _here(source, context, k)
    groups = [(task, [cell for cell in here if cell.task == task]) for task in _tasks(source, here)]
    if len(groups) > 1:
        groups.insert(0, (ALL_TASKS, [cell for cell in source.overview if cell.context == context and cell.k in (None, k)]))
    for task, every in groups:
        cells = [cell for cell in every if cell.whole]
        title = f"{task}, {setting(context, k)}"
        panel = Panel("", _points(cells), _references(cells), "score", y_range=(-0.04, 1.06))
        name = slug(f"score-{slug(task, set())}-{context}-k{k}", taken)
        description = f"Score against scan bits per token on {title}. The numbers are in the table above. {left_out_words(every)}".rstrip()
        where = origin(source, context, k, here if task == ALL_TASKS else cells)
        drawing = draw_panels(name, title, description, where, [panel], styles)
        if drawing is not None:
            drawings.append(drawing)
    return drawings


def _points(cells: Sequence[Cell]) -> list[Point]:
    return [
        Point(
            cell.method.family,
            cell.bits,
            cell.score,
            cell.standard_error,
            f"{cell.method.label}: {with_error(cell)} at {number(cell.bits, 1)} bits",
            cell.method.name not in FIXED_DEPTH,
        )
        for cell in cells
        if is_scan(cell) and cell.bits is not None and cell.score is not None
    ]


def _references(cells: Sequence[Cell]) -> list[Reference]:
    return [
        Reference(cell.method.role.value, cell.score, cell.method.role is Role.EXACT, f"{cell.method.role.value}: {with_error(cell)}")
        for cell in cells
        if not is_scan(cell) and cell.score is not None
    ]


def _details(source: Source, context: int, k: int | None) -> Table:
    cells = _here(source, context, k)
    names = ("score", "minus exact top-k", "wins / ties / losses", "bits", "samples", "pairs", "dense", "exact top-k", "declared bits")
    columns = (
        Column("method"),
        Column("task", text=True),
        *map(Column, names),
        Column("channels"),
        Column("rows"),
        Column("notes", text=True),
    )
    rows = []
    for cell in cells:
        found = cell.against_exact
        entries = (
            Entry(cell.method.label),
            Entry(cell.task),
            entry(cell.score, 3, error=cell.standard_error),
            difference(found.mean, found.low, found.high) if found else Entry(),
            Entry(f"{found.wins} / {found.ties} / {found.losses}") if found else Entry(),
            entry(cell.bits, 2),
            Entry(f"{cell.samples}", cell.samples),
            Entry(f"{found.pairs}", found.pairs) if found else Entry(),
            entry(cell.dense_score),
            entry(cell.exact_score),
            entry(cell.declared_bits, 2),
            entry(cell.active_channels, 1),
            entry(cell.rows, 1),
            Entry("; ".join(cell.notes)),
        )
        rows.append(Row(entries, control=not is_scan(cell)))
    title = f"All numbers at {setting(context, k)}"
    return Table(f"all-{context}-k{k}", title, origin(source, context, k, cells), columns, tuple(rows), collapsed=True)


def _failures(source: Source) -> Table:
    columns = (Column("method"), Column("task", text=True), Column("sample"), Column("setting", text=True), Column("error", text=True))
    rows = [
        Row((Entry(one.method.label), Entry(one.task), Entry(f"{one.sample}"), Entry(setting(one.context, one.k)), Entry(one.error[:500])))
        for one in source.failures[:MAX_FAILURES]
    ]
    more = len(source.failures) - len(rows)
    legend = f"{more} more are in samples.csv" if more > 0 else ""
    return Table("failures", "Failed samples", f"run {source.name} · {source.model}", columns, tuple(rows), legend)


def _measures(source: Source) -> list[Measure]:
    found = []
    several = len(source.tasks) > 1
    values = {(point.task, point.context, point.k, point.method, point.sample): point.score for point in source.points}
    by_cell: dict[tuple[str, int, int | None, Method], dict[int, float]] = {}
    for (task, context, k, method, sample), score in values.items():
        if score is not None:
            by_cell.setdefault((task, context, k, method), {})[sample] = score
    for cell in [*(source.overview if several else []), *source.cells]:
        if cell.score is None or not cell.whole:
            continue
        where = f"{cell.task}, {setting(cell.context, cell.k)}"
        over = " ".join(cell.tasks) if cell.task == ALL_TASKS else ""
        samples = by_cell.get((cell.task, cell.context, cell.k, cell.method), {})
        found.append(Measure(where, cell.method.label, "score", cell.score, cell.standard_error, samples, over=over))
    return found


def _facts(source: Source) -> list[Fact]:
    cells = [*(source.overview if len(source.tasks) > 1 else []), *source.cells]
    return [
        Fact(
            "score",
            cell.task,
            cell.method.label,
            cell.context,
            cell.k,
            cell.score,
            cell.standard_error,
            " ".join(cell.tasks) if cell.task == ALL_TASKS else "",
        )
        for cell in cells
        if cell.score is not None and cell.whole
    ]
