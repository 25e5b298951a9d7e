"""Means with standard errors, paired comparisons, and marks for cells that cannot tell methods apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

CONFIDENCE = 0.95
FLOOR = 0.05
"""A score at which a task is as good as unsolved."""
CEILING = 0.99
"""A score at which a task is as good as solved."""
_NORMAL_QUANTILE = 1.959963984540054  # of CONFIDENCE, two-sided
_RESAMPLED_VALUES = 4_000_000  # drawn at a time: bounds the memory of the bootstrap to some 64 MB
_SAME = 1e-12


@dataclass(frozen=True)
class Estimate:
    """A mean of ``n`` values with its standard error, NaN for a single value."""

    mean: float
    standard_error: float
    n: int


@dataclass(frozen=True)
class PairedDifference:
    """The mean of ``a - b`` over pairs, its bootstrap interval (NaN for a single pair), and who was ahead how often."""

    mean: float
    low: float
    high: float
    wins: int
    ties: int
    losses: int
    n: int


def mean_and_standard_error(values: Sequence[float]) -> Estimate:
    """Mean and standard error (sample standard deviation over ``sqrt(n)``). Raises ``ValueError`` without values."""
    scores = _finite(values)
    return Estimate(float(scores.mean()), _standard_error(scores), len(scores))


def pooled_mean_and_standard_error(groups: Mapping[str, Sequence[float]]) -> Estimate:
    """The mean of the groups' means, with the standard error of all their values pooled (the paper's Table 7).

    Groups are tasks, values are per-sample scores. Every task counts alike, however many samples it has.
    """
    if not groups:
        raise ValueError("no groups of values")
    scores = [_finite(values) for values in groups.values()]
    pooled = np.concatenate(scores)
    return Estimate(float(np.mean([group.mean() for group in scores])), _standard_error(pooled), len(pooled))


def paired_difference(
    a: Sequence[float], b: Sequence[float], *, weights: Sequence[float] | None = None, resamples: int = 10_000, seed: int
) -> PairedDifference:
    """Compare two methods on the same samples (or sessions).

    Args:
        a, b: Scores, shape ``(n,)`` each, paired by position.
        weights: What each pair counts, positive, shape ``(n,)``; over several tasks ``1 / n_task``, so that every task counts alike.
        resamples: Bootstrap resamples of the pairs.
        seed: Of the bootstrap's own generator.

    Returns:
        The (weighted) mean of ``a - b`` with the percentile interval of ``CONFIDENCE``, and wins, ties and losses of ``a``.

    Raises:
        ValueError: The lengths differ, or there are no pairs.
    """
    first, second = _finite(a), _finite(b)
    if len(first) != len(second):
        raise ValueError(f"{len(first)} scores cannot be paired with {len(second)}")
    difference = first - second
    difference[np.abs(difference) < _SAME] = 0.0
    share = np.ones(len(difference)) if weights is None else _finite(weights)
    if len(share) != len(difference):
        raise ValueError(f"{len(share)} weights for {len(difference)} pairs")
    if (share == share[0]).all():
        share = np.ones(len(difference))
    low, high = _bootstrap_interval(difference, share, resamples, seed)
    wins, losses = int((difference > 0).sum()), int((difference < 0).sum())
    n = len(difference)
    return PairedDifference(float((difference * share).sum() / share.sum()), low, high, wins, n - wins - losses, losses, n)


def is_discriminative(dense_scores: Sequence[float], *, floor: float = FLOOR) -> bool:
    """Whether a cell can show a loss: dense is above the floor by more than the sampling error.

    Where it is not, even a method that fails every sample would not be seen to be worse than dense. A single sample has no
    sampling error: it counts by its score alone.
    """
    dense = mean_and_standard_error(dense_scores)
    error = 0.0 if math.isnan(dense.standard_error) else dense.standard_error
    return dense.mean - _NORMAL_QUANTILE * error > floor


def _bootstrap_interval(values: np.ndarray, weights: np.ndarray, resamples: int, seed: int) -> tuple[float, float]:
    n = len(values)
    if n == 1:
        return math.nan, math.nan
    rng = np.random.default_rng(seed)
    rows = max(1, _RESAMPLED_VALUES // n)
    weighted, means = values * weights, []
    for done in range(0, resamples, rows):
        drawn = rng.integers(n, size=(min(rows, resamples - done), n))
        means.append(weighted[drawn].sum(axis=1) / weights[drawn].sum(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return float(low), float(high)


def _standard_error(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def _finite(values: Sequence[float]) -> np.ndarray:
    array = np.array(values, dtype=np.float64)
    if array.ndim != 1 or not len(array):
        raise ValueError("no values")
    if not np.isfinite(array).all():
        raise ValueError("a value is not a finite number")
    return array
