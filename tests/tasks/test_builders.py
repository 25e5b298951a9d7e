"""Drafts: what the builders of each task ask, before there is a context."""

from __future__ import annotations

import itertools
import re
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom_eval.errors import UserError
from fathom_eval.tasks import needles, prompts
from fathom_eval.tasks.draft import Draft, Surroundings
from fathom_eval.tasks.needles import ADJECTIVES, MOST_KEYS, NOUNS, niah_multikey, niah_multiquery, niah_multivalue, niah_single
from fathom_eval.tasks.tracking import variable_tracking
from fathom_eval.tasks.words import frequent_words, is_decided, zipf_counts

NOTHING_OCCURS = Surroundings(decoys=7, occurs=lambda text: False)
NEEDLE = re.compile(r"^One of the special magic numbers for ([a-z]+-[a-z]+) is: ([1-9]\d{6})\.$")
SEEDS = st.integers(0, 2**64 - 1)


def pairs(draft: Draft) -> list[tuple[str, str]]:
    found = [NEEDLE.match(needle) for needle in draft.needles]
    return [(match[1], match[2]) for match in found if match] if all(found) else []


def none_contains_another(strings: list[str]) -> bool:
    return not any(a in b for a, b in itertools.permutations(strings, 2))


@pytest.mark.parametrize(
    ("build", "keys", "values", "asked"),
    [(niah_single, 1, 1, 1), (niah_multikey, 8, 1, 1), (niah_multivalue, 1, 4, 1), (niah_multiquery, 4, 1, 4)],
)
@settings(deadline=None)
@given(seed=SEEDS)
def test_needles(build, keys: int, values: int, asked: int, seed: int):
    draft = build(Random(seed), NOTHING_OCCURS)
    hidden = pairs(draft)
    assert len(hidden) == keys * values
    names, numbers = list(dict.fromkeys(key for key, _ in hidden)), [number for _, number in hidden]
    assert len(names) == keys
    assert none_contains_another(names)
    assert none_contains_another(numbers)
    assert draft.gold == tuple(numbers[: asked * values])
    assert len(draft.chains) == len(draft.needles)
    for text in (draft.question, draft.answer_prefix):
        assert [name for name in names if name in text] == names[:asked]
        assert not re.search(r"\d", text)


def test_number_of_decoys():
    for decoys in (0, 3, 40):
        assert len(niah_multikey(Random(0), Surroundings(decoys, lambda text: False)).needles) == decoys + 1
    with pytest.raises(UserError, match="at most 1"):
        niah_multikey(Random(0), Surroundings(5000, lambda text: False))


def test_most_decoys_can_be_drawn():
    most = MOST_KEYS - 1
    assert len(pairs(niah_multikey(Random(0), Surroundings(most, lambda text: False)))) == most + 1


def test_keys_are_never_part_of_one_another():
    """A key is part of another only if its adjective ends the other's adjective and its noun starts the other's noun."""
    assert len(set(ADJECTIVES)) == len(ADJECTIVES)
    assert len(set(NOUNS)) == len(NOUNS)
    assert not any(a.endswith(b) for a, b in itertools.permutations(ADJECTIVES, 2))
    assert not any(a.startswith(b) for a, b in itertools.permutations(NOUNS, 2))


@settings(deadline=None)
@given(SEEDS)
def test_variable_tracking(seed: int):
    draft = variable_tracking(Random(seed), NOTHING_OCCURS)
    values: dict[str, str] = {}
    for sentence in draft.needles:
        name, source = re.fullmatch(r"VAR (\w+) = (?:VAR )?(\w+)\.", sentence).groups()  # type: ignore[union-attr]
        assert name not in values
        values[name] = values.get(source, source)
    (asked,) = re.findall(r"\d{5}", draft.question)
    assert draft.gold == tuple(name for name, value in values.items() if value == asked)
    assert [len(chain) for chain in draft.chains] == [4, 4]
    assert draft.answer_prefix.endswith(" VAR")
    assert draft.answer == ", VAR ".join(draft.gold)
    assert len(draft.gold) == 4
    assert len(set(values.values())) == 2
    assert none_contains_another([*values, *set(values.values())])
    assert not any(name in draft.question + draft.answer_prefix for name in values)


@settings(deadline=None)
@given(SEEDS)
def test_frequent_words(seed: int):
    draft = frequent_words(Random(seed), NOTHING_OCCURS)
    assert draft.gold == draft.vocabulary[:3]
    assert len(set(draft.vocabulary)) == len(draft.vocabulary)
    assert {len(word) for word in draft.vocabulary} == {6}
    assert not draft.needles


@settings(deadline=None)
@given(st.integers(0, 500_000))
def test_zipf_counts_have_no_tie_among_the_first_four(total: int):
    counts = zipf_counts(total, 512)
    assert counts == sorted(counts, reverse=True)
    assert 0 not in counts
    assert sum(counts) <= total * 1.05 + 20
    assert is_decided(counts) == (len(counts) > 3 and len(set(counts[:4])) == 4)
    if total >= 60:
        assert is_decided(counts)
    if total >= 1000:
        assert counts[0] / counts[1] == pytest.approx(4, rel=0.02)
        assert counts[0] / counts[2] == pytest.approx(9, rel=0.03)


def test_a_tie_is_not_decided():
    assert is_decided([9, 4, 2, 1])
    assert not is_decided([9, 4, 2, 2, 1])
    assert not is_decided([9, 9, 2, 1])
    assert not is_decided([9, 4, 2])


def test_strings_of_the_haystack_are_not_drawn():
    plain = niah_single(Random(4), NOTHING_OCCURS)
    (key, number) = pairs(plain)[0]
    other = niah_single(Random(4), Surroundings(7, {key, number}.__contains__))
    assert pairs(other)
    assert key not in other.needles[0]
    assert number not in other.needles[0]
    with pytest.raises(UserError, match="already holds nearly all possible keys"):
        niah_single(Random(4), Surroundings(7, lambda text: True))


@pytest.mark.parametrize("name", [name for name in dir(prompts) if isinstance(getattr(prompts, name), prompts.Wording)])
def test_answer_prefixes_end_right_before_the_answer(name: str):
    wording = getattr(prompts, name)
    for text in (wording.instruction, wording.question, wording.answer_prefix):
        assert text == text.strip()
        assert "\n" not in text
    assert not wording.answer_prefix.endswith(".")


def test_needle_sentence_is_the_benchmarks():
    assert prompts.NEEDLE == "One of the special magic numbers for {key} is: {value}."
    assert needles.DIGITS == 7
