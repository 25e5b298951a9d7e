"""What came of reading: how much was used, and what was left out and why. All lines are safe to print."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from fathom_eval.sessions.safe_text import visible

_USED = "; what came before is used"
KEPT_LINES = 200
"""Problems of which the place is kept; the rest is counted."""


@dataclass
class ReadReport:
    """Counts of one reading, filled while it goes on.

    Attributes:
        records: rows, lines or conversations that were looked at.
        trajectories: those that gave one.
        formats: trajectories by format.
        broken: places of records that are no JSON, or too long, with the reason.
        cut: sources that ended early, with what was used of them.
        skipped: places of records without a usable trajectory, with the reason.
        reasons: how often each kind of problem came up.
        unknown_keys: keys of the first record of no known format.
    """

    records: int = 0
    trajectories: int = 0
    formats: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)
    cut: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    reasons: Counter[str] = field(default_factory=Counter)
    unknown_keys: str = ""

    def break_off(self, where: str, reason: str) -> None:
        """A record that cannot be read."""
        self.reasons["broken records"] += 1
        if len(self.broken) < KEPT_LINES:
            self.broken.append(visible(f"{where}: {reason}", 300))

    def cut_short(self, where: str, reason: str) -> None:
        """A source that ended before its end."""
        self.reasons["sources cut short"] += 1
        self.cut.append(visible(f"{where}: {reason}", 300 - len(_USED)) + _USED)

    def skip(self, where: str, reason: str, kind: str) -> None:
        """A record without a usable trajectory. ``kind`` is the reason without details."""
        self.reasons[kind] += 1
        if len(self.skipped) < KEPT_LINES:
            self.skipped.append(visible(f"{where}: {reason}", 300))

    def lines(self) -> list[str]:
        """Everything that was left out, for people."""
        return [*self.cut, *self.broken, *self.skipped]

    def why_nothing(self) -> str:
        """In words why no trajectory came of it; empty where nothing was left out."""
        if not self.cut:
            return next(iter(self.lines()), "")
        # Every whole record that gives no trajectory is among the skipped ones.
        what = self.cut[0].removesuffix(_USED)
        return f"{what}; before that, {self.skipped[0]}" if self.skipped else f"{what} before the first whole record"
