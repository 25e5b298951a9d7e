from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom_eval.waterfill import channel_importance, read_depths, water_line


def bisect_depths(importance: list[float], budget: int, max_depth: int = 4) -> list[int]:
    """The paper's own procedure (appendix A): 30 halvings of a bracket on theta, then a greedy fill for tied importances."""
    depths = [0] * len(importance)
    if any(importance):
        low, high = max(importance) * 4.0**-12, 4 * max(importance)

        def at(theta: float) -> list[int]:
            return [min(max(round(math.log(g / theta, 4)), 0), max_depth) if g > 0 else 0 for g in importance]

        for _ in range(30):
            theta = math.sqrt(low * high)
            if sum(at(theta)) <= budget:
                high = theta
            else:
                low = theta
        depths = at(high)
    while sum(depths) < min(budget, max_depth * len(importance)):
        gains = [g * 4.0**-t if t < max_depth else -1.0 for g, t in zip(importance, depths, strict=True)]
        depths[gains.index(max(gains))] += 1
    return depths


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=12, unique=True), st.integers(1, 48))
def test_sort_equals_the_papers_bisection(importance: list[float], budget: int) -> None:
    # Distinct in fp32 and clear of each other's thresholds, so that both procedures see the same order.
    logs = sorted(math.log(g, 4) % 1 for g in importance)
    if any(b - a < 1e-4 for a, b in zip(logs, [*logs[1:], logs[0] + 1], strict=True)):
        return
    assert read_depths(torch.tensor(importance), budget).tolist() == bisect_depths(importance, budget)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.floats(0, 2.0**100, width=32, allow_subnormal=False), min_size=1, max_size=20), st.integers(1, 100), st.integers(1, 8))
def test_the_whole_budget_is_spent_and_no_more(importance: list[float], budget: int, max_depth: int) -> None:
    depths = read_depths(torch.tensor(importance), budget, max_depth)
    assert depths.sum() == min(budget, max_depth * len(importance))
    assert depths.min() >= 0
    assert depths.max() <= max_depth


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(1e-3, 1e3), min_size=2, max_size=8), st.integers(1, 30))
def test_no_other_allocation_has_less_error(importance: list[float], budget: int) -> None:
    depths = read_depths(torch.tensor(importance), budget).tolist()

    def error(t: list[int]) -> float:
        return sum(g * 4.0**-d for g, d in zip(importance, t, strict=True))

    for giver in range(len(depths)):
        for taker in range(len(depths)):
            if giver != taker and depths[giver] > 0 and depths[taker] < 4:
                moved = list(depths)
                moved[giver] -= 1
                moved[taker] += 1
                assert error(moved) >= error(depths) * (1 - 1e-5)


def test_ties_are_filled_lower_channel_first() -> None:
    assert read_depths(torch.ones(128), 48).tolist() == [1] * 48 + [0] * 80
    assert read_depths(torch.ones(4), 6).tolist() == [2, 2, 1, 1]
    assert read_depths(torch.zeros(3), 6).tolist() == [4, 2, 0]


def test_depths_do_not_depend_on_the_scale_of_the_importance() -> None:
    importance = torch.rand(3, 64, generator=torch.Generator().manual_seed(0))
    for factor in (1e-6, 1e6):
        assert torch.equal(read_depths(importance * factor, 24), read_depths(importance, 24))


def test_water_line_is_the_smallest_that_fits() -> None:
    importance = torch.rand(64, generator=torch.Generator().manual_seed(1)) + 0.01
    theta = water_line(importance, 24)

    def spent(at: torch.Tensor) -> int:
        return int((torch.log(importance / at) / math.log(4)).round().clamp(0, 4).sum())

    assert spent(theta * 1.0001) <= 24 < spent(theta * 0.9999)
    assert water_line(importance, 256) == 0


def test_importance_sums_the_group() -> None:
    query = torch.tensor([[3.0, 1.0], [1.0, 2.0]])
    assert channel_importance(query, torch.tensor([2.0, 1.0])).tolist() == pytest.approx([20.0, 5.0])
