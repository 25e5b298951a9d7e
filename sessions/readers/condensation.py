"""What a model still saw after its history was condensed: OpenHands logs keep the events that a condensation took away."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Condensation:
    """One condensation: where it stands in the log, the ids it took away, and the summary that stands at ``offset`` of the rest."""

    position: int
    forgotten: frozenset[str]
    summary: str | None
    offset: int | None


@dataclass(frozen=True)
class Summary:
    """A summary in the place of forgotten events. ``position`` is that of its condensation."""

    text: str
    position: int


def condensed_view(ids: Sequence[str], shown: Collection[int], condensations: Sequence[Condensation]) -> list[int | Summary]:
    """Positions of the events that the model sees after all condensations, and the last summary in its place.

    Args:
        ids: of every event of the log.
        shown: positions of the events that become messages; only these count for the summary's offset.
        condensations: in the order of the log.

    This is ``View.from_events`` of OpenHands: what any condensation forgot stays forgotten, and only the last summary is shown.
    """
    forgotten = frozenset[str]().union(*(condensation.forgotten for condensation in condensations))
    view: list[int | Summary] = [position for position in sorted(shown) if ids[position] not in forgotten]
    for condensation in reversed(condensations):
        if condensation.summary is not None and condensation.offset is not None:
            view.insert(max(condensation.offset, 0), Summary(condensation.summary, condensation.position))
            break
    return view
