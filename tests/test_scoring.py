from __future__ import annotations

from difflib import SequenceMatcher
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom_eval.scoring import hit_rate, hits, step_agreement

NUMBERS = st.lists(st.integers(1_000_000, 9_999_999).map(str), min_size=1, max_size=6, unique=True)


def test_hits_say_which_gold_strings_the_generation_holds():
    assert hits(" 1234567, 7654321.", ["7654321", "1111111", "1234567"]) == [True, False, True]
    assert hit_rate(" 1234567, 7654321.", ["7654321", "1111111", "1234567"]) == pytest.approx(2 / 3)


@settings(deadline=None)
@given(NUMBERS, st.integers(0, 6))
def test_hit_rate_counts_each_gold_string_once_wherever_it_stands(gold: list[str], said: int):
    said = min(said, len(gold))
    assert hit_rate(f"They are {' and '.join(reversed(gold[:said]))}; again {' '.join(gold[:said])}", gold) == said / len(gold)


def test_empty_generation_scores_zero_and_no_gold_is_an_error():
    assert hit_rate("", ["K47"]) == 0
    with pytest.raises(ValueError, match="without gold"):
        hit_rate("anything", [])


def test_step_agreement_of_empty_steps():
    assert step_agreement("", "") == 1
    assert step_agreement("", "ls") == step_agreement("ls", "") == 0
    assert step_agreement(" \n", "") == 1


def test_step_agreement_is_by_words_and_ignores_only_whitespace():
    assert step_agreement("run the tests\nagain", "run  the tests again") == 1
    assert step_agreement("run the tests again", "run all tests again") == pytest.approx(0.75)


def test_step_agreement_depends_on_the_order():
    assert step_agreement("t i d e", "d i e t") == 0.25
    assert step_agreement("d i e t", "t i d e") == 0.5


def test_long_nearly_equal_steps_agree():
    """With autojunk every word of such a step is dropped as too frequent, and the ratio falls to zero."""
    words = [f"w{word}" for word in range(40) for _ in range(11)]
    Random(0).shuffle(words)
    changed = ["other", *words[1:-1], "another"]
    assert SequenceMatcher(None, words, changed).ratio() == 0
    assert step_agreement(" ".join(words), " ".join(changed)) == pytest.approx(438 / 440)


@settings(deadline=None)
@given(st.text(alphabet="ab \n", max_size=40), st.text(alphabet="ab \n", max_size=40))
def test_step_agreement_is_a_ratio_and_one_for_equal_steps(a: str, b: str):
    assert 0 <= step_agreement(a, b) <= 1
    assert step_agreement(a, a) == 1
    if a.split() != b.split():
        assert step_agreement(a, b) < 1
