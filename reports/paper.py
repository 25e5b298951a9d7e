"""The paper's numbers, read from data files, beside those of a report; and the list of commands that measure each table's counterpart.

``python -m fathom_eval.reports.paper`` prints ``docs/paper.md``.
"""

from __future__ import annotations

import csv
import json
import re
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from fathom_eval.reports.cells import ALL_TASKS
from fathom_eval.reports.document import Block, Column, Entry, Fact, Row, Section, Table, entry
from fathom_eval.reports.wording import join, number, setting, significant

_DATA = Path(__file__).parent / "paper_data"
_NEAR = 0.03
"""Contexts that differ by less are one: 131,000 tokens stand beside 131,072."""
SAME = "same model and setting"
OTHER_MODEL, OTHER_TASKS, OTHER_K, OTHER_CONTEXT, OTHER_HARDWARE, OTHER_STATISTICS = MARKS = (
    "other model",
    "other tasks",
    "other k",
    "other context",
    "other hardware",
    "other statistics",
)
"""What keeps two numbers from being compared, the gravest first. Every one that applies stands on the row."""
UNVERIFIED = (
    "The paper calls its errors mean relative errors against dense attention too; that they are the same quantity is not verified, since "
    "none of its models has been measured with this program yet."
)
CALIBRATED = frozenset({"fathom", "uniform_depth", "double_sparsity", "loki", "loki_published"})
"""Methods that read statistics of keys: the paper makes them ahead on text, here they are those of the prefix's own keys by default."""
_TIMES = frozenset({"gpu_ms", "wall_ms"})
_STATISTICS = re.compile(r" statistics=\S+")
_DIGITS = {"score": 3, "agreement": 2, "active_channels": 0, "gpu_ms": 0, "wall_ms": 0}
_NAMES = {"error_dense": "error to dense", "active_channels": "active channels", "gpu_ms": "GPU ms", "wall_ms": "wall ms"}


@dataclass(frozen=True, slots=True)
class PaperValue:
    """One number of one table. ``ours`` is the label of this program's method that it belongs to, empty where there is none."""

    table: int
    quantity: str
    model: str
    device: str
    context: int | None
    k: int | None
    task: str
    index: str
    method: str
    ours: str
    bits: float | None
    bound: str
    value: float
    error: float | None

    @property
    def calibrated_ahead(self) -> bool | None:
        """Whether its statistics are of another text, as all but the session-calibrated ones are; None for a method that needs none."""
        return "session-calibrated" not in self.method if self.ours and self.ours.split()[0] in CALIBRATED else None


@dataclass(frozen=True, slots=True)
class PaperTable:
    """One table of the paper.

    Attributes:
        kind: Of the run that measures its counterpart.
        commands: What measures it.
        headline: Its numbers are shown beside runs of other models too.
    """

    table: int
    title: str
    kind: str
    quantity: str
    note: str
    commands: tuple[str, ...]
    headline: bool


@cache
def paper_values() -> tuple[PaperValue, ...]:
    """All numbers."""

    def whole(text: str) -> int | None:
        return int(text) if text else None

    def real(text: str) -> float | None:
        return float(text) if text else None

    with (_DATA / "values.csv").open(encoding="utf-8", newline="") as handle:
        return tuple(
            PaperValue(
                int(row["table"]),
                row["quantity"],
                row["model"],
                row["device"],
                whole(row["context"]),
                whole(row["k"]),
                row["task"],
                row["index"],
                row["method"],
                row["ours"],
                real(row["bits"]),
                row["bound"],
                float(row["value"]),
                real(row["error"]),
            )
            for row in csv.DictReader(handle)
        )


@cache
def paper_tables() -> tuple[PaperTable, ...]:
    """All tables, by number."""
    found: dict[str, Any] = json.loads((_DATA / "tables.json").read_text(encoding="utf-8"))
    return tuple(PaperTable(**{**table, "commands": tuple(table["commands"])}) for table in found["tables"])


def paper_source() -> str:
    """Title and number of the paper."""
    return str(json.loads((_DATA / "tables.json").read_text(encoding="utf-8"))["source"])


def paper_blocks(sections: Sequence[Section]) -> list[Block]:
    """The paper's numbers beside those of each run that has some of the same methods and quantities; nothing where none has."""
    found = [_lines(section) for section in sections]
    prefixes = [f"{section.anchor}-" if len(sections) > 1 else "" for section in sections]
    tables = [_table(section, lines, f"{prefix}paper") for section, lines, prefix in zip(sections, found, prefixes, strict=True) if lines]
    matches = sum(not line[0] for lines in found for line in lines)
    if not tables:
        return []
    text = (
        f"What {paper_source()} reports for the same methods. Only rows marked “{SAME}” can be compared; the others are here to be seen, "
        "since model, k, context, text and hardware change every number. A k is the same where it is equal, or its share of the context is."
    )
    if not matches:
        text += " No row here has that mark."
    if any(fact.quantity.startswith("error") for lines in found for _, fact, _ in lines):
        text += f" {UNVERIFIED}"
    if any(OTHER_STATISTICS in line[0] for lines in found for line in lines):
        text += (
            f" “{OTHER_STATISTICS}”: the paper calibrates its methods ahead on text, and the run takes statistics of the prefix's own "
            "keys, or the other way round. 'fathom-eval calibrate' makes them ahead, and a method's option statistics=NAME reads them."
        )
    return [Block("paper", "Beside the paper", tables, text)]


Line = tuple[tuple[str, ...], Fact, list[PaperValue]]
"""What keeps the two from being compared; ours; the paper's."""


def _lines(section: Section) -> list[Line]:
    headline = {table.table for table in paper_tables() if table.headline}
    lines = []
    for fact in section.facts:
        found: dict[tuple[tuple[str, ...], int], list[PaperValue]] = {}
        for value in paper_values():
            if value.quantity == fact.quantity and _method_is(fact.method, value) and _place_is(fact, value):
                marks = _marks(section, fact, value)
                if OTHER_MODEL not in marks or value.table in headline:
                    found.setdefault((marks, value.table), []).append(value)
        best = min((_weight(marks) for marks, _ in found), default=0)
        lines += [(marks, fact, values) for (marks, _), values in found.items() if _weight(marks) == best]
    return sorted(lines, key=lambda line: _weight(line[0]))


def _weight(marks: Sequence[str]) -> int:
    """Smaller is nearer: one graver mark outweighs all lesser ones."""
    return sum(2 ** (len(MARKS) - MARKS.index(mark)) for mark in marks)


def _method_is(label: str, value: PaperValue) -> bool:
    if not value.ours:
        return False
    # The basis rule: raw channels for models with QK-norm, planes of the rotated keys otherwise.
    own = label.replace("basis=auto", "basis=raw" if value.model.startswith("Qwen3") else "basis=klt")
    own = _STATISTICS.sub("", own)
    if value.quantity in _TIMES:
        return _timed_method(own) == value.ours
    return own == value.ours


def _timed_method(label: str) -> str:
    """The name that the paper's timed reads have here, made of what a timing record calls its method."""
    text = label.lower().replace("budget=", "").replace("basis=raw", "").replace("basis=klt", "").replace("per-layer", "")
    text = text.replace("nibble", "channels").replace("r=", "").replace("d/8", "16").replace("d/4", "32").replace("_", " ")
    words = text.replace(",", " ").replace("c=", "").split()
    if not words or "rerank" in text:
        return ""
    if words[0] in ("dense", "landmark", "thumbnail"):
        return words[0]
    if words[0] in ("sparq", "channels", "double", "loki") and "32" in words:
        return "channels 32"
    if words[0] in ("sparq", "channels") and "16" in words:
        return "sparq 16"
    return " ".join(words[:2])


def _place_is(fact: Fact, value: PaperValue) -> bool:
    return fact.extra == value.index if fact.quantity in _TIMES else fact.task == value.task


def _marks(section: Section, fact: Fact, value: PaperValue) -> tuple[str, ...]:
    """What keeps a number of ours and one of the paper from being compared; empty where nothing does."""
    near = fact.context is None or value.context is None or abs(fact.context - value.context) <= _NEAR * value.context
    applies = {
        OTHER_MODEL: not same_model(section.model, value.model),
        OTHER_TASKS: fact.task == ALL_TASKS and fact.extra.split() != _tasks_of(value),
        OTHER_K: not _same_k(fact, value),
        OTHER_CONTEXT: not near,
        OTHER_HARDWARE: fact.quantity in _TIMES and "a100" not in section.device.lower(),
        OTHER_STATISTICS: fact.quantity not in _TIMES and _calibrated_ahead(fact.method) is not value.calibrated_ahead,
    }
    return tuple(mark for mark in MARKS if applies[mark])


@cache
def _tasks_of(mean: PaperValue) -> list[str]:
    """The tasks that a mean of the paper is over: those that it gives one by one for the same model and context."""
    same = (value for value in paper_values() if (value.quantity, value.model, value.context) == (mean.quantity, mean.model, mean.context))
    return sorted({value.task for value in same if value.task != mean.task})


def _same_k(fact: Fact, value: PaperValue) -> bool:
    """Equal, or the same share of the context, which is what an error depends on; the time of a step depends on k itself."""
    if fact.k == value.k:
        return True
    if fact.quantity in _TIMES or not (fact.k and value.k and fact.context and value.context):
        return False
    ours, theirs = fact.k / fact.context, value.k / value.context
    return abs(ours - theirs) <= _NEAR * theirs


def _calibrated_ahead(label: str) -> bool | None:
    """Whether a method of ours has statistics of another text; None for one that needs none."""
    if label.split()[0] not in CALIBRATED:
        return None
    return _STATISTICS.search(label) is not None


def same_model(own: str, paper: str) -> bool:
    """Whether a model's name, with or without its owner or folder, is that of the paper."""
    # Steps are timed on random weights of a model's shape: for times that is the model.
    return own.rstrip("/").rsplit("/", 1)[-1].lower().removesuffix(".gguf").removesuffix("-shape") == paper.lower()


def _table(section: Section, lines: Sequence[Line], name: str) -> Table:
    columns = (
        Column("method"),
        Column("quantity", text=True),
        Column("setting", text=True),
        Column("here"),
        Column("paper"),
        Column("table"),
        Column("paper's setting", text=True),
        Column("match", text=True),
    )
    rows = []
    for marks, fact, values in lines:
        digits = _DIGITS.get(fact.quantity)
        quantity = " ".join(part for part in (_NAMES.get(fact.quantity, fact.quantity), fact.task or fact.extra) if part)
        where = setting(fact.context, fact.k) if fact.context is not None else f"k = {fact.k}"
        entries = (
            Entry(fact.method),
            Entry(quantity),
            Entry(where),
            entry(fact.value, digits, error=fact.error),
            _paper_entry(values, digits),
            Entry(f"{values[0].table}", values[0].table),
            Entry("; ".join(dict.fromkeys(_where(value) for value in values))),
            Entry(", ".join(marks) or SAME),
        )
        rows.append(Row(entries, control=bool(marks)))
    origin = " · ".join(part for part in (f"run {section.name}", section.model, section.device, paper_source()) if part)
    legend = "paper: one value, or the lowest and highest of a table's settings; with its standard error where the paper gives one"
    folded = all(marks for marks, _, _ in lines)
    return Table(name, f"The paper beside run {section.name}", origin, columns, tuple(rows), legend, collapsed=folded)


def _paper_entry(values: Sequence[PaperValue], digits: int | None) -> Entry:
    def show(value: PaperValue) -> str:
        return value.bound + (number(value.value, digits) if digits is not None else significant(value.value))

    if len(values) == 1:
        shown = entry(values[0].value, digits, error=values[0].error)
        return Entry(values[0].bound + shown.text, shown.value, shown.error)
    ordered = sorted(values, key=lambda value: value.value)
    return Entry(f"{show(ordered[0])} to {show(ordered[-1])}")


def _where(value: PaperValue) -> str:
    context = f"{value.context // 1024}k" if value.context and value.context < 2**20 else "1M" if value.context else ""
    device = value.device.split("-")[0] if value.quantity in _TIMES else ""
    return " ".join(part for part in (value.model, context, f"k = {value.k}" if value.k else "", device) if part)


def paper_markdown() -> str:
    """``docs/paper.md``: for every table of the paper the command that measures its counterpart."""
    lines = [
        "# The paper's tables and their counterparts",
        "",
        f"{paper_source()}. `reports/paper_data/values.csv` holds the numbers of its tables, facts only, each with the number of",
        "its table.",
        "`fathom-eval report` shows them beside those of a run where method and quantity are the same, and says for each whether it can be",
        f"compared: “{SAME}”, or what stands in the way, “{OTHER_MODEL}”, “{OTHER_TASKS}” (of a mean), “{OTHER_K}” (neither k nor k / n",
        f"is equal), “{OTHER_CONTEXT}”, “{OTHER_HARDWARE}” (times only) and “{OTHER_STATISTICS}”: the paper calibrates ahead on text, the",
        "default here is statistics of the prefix's own keys.",
        *textwrap.wrap(UNVERIFIED, 140),
        "",
        "Every command below takes other models, contexts and methods too; each writes a run directory, and `fathom-eval report` makes",
        "the table of it.",
        "A word in capitals stands for something of yours: a run directory, or a calibration that `fathom-eval calibrate` makes first",
        "(`fathom-eval fidelity --list-suites` says how). Those of `bench` need a GPU.",
        "",
        "| table | what it shows | quantity | numbers | counterpart |",
        "| ---: | --- | --- | ---: | --- |",
    ]
    for table in paper_tables():
        amount = sum(value.table == table.table for value in paper_values())
        commands = "<br>".join(f"`{command}`" for command in table.commands)
        counterpart = f"{commands}{f'<br>{table.note}' if table.note else ''}"
        lines.append(f"| {table.table} | {table.title} | {table.quantity or 'ratios'} | {amount} | {counterpart} |")
    kinds = join([f"`{kind}`" for kind in dict.fromkeys(table.kind for table in paper_tables() if table.kind != "summary")])
    lines += ["", f"Kinds of run that they need: {kinds}.", ""]
    lines += ["This page is printed by `python -m fathom_eval.reports.paper`; a test holds it to the data.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    print(paper_markdown(), end="")
