"""Records of single kernels and of the link as tables, one a kind of measurement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fathom_eval.console import printable
from fathom_eval.reports.canvas import slug
from fathom_eval.reports.document import Block, Column, Entry, Item, Row, Table, entry
from fathom_eval.reports.grids import Bar, draw_bars
from fathom_eval.reports.wording import join, significant

# Names of fields that the records of kernels have, as a reader reads them.
_TITLES = {
    "gbytes_per_s": "GB/s",
    "gb_s": "GB/s",
    "gpu_ms": "ms",
    "mbytes": "MB",
    "of_ceiling": "of ceiling",
    "active_channels": "channels",
    "mbytes_of_36_layers": "MB of 36 layers",
    "rows_a_head": "rows a head",
}
_NO_TABLE = frozenset({"device", "check"})
_MOST_BARS = 40
# Of the key of a record, and what the line below the table says.
_NO_COLUMN = frozenset({"kind", "name", "measure", "task", "method", "sample", "k", "options", "method_version", "device"})


def kernel_blocks(records: Sequence[Mapping[str, Any]], anchor: str, origin: str) -> list[Block]:
    """One block a kind of record, in the order they were met; records of one kind and context stand together."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        kind = printable(record.get("measure") or record.get("kind"))
        if kind not in _NO_TABLE:
            kinds.setdefault(kind, []).append(record)
    blocks = []
    taken: set[str] = set()
    drawn: set[str] = set()
    for number, (kind, members) in enumerate(kinds.items()):
        items: list[Item] = [*_figure(kind, members, origin, drawn), _table(kind, members, origin, taken)]
        blocks.append(Block(f"{anchor}-kind-{number}", kind, items))
    return blocks


def kernel_answer(records: Sequence[Mapping[str, Any]]) -> str:
    """The times of the kernels whose rate is measured against a ceiling, at the longest context of each kind."""
    parts = []
    kinds = dict.fromkeys(printable(record.get("measure") or record.get("kind")) for record in records if "of_ceiling" in record)
    for kind in kinds:
        own = [one for one in records if printable(one.get("measure") or one.get("kind")) == kind and _is_timed(one)]
        if own:
            longest = max(one["context"] for one in own)
            named = [f"{printable(one['name'])} {significant(time_of_kernel(one))} ms" for one in own if one["context"] == longest]
            parts.append(f"{kind[:1].upper()}{kind[1:]}, {longest:,} tokens: {join(named)}.")
    return " ".join(parts)


def time_of_kernel(record: Mapping[str, Any]) -> float | None:
    """Milliseconds of a kernel, under either name that records have for them."""
    found = record.get("ms", record.get("gpu_ms"))
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else None


def _is_timed(record: Mapping[str, Any]) -> bool:
    return time_of_kernel(record) is not None and isinstance(record.get("context"), int) and "of_ceiling" in record and "name" in record


def _figure(kind: str, records: Sequence[Mapping[str, Any]], origin: str, taken: set[str]) -> list[Item]:
    named = [record for record in records if _is_timed(record)]
    contexts = [record["context"] for record in named]
    if len(named) < 3 or not contexts:
        return []
    longest = max(contexts)
    bars = [Bar(printable(one["name"]), [("ms", time_of_kernel(one) or 0.0)]) for one in named if one["context"] == longest]
    if len(bars) > _MOST_BARS:
        return []
    title = f"{kind}, {longest:,} tokens"
    drawing = draw_bars(
        slug(f"kernels-{kind}", taken),
        title,
        f"Milliseconds of each kernel: {title}. The numbers are in the table.",
        origin,
        bars,
        "ms",
    )
    return [] if drawing is None else [drawing]


def _table(kind: str, records: Sequence[Mapping[str, Any]], origin: str, taken: set[str]) -> Table:
    names = list(
        dict.fromkeys(
            name
            for record in records
            for name, value in record.items()
            if name not in _NO_COLUMN and not isinstance(value, (Mapping, list))
        )
    )
    named = any("name" in record for record in records)
    columns = [Column("name" if named else names[0])] + [
        Column(_TITLES.get(name, printable(name))) for name in (names if named else names[1:])
    ]
    rows = []
    for record in records:
        first = Entry(printable(record.get("name", ""))) if named else _entry(record.get(names[0]))
        rows.append(Row((first, *(_entry(record.get(name)) for name in (names if named else names[1:])))))
    return Table(slug(f"kernels-{kind}", taken), kind, origin, tuple(columns), tuple(rows), collapsed=len(rows) > 30)


def _entry(value: object) -> Entry:
    if value is None:
        return Entry()
    if isinstance(value, int) and not isinstance(value, bool):
        return Entry(f"{value:,}", value)
    if isinstance(value, float):
        return entry(value, None)
    return Entry(printable(value))
