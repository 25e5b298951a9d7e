"""Text of ``docs/scale.md``: paragraphs, tables and sizes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

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
