"""Where a generation ends by its text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class StopStrings:
    """Watches the end of every row's text for stop strings.

    A token is at least one byte, so as many tokens as the longest stop string has bytes hold all of it.

    Args:
        prompt: Tokens before the first generated one; a stop string may begin in them.
        rows: Generations that are watched.
    """

    def __init__(self, tokenizer: Any, strings: tuple[str, ...], prompt: Sequence[int], rows: int) -> None:
        self._tokenizer, self._strings = tokenizer, strings
        self._window = max(len(string.encode()) for string in strings) + 1
        self._tails = [list(prompt[-self._window :]) for _ in range(rows)]

    def add(self, token_ids: Sequence[int], watched: Sequence[bool]) -> list[bool]:
        """Whether the token that each row has come to completes a stop string; rows that are not watched have ended already."""
        return [on and self._completes(tail, token) for tail, token, on in zip(self._tails, token_ids, watched, strict=True)]

    def _completes(self, tail: list[int], token: int) -> bool:
        before, after = self._text(tail), self._text([*tail, token])
        tail.append(token)
        del tail[: -self._window]
        return any(after.count(string) > before.count(string) for string in self._strings)

    def _text(self, token_ids: list[int]) -> str:
        return str(self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
