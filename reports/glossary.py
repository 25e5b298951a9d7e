"""What the columns of a report mean, from a text file of terms."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fathom_eval.reports.cells import ALL_TASKS, FLOOR, MINIMUM_PAIRS
from fathom_eval.stats import CEILING

_FILE = Path(__file__).parent / "templates" / "glossary.txt"


@cache
def glossary(kind: str) -> tuple[tuple[str, str], ...]:
    """(term, meaning) of every term that tables of this kind of run use."""
    text = _FILE.read_text(encoding="utf-8").format(all_tasks=ALL_TASKS, floor=FLOOR, minimum_pairs=MINIMUM_PAIRS, ceiling=CEILING)
    section = text.split(f"[{kind}]\n", 1)[1].split("\n[", 1)[0]
    pairs = (line.split(" | ", 1) for line in section.splitlines() if line.strip())
    return tuple((term, meaning) for term, meaning in pairs)
