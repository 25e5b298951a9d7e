"""What a report is made of, whatever the kind of its runs: sections of blocks that hold tables, figures and steps.

Every kind of run turns its records into these; one template, one CSV writer, one Markdown writer and one LaTeX writer show them.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fathom_eval.reports.gaps import Gap
from fathom_eval.reports.wording import Remark, number, signed, significant


@dataclass(frozen=True, slots=True)
class Entry:
    """One cell of a table.

    Attributes:
        text: What a reader sees.
        value, error, low, high: The numbers behind it, unrounded, for the CSV file; without a value the text is written there.
        small: Lines below it on the page, in smaller type.
        style: Style class on the page: ``below``, ``above``, ``floor``, ``total``, ``differs`` or nothing. A sign says the same.
    """

    text: str = ""
    value: float | str | None = None
    error: float | None = None
    low: float | None = None
    high: float | None = None
    small: tuple[str, ...] = ()
    style: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """Heading of a column. A ``text`` column stands to the left and wraps."""

    title: str
    small: str = ""
    text: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One line; the first entry names it. A ``control`` row is a reference, not a method under test."""

    entries: tuple[Entry, ...]
    control: bool = False


@dataclass(frozen=True, slots=True)
class Table:
    """A table that names where its numbers come from.

    Attributes:
        name: Stem of its CSV file, unique within a report.
        origin: Run, model, context, k, device and samples, as far as they apply.
        collapsed: Folded away on the page until it is asked for.
        caution: What its numbers cannot tell because the run lacks it; stands above the table.
    """

    name: str
    title: str
    origin: str
    columns: tuple[Column, ...]
    rows: tuple[Row, ...]
    legend: str = ""
    collapsed: bool = False
    caution: str = ""


@dataclass(frozen=True, slots=True)
class Drawing:
    """One figure: its file name without ending, what it shows in words, where its numbers come from, and its bytes in both formats.

    ``reading`` says how to read it, and stands above it on the page.
    """

    name: str
    title: str
    description: str
    origin: str
    svg: str
    png: bytes
    reading: str = ""

    @property
    def wide(self) -> bool:
        """Whether it needs the whole width of a page to be legible."""
        found = re.search(r'viewBox="0 0 ([\d.]+)', self.svg)
        return found is not None and float(found[1]) > 450


@dataclass(frozen=True)
class Steps:
    """The steps of agent sessions beside those of exact top-k; ``sessions`` is what the page's script shows, plain JSON values."""

    name: str
    sessions: Sequence[Mapping[str, Any]]
    left_out: int


Item = Table | Drawing | Steps


@dataclass(frozen=True)
class Block:
    """A heading, a sentence and what belongs to it."""

    anchor: str
    title: str
    items: Sequence[Item]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Measure:
    """One number that can be set beside that of another run.

    Attributes:
        where: Task, context and k in words.
        quantity: What was measured.
        samples: Values by sample, paired where two runs have one identity; empty where there are none.
        decimals: Shown; None for significant digits.
        over: What a mean is over, where ``where`` does not say it: only means over the same are set side by side.
    """

    where: str
    method: str
    quantity: str
    value: float
    error: float | None = None
    samples: Mapping[Any, float] = field(default_factory=dict)
    decimals: int | None = 3
    over: str = ""


@dataclass(frozen=True, slots=True)
class Fact:
    """One measured value as the table of the paper's numbers needs it: context and k are None where they do not matter.

    ``extra`` is where the index of a timed step lies, and of a mean over tasks their names, sorted.
    """

    quantity: str
    task: str
    method: str
    context: int | None
    k: int | None
    value: float
    error: float | None
    extra: str = ""


@dataclass(frozen=True)
class Section:
    """One run.

    Attributes:
        kind: What was measured: ``ruler``, ``sessions``, ``fidelity``, ``step`` or ``kernels``.
        subject, answer: What was compared and what came out, in sentences.
        missing: What an interrupted run lacks, the worst first.
        measures, facts: For the comparison with other runs and with the paper.
        glossary: What columns mean: (term, meaning).
        provenance, starts: Facts of the manifest; time and changes of every start.
        data: Further CSV files, by file name, with the function that writes each.
        warnings: What whoever makes the report should know, one line each; no part of the page.
    """

    anchor: str
    name: str
    kind: str
    model: str
    device: str
    subject: str
    answer: str
    remarks: Sequence[Remark]
    blocks: Sequence[Block]
    missing: Sequence[Gap] = ()
    measures: Sequence[Measure] = ()
    facts: Sequence[Fact] = ()
    glossary: Sequence[tuple[str, str]] = ()
    provenance: Sequence[tuple[str, str]] = ()
    starts: Sequence[tuple[str, str]] = ()
    identity: str = ""
    manifest: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Callable[[Path], None]] = field(default_factory=dict)
    warnings: Sequence[str] = ()


@dataclass(frozen=True)
class Document:
    """A whole report: its sections, what several of them have to do with each other, and what could not be reported."""

    title: str
    sections: Sequence[Section]
    shared: Sequence[Block]
    left_out: Sequence[str] = ()

    @property
    def blocks(self) -> list[Block]:
        """All blocks in reading order."""
        return [*(block for section in self.sections for block in section.blocks), *self.shared]

    @property
    def tables(self) -> list[Table]:
        """All tables in reading order."""
        return [item for block in self.blocks for item in block.items if isinstance(item, Table)]

    @property
    def drawings(self) -> list[Drawing]:
        """All figures in reading order."""
        return [item for block in self.blocks for item in block.items if isinstance(item, Drawing)]


def entry(value: float | None, digits: int | None = 3, *, error: float | None = None, mark: str = "", **more: Any) -> Entry:
    """A number with its standard error and a sign; ``digits`` None for three significant ones."""
    if value is None or math.isnan(value):
        return Entry("–", **more)
    shown = number(value, digits) if digits is not None else significant(value)
    # What has significant digits, an error or a time, is zero by construction alone, with no error to speak of; a score is measured.
    if error is not None and (math.isnan(error) or (digits is None and value == error == 0)):
        error = None
    if error is not None:
        shown += f" ± {number(error, digits) if digits is not None else significant(error, 2)}"
    return Entry(f"{shown} {mark}".rstrip(), value, error, **more)


def difference(mean: float, low: float | None, high: float | None, digits: int | None = 3, **more: Any) -> Entry:
    """A difference with its interval; an interval that is not a number is left out."""

    def show(value: float) -> str:
        return signed(value, digits) if digits is not None else ("+" if value > 0 else "") + significant(value)

    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return Entry(show(mean), mean, **more)
    return Entry(f"{show(mean)} [{show(low)}, {show(high)}]", mean, None, low, high, **more)


def explained(blocks: Sequence[Block], reading: str) -> list[Block]:
    """The blocks, the first figure of them with the words on how to read it."""
    for place, block in enumerate(blocks):
        for index, item in enumerate(block.items):
            if isinstance(item, Drawing):
                items = [*block.items[:index], replace(item, reading=reading), *block.items[index + 1 :]]
                return [*blocks[:place], replace(block, items=items), *blocks[place + 1 :]]
    return list(blocks)


def renamed(item: Item, prefix: str) -> Item:
    """The item under a file name that no other run's item has."""
    return replace(item, name=f"{prefix}{item.name}")
