"""The sentences of a report, generated from its statistics."""

from __future__ import annotations

import math

from fathom_eval.console import printable
from fathom_eval.reports.cells import ALL_TASKS, CEILING_NOTE, NOT_DISCRIMINATIVE, Cell, Comparison, Method, Role
from fathom_eval.reports.coverage import covered, left_out_words, pairs_covered
from fathom_eval.reports.decoding import decoding_remarks, decoding_words
from fathom_eval.reports.gaps import NOUNS, half_remarks
from fathom_eval.reports.ruler_source import Source, is_scan
from fathom_eval.reports.wording import Remark, count, join, number, setting, signed, spread

_GROUPS = (
    "Below exact top-k at every context and k",
    "Below it at some",
    "Below at some, above at others",
    "Over all tasks nowhere separated from exact top-k by these samples",
    "Above exact top-k somewhere",
)


def with_error(cell: Cell, digits: int = 3) -> str:
    """Score ± standard error."""
    score = number(cell.score, digits)
    return score if cell.standard_error is None else f"{score} ± {number(cell.standard_error, digits)}"


def interval(cell: Cell, digits: int = 3) -> str:
    """Paired difference to exact top-k with its interval, and of how many tasks it is where it lacks some."""
    found = cell.against_exact
    if found is None:
        return ""
    mean = signed(found.mean, digits)
    shown = mean if math.isnan(found.low) else f"{mean} [{signed(found.low, digits)}, {signed(found.high, digits)}]"
    return f"{shown} {pairs_covered(cell)}".rstrip()


def subject(source: Source) -> str:
    """What was compared: methods, tasks, model, device, haystack, samples."""
    scans = {cell.method for cell in source.cells if is_scan(cell)}
    counts = sorted({cell.samples for cell in source.cells if cell.method.role is Role.DENSE} or {cell.samples for cell in source.cells})
    samples = spread(counts, "sample")
    where = f" on {join(source.devices)}" if source.devices else ""
    haystack = f", in a haystack of {source.haystack}" if source.haystack else ""
    text = (
        f"{count(len(scans), 'scan')} of {source.model}{where}, compared with dense attention and with exact top-k: "
        f"{join(source.tasks)}{haystack}, {samples} a task and context."
    )
    return f"{text} {decoding_words(source.run.manifest, source.points)}".rstrip()


def answer(source: Source) -> str:
    """Which scans separate from exact top-k by their paired interval, and which do not, over every context and k of the run."""
    settings = source.settings
    absent = source.absent()
    if len(settings) == 1:
        return " ".join(part for part in (absent, finding(source, *settings[0])) if part)
    verdicts: dict[Method, list[Comparison]] = {}
    for cell in source.overview:
        if cell.compared is not None:
            verdicts.setdefault(cell.method, []).append(cell.compared)
    groups: dict[str, list[str]] = {}
    for method, found in verdicts.items():
        below, above = sum(one.below for one in found), sum(one.above for one in found)
        group, counted = _verdict(below, above, len(found))
        groups.setdefault(group, []).append(f"{method.label} ({counted})" if counted else method.label)
    parts = [f"{name}: {join(groups[name])}." for name in _GROUPS if name in groups]
    return " ".join(part for part in (absent, *parts, left_out_words(source.overview)) if part)


def _verdict(below: int, above: int, amount: int) -> tuple[str, str]:
    """The group of a scan that separates from exact top-k so often, and its counts in words where the group does not say them."""
    every, some, mixed, nowhere, better = _GROUPS
    if below and above:
        return mixed, f"{below} below, {above} above of {amount}"
    if above:
        return better, f"{above} of {amount}"
    if below == amount:
        return every, ""
    return (some, f"{below} of {amount}") if below else (nowhere, "")


def finding(source: Source, context: int, k: int | None) -> str:
    """The answer at one context and k, with the numbers."""
    cells = [cell for cell in source.overview if cell.context == context and cell.k in (None, k)]
    if not cells:
        return f"At {setting(context, k)} dense attention is at the floor on every task: nothing can be told apart."
    told = {cell.task for cell in source.cells if cell.context == context and NOT_DISCRIMINATIVE not in cell.notes}
    tasks = [task for task in source.tasks if task in told]
    whole = [cell for cell in cells if cell.whole and not is_scan(cell)]
    references = [f"{cell.method.role.value} scores {with_error(cell)} {covered(cell)}".rstrip() for cell in whole]
    parts = [f"At {setting(context, k)}, over {join(tasks)}, {join(references)}."] if references else []
    compared = [(cell, cell.compared) for cell in cells if cell.compared is not None]
    below = [f"{cell.method.label} ({signed(found.mean)})" for cell, found in compared if found.below]
    above = [f"{cell.method.label} ({signed(found.mean)})" for cell, found in compared if found.above]
    same = [cell.method.label for cell, found in compared if not found.below and not found.above]
    scans = count(len(compared), "scan")
    if below:
        parts.append(f"{len(below)} of {scans} separate from exact top-k by their paired interval and score below it: {join(below)}.")
    if above:
        parts.append(f"{len(above)} of {scans} score above it: {join(above)}.")
    if same:
        parts.append(f"Not separated from it by these samples: {join(same)}.")
    if compared and not below and not above:
        parts.append("No scan separates: the setting may be too easy, or the samples too few, to rank them.")
    return " ".join(part for part in (*parts, left_out_words(cells)) if part)


def remarks(source: Source) -> list[Remark]:
    """What limits the numbers: a haystack of plain documentation, floors, suspicious gains, failures, gaps, damage."""
    found = []
    if "python-docs" in source.haystack:
        found.append(
            Remark(
                "The haystack is python-docs, the documentation that ships with Python, not WikiText: scores are comparable within this "
                "report, not with published RULER numbers.",
                grave=True,
            )
        )
    floor = [f"{cell.task} at {cell.context:,} tokens" for cell in source.cells if NOT_DISCRIMINATIVE in cell.notes]
    if floor:
        where = join(list(dict.fromkeys(floor)))
        found.append(Remark(f"Not discriminative, because dense attention itself is at the floor: {where}; left out of '{ALL_TASKS}'."))
    solved = [f"{cell.task} at {setting(cell.context, cell.k)}" for cell in source.cells if CEILING_NOTE in cell.notes]
    ceiling = list(dict.fromkeys(solved))
    if ceiling:
        found.append(Remark(f"At the ceiling, where every scan succeeds and none can be told from another: {join(ceiling)}."))
    above = [
        f"{cell.method.label} on {cell.task} at {setting(cell.context, cell.k)}"
        for cell in source.cells
        if cell.against_dense is not None and cell.against_dense.above
    ]
    if above:
        found.append(Remark(f"Above dense by more than chance, so look at the samples before believing it: {join(above)}.", grave=True))
    silent = [f"{cell.method.label} on {cell.task}: {note}" for cell in source.cells for note in cell.notes if "fired" in note]
    if silent:
        found.append(Remark(f"A scan that did not run every time passes for dense attention: {join(silent)}.", grave=True))
    if source.failures:
        failed, be = count(len(source.failures), "record"), "is" if len(source.failures) == 1 else "are"
        found.append(Remark(f"{failed} of failed samples {be} in no mean and {be} listed below.", grave=True))
    if source.missing:
        gaps = count(len(source.missing), "gap")
        text = f"The run is not complete: {gaps} listed below. Comparisons use only the samples that both sides have."
        found.append(Remark(text))
    found += half_remarks(source.halves, source.run.torn, NOUNS["ruler"])
    if source.run.problems:
        damage = "; ".join(printable(problem) for problem in list(source.run.problems)[:3])
        found.append(Remark(f"{count(len(source.run.problems), 'damaged line')} of the records skipped: {damage}.", grave=True))
    found += decoding_remarks(source.run.manifest, source.points)
    return found + [Remark(f"{text}.") for text in source.remarks]
