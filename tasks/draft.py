"""A draft: everything of a sample but the text around it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random

from fathom_eval.errors import UserError
from fathom_eval.tasks.prompts import Wording

DRAWS = 1000


@dataclass(frozen=True)
class Draft:
    """What one sample asks, before its context is made.

    Attributes:
        instruction, question, answer_prefix: The wording around the context.
        answer: A right answer as it is expected after the prefix.
        gold: The strings that the answer must hold.
        chains: Sentences to hide in the haystack. Those of one chain keep their order in the text.
        vocabulary: Words by falling frequency that make up the whole context instead of a haystack.
    """

    instruction: str
    question: str
    answer_prefix: str
    answer: str
    gold: tuple[str, ...]
    chains: tuple[tuple[str, ...], ...] = ()
    vocabulary: tuple[str, ...] = ()

    @classmethod
    def of(
        cls,
        wording: Wording,
        gold: Sequence[str],
        *,
        names: Mapping[str, str],
        chains: Sequence[tuple[str, ...]] = (),
        vocabulary: Sequence[str] = (),
    ) -> Draft:
        """A draft in this wording; ``names`` are put into its places."""
        return cls(
            instruction=wording.instruction.format(**names),
            question=wording.question.format(**names),
            answer_prefix=wording.answer_prefix.format(**names),
            answer=wording.separator.join(gold),
            gold=tuple(gold),
            chains=tuple(chains),
            vocabulary=tuple(vocabulary),
        )

    @property
    def needles(self) -> tuple[str, ...]:
        return tuple(needle for chain in self.chains for needle in chain)


@dataclass(frozen=True)
class Surroundings:
    """What a builder must know of the run: the number of decoys, and whether a string already occurs in the haystack."""

    decoys: int
    occurs: Callable[[str], bool]


def draw_distinct(count: int, draw: Callable[[], str], surroundings: Surroundings, what: str) -> list[str]:
    """``count`` distinct strings, none of which occurs in the haystack. Raises ``UserError`` if they cannot be found."""
    found: dict[str, None] = {}
    for _ in range(DRAWS + 10 * count):
        if len(found) == count:
            return list(found)
        candidate = draw()
        if candidate not in found and not surroundings.occurs(candidate):
            found[candidate] = None
    raise UserError(f"the haystack already holds nearly all possible {what}; use another haystack")


def draw_number(rng: Random, digits: int) -> str:
    """A number of exactly so many digits. Distinct ones of a sample cannot be part of each other."""
    return str(rng.randrange(10 ** (digits - 1), 10**digits))
