"""Steps of one trajectory as they are read: calls and results are matched, ids made unique, what is left out is counted."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from fathom_eval.sessions.readers.fields import split_thinking
from fathom_eval.sessions.safe_text import visible
from fathom_eval.sessions.steps import Assistant, Step, System, ToolCall, ToolResult, User


@dataclass(frozen=True)
class RecordedCall:
    """A call before its id is made unique. ``id`` is empty where none is recorded."""

    id: str
    name: str
    arguments: str


@dataclass
class StepBuilder:
    """Collects steps.

    Attributes:
        namespace: the trajectory's id; its hash stands before every call id.
        event_log: whether the source is a log of events, not of messages. The model sees of a log only calls that were answered, so
            others go (but for the last response, which is the trajectory's end), and so do results without a call. A list of messages
            is what the model saw, and stays.
        notes: what was left out, and how often.
    """

    namespace: str
    event_log: bool
    notes: Counter[str] = field(default_factory=Counter)
    _steps: list[Step] = field(default_factory=list)
    _open: dict[str, str] = field(default_factory=dict)
    _used: Counter[str] = field(default_factory=Counter)
    _answered: set[str] = field(default_factory=set)

    @property
    def last(self) -> Step | None:
        """The step added last."""
        return self._steps[-1] if self._steps else None

    def system(self, content: str, index: int) -> None:
        self._steps.append(System(content, index))

    def user(self, content: str, index: int) -> None:
        self._steps.append(User(content, index))

    def assistant(self, content: str, calls: Sequence[RecordedCall], index: int, reasoning: str = "") -> None:
        """A response of the model. A leading thinking block of its content counts as reasoning."""
        thinking, rest = split_thinking(content)
        # Results name the call they answer by its recorded id: of two calls with one id the later one is meant.
        self._open = {}
        named = tuple(ToolCall(self._unique(call.id), call.name, call.arguments) for call in calls)
        self._steps.append(Assistant(rest, named, index, "\n".join(part for part in (reasoning, thinking) if part)))

    def result(self, recorded_id: str, content: str, name: str, index: int) -> None:
        """A tool's result. Without an id it answers the oldest open call."""
        if not recorded_id and self._open:
            recorded_id = next(iter(self._open))
        call_id = self._open.pop(recorded_id, "")
        if call_id:
            self._answered.add(call_id)
        elif self.event_log:
            self.notes["results without a call left out"] += 1
            return
        else:
            self.notes["results without a call"] += 1
        self._steps.append(ToolResult(call_id, content, name or self._name_of(call_id), index))

    def finish(self) -> tuple[Step, ...]:
        """The steps."""
        if not self.event_log:
            return tuple(self._steps)
        last = max((position for position, step in enumerate(self._steps) if isinstance(step, Assistant)), default=-1)
        dropped: set[str] = set()
        kept: list[Step] = []
        for position, step in enumerate(self._steps):
            if isinstance(step, Assistant) and position < last and any(call.id not in self._answered for call in step.tool_calls):
                dropped.update(call.id for call in step.tool_calls)
                self.notes["responses with an unanswered call left out (the model never saw them again)"] += 1
            elif not (isinstance(step, ToolResult) and step.call_id in dropped):
                kept.append(step)
        return tuple(kept)

    def _unique(self, recorded_id: str) -> str:
        recorded_id = recorded_id or f"call-{self._used.total()}"
        self._used[recorded_id] += 1
        repeated = self._used[recorded_id]
        digest = hashlib.sha256(self.namespace.encode()).hexdigest()[:8]
        unique = f"{digest}-{recorded_id}" + (f"#{repeated}" if repeated > 1 else "")
        self._open[recorded_id] = unique
        return unique

    def _name_of(self, call_id: str) -> str:
        for step in reversed(self._steps):
            if isinstance(step, Assistant):
                return next((call.name for call in step.tool_calls if call.id == call_id), "")
        return ""


def counted(notes: Counter[str]) -> tuple[str, ...]:
    """Notes as lines that are safe to print: ``3 × results without a call left out``."""
    return tuple(visible(f"{count} × {what}", 200) for what, count in sorted(notes.items()))
