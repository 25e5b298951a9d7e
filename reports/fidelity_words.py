"""The sentences about a fidelity run, generated from its numbers, and the reads at equal error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pandas as pd

from fathom_eval.console import printable
from fathom_eval.reports.cells import MINIMUM_PAIRS
from fathom_eval.reports.curves import FIXED_DEPTH
from fathom_eval.reports.gaps import Gap
from fathom_eval.reports.wording import Remark, count, join, number, others_below, setting, significant

Rows = Sequence[Mapping[str, Any]]


_MOST_IN_LEAD = 6
_OWN_SIZE = "(k: of the oracle only)"  # how labels end of methods that decide how many tokens they attend to


def _scans(rows: Rows) -> list[Mapping[str, Any]]:
    return [row for row in rows if not row["control"] and row["bits"] is not None and row["error_dense"] is not None]


def frontier(rows: Rows) -> list[Mapping[str, Any]]:
    """The scans under the paper's protocol that no other one beats in both bits and error, by bits.

    Those that attend to more than k tokens, or by another policy (reranking, the union of a group), stand outside it.
    """
    best: list[Mapping[str, Any]] = []
    held = [row for row in _scans(rows) if not row["protocol"] and not row["method"].endswith(_OWN_SIZE)]
    for row in sorted(held, key=lambda row: (row["bits"], row["error_dense"])):
        if not best or row["error_dense"] < best[-1]["error_dense"]:
            best.append(row)
    return best


def equal_error(rows: Rows) -> list[tuple[Mapping[str, Any], Mapping[str, Any] | None]]:
    """Every scan of a fixed depth with the read of variable depth that reaches its error at the fewest bits; None where none does.

    Both select and attend by one policy: what reranking or the union of a group brings is not the scan's.
    """
    scans = _scans(rows)
    variable = [row for row in scans if row["name"] == "fathom"]
    if not variable:
        return []
    found = []
    for row in sorted((row for row in scans if row["name"] in FIXED_DEPTH), key=lambda row: row["bits"]):
        alike = [other for other in variable if other["protocol"] == row["protocol"]]
        if not alike:
            continue
        reached = [other for other in alike if other["error_dense"] <= row["error_dense"]]
        found.append((row, min(reached, key=lambda other: other["bits"], default=None)))
    return found


def answer(rows: Rows, settings: Sequence[tuple[int, int]], pairs: pd.DataFrame) -> str:
    """The finding of the longest context at its first k, in short; those of the other settings stand with their tables."""
    longest = max((context for context, _ in settings), default=0)
    ordered = sorted(settings, key=lambda at: at[0] != longest)
    text = next((text for at in ordered if (text := finding(rows, at, pairs, brief=True))), "")
    return text + others_below(len(settings) - 1) if text else ""


def finding(rows: Rows, at: tuple[int, int], pairs: pd.DataFrame, *, brief: bool = False) -> str:
    """Which scans no other one beats at one context and k, and what separates them from the next by the paired interval.

    Args:
        brief: Of many scans name the first ones and the last.
    """
    context, k = at
    here = [row for row in rows if row["context"] == context and row["k"] in (None, k)]
    best = frontier(here)
    if not best:
        return ""
    oracle = [row["error_dense"] for row in here if row["name"] == "exact" and row["options"] == "{}"]
    own = f"exact top-k itself differs from dense by {significant(oracle[0])}; " if oracle and oracle[0] is not None else ""
    named = [f"{row['method']} ({number(row['bits'], 1)} bits, {significant(row['error_dense'])})" for row in best]
    more = len(named) - _MOST_IN_LEAD
    if brief and more > 1:
        named = [*named[: _MOST_IN_LEAD - 1], f"{more} more", named[-1]]
    lead = (
        f"At {setting(context, k)} {own}of {count(len(_scans(here)), 'scan')}, under the paper's protocol these are beaten by none "
        "in both bits and error"
    )
    alike = [[best[0]["method"]]]
    for left, right in pairwise(row["method"] for row in best):
        if _separate(pairs, context, k, left, right):
            alike.append([right])
        else:
            alike[-1].append(right)
    unclear = [f"{group[0]} {'and' if len(group) == 2 else '…'} {group[-1]}" for group in alike if len(group) > 1]
    told = f" By these windows neighbours are not separated in error: {'; '.join(unclear)}." if unclear else ""
    return f"{lead}: {join(named)}.{told}"


def _separate(pairs: pd.DataFrame, context: int, k: int, first: str, second: str) -> bool:
    if not len(pairs):
        return False
    same = (pairs["context"] == context) & (pairs["k"] == k) & (pairs["metric"] == "error_dense") & (pairs["windows"] >= MINIMUM_PAIRS)
    names = pairs["method"].isin([first, second]) & pairs["other"].isin([first, second])
    found = pairs[same & names]
    return bool(len(found) and (found["high"].iloc[0] < 0 or found["low"].iloc[0] > 0))


def fidelity_remarks(rows: Rows, problems: Sequence[str], missing: Sequence[Gap], notes: Sequence[str], haystack: str) -> list[Remark]:
    """What limits the numbers."""
    found = []
    windows = max((row["windows"] for row in rows), default=0)
    if windows < MINIMUM_PAIRS:
        found.append(Remark(f"{count(windows, 'window')}: fewer than {MINIMUM_PAIRS} separate no two methods, whatever a bootstrap says."))
    if "python-docs" in haystack:
        found.append(Remark("The text is python-docs, the documentation that ships with Python, not WikiText.", grave=True))
    failed = [f"{row['method']} in {count(row['failures'], 'window')}" for row in rows if row["failures"]]
    if failed:
        found.append(Remark(f"Failed, and in no mean: {join(list(dict.fromkeys(failed)))}.", grave=True))
    if missing:
        found.append(Remark(f"The run is not complete: {count(len(missing), 'gap')} listed below. Differences use shared windows only."))
    if problems:
        damage = "; ".join(printable(problem) for problem in problems[:3])
        found.append(Remark(f"{count(len(problems), 'damaged line')} of the records skipped: {damage}.", grave=True))
    return found + [Remark(f"{note}.") for note in notes]
