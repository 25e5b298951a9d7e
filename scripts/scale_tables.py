"""Text of ``docs/scale.md``: paragraphs, tables and sizes."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

GIB, HOUR = 2**30, 3600


def wrapped(line: str) -> str:
    """A paragraph or a point of a list in lines of at most 140 characters."""
    return textwrap.fill(line, 140, subsequent_indent="  " if line.startswith("- ") else "")


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, all columns but the first to the right."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, marks, *rows))


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / GIB:,.1f}"


def span(values: Iterable[float], form: str = "{:.2g}") -> str:
    """The least and the most of them, or the one that they all are."""
    found = sorted(values)
    low, high = form.format(found[0]), form.format(found[-1])
    return low if low == high else f"{low} to {high}"


def seconds_text(value: float) -> str:
    """Seconds, minutes or hours."""
    return (
        f"{value:.2g} s"
        if value < 10
        else f"{value:.0f} s"
        if value < 600
        else f"{value / 60:.0f} min"
        if value < 36000
        else f"{value / HOUR:,.0f} h"
    )
