"""Numbers and lists in words, and what a reader must know before trusting a number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Remark:
    """Something a reader must know before trusting a number."""

    text: str
    grave: bool = False


def number(value: float | None, digits: int = 3) -> str:
    """A number with a real minus sign, or a dash where there is none."""
    if value is None or math.isnan(value):
        return "–"
    text = f"{value:.{digits}f}"
    return text.replace("-", "−") if float(text) else text.lstrip("-")


def signed(value: float, digits: int = 3) -> str:
    """A difference with its sign."""
    text = number(value, digits)
    return text if text.startswith("−") or text == "–" or not float(text) else f"+{text}"


def significant(value: float | None, digits: int = 3) -> str:
    """A number to so many significant digits, without an exponent: errors and times span many orders of magnitude."""
    if value is None or math.isnan(value):
        return "–"
    if value == 0:
        return "0"
    places = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return number(value, min(places, 9))


def setting(context: int, k: int | None) -> str:
    """A context and a k in words."""
    return f"{context:,} tokens" + ("" if k is None else f", k = {k:,}")


def count(amount: int, noun: str) -> str:
    """``1 scan``, ``2 scans``, ``3 trajectories``."""
    if amount == 1:
        return f"{amount:,} {noun}"
    return f"{amount:,} {noun[:-1]}ies" if noun.endswith("y") and noun[-2] not in "aeiou" else f"{amount:,} {noun}s"


def others_below(amount: int) -> str:
    """The sentence that ends a lead of one setting out of several; empty where there is no other."""
    return {0: "", 1: " The other setting stands below."}.get(amount, f" The other {amount:,} settings stand below.")


def join(items: Sequence[str]) -> str:
    """``a, b and c``."""
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + (f" and {items[-1]}" if items else "")


def spread(values: Sequence[int], noun: str) -> str:
    """``1 window``, ``24 windows``, or ``12 to 24 windows`` where they differ; empty without values."""
    if not values:
        return ""
    low, high = min(values), max(values)
    return count(low, noun) if low == high else f"{low:,} to {count(high, noun)}"
