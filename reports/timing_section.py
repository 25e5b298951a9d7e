"""Decode steps and kernels on a GPU as a section of a report: time against context, where it goes, and how far it is from the floor."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from fathom_eval.console import printable
from fathom_eval.reports.canvas import Style, slug
from fathom_eval.reports.curves import Panel, Point, draw_panels
from fathom_eval.reports.document import Block, Fact, Item, Measure, Section
from fathom_eval.reports.equal_errors import equal_error_block
from fathom_eval.reports.facts import provenance_of, starts_of
from fathom_eval.reports.glossary import glossary
from fathom_eval.reports.grids import Bar, draw_bars
from fathom_eval.reports.kernel_tables import kernel_blocks
from fathom_eval.reports.step_ratios import ratio_block
from fathom_eval.reports.tables import results_csv
from fathom_eval.reports.timing_source import ROWS, Place, TimingSource, contexts_of, place_of, valid
from fathom_eval.reports.timing_steps import Step, clock_of, method_of, overlaps, quotient, time_of, value
from fathom_eval.reports.timing_tables import parts_table, step_table
from fathom_eval.reports.timing_words import answer, finding, remarks, subject
from fathom_eval.reports.wording import significant, spread


def timing_section(source: TimingSource, anchor: str, styles: dict[str, Style]) -> Section:
    """The timings with everything that a report shows of them."""
    blocks = [_block(source, anchor, number, place, styles) for number, place in enumerate(source.places)]
    first = (ratio_block(source, anchor), equal_error_block(source.equal, anchor, source.name, source.device))
    blocks = [*(block for block in first if block is not None), *blocks]
    blocks += kernel_blocks(source.others, anchor, f"run {source.name} · {source.device}")
    manifest = source.run.manifest
    return Section(
        anchor=anchor,
        name=source.name,
        kind="timing",
        model=source.model,
        device=source.device,
        subject=subject(source),
        answer=answer(source),
        remarks=remarks(source),
        blocks=blocks,
        measures=_measures(source),
        facts=_facts(source),
        glossary=glossary("timing"),
        provenance=provenance_of(manifest),
        starts=starts_of(manifest),
        identity=str(manifest.get("identity_sha256", "")),
        manifest=manifest,
        data={"results.csv": partial(_write, source=source)},
        warnings=source.not_shown,
    )


def _block(source: TimingSource, anchor: str, number_: int, place: Place, styles: dict[str, Style]) -> Block:
    steps = source.at(place)
    turns = spread([int(amount) for step in steps if (amount := value(step, "repeats"))], "timed turn")
    contexts = spread([step["context"] for step in steps], "token")
    where = source.origin(" · ".join(part for part in (str(place), contexts, turns) if part))
    more = "".join(f"-{letter}{amount}" for letter, amount in (("s", place.sessions), ("l", place.lanes)) if amount > 1)
    more += f"-h{place.last}" * bool(place.last) + f"-{place.rows}" * (place.rows in ROWS)
    stem = slug(f"{place.index}-b{place.batch}-k{place.k}{more}", set())
    items: list[Item] = []
    curve = _curve(stem, place, steps, where, styles)
    bars = _bars(stem, steps, where)
    items += [drawing for drawing in (curve, bars) if drawing is not None]
    items += [step_table(source, stem, place, where), parts_table(stem, steps, where)]
    # The table says by itself that Fathom's read is missing.
    counted = contexts_of(steps)
    told = len(source.places) > 1 and counted and source.turns(place, counted[-1])
    return Block(f"{anchor}-step-{number_}", f"Decode step, {place}", items, finding(source, place) if told else "")


def _curve(stem: str, place: Place, steps: Sequence[Step], where: str, styles: dict[str, Style]) -> Any:
    """Time and ratio against context; None where there is one context alone, which the bars show."""
    if len({step["context"] for step in valid(steps)}) < 2:
        return None

    def points(of: str, text: str) -> list[Point]:
        found = []
        for step in valid(steps):
            amount = time_of(step) if of == "time" else quotient(step, "gpu_ms", "floor_ms")
            if amount is not None:
                tip = f"{method_of(step)}, {step['context']:,} tokens: {text} {significant(amount)}"
                found.append(Point(method_of(step), float(step["context"]), amount, None, tip, joined=True))
        return found

    clock = "GPU" if any(value(step, "gpu_ms") is not None for step in steps) else "wall"
    label = "tokens of context"
    panels = [
        Panel(f"{clock} time of a step", points("time", f"{clock} ms"), [], "ms", label, y_log=True),
        Panel("GPU time over its floor", points("ratio", "times the floor"), [], "× floor", label),
    ]
    description = f"GPU time of a decode step against context, and its ratio to the floor; {place}. The numbers are in the table below."
    return draw_panels(f"step-{stem}", f"decode step, {place}", description, where, [one for one in panels if one.points], styles)


def _bars(stem: str, steps: Sequence[Step], where: str) -> Any:
    split = [step for step in valid(steps) if isinstance(step.get("parts_ms"), Mapping) and step["parts_ms"]]
    if not split:
        return None
    longest = max(step["context"] for step in split)
    shown = [step for step in split if step["context"] == longest]
    side_by_side = any(overlaps(step) for step in split)
    bars = [
        Bar(method_of(step), [(printable(name), float(ms)) for name, ms in step["parts_ms"].items() if ms], _marks(step, side_by_side))
        for step in shown
    ]
    title = f"where the time goes at {longest:,} tokens"
    axis = "GPU ms of all kernels; of those side by side, each" if side_by_side else "GPU ms of a step"
    marked = "with the floor marked"
    if side_by_side:
        marked = "with the floor and the step's own time marked, which the bar exceeds, since kernels of it ran side by side"
    description = f"GPU milliseconds of a step by component at {longest:,} tokens, {marked}. The numbers are in the table below."
    return draw_bars(f"parts-{stem}", title, description, where, bars, axis)


def _marks(step: Step, side_by_side: bool) -> list[tuple[str, float]]:
    """The floor, and of kernels that ran side by side, whose sum is no time of a step, the step's own time."""
    clock = clock_of(step)
    named = {"floor": value(step, "floor_ms")}
    if side_by_side:
        named[f"the whole step, {'wall' if clock == 'wall_ms' else 'GPU'} time"] = value(step, clock)
    return [(name, amount) for name, amount in named.items() if amount is not None]


def _measures(source: TimingSource) -> list[Measure]:
    return [
        Measure(f"{step['context']:,} tokens, {place_of(step)}", method_of(step), "ms", time_of(step) or 0.0, decimals=None)
        for step in valid(source.steps)
    ]


def _facts(source: TimingSource) -> list[Fact]:
    """Times of one session at a time; of several lanes and ways to bring rows, those that Fathom's read is fastest with."""
    cells: dict[tuple[str, int, int], list[tuple[Place, list[Step]]]] = defaultdict(list)
    for place in source.places:
        if place.batch == place.sessions == 1:
            here = valid(source.at(place))
            for context in contexts_of(here):
                cells[place.index, context, place.k].append((place, [step for step in here if step["context"] == context]))
    found: list[Fact] = []
    for (index, context, k), settings in cells.items():
        _, steps = min(settings, key=lambda setting: _reference_time(source, setting[0], context))
        for step, name in itertools.product(steps, ("gpu_ms", "wall_ms")):
            amount = value(step, name)
            if amount is not None:
                found.append(Fact(name, "", method_of(step), context, k, amount, None, index))
    return found


def _reference_time(source: TimingSource, place: Place, context: int) -> tuple[int, float]:
    """Of Fathom's read, after how plain a read it is: times of two reads do not tell which setting is faster."""
    turns = source.turns(place, context)
    return (source.reads.index(method_of(turns[0].own)), time_of(turns[0].own) or math.inf) if turns else (len(source.reads), math.inf)


def _write(path: Path, source: TimingSource) -> None:
    rows = []
    for record in (*source.steps, *source.others):
        flat = {name: one for name, one in record.items() if not isinstance(one, (Mapping, list))}
        parts = record.get("parts_ms")
        flat |= {f"parts_ms.{name}": ms for name, ms in parts.items()} if isinstance(parts, Mapping) else {}
        rows.append({"run": source.name, **{printable(name): one for name, one in flat.items()}})
    path.write_text(results_csv([pd.DataFrame(rows)]), encoding="utf-8")
