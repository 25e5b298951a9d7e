"""Scores of one generation."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import SequenceMatcher


def hits(generation: str, gold: Sequence[str]) -> list[bool]:
    """For every gold string whether the generation contains it."""
    return [answer in generation for answer in gold]


def hit_rate(generation: str, gold: Sequence[str]) -> float:
    """The share of gold strings that the generation contains, in [0, 1] (the paper's RULER score, §5.1).

    Raises ``ValueError`` without gold strings: there is nothing to score.
    """
    if not gold:
        raise ValueError("a sample without gold strings cannot be scored")
    found = hits(generation, gold)
    return sum(found) / len(found)


def step_agreement(reference: str, candidate: str) -> float:
    """Word-level sequence-match ratio of two steps, in [0, 1] (§5.6); 1 when both are empty.

    ``reference`` is the exact top-k step. The ratio is not symmetric, so the order matters. ``autojunk`` would drop the
    frequent words of a step of 200 words or more and let nearly equal steps score 0.
    """
    return SequenceMatcher(None, reference.split(), candidate.split(), autojunk=False).ratio()
