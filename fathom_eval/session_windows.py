"""Windows of agent sessions: what ``fidelity`` measures at instead of windows of a text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from fathom_eval.errors import UserError
from fathom_eval.models import LoadedModel
from fathom_eval.session_data import SessionData, SourceSettings, prepare_sessions

_SLACKS = (1.25, 20.0)
"""A session is cut to the context from at most so much more, so that trajectories can be joined to it. Where all trajectories are longer
than that, as with a short context, windows are the ends of longer sessions, since sessions begin alike. How many windows are asked for
makes no difference."""


class SessionWindows:
    """``context`` tokens of agent sessions, each of trajectories of one repository, rendered as recorded.

    They are a session's first tokens; where all are much longer, its last.

    Args:
        loaded: Its tokenizer encodes, and its chat template renders where it takes tools.
        source: Which trajectories; lengths and number of sessions are taken from what is asked for here.
    """

    def __init__(self, loaded: LoadedModel, source: SourceSettings, say: Callable[[str], None] = lambda line: None) -> None:
        self._loaded, self._source, self._say = loaded, source, say
        self._data: dict[int, SessionData] = {}

    @property
    def identity(self) -> dict[str, Any]:
        """What decides which tokens a window holds; known once a context has been checked."""
        data = next(iter(self._data.values()))
        found = {name: value for name, value in data.identity.items() if name != "session_tokens"}
        longer = sorted(context for context, held in self._data.items() if _is_cut(held, context))
        return {**found, "ends_of_longer": longer} if longer else found

    def check(self, context: int, windows: int) -> None:
        """Raise :class:`UserError` unless the trajectories give so many sessions of that length, with different beginnings."""
        found = len(self._sessions(context, windows).sessions)
        if found < windows:
            raise UserError(
                f"{windows} windows of {context:,} tokens need as many sessions; {self._source.name} gives {found}: take fewer windows, "
                "a shorter context or more trajectories"
            )
        different = len({tuple(self.token_ids(context, index)) for index in range(windows)})
        if different < windows:
            raise UserError(
                f"{windows} windows of {context:,} tokens are {different} different ones, since sessions of {self._source.name} begin "
                "alike: take a longer context or fewer windows"
            )

    def origin(self, context: int, index: int) -> dict[str, Any]:
        """Which session a window is the beginning of."""
        session = self._sessions(context, index + 1).sessions[index]
        return {"session": session.id, "repo": session.repo}

    def token_ids(self, context: int, index: int) -> list[int]:
        """The ``context`` ids of a window."""
        held = self._sessions(context, index + 1)
        found = held.sessions[index].prompt_ids
        return found[-context:] if _is_cut(held, context) else found[:context]

    def _sessions(self, context: int, count: int) -> SessionData:
        held = self._data.get(context)
        if held is None or len(held.sessions) < count:
            self._data[context] = held = self._prepare(context, count)
        return held

    def _prepare(self, context: int, count: int) -> SessionData:
        for slack in _SLACKS:
            settings = replace(self._source, sessions=count, low=context, high=int(context * slack))
            try:
                return prepare_sessions(self._loaded, settings, say=self._say)
            except UserError:
                if slack == _SLACKS[-1]:
                    raise
        raise AssertionError("unreachable")


def _is_cut(held: SessionData, context: int) -> bool:
    return held.high > context * _SLACKS[0]
