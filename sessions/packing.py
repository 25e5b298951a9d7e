"""Which trajectories make up a session: as many sessions as possible from what there is.

This is bin covering: a session is covered when it holds ``low`` tokens, and its last trajectory can be cut, so only the choice of members
matters. Optimal covering is NP-hard; a greedy choice in several orders, of which the best is taken, comes close.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_ORDERS = 48
_STEPS = 2_000_000
"""Comparisons that all orders together may take, roughly."""


@dataclass(frozen=True)
class Item:
    """A trajectory: ``length`` tokens as a whole, or one of ``cuts`` (ascending) as the last of its session."""

    name: str
    length: int
    cuts: tuple[int, ...]

    def cuts_between(self, low: int, high: int) -> tuple[int, ...]:
        """The cuts of at least ``low`` and at most ``high`` tokens."""
        return self.cuts[bisect_left(self.cuts, low) : bisect_left(self.cuts, high + 1)]


@dataclass(frozen=True)
class Pack:
    """Members of one session: whole ones in order, then the one that is cut, at one of ``cuts``."""

    whole: tuple[str, ...]
    last: str
    cuts: tuple[int, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """All members, in order."""
        return (*self.whole, self.last)


def rank(seed: int, *parts: str) -> str:
    """Sort key that looks random and is the same on any machine."""
    return hashlib.sha256("\x1f".join((str(seed), *parts)).encode()).hexdigest()


def pack(items: Sequence[Item], low: int, high: int, seed: int) -> list[Pack]:
    """Sessions of ``low`` to ``high`` tokens; no item is in two of them.

    The result depends on the items, the bounds and the seed alone, not on the order of the items.
    """
    usable = [item for item in items if item.length < high or item.cuts_between(0, high)]
    orders = max(2, min(_ORDERS, _STEPS // max(1, len(usable)) ** 2))
    best: list[Pack] = []
    bound = sum(min(item.length, high) for item in usable) // low if low else len(usable)
    for number in range(orders):
        order = sorted(usable, key=lambda item: rank(seed, str(number), item.name))
        if number % 2:
            # Largest first leaves the small ones for filling up.
            order.sort(key=lambda item: -item.length)
        found = _cover(order, low, high, seed)
        if len(found) > len(best):
            best = found
        if len(best) >= bound:
            break
    return best


def _cover(order: Sequence[Item], low: int, high: int, seed: int) -> list[Pack]:
    by_length = sorted(order, key=lambda item: (item.length, rank(seed, item.name)))
    used: set[str] = set()
    packs = []
    for start in order:
        if start.name in used:
            continue
        found = _cover_with(start, [item for item in by_length if item.name not in used and item is not start], low, high, seed)
        if found is not None:
            packs.append(found)
            used.update(found.members)
    return packs


def _cover_with(start: Item, others: Sequence[Item], low: int, high: int, seed: int) -> Pack | None:
    """A session with ``start`` in it, filled up with as little waste as a greedy choice can have. ``others`` ascend in length."""
    if cuts := start.cuts_between(low, high):
        return Pack((), start.name, cuts)
    if start.length >= high:
        return _before(start, others, low, high, seed)
    members, filled = [start], start.length
    left = list(others)
    while True:
        for item in left:
            if cuts := item.cuts_between(low - filled, high - filled):
                whole = sorted((member.name for member in members), key=lambda name: rank(seed, "member", name))
                return Pack(tuple(whole), item.name, cuts)
        # Nothing completes it: the largest that leaves room for a last one.
        larger = [item for item in left if filled + item.length < high]
        if not larger:
            return None
        members.append(larger[-1])
        filled += larger[-1].length
        left.remove(larger[-1])


def _before(last: Item, others: Sequence[Item], low: int, high: int, seed: int) -> Pack | None:
    """A session that ends in ``last``, which is too long to stand whole, after the shortest other that makes one of its cuts fit."""
    for item in others:
        if item.length < high and (cuts := last.cuts_between(low - item.length, high - item.length)):
            return Pack((item.name,), last.name, cuts)
    return None


def by_repository(names: Iterable[tuple[str, Item]]) -> dict[str, list[Item]]:
    """Items grouped by repository, repositories in alphabetical order."""
    groups: dict[str, list[Item]] = {}
    for repo, item in names:
        groups.setdefault(repo, []).append(item)
    return dict(sorted(groups.items()))
