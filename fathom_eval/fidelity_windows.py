"""The windows of text that a fidelity run measures."""

from __future__ import annotations

from functools import cached_property
from random import Random
from typing import Any, Protocol

from fathom_eval.errors import UserError
from fathom_eval.tasks.encoding import PromptEncoder
from fathom_eval.tasks.haystack import Haystack
from fathom_eval.tasks.samples import sample_seed

TASK = "fidelity"


class WindowSource(Protocol):
    """Where windows come from: a text, or agent sessions (:class:`fathom_eval.session_windows.SessionWindows`)."""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides which tokens a window holds; asked for after :meth:`check`."""

    def check(self, context: int, windows: int) -> None:
        """Raise :class:`UserError` unless there are so many windows."""

    def origin(self, context: int, index: int) -> dict[str, Any]:
        """Where a window comes from, for its records."""

    def token_ids(self, context: int, index: int) -> list[int]:
        """The ``context`` ids of a window."""


class Windows:
    """Disjoint windows of a text, the same ones whatever else is asked for.

    The text is encoded once. A context of c tokens cuts it into as many windows as fit, at a seeded offset, and window i is the
    i-th of them in a seeded order; each begins with BOS where the tokenizer wants one.
    """

    def __init__(self, tokenizer: Any, haystack: Haystack, seed: int) -> None:
        self._encoder = PromptEncoder(tokenizer, chat_template=False)
        self._haystack, self._seed = haystack, seed

    @cached_property
    def _ids(self) -> list[int]:
        return self._encoder.encode_many([self._haystack.text])[0]

    @cached_property
    def _beginning(self) -> list[int]:
        return self._encoder.encode("")

    @property
    def identity(self) -> dict[str, Any]:
        """What decides which tokens a window holds."""
        return {"haystack": self._haystack.sha256, "seed": self._seed}

    def check(self, context: int, windows: int) -> None:
        """Raise :class:`UserError` unless so many windows fit into the text."""
        fit = len(self._ids) // (context - len(self._beginning))
        if fit < windows:
            raise UserError(
                f"{windows} windows of {context} tokens do not fit: the haystack {self._haystack.origin} has {len(self._ids)} tokens, "
                f"enough for {fit}; take fewer windows, a shorter context or a longer text"
            )

    def start(self, context: int, index: int) -> int:
        """Where in the encoded text a window starts."""
        length = context - len(self._beginning)
        fit = len(self._ids) // length
        random = Random(sample_seed(self._seed, TASK, context, 0))
        offset = random.randrange(len(self._ids) - fit * length + 1)
        order = list(range(fit))
        random.shuffle(order)
        return offset + order[index] * length

    def origin(self, context: int, index: int) -> dict[str, Any]:
        """Where in the text a window starts, for its records."""
        return {"window_start": self.start(context, index)}

    def token_ids(self, context: int, index: int) -> list[int]:
        """The ``context`` ids of a window."""
        start = self.start(context, index)
        return [*self._beginning, *self._ids[start : start + context - len(self._beginning)]]
