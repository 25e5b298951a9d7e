"""Decode steps of all settings in one table: times over that of Fathom's read, and how close its own step is to the floor.

Few methods are columns and settings rows. Of more methods than a page has room for, methods are rows, settings columns, and Fathom's own
step has a table of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fathom_eval.console import printable
from fathom_eval.reports.document import Block, Column, Entry, Row, Table, entry
from fathom_eval.reports.timing_source import Place, TimingSource, contexts_of
from fathom_eval.reports.timing_steps import (
    APART,
    BUDGET,
    MOST_METHODS,
    Turns,
    clock_of,
    is_48_bit,
    legend_of_mark,
    method_of,
    overlaps,
    quotient,
    ratio,
    time_of,
    value,
)
from fathom_eval.reports.wording import number

_TITLE = "All settings against Fathom's read"
_OWN = (Column("step ÷ floor"), Column("wall ÷ GPU"), Column("top-k a layer", "ms"), Column("scan of link"))
_OWN_LEGEND = (
    "scan of link: the rate of its scan over the copy rate of the link; top-k and scan only where no other kernel runs beside them"
)


@dataclass(frozen=True)
class _Cell:
    """One setting and context, the steps there that are set against one read of Fathom, and what to say of them beside the setting."""

    place: Place
    context: int
    turns: Turns
    remarks: tuple[str, ...]

    @property
    def words(self) -> str:
        return ", ".join((str(self.place), *self.remarks))

    def heading(self, places: Sequence[Place]) -> str:
        return ", ".join(part for part in (f"÷ at {self.context:,} tokens", self.place.apart(places), *self.remarks) if part)

    def entries(self, names: Sequence[str]) -> list[Entry]:
        # Of a method's several steps the fastest, which stands first.
        others = {method_of(step): ratio(step, self.turns.own) for step in reversed(self.turns.others)}
        return [entry(others.get(name), 2, mark=APART if self.turns.apart else "") for name in names]


def ratio_block(source: TimingSource, anchor: str) -> Block | None:
    """All settings against Fathom's read; None where nothing is set against a reference, or nothing has a floor."""
    cells = [cell for place in source.places for context in contexts_of(source.at(place)) for cell in _cells(source, place, context)]
    if not any(cell.turns.others or value(cell.turns.own, "floor_ms") for cell in cells):
        return None
    label = source.reads[0]
    bits: dict[str, float] = {}
    for cell in cells:
        for step in cell.turns.others:
            bits.setdefault(method_of(step), value(step, "scan_bits") or 0.0)
    names = sorted(bits, key=lambda name: round(bits[name]))
    tables = _by_method(source, cells, names, bits) if len(names) > MOST_METHODS else [_by_setting(source, cells, names, bits)]
    title = f"Against Fathom's {f'{BUDGET}-bit ' if is_48_bit(label) else ''}read: {label}"
    return Block(f"{anchor}-ratios", title, tables)


def _cells(source: TimingSource, place: Place, context: int) -> list[_Cell]:
    found = source.turns(place, context)
    several = sum(not turns.apart for turns in found) > 1
    cells = []
    for turns in found:
        label = method_of(turns.own)
        remarks = [f"against {label}"] if label != source.reads[0] else []
        remarks += [f"round {printable(turns.own.get('round'))}"] if several and not turns.apart else []
        remarks += [turns.apart] if turns.apart else []
        cells.append(_Cell(place, context, turns, tuple(remarks)))
    return cells


def _legend(source: TimingSource, cells: Sequence[_Cell], about: str) -> str:
    others = ", or of the read that a setting names" if any(method_of(cell.turns.own) != source.reads[0] for cell in cells) else ""
    apart = legend_of_mark((cell.turns.apart for cell in cells), "the reference")
    side = [cell.place.sessions > 1 for cell in cells]
    clock = "wall time" if all(side) else "GPU time"
    mixed = "; of several sessions side by side ÷ and step ÷ floor are of wall times" if any(side) and not all(side) else ""
    return f"÷: a method's {clock} over that of {source.reads[0]}{others}{about}{mixed}{apart}"


def _by_setting(source: TimingSource, cells: Sequence[_Cell], names: Sequence[str], bits: Mapping[str, float]) -> Table:
    """A row a setting and context, a column a method."""
    methods = [Column(f"{name} ÷", f"{number(bits[name], 0)} bits" if bits[name] else "") for name in names]
    rows = [Row((*_where(cell), *cell.entries(names), *_own(cell))) for cell in cells]
    legend = _legend(source, cells, f", which the last four columns are about; {_OWN_LEGEND}")
    return Table("step-ratios", _TITLE, source.origin(), (Column("setting"), Column("context"), *methods, *_OWN), tuple(rows), legend)


def _by_method(source: TimingSource, cells: Sequence[_Cell], names: Sequence[str], bits: Mapping[str, float]) -> list[Table]:
    """A row a method, a column a setting and context; a table a setting where they too are many."""
    places = list(dict.fromkeys(cell.place for cell in cells))
    groups = [cells] if len(cells) <= MOST_METHODS else [[cell for cell in cells if cell.place == place] for place in places]
    tables = []
    for index, group in enumerate(groups, start=1):
        present = {method_of(step) for cell in group for step in cell.turns.others}
        here = list(dict.fromkeys(cell.place for cell in group))
        columns = [Column(cell.heading(here)) for cell in group]
        ratios = [cell.entries(names) for cell in group]
        rows = [
            Row((Entry(name), entry(bits[name] or None, 0), *found)) for name, *found in zip(names, *ratios, strict=True) if name in present
        ]
        where = source.origin(here[0].shared(here))
        name = "step-ratios" if len(groups) == 1 else f"step-ratios-{index}"
        title = _TITLE if len(groups) == 1 else f"Against Fathom's read, {here[0]}"
        tables.append(Table(name, title, where, (Column("method"), Column("scan bits"), *columns), tuple(rows), _legend(source, group, "")))
    return [*tables, _own_table(source, [cell for cell in cells if not cell.turns.apart])]


def _own_table(source: TimingSource, cells: Sequence[_Cell]) -> Table:
    """The reference's own step in every setting."""
    columns = (Column("setting"), Column("context"), Column("GPU ms"), *_OWN)
    rows = [Row((*_where(cell), entry(time_of(cell.turns.own), None), *_own(cell))) for cell in cells]
    return Table("step-reference", "The step of Fathom's read itself", source.origin(), columns, tuple(rows), _OWN_LEGEND)


def _where(cell: _Cell) -> tuple[Entry, Entry]:
    return Entry(cell.words), Entry(f"{cell.context:,}", cell.context)


def _own(cell: _Cell) -> list[Entry]:
    """What the columns of the reference's own step say; nothing again where its steps are others of another round."""
    own = {} if cell.turns.apart else cell.turns.own
    parts, layers = own.get("parts_ms"), value(own, "layers")
    top = value(parts, "top_k") if isinstance(parts, Mapping) and not overlaps(own) else None
    return [
        entry(quotient(own, clock_of(own), "floor_ms") if value(own, "gpu_ms") is not None else None, 2),
        entry(quotient(own, "wall_ms", "gpu_ms"), 3),
        entry(top / layers if top and layers else None, 3),
        entry(value(own, "scan_of_link"), 3),
    ]
