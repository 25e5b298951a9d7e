"""Frequent-word extraction: the context is made of synthetic words whose frequencies follow a Zipf law (RULER's ``fwe``)."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from fathom_eval.tasks import prompts
from fathom_eval.tasks.draft import Draft, Surroundings

EXPONENT = 2
ASKED = 3
VOCABULARY = 512
_ZETA = 1.6449340668482264  # Riemann zeta of the exponent, π²/6
_CONSONANTS, _VOWELS = "bdfgklmnprstvz", "aeiou"


def frequent_words(rng: Random, surroundings: Surroundings) -> Draft:
    """The three most frequent words are gold. All words have six letters, so that none is part of another."""
    words: dict[str, None] = {}
    while len(words) < VOCABULARY:  # 343,000 words are possible
        words["".join(rng.choice(_CONSONANTS) + rng.choice(_VOWELS) for _ in range(3))] = None
    vocabulary = list(words)
    return Draft.of(prompts.FREQUENT_WORDS, vocabulary[:ASKED], names={}, vocabulary=vocabulary)


def zipf_counts(total: int, ranks: int) -> list[int]:
    """How often each rank occurs in a text of about ``total`` words: ``total · rank**-2 / ζ(2)``, rounded; zeros left out.

    Expected counts and not a random draw, so that only a very short text has a tie (see :func:`is_decided`).
    """
    counts = (round(total / (_ZETA * rank**EXPONENT)) for rank in range(1, ranks + 1))
    return [count for count in counts if count]


def is_decided(counts: list[int]) -> bool:
    """Whether the asked words and the first one after them all differ in frequency."""
    top = counts[: ASKED + 1]
    return len(top) == ASKED + 1 and all(more > fewer for more, fewer in pairwise(top))
