"""Needle-in-a-haystack tasks: sentences that give numbers to keys (RULER's ``niah`` family)."""

from __future__ import annotations

from random import Random

from fathom_eval.errors import UserError
from fathom_eval.tasks import prompts
from fathom_eval.tasks.draft import Draft, Surroundings, draw_distinct, draw_number

_ADJECTIVES = """
amber ancient bitter brave breezy bright broken calm careful clever cloudy cosmic crimson curious dusty eager elegant faithful
famous fearless fragile frozen gentle giant golden grumpy happy hidden hollow humble jolly lazy lonely lucky mellow mighty misty
modern muddy narrow noisy orange patient polite proud purple quiet rapid royal rusty scarlet secret shiny silent silver simple
sleepy smooth spicy sturdy sudden sunny tender thirsty tiny vivid wandering wooden yellow
"""
_NOUNS = """
anchor apple badger balcony banjo barrel basket beacon bridge bucket butter cactus camera candle canyon carpet castle cherry circus
clock compass cottage dolphin dragon engine falcon feather ferry forest fountain garden guitar hammer harbor helmet island jacket
kettle ladder lantern lemon lizard magnet marble meadow mirror monkey mountain museum needle ocean orchard paddle parrot pencil
pepper pillow planet pocket puzzle rabbit ribbon river rocket saddle sailor scarf shadow spider teapot temple thunder ticket tiger
tunnel turtle umbrella valley violin walnut whistle window winter wizard
"""
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()
MOST_KEYS = len(ADJECTIVES) * len(NOUNS) // 4
"""Of one sample: few enough that random draws find new ones quickly."""
DIGITS = 7


def niah_single(rng: Random, surroundings: Surroundings) -> Draft:
    """One key, one value."""
    return _draft(rng, surroundings, prompts.NIAH_SINGLE, asked=1)


def niah_multikey(rng: Random, surroundings: Surroundings) -> Draft:
    """One key is asked for among ``decoys`` others, each with a value."""
    return _draft(rng, surroundings, prompts.NIAH_MULTIKEY, asked=1, decoys=surroundings.decoys)


def niah_multivalue(rng: Random, surroundings: Surroundings) -> Draft:
    """One key with four values, all of which are asked for."""
    return _draft(rng, surroundings, prompts.NIAH_MULTIVALUE, asked=1, values=4)


def niah_multiquery(rng: Random, surroundings: Surroundings) -> Draft:
    """Four keys with one value each, all of which are asked for."""
    return _draft(rng, surroundings, prompts.NIAH_MULTIQUERY, asked=4)


def _draft(rng: Random, surroundings: Surroundings, wording: prompts.Wording, *, asked: int, decoys: int = 0, values: int = 1) -> Draft:
    """The first ``asked`` keys are the targets; the needles are in the order target values, then decoys."""
    if asked + decoys > MOST_KEYS:
        raise UserError(f"{decoys} decoys are more than there are keys for; at most {MOST_KEYS - asked} are possible")
    keys = draw_distinct(asked + decoys, lambda: f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}", surroundings, "keys")
    numbers = draw_distinct(len(keys) * values, lambda: draw_number(rng, DIGITS), surroundings, "numbers of seven digits")
    owners = [key for key in keys for _ in range(values)]
    needles = [prompts.NEEDLE.format(key=key, value=number) for key, number in zip(owners, numbers, strict=True)]
    names = {"keys": _listed(keys[:asked]), "count": prompts.COUNTS[asked * values]}
    return Draft.of(wording, numbers[: asked * values], names=names, chains=[(needle,) for needle in needles])


def _listed(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
