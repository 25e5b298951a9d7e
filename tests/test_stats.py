from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom_eval import stats
from fathom_eval.stats import (
    is_discriminative,
    mean_and_standard_error,
    paired_difference,
    pooled_mean_and_standard_error,
)

SCORES = st.lists(st.floats(0, 1), min_size=2, max_size=30)
PAIRS = st.lists(st.tuples(st.floats(0, 1), st.floats(0, 1)), min_size=2, max_size=30)


def test_standard_error_by_hand():
    estimate = mean_and_standard_error([1, 0, 1, 1])
    assert (estimate.mean, estimate.n) == (0.75, 4)
    assert estimate.standard_error == pytest.approx(0.25)  # sqrt((3 · 1/16 + 9/16) / 3) / sqrt(4)


def test_one_sample_has_no_standard_error():
    assert math.isnan(mean_and_standard_error([0.5]).standard_error)
    difference = paired_difference([1.0], [0.0], seed=0)
    assert difference.mean == 1
    assert math.isnan(difference.low)
    assert math.isnan(difference.high)


@pytest.mark.parametrize("values", [[], [math.nan], [math.inf, 1.0]])
def test_no_mean_without_finite_values(values: list[float]):
    with pytest.raises(ValueError, match=r"no values|finite"):
        mean_and_standard_error(values)


@settings(deadline=None)
@given(SCORES)
def test_mean_lies_within_the_values(values: list[float]):
    estimate = mean_and_standard_error(values)
    assert min(values) - 1e-9 <= estimate.mean <= max(values) + 1e-9
    assert 0 <= estimate.standard_error <= (max(values) - min(values)) + 1e-9


def test_pooled_mean_weighs_tasks_alike_and_pools_the_error():
    estimate = pooled_mean_and_standard_error({"a": [1, 1, 1, 1], "b": [0, 0]})
    assert estimate.mean == 0.5
    assert estimate.standard_error == pytest.approx(np.std([1, 1, 1, 1, 0, 0], ddof=1) / math.sqrt(6))
    assert estimate.n == 6
    with pytest.raises(ValueError, match="no groups"):
        pooled_mean_and_standard_error({})


@settings(deadline=None)
@given(PAIRS, st.integers(0, 2**32))
def test_paired_difference_is_consistent(pairs: list[tuple[float, float]], seed: int):
    a, b = [x for x, _ in pairs], [y for _, y in pairs]
    forth, back = paired_difference(a, b, resamples=200, seed=seed), paired_difference(b, a, resamples=200, seed=seed)
    assert forth.wins + forth.ties + forth.losses == forth.n == len(pairs)
    assert (forth.wins, forth.losses) == (back.losses, back.wins)
    assert forth.mean == pytest.approx(-back.mean)
    assert forth.low == pytest.approx(-back.high)
    low, high = min(x - y for x, y in pairs), max(x - y for x, y in pairs)
    assert low - 1e-9 <= forth.low <= forth.high <= high + 1e-9


def test_equal_scores_tie_in_spite_of_rounding():
    difference = paired_difference([0.1 + 0.2, 1 / 3], [0.3, 1 - 2 / 3], seed=0)
    assert (difference.wins, difference.ties, difference.losses) == (0, 2, 0)
    assert (difference.low, difference.high) == (0, 0)


def test_bootstrap_interval_agrees_with_the_normal_one():
    rng = np.random.default_rng(3)
    a, b = rng.normal(0.3, 1, 400), rng.normal(0, 1, 400)
    difference = paired_difference(a.tolist(), b.tolist(), seed=1)
    error = (a - b).std(ddof=1) / 20
    assert difference.low == pytest.approx((a - b).mean() - 1.96 * error, abs=0.1 * error)
    assert difference.high == pytest.approx((a - b).mean() + 1.96 * error, abs=0.1 * error)


def test_bootstrap_has_a_generator_of_its_own():
    a, b = [1, 0, 1, 0.5, 1], [0, 0, 1, 1, 0.25]
    before = np.random.get_state()[1].tolist()  # noqa: NPY002
    assert paired_difference(a, b, seed=5) == paired_difference(a, b, seed=5)
    assert np.random.get_state()[1].tolist() == before  # noqa: NPY002
    assert paired_difference(a, b, resamples=50, seed=6) != paired_difference(a, b, resamples=50, seed=7)


def test_many_values_are_resampled_in_bounded_pieces(monkeypatch: pytest.MonkeyPatch):
    drawn: list[int] = []

    class Generator:
        def integers(self, n: int, size: tuple[int, int]) -> np.ndarray:
            drawn.append(size[0])
            return np.zeros(size, dtype=np.int64)

    monkeypatch.setattr(stats, "_RESAMPLED_VALUES", 100)
    monkeypatch.setattr(stats.np.random, "default_rng", lambda seed: Generator())
    difference = paired_difference([2.0] * 30, [1.0] * 30, resamples=10, seed=0)
    assert drawn == [3, 3, 3, 1]
    assert (difference.low, difference.high) == (1, 1)


def test_pairs_must_match():
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_difference([1, 2], [1], seed=0)


@pytest.mark.parametrize(
    ("dense", "expected"),
    [
        ([1, 1, 1, 1, 1, 1], True),
        ([0, 0, 0, 0, 0, 0], False),
        ([0, 0, 0, 1, 0, 0], False),  # a method at zero would not be seen to be worse
        ([1, 1, 0, 1, 1, 1], True),
        ([0.25, 0, 0, 0] * 10, True),  # low, but clearly above the floor
        ([0.05, 0.05, 0.05], False),
        ([1], True),
        ([0], False),
    ],
)
def test_a_cell_at_the_floor_is_not_discriminative(dense: list[float], expected: bool):
    assert is_discriminative(dense, floor=0.01 if 0.25 in dense else 0.05) is expected


def test_an_eviction_method_does_not_beat_dense_when_both_are_at_the_floor():
    """Two lucky hits over a dense that fails: the cell is marked, and the difference is not significant."""
    dense, sparse = [0.0] * 12, [1.0, 1.0] + [0.0] * 10
    assert not is_discriminative(dense)
    assert paired_difference(sparse, dense, seed=0).low == 0


def test_weights_make_the_difference_that_of_the_weighted_means() -> None:
    first, second = [1.0, 1.0, 0.0, 0.5], [0.0, 0.5, 0.0, 1.0]
    weights = [1 / 3, 1 / 3, 1 / 3, 1.0]  # three samples of one task, one of another
    found = paired_difference(first, second, weights=weights, seed=0)
    assert found.mean == pytest.approx((1.5 / 3 + -0.5) / 2)
    assert found.low <= found.mean <= found.high
    assert (found.wins, found.ties, found.losses) == (2, 1, 1)
    assert paired_difference(first, second, weights=[0.5] * 4, seed=0) == paired_difference(first, second, seed=0)
    with pytest.raises(ValueError, match="3 weights for 4 pairs"):
        paired_difference(first, second, weights=[1.0] * 3, seed=0)
