"""The tables of one setting's decode steps: times, multiples of Fathom's read and bytes; and milliseconds by component."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fathom_eval.console import printable
from fathom_eval.reports.document import Column, Entry, Row, Table, entry
from fathom_eval.reports.timing_source import Place, TimingSource, contexts_of
from fathom_eval.reports.timing_steps import (
    APART,
    OTHER_ROUND,
    Step,
    aliased_layers,
    legend_of_mark,
    method_of,
    overlaps,
    quotient,
    ratio,
    value,
    void_reason,
)
from fathom_eval.reports.timing_words import absent
from fathom_eval.reports.wording import join, number, significant

_MB = 1e6
_TITLES = ("context", "GPU ms", "wall ms", "floor ms", "GPU ÷ floor", "× Fathom", "scan bits", "channels", "link MB", "rows MB")
PROFILED = "GPU ms of sessions side by side are of a profiled run, which may take longer than the wall time of one without the profiler"
OVERLAP = (
    "kernels ran side by side: while one lane scans, another fetches rows or attends, so each component has the time of its own kernels, "
    "their sum is more than the step's GPU time, and no component says how much shorter the step would be without it"
)


def step_table(source: TimingSource, stem: str, place: Place, where: str) -> Table:
    """One row a step, void ones too."""
    steps = source.at(place)
    columns = (Column("method"), *(Column(title, "10th to 90th percentile" if title == "wall ms" else "") for title in _TITLES))
    columns = (*columns, Column("notes", text=True))
    found = {context: source.turns(place, context) for context in contexts_of(steps)}
    own = {id(step): (turns.own, turns.apart) for each in found.values() for turns in each for step in turns.others}
    own |= {id(turns.own): (turns.own, "") for each in found.values() for turns in each}
    synthetic = all(step.get("synthetic") for step in steps)
    rows = []
    for step in steps:
        reference, apart = own.get(id(step), (None, ""))
        notes = [*(["another round than Fathom's read"] if apart == OTHER_ROUND else []), *_notes(step, synthetic=not synthetic)]
        rows.append(Row(_entries(step, reference, APART if apart else "", notes), control=bool(step.get("void"))))
    references = list(dict.fromkeys(method_of(turns.own) for each in found.values() for turns in each))
    clock = "wall" if place.sessions > 1 else "GPU"
    legend = f"× Fathom: {clock} time over that of {' or '.join(references) or 'a read of Fathom'} in the same setting"
    legend += f"; {PROFILED}" if place.sessions > 1 else ""
    legend += "; void rows are in no figure"
    legend += legend_of_mark((apart for _, apart in own.values()), "that read")
    links = sorted({number(rate, 1) for step in steps if (rate := value(step, "link_gb_s")) is not None})
    legend += f"; copy rate of the link {join(links)} GB/s" if links else ""
    legend += "; synthetic K/V" if synthetic else ""
    without = [context for context, turns in found.items() if not turns]
    caution = absent(source, place, max(without)) if without else ""
    return Table(f"steps-{stem}", f"Decode step, {place}", where, columns, tuple(rows), legend, caution=caution)


def _entries(step: Step, reference: Step | None, mark: str, notes: Sequence[str]) -> tuple[Entry, ...]:
    low, high = value(step, "wall_ms_p10"), value(step, "wall_ms_p90")
    percentiles = (f"{significant(low)}–{significant(high)}",) if low is not None and high is not None else ()
    megabytes = [None if (found := value(step, name)) is None else found / _MB for name in ("link_bytes", "rows_bytes")]
    return (
        Entry(method_of(step)),
        Entry(f"{step['context']:,}", step["context"]),
        entry(value(step, "gpu_ms"), None),
        entry(value(step, "wall_ms"), None, small=percentiles),
        entry(value(step, "floor_ms"), None),
        entry(quotient(step, "gpu_ms", "floor_ms"), 2),
        entry(None if reference is None else ratio(step, reference), 2, mark=mark),
        entry(value(step, "scan_bits"), 1),
        entry(value(step, "active_channels"), 1),
        entry(megabytes[0], 1),
        entry(megabytes[1], 1),
        Entry("; ".join(notes)),
    )


def _notes(step: Step, *, synthetic: bool) -> list[str]:
    notes = []
    if step.get("void"):
        reason = void_reason(step)
        notes.append(f"void: {reason}" if reason else "void")
    aliased = aliased_layers(step)
    if aliased:
        notes.append("1 layer shares buffers" if aliased == 1 else f"{aliased:g} layers share buffers")
    if synthetic and step.get("synthetic"):
        notes.append("synthetic K/V")
    return notes


def parts_table(stem: str, steps: Sequence[Step], where: str) -> Table:
    """Milliseconds of each component, and their sum."""
    names = list(dict.fromkeys(name for step in steps if isinstance(step.get("parts_ms"), Mapping) for name in step["parts_ms"]))
    columns = (Column("method"), Column("context"), *(Column(printable(name), "ms") for name in names), Column("sum", "ms"))
    legend = OVERLAP if any(overlaps(step) for step in steps) else ""
    rows = []
    for step in steps:
        if isinstance(step.get("parts_ms"), Mapping):
            parts = [value(step["parts_ms"], name) for name in names]
            # Not sum(): that rounds in another way from Python 3.12 on.
            total = math.fsum(part for part in parts if part is not None)
            cells = (*(entry(part, None) for part in parts), entry(total, None))
            rows.append(Row((Entry(method_of(step)), Entry(f"{step['context']:,}", step["context"]), *cells)))
    return Table(f"parts-{stem}", "GPU milliseconds by component", where, columns, tuple(rows), legend, collapsed=True)
