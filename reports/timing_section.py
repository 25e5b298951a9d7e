"""Decode steps and kernels on a GPU as a section of a report: time against context, where it goes, and how far it is from the floor."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import pandas as pd

from fathom_eval.console import printable
from fathom_eval.errors import UserError
from fathom_eval.reports.absent import adding
from fathom_eval.reports.canvas import Style, slug
from fathom_eval.reports.curves import Panel, Point, draw_panels
from fathom_eval.reports.document import Block, Column, Entry, Fact, Item, Measure, Row, Section, Table, entry
from fathom_eval.reports.facts import devices_of, fact, provenance_of, starts_of
from fathom_eval.reports.glossary import glossary
from fathom_eval.reports.grids import Bar, draw_bars
from fathom_eval.reports.kernel_tables import kernel_answer, kernel_blocks, time_of_kernel
from fathom_eval.reports.loading import Loaded, Records
from fathom_eval.reports.step_ratios import method_of, overlaps, quotient, ratio_table, reference_of, time_of, value
from fathom_eval.reports.tables import results_csv
from fathom_eval.reports.wording import Remark, count, join, number, others_below, significant, spread

_MB = 1e6
OVERLAP = (
    "kernels ran side by side: while one lane scans, another fetches rows or attends, so each component has the time of its own kernels, "
    "their sum is more than the step's GPU time, and no component says how much shorter the step would be without it"
)
Place = tuple[str, int, int, int, int, int, str]
"""Where the index lies, batch, k, sessions side by side, lanes, KV heads of the last lane (0: as the others), who brings the rows."""

_ROWS = {"cpu": ", rows gathered by the CPU", "both": ", rows gathered by the CPU but for the last lane"}


@dataclass(frozen=True)
class TimingSource:
    """Timings as a report sees them."""

    name: str
    run: Records
    steps: Sequence[Mapping[str, Any]]
    others: Sequence[Mapping[str, Any]]

    @cached_property
    def device(self) -> str:
        """The devices named by the records or the manifest."""
        named = [printable(step["device"]) for step in self.steps if step.get("device")] or devices_of(self.run.manifest)
        return ", ".join(dict.fromkeys(named))

    @cached_property
    def model(self) -> str:
        """The model whose shape was timed; empty where unknown."""
        named = [str(step["model"]) for step in self.steps if isinstance(step.get("model"), str)]
        return printable(named[0]) if named else fact(self.run.manifest, "model", "shape")

    @property
    def families(self) -> list[str]:
        """Every method is a line of its own."""
        return list(dict.fromkeys(method_of(step) for step in self.steps))

    @property
    def places(self) -> list[Place]:
        """Every setting that spans contexts; of one place and batch that with the longest context first."""
        longest: dict[Place, int] = defaultdict(int)
        for step in self.steps:
            place = place_of(step)
            longest[place] = max(longest[place], step["context"])
        return sorted(longest, key=lambda place: (place[0] != "host", place[:4], -longest[place], place))


def timing_source(loaded: Loaded) -> TimingSource:
    """The timings. Raises UserError where there are none."""
    steps, others = [], []
    for record in loaded.records.iter_records():
        timed = time_of(record) is not None and isinstance(record.get("context"), int)
        if record.get("kind") == "step" and timed:
            steps.append(record)
        else:
            others.append(record)
    if not steps and not any(time_of_kernel(record) is not None for record in others):
        raise UserError(f"{loaded.path} holds no timings")
    return TimingSource(loaded.name, loaded.records, steps, others)


def timing_section(source: TimingSource, anchor: str, styles: dict[str, Style]) -> Section:
    """The timings with everything that a report shows of them."""
    blocks = [_block(source, anchor, number, place, styles) for number, place in enumerate(source.places)]
    ratios = ratio_table([(_words(place), _valid(_here(source, place))) for place in source.places], _origin(source))
    if ratios is not None:
        blocks.insert(0, Block(f"{anchor}-ratios", "Against Fathom's 48-bit read", [ratios]))
    blocks += kernel_blocks(source.others, anchor, f"run {source.name} · {source.device}")
    manifest = source.run.manifest
    return Section(
        anchor=anchor,
        name=source.name,
        kind="timing",
        model=source.model,
        device=source.device,
        subject=_subject(source),
        answer=_answer(source),
        remarks=_remarks(source),
        blocks=blocks,
        measures=_measures(source),
        facts=_facts(source),
        glossary=glossary("timing"),
        provenance=provenance_of(manifest),
        starts=starts_of(manifest),
        identity=str(manifest.get("identity_sha256", "")),
        manifest=manifest,
        data={"results.csv": partial(_write, source=source)},
    )


def place_of(step: Mapping[str, Any]) -> Place:
    """Where the index of a step lies, its batch and k."""
    index = printable(step.get("index") or "unknown")
    batch, sessions, lanes = (int(value(step, name) or 1) for name in ("batch", "sessions", "lanes"))
    return (
        index,
        batch,
        int(value(step, "k") or 0),
        sessions,
        lanes,
        int(value(step, "last_lane") or 0),
        printable(step.get("rows_by") or "gpu"),
    )


def _words(place: Place) -> str:
    index, batch, k, sessions, lanes, last, rows = place
    where = {"host": "index in host memory", "hbm": "index in HBM"}.get(index, f"index: {index}")
    more = f", {sessions} sessions side by side" if sessions > 1 else ""
    more += f", {lanes} lanes" if lanes > 1 else ""
    more += f", the last of {count(last, 'KV head')}" if last else ""
    more += _ROWS.get(rows, "")
    return f"{where}, batch {batch}, k = {k:,}{more}"


def _valid(steps: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [step for step in steps if not step.get("void")]


def _here(source: TimingSource, place: Place) -> list[Mapping[str, Any]]:
    return sorted((step for step in source.steps if place_of(step) == place), key=lambda step: (step["context"], time_of(step)))


def _origin(source: TimingSource, words: str = "") -> str:
    return " · ".join(part for part in (f"run {source.name}", source.model, words, source.device) if part)


def _block(source: TimingSource, anchor: str, number_: int, place: Place, styles: dict[str, Style]) -> Block:
    steps = _here(source, place)
    turns = spread([int(amount) for step in steps if (amount := value(step, "repeats"))], "timed turn")
    contexts = spread([step["context"] for step in steps], "token")
    where = _origin(source, " · ".join(part for part in (_words(place), contexts, turns) if part))
    more = "".join(f"-{letter}{amount}" for letter, amount in (("s", place[3]), ("l", place[4])) if amount > 1)
    more += f"-h{place[5]}" * bool(place[5]) + f"-{place[6]}" * (place[6] in _ROWS)
    stem = slug(f"{place[0]}-b{place[1]}-k{place[2]}{more}", set())
    items: list[Item] = []
    curve = _curve(stem, place, steps, where, styles)
    bars = _bars(stem, steps, where)
    items += [drawing for drawing in (curve, bars) if drawing is not None]
    items += [_step_table(source, stem, place, steps, where), _parts_table(stem, steps, where)]
    # The table says by itself that Fathom's read is missing.
    told = len(source.places) > 1 and (valid := _valid(steps)) and not _alone(steps, max(step["context"] for step in valid))
    return Block(f"{anchor}-step-{number_}", f"Decode step, {_words(place)}", items, _finding(source, place) if told else "")


def _curve(stem: str, place: Place, steps: Sequence[Mapping[str, Any]], where: str, styles: dict[str, Style]) -> Any:
    """Time and ratio against context; None where there is one context alone, which the bars show."""
    if len({step["context"] for step in _valid(steps)}) < 2:
        return None

    def points(of: str, text: str) -> list[Point]:
        found = []
        for step in _valid(steps):
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
    description = (
        f"GPU time of a decode step against context, and its ratio to the floor; {_words(place)}. The numbers are in the table below."
    )
    return draw_panels(f"step-{stem}", f"decode step, {_words(place)}", description, where, [one for one in panels if one.points], styles)


def _bars(stem: str, steps: Sequence[Mapping[str, Any]], where: str) -> Any:
    split = [step for step in _valid(steps) if isinstance(step.get("parts_ms"), Mapping) and step["parts_ms"]]
    if not split:
        return None
    longest = max(step["context"] for step in split)
    bars = [
        Bar(method_of(step), [(printable(name), float(ms)) for name, ms in step["parts_ms"].items() if ms], value(step, "floor_ms"))
        for step in split
        if step["context"] == longest
    ]
    title = f"where the time goes at {longest:,} tokens"
    axis = "GPU ms of all kernels; of those side by side, each" if any(overlaps(step) for step in split) else "GPU ms of a step"
    description = (
        f"GPU milliseconds of a step by component at {longest:,} tokens, with the floor marked. The numbers are in the table below."
    )
    return draw_bars(f"parts-{stem}", title, description, where, bars, axis, "floor")


def _void_reason(step: Mapping[str, Any]) -> str:
    reason = step.get("void_reason") or ("" if step["void"] is True else step["void"])
    return printable(reason) if reason else ""


def _step_table(source: TimingSource, stem: str, place: Place, steps: Sequence[Mapping[str, Any]], where: str) -> Table:
    titles = (
        "context",
        "GPU ms",
        "wall ms",
        "floor ms",
        "GPU ÷ floor",
        "× Fathom",
        "scan bits",
        "channels",
        "link MB",
        "rows MB",
    )
    columns = (Column("method"), *(Column(title, "10th to 90th percentile" if title == "wall ms" else "") for title in titles))
    columns = (*columns, Column("notes", text=True))
    rows = []
    for step in steps:
        reference = reference_of([one for one in _valid(steps) if one["context"] == step["context"]])
        gpu, base = value(step, "gpu_ms"), time_of(reference) if reference else None
        low, high = value(step, "wall_ms_p10"), value(step, "wall_ms_p90")
        percentiles = (f"{significant(low)}–{significant(high)}",) if low is not None and high is not None else ()
        megabytes = [None if (found := value(step, name)) is None else found / _MB for name in ("link_bytes", "rows_bytes")]
        entries = (
            Entry(method_of(step)),
            Entry(f"{step['context']:,}", step["context"]),
            entry(gpu, None),
            entry(value(step, "wall_ms"), None, small=percentiles),
            entry(value(step, "floor_ms"), None),
            entry(quotient(step, "gpu_ms", "floor_ms"), 2),
            entry((time_of(step) or 0.0) / base if base else None, 2),
            entry(value(step, "scan_bits"), 1),
            entry(value(step, "active_channels"), 1),
            entry(megabytes[0], 1),
            entry(megabytes[1], 1),
            Entry("; ".join(_notes(step, synthetic=not all(one.get("synthetic") for one in steps)))),
        )
        rows.append(Row(entries, control=bool(step.get("void"))))
    legend = "× Fathom: GPU time over that of Fathom's 48-bit read in the same setting; void rows are in no figure"
    links = sorted({number(rate, 1) for step in steps if (rate := value(step, "link_gb_s")) is not None})
    legend += f"; copy rate of the link {join(links)} GB/s" if links else ""
    legend += "; synthetic K/V" if all(step.get("synthetic") for step in steps) else ""
    without = [context for context in {step["context"] for step in _valid(steps)} if _alone(steps, context)]
    caution = _absent(source, place, max(without)) if without else ""
    return Table(f"steps-{stem}", f"Decode step, {_words(place)}", where, columns, tuple(rows), legend, caution=caution)


def _alone(steps: Sequence[Mapping[str, Any]], context: int) -> bool:
    """Whether the steps of a context have no read of Fathom to be set against."""
    return reference_of([step for step in _valid(steps) if step["context"] == context]) is None


def _aliased(step: Mapping[str, Any]) -> float:
    """Layers that have no buffers of their own."""
    layers, apart = value(step, "layers"), value(step, "distinct_layers")
    return value(step, "aliased_layers") or (layers - apart if layers is not None and apart is not None else 0.0)


def _notes(step: Mapping[str, Any], *, synthetic: bool) -> list[str]:
    notes = []
    if step.get("void"):
        reason = _void_reason(step)
        notes.append(f"void: {reason}" if reason else "void")
    aliased = _aliased(step)
    if aliased:
        notes.append("1 layer shares buffers" if aliased == 1 else f"{aliased:g} layers share buffers")
    if synthetic and step.get("synthetic"):
        notes.append("synthetic K/V")
    return notes


def _parts_table(stem: str, steps: Sequence[Mapping[str, Any]], where: str) -> Table:
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


def _subject(source: TimingSource) -> str:
    on = f" on {source.device}" if source.device else ""
    if not source.steps:
        return f"Times of {count(len([one for one in source.others if time_of_kernel(one) is not None]), 'kernel measurement')}{on}."
    contexts = sorted({step["context"] for step in source.steps})
    span = f"{contexts[0]:,}" if len(contexts) == 1 else f"{contexts[0]:,} to {contexts[-1]:,}"
    shape = f" of the shape of {source.model}" if source.model else ""
    return f"Decode steps of {count(len(source.families), 'method')}{shape}{on}, at {span} tokens of context."


def _answer(source: TimingSource) -> str:
    """The first setting that counts; the paragraphs of the others stand with their tables."""
    if not source.steps:
        return kernel_answer(source.others)
    found = [place for place in source.places if _valid(_here(source, place))]
    if not found:
        return ""
    return _finding(source, found[0]) + others_below(len(found) - 1)


def _finding(source: TimingSource, place: Place) -> str:
    """The times of one setting at its longest context, over that of Fathom's read; empty where every step is void."""
    steps = _valid(_here(source, place))
    context = max((step["context"] for step in steps), default=0)
    here = [step for step in steps if step["context"] == context]
    reference = reference_of(here)
    if reference is None:
        return _absent(source, place, context) if here else ""
    base, own = time_of(reference) or math.nan, quotient(reference, "gpu_ms", "floor_ms")
    clock = "GPU time" if value(reference, "gpu_ms") is not None else "wall-clock time, without a GPU"
    floor = "" if own is None else f", {number(own, 2)} times its floor"
    others = [f"{method_of(step)} {number((time_of(step) or math.nan) / base, 2)}×" for step in here if step is not reference]
    compared = f" The others take, as a multiple of it: {join(others)}." if others else ""
    own_time = f"{method_of(reference)} takes {significant(base)} ms of {clock}{floor}"
    return f"With the {_words(place)}, at {context:,} tokens: {own_time}.{compared}"


def _absent(source: TimingSource, place: Place, context: int) -> str:
    """What a setting without a read of Fathom cannot tell, and the command that adds it."""
    lost = f"With the {_words(place)}, at {context:,} tokens: Fathom's read, which the others are set against, is missing."
    return f"{lost} {adding('bench step', source.name, 'fathom:budget=48')}"


def _remarks(source: TimingSource) -> list[Remark]:
    found = []
    void = [step for step in source.steps if step.get("void")]
    if void:
        reasons = list(dict.fromkeys(reason for step in void if (reason := _void_reason(step))))
        because = f": {'; '.join(reasons)}" if reasons else ", for reasons that the records do not give"
        found.append(Remark(f"{count(len(void), 'step')} void, in no figure and no ratio{because}.", grave=True))
    if any(_aliased(step) for step in source.steps):
        found.append(Remark("In some steps layers share buffers because host memory did not hold them all; their rows say so."))
    ratios = [
        (value(step, "wall_ms") or 0) / (value(step, "gpu_ms") or math.inf) for step in _valid(source.steps) if value(step, "wall_ms")
    ]
    if ratios:
        found.append(
            Remark(f"Wall-clock is {' to '.join(sorted({number(ratio, 2) for ratio in (min(ratios), max(ratios))}))} times GPU time.")
        )
    if source.run.problems:
        found.append(Remark(f"{count(len(source.run.problems), 'damaged line')} of the records skipped.", grave=True))
    return found


def _measures(source: TimingSource) -> list[Measure]:
    return [
        Measure(f"{step['context']:,} tokens, {_words(place_of(step))}", method_of(step), "ms", time_of(step) or 0.0, decimals=None)
        for step in _valid(source.steps)
    ]


def _facts(source: TimingSource) -> list[Fact]:
    """Times of one session at a time; of several lanes and ways to bring rows, those that Fathom's read is fastest with."""
    cells: dict[tuple[str, int, int], list[Sequence[Mapping[str, Any]]]] = defaultdict(list)
    for place in source.places:
        index, batch, k, sessions, *_ = place
        if batch == sessions == 1:
            here = _valid(_here(source, place))
            for context in {step["context"] for step in here}:
                cells[index, context, k].append([step for step in here if step["context"] == context])
    found: list[Fact] = []
    for (index, context, k), settings in cells.items():
        steps = min(settings, key=_reference_time)
        for step, name in itertools.product(steps, ("gpu_ms", "wall_ms")):
            amount = value(step, name)
            if amount is not None:
                found.append(Fact(name, "", method_of(step), context, k, amount, None, index))
    return found


def _reference_time(steps: Sequence[Mapping[str, Any]]) -> float:
    """Of Fathom's read; infinite where there is none."""
    reference = reference_of(steps)
    return math.inf if reference is None else time_of(reference) or math.inf


def _write(path: Path, source: TimingSource) -> None:
    rows = []
    for record in (*source.steps, *source.others):
        flat = {name: one for name, one in record.items() if not isinstance(one, (Mapping, list))}
        parts = record.get("parts_ms")
        flat |= {f"parts_ms.{name}": ms for name, ms in parts.items()} if isinstance(parts, Mapping) else {}
        rows.append({"run": source.name, **{printable(name): one for name, one in flat.items()}})
    path.write_text(results_csv([pd.DataFrame(rows)]), encoding="utf-8")
