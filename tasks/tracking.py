"""Variable tracking: which variables hold a value that was handed on along a chain of assignments (RULER's ``vt``)."""

from __future__ import annotations

from itertools import pairwise
from random import Random

from fathom_eval.tasks import prompts
from fathom_eval.tasks.draft import Draft, Surroundings, draw_distinct, draw_number

ASSIGNMENTS = 4
DIGITS = 5
LETTERS = "ABCDEFGHJKLMNPQRSTUVWXYZ"


def variable_tracking(rng: Random, surroundings: Surroundings) -> Draft:
    """Four chained assignments and one decoy chain of another value; every variable of the first chain is gold."""
    names = draw_distinct(2 * ASSIGNMENTS, lambda: rng.choice(LETTERS) + draw_number(rng, 2), surroundings, "variable names")
    values = draw_distinct(2, lambda: draw_number(rng, DIGITS), surroundings, "numbers of five digits")
    chain, decoy = names[:ASSIGNMENTS], names[ASSIGNMENTS:]
    chains = [_assignments(chain, values[0]), _assignments(decoy, values[1])]
    return Draft.of(prompts.VARIABLE_TRACKING, chain, names={"value": values[0], "count": prompts.COUNTS[ASSIGNMENTS]}, chains=chains)


def _assignments(names: list[str], value: str) -> tuple[str, ...]:
    later = (prompts.LATER_ASSIGNMENT.format(name=name, source=source) for source, name in pairwise(names))
    return (prompts.FIRST_ASSIGNMENT.format(name=names[0], value=value), *later)
