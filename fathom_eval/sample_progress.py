"""What is being done for one sample, in words: how far its prefill is, which of its branches are decoded, and at which step they are."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from fathom_eval.decode import DecodeProgress


class SampleProgress:
    """Puts into words what prefill and decoding report. Batches are counted, so that their branches can be named.

    Args:
        name: Of the sample.
        branches: That are decoded of it, in however many batches.
        tell: Takes what is being done, after every chunk and step; None where nobody asks.
    """

    def __init__(self, name: str, branches: int, tell: Callable[[str], None] | None = None) -> None:
        self._name, self._branches, self._tell = name, branches, tell
        self._decoded = 0

    def prefilling(self, tokens: int) -> Callable[[int], None]:
        """The ``progress`` of a prefill of so many tokens."""

        def told(done: int) -> None:
            self._say(f"prefill, {done:,} of {tokens:,} tokens")

        told(0)
        return told

    @contextlib.contextmanager
    def decoding(self, size: int, max_new_tokens: int) -> Iterator[Callable[[DecodeProgress], None]]:
        """The ``progress`` of decoding the next ``size`` branches, within the block."""
        first, last = self._decoded + 1, self._decoded + size
        which = f"branch {first}" if size == 1 else f"branches {first}-{last}"

        def told(progress: DecodeProgress) -> None:
            running = "" if size == 1 else f", {progress.running} running"
            self._say(f"decoding {which} of {self._branches}, {progress.steps} of {max_new_tokens} steps{running}")

        told(DecodeProgress(0, size))
        try:
            yield told
        except Exception:
            # Branches that failed together are decoded again in smaller batches, one that failed alone is not.
            self._decoded += size == 1
            raise
        self._decoded = last

    def _say(self, what: str) -> None:
        if self._tell is not None:
            self._tell(f"{self._name}: {what}")
