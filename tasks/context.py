"""Contexts of a wanted length: a window of the haystack with needles in it, or a text of synthetic words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np

from fathom_eval.tasks import prompts
from fathom_eval.tasks.draft import Draft
from fathom_eval.tasks.encoding import PromptEncoder
from fathom_eval.tasks.haystack import Haystack
from fathom_eval.tasks.words import is_decided, zipf_counts

SHALLOWEST, DEEPEST = 0.05, 0.95
_WINDOW_DRAWS = 16
_WORD = re.compile(r"\s*\S{1,24}")


@dataclass(frozen=True)
class Context:
    """A context, the tokens it was counted to have (needles left out), and how deep each needle lies (0 start, 1 end)."""

    text: str
    tokens: int
    depths: tuple[float, ...] = ()


class Filler(Protocol):
    """Makes the context of one sample. The same budget always gives the same context."""

    def fill(self, budget: int) -> Context | None:
        """The longest context of at most ``budget`` tokens (needles not counted); ``None`` when that is too short for the task."""


class TokenizedHaystack:
    """A haystack with the token count of every sentence: tokenised once, so that any window is cheap to measure."""

    def __init__(self, haystack: Haystack, encoder: PromptEncoder) -> None:
        self.sentences = haystack.sentences
        self.starts = np.concatenate([[0], np.cumsum(encoder.count(haystack.sentences))])
        self._encoder = encoder

    @property
    def tokens(self) -> int:
        return int(self.starts[-1])

    def window(self, start: float, budget: int) -> list[tuple[str, int]]:
        """Sentences with their token counts, at most ``budget`` tokens together.

        ``start`` in [0, 1) picks one of the sentences from which so much text is left. The last sentence is cut at a word.
        """
        last_start = int(np.searchsorted(self.starts, self.tokens - budget, side="right")) - 1
        first = int(start * (max(last_start, 0) + 1))
        end = int(np.searchsorted(self.starts, self.starts[first] + budget, side="right")) - 1
        window = [(self.sentences[i], int(self.starts[i + 1] - self.starts[i])) for i in range(first, end)]
        left = budget - int(self.starts[end] - self.starts[first])
        if end < len(self.sentences) and left > 0:
            words = _WORD.findall(self.sentences[end])
            ends = np.cumsum(self._encoder.count(words))
            kept = int(np.searchsorted(ends, left, side="right"))
            if kept:
                window.append(("".join(words[:kept]), int(ends[kept - 1])))
        return window


class HaystackFiller:
    """A random window of a haystack, with the chains of a draft at random depths between its sentences."""

    def __init__(self, haystack: TokenizedHaystack, draft: Draft, rng: Random) -> None:
        self._haystack = haystack
        self._draft = draft
        self._starts = [rng.random() for _ in range(_WINDOW_DRAWS)]
        self._wishes = [sorted(rng.uniform(SHALLOWEST, DEEPEST) for _ in chain) for chain in draft.chains]

    def fill(self, budget: int) -> Context | None:
        # A window of few, long sentences may lack places for the needles: then the next drawn one is taken.
        for start in self._starts:
            window = self._haystack.window(start, budget)
            lengths = np.array([tokens for _, tokens in window[:-1]])
            depths = np.cumsum(lengths) / max(1, sum(tokens for _, tokens in window))
            places = _places(depths, self._wishes)
            if places is not None:
                return self._assemble(window, depths, places)
        return None

    def _assemble(self, window: Sequence[tuple[str, int]], depths: np.ndarray, places: Sequence[int]) -> Context:
        after = dict(zip(places, self._draft.needles, strict=True))
        parts: list[str] = []
        for position, (sentence, _) in enumerate(window):
            glued = position - 1 in after and not sentence[:1].isspace()
            parts.append(f" {sentence}" if glued else sentence)
            if position in after:
                parts.append(f" {after[position]}")
        tokens = sum(count for _, count in window)
        return Context("".join(parts).lstrip(), tokens, tuple(float(depths[place]) for place in places))


def _places(depths: np.ndarray, wishes: Sequence[Sequence[float]]) -> list[int] | None:
    """For every needle the free boundary nearest to its wished depth, in the order of its chain; ``None`` if they run out."""
    free = [int(place) for place in np.flatnonzero((depths >= SHALLOWEST) & (depths <= DEEPEST))]
    if len(free) < sum(map(len, wishes)):
        return None
    places: list[int] = []
    for chain in wishes:
        chosen = []
        for wish in chain:
            nearest = min(free, key=lambda place: abs(depths[place] - wish))
            free.remove(nearest)
            chosen.append(nearest)
        places.extend(sorted(chosen))
    return places


class WordFiller:
    """The words of a draft's vocabulary in random order, with Zipf frequencies."""

    def __init__(self, draft: Draft, encoder: PromptEncoder, rng: Random) -> None:
        self._vocabulary = draft.vocabulary
        self._lengths = encoder.count([f"{prompts.WORD_SEPARATOR}{word}" for word in draft.vocabulary])
        self._seed = rng.getrandbits(64)

    def fill(self, budget: int) -> Context | None:
        low, high = 0, budget  # every word takes a token at least
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self._tokens(self._counts(middle)) <= budget else (low, middle - 1)
        counts = self._counts(low)
        if not is_decided(counts):
            return None
        words = [word for word, count in zip(self._vocabulary, counts, strict=False) for _ in range(count)]
        Random(self._seed).shuffle(words)
        return Context(prompts.WORD_SEPARATOR.join(words), self._tokens(counts))

    def _counts(self, total: int) -> list[int]:
        return zipf_counts(total, len(self._vocabulary))

    def _tokens(self, counts: Sequence[int]) -> int:
        return sum(count * length for count, length in zip(counts, self._lengths, strict=False))
