"""The worked example of the paper's appendix A: six keys, four channels, two query heads that share a KV head.

The numbers hold under the conventions of this package: variance with n - 1, codes from an fp16 scale in fp32, unscaled scores, ties to
the lower index.
"""

from __future__ import annotations

import pytest
import torch

from fathom_eval.calibration import KeyStatistics
from fathom_eval.kernels.pack import block_scales, pack_planes, quantise
from fathom_eval.kernels.scan import scan_planes
from fathom_eval.methods.base import top_channels
from fathom_eval.selection import top_indices
from fathom_eval.waterfill import channel_importance, read_depths, water_line

KEYS = torch.tensor(
    [
        [1.8, 0.4, -0.2, 0.05],
        [-1.1, 0.9, 0.3, -0.02],
        [0.3, -1.2, 0.1, 0.04],
        [1.2, 0.7, 0.4, 0.01],
        [-0.6, -0.3, -0.5, 0.03],
        [0.9, 1.1, -0.3, -0.05],
    ]
)
QUERIES = torch.tensor([[3.0, 1.0, 2.0, 0.1], [1.0, 2.0, -1.0, 0.2]])
VARIANCE = KeyStatistics(KEYS.unsqueeze(0)).variance[0]
IMPORTANCE = channel_importance(QUERIES, VARIANCE)


@pytest.fixture(scope="module")
def store() -> tuple[torch.Tensor, torch.Tensor]:
    padded = torch.cat([KEYS, torch.zeros(58, 4)])  # zeros fill the block and leave its scales alone
    scales = block_scales(padded.unsqueeze(0))
    return pack_planes(quantise(padded.unsqueeze(0), scales)), scales


def scores(store: tuple[torch.Tensor, torch.Tensor], depths: list[int]) -> torch.Tensor:
    return scan_planes(QUERIES.unsqueeze(0), torch.tensor([depths]), *store)[0, :, :6]


def top2(values: torch.Tensor) -> list[list[int]]:
    return [sorted(row) for row in top_indices(values, 2).tolist()]


def test_variance_and_importance() -> None:
    torch.testing.assert_close(VARIANCE, torch.tensor([1.2217, 0.7547, 0.1267, 0.00148]), atol=6e-5, rtol=4e-3)
    torch.testing.assert_close(IMPORTANCE, torch.tensor([12.217, 3.773, 0.633, 0.000074]), atol=6e-4, rtol=4e-3)


def test_codes() -> None:
    padded = torch.cat([KEYS, torch.zeros(58, 4)]).unsqueeze(0)
    codes = quantise(padded, block_scales(padded))[0, :, :6]
    assert codes.tolist() == [
        [15, 3, 9, 13, 5, 12],
        [10, 13, 0, 12, 6, 15],
        [4, 12, 9, 14, 0, 3],
        [15, 4, 14, 9, 12, 0],
    ]


def test_exact_scores_and_sets() -> None:
    exact = QUERIES @ KEYS.T
    torch.testing.assert_close(exact[0], torch.tensor([5.405, -1.802, -0.096, 5.101, -3.097, 3.195]))
    torch.testing.assert_close(exact[1], torch.tensor([2.81, 0.396, -2.192, 2.202, -0.694, 3.39]))
    assert top2(exact) == [[0, 3], [0, 5]]


@pytest.mark.parametrize(("budget", "theta", "depths"), [(8, 0.079167, [4, 3, 1, 0]), (6, 0.117917, [3, 2, 1, 0])])
def test_water_line(budget: int, theta: float, depths: list[int]) -> None:
    assert read_depths(IMPORTANCE, budget).tolist() == depths
    assert water_line(IMPORTANCE, budget).item() == pytest.approx(theta, rel=2e-5)


def test_scores_of_the_eight_bit_read(store: tuple[torch.Tensor, torch.Tensor]) -> None:
    found = scores(store, [4, 3, 1, 0])
    expected = [[5.0125, -1.7875, 0.4625, 4.9625, -2.3375, 3.5875], [2.8375, 0.2375, -2.0125, 2.4875, -0.6125, 3.3625]]
    torch.testing.assert_close(found, torch.tensor(expected), atol=2e-3, rtol=0)  # fp16 scales of 1.8, 1.2 and 0.05
    assert top2(found) == [[0, 3], [0, 5]]


@pytest.mark.parametrize(
    ("depths", "sets"),
    [
        ([3, 2, 1, 0], [[0, 3], [3, 5]]),  # Fathom at 6 bits fails on head B
        ([4, 4, 0, 0], [[0, 3], [3, 5]]),  # Double Sparsity c = 2 and SparQ r = 2
        ([4, 0, 4, 0], [[0, 3], [0, 5]]),  # SparQ, had the tie gone to channel 2
        ([2, 2, 2, 2], [[3, 5], [3, 5]]),  # thumbnail
        ([4, 4, 4, 4], [[0, 3], [0, 5]]),  # full 4-bit scan
    ],
)
def test_selected_sets(store: tuple[torch.Tensor, torch.Tensor], depths: list[int], sets: list[list[int]]) -> None:
    assert top2(scores(store, depths)) == sets


def test_sparq_takes_the_lower_channel_of_a_tie() -> None:
    assert top_channels(QUERIES.abs().sum(0), 2).tolist() == [True, True, False, False]


def test_loki_with_two_coordinates() -> None:
    statistics = KeyStatistics(KEYS.unsqueeze(0))
    basis = statistics.basis
    rotated = (KEYS - basis.mean[0]) @ basis.vectors[0]
    padded = torch.cat([rotated, torch.zeros(58, 4)]).unsqueeze(0)
    scales = block_scales(padded)
    projected = QUERIES @ basis.vectors[0]
    order = basis.variance[0] * projected.square().mean(0)
    depths = top_channels(order, 2).long() * 4
    found = scan_planes(projected.unsqueeze(0), depths.unsqueeze(0), pack_planes(quantise(padded, scales)), scales)[0, :, :6]
    assert top2(found) == [[0, 3], [3, 5]]
