"""Scalar codebooks: the levels that lose least of a distribution, and codes by the nearest of them.

Shapes: L levels.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

ITERATIONS = 60


def scalar_levels(values: Tensor, levels: int, weights: Tensor | None = None, iterations: int = ITERATIONS) -> Tensor:
    """Lloyd's algorithm in one dimension (k-means, Lloyd-Max), for many distributions at once.

    On sorted values a cell is a range, so its mean is a difference of two running sums and an iteration looks at the thresholds instead
    of at all values. It finds a local optimum, so it starts from levels that hold equally many values, from levels at equal distances
    and from the middle of both, and keeps the best end. A level whose cell is empty stays where it is.

    Args:
        values: ``[…, n]``, in any order.
        levels: L.
        weights: How much each value counts, of the same shape; alike if None.

    Returns:
        fp32 ``[…, L]``, ascending.
    """
    values, order = values.double().contiguous().sort(-1)
    weights = torch.ones_like(values) if weights is None else weights.double().gather(-1, order)
    mass, first, second = (torch.nn.functional.pad((values.pow(power) * weights).cumsum(-1), (1, 0)) for power in range(3))
    count = values.shape[-1]
    middles = (torch.arange(levels, device=values.device, dtype=torch.float64) + 0.5) / levels
    at = torch.searchsorted(mass[..., 1:].contiguous(), mass[..., -1:] * middles)
    equal = values.gather(-1, at.clamp_max(count - 1))
    apart = values[..., :1] + (values[..., -1:] - values[..., :1]) * middles
    found = torch.stack([equal, apart, (equal + apart) / 2], dim=-2)  # […, 3, L]
    for _ in range(iterations):
        edges = _edges(values, found)
        inside, total = _within(mass, edges), _within(first, edges)
        found = torch.where(inside > 0, total / inside.clamp_min(torch.finfo(torch.float64).tiny), found)
    edges = _edges(values, found)
    inside, total, squares = (_within(sums, edges) for sums in (mass, first, second))
    loss = (squares - 2 * found * total + found.square() * inside).sum(-1, keepdim=True)
    best = loss.argmin(-2, keepdim=True).expand(*found.shape[:-2], 1, levels)
    return found.gather(-2, best).squeeze(-2).float()


def _edges(values: Tensor, levels: Tensor) -> Tensor:
    """Where each level's cell begins and ends among the sorted values ``[…, n]``: ``[…, S, L]`` to ``[…, S, L + 1]``."""
    thresholds = (levels[..., 1:] + levels[..., :-1]) / 2
    inner = torch.searchsorted(values, thresholds.flatten(-2)).unflatten(-1, thresholds.shape[-2:])
    outer = torch.zeros_like(levels[..., :1], dtype=torch.int64)
    return torch.cat([outer, inner, outer + values.shape[-1]], dim=-1)


def _within(sums: Tensor, edges: Tensor) -> Tensor:
    """Differences of running sums ``[…, n + 1]`` between edges ``[…, S, L + 1]``."""
    found: Tensor = sums.gather(-1, edges.flatten(-2)).unflatten(-1, edges.shape[-2:])
    return found.diff(dim=-1)


def nearest_level(values: Tensor, levels: Tensor) -> Tensor:
    """The number of the nearest level, uint8 of the shape of ``values``.

    Args:
        values: ``[…, n, C]``.
        levels: Ascending, ``[…, C, L]``, or ``[L]`` for all channels.
    """
    thresholds = (levels[..., 1:] + levels[..., :-1]) / 2
    codes = torch.zeros_like(values, dtype=torch.uint8)
    for number in range(thresholds.shape[-1]):
        threshold = thresholds[..., number]
        codes += values > (threshold.unsqueeze(-2) if levels.dim() > 1 else threshold)
    return codes


def merged_levels(levels: Tensor, read: int, mass: Tensor | None = None) -> Tensor:
    """Levels ``[…, L]`` as a reader of only the first ``read`` bits of a code must take them, of the same shape.

    Args:
        mass: How often each level occurs, where the reader knows it; otherwise all alike.
    """
    merged = levels.shape[-1] >> read
    if mass is None:
        mass = torch.ones_like(levels)
    pairs: Tensor = levels.unflatten(-1, (-1, merged))
    weights: Tensor = mass.unflatten(-1, (-1, merged))
    means = (pairs * weights).sum(-1) / weights.sum(-1)
    return means.repeat_interleave(merged, dim=-1)


@lru_cache
def sphere_levels(channels: int, bits: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Levels for √D times a coordinate of a random unit vector of D channels, whose density is (1 − x²)^((D − 3) / 2).

    Returns:
        The ``2^bits`` levels that lose least, fp32 ascending, and the probability of each one's cell.
    """
    reach = min(math.sqrt(channels), 8.0)
    grid = torch.linspace(-reach, reach, 2**17 + 1, dtype=torch.float64)
    density = (1 - grid.square() / channels).clamp_min(0).pow((channels - 3) / 2)
    levels = scalar_levels(grid, 2**bits, density, iterations=1000)
    levels = (levels - levels.flip(0)) / 2  # as the density is
    cells = nearest_level(grid.unsqueeze(-1), levels.double()).squeeze(-1).long()
    mass = torch.zeros(2**bits, dtype=torch.float64).index_add_(0, cells, density)
    return levels.to(device), (mass / mass.sum()).float().to(device)
