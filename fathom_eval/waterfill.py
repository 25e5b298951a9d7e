"""How many bits of each channel a query reads: importance and the water line (paper §3.3, Eq. 3–4)."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


def channel_importance(query: Tensor, variance: Tensor) -> Tensor:
    """Each channel's contribution to the variance of the scores, summed over the query heads of a group (Eq. 3).

    Args:
        query: ``[..., G, D]`` in the store's basis.
        variance: The keys' variance in that basis, ``[..., D]``.

    Returns:
        fp32 ``[..., D]``.
    """
    return query.float().square().sum(-2) * variance


def read_depths(importance: Tensor, budget: int | tuple[int, ...] | Tensor, max_depth: int = 4, limits: Tensor | None = None) -> Tensor:
    """Spend ``budget`` bits a key on the channels by reverse water-filling (Eq. 4).

    Eq. 4 gives channel j depth ``clip(round(log4(g_j / theta)), 0, max_depth)`` with the smallest theta whose depths fit the
    budget. A channel takes its d-th plane as soon as theta falls below ``g_j * 4^-(d - 1/2)``, so the smallest theta that fits
    lies between the budget-th and the next of these thresholds, and the depths are how many of a channel's thresholds are among
    the ``budget`` largest: one sort instead of a bisection. Tied importances, where no theta spends the whole budget, are filled
    lower channel first. An all-zero importance therefore fills channel 0 first.

    Args:
        importance: Non-negative ``[..., D]``.
        budget: Code bits a key; what exceeds ``D * max_depth`` is not spent. One for all, one for each of the first
            dimension, or a tensor of integers that broadcasts to ``[...]``.
        limits: Depths that single channels must not exceed, integers of the shape of ``importance`` or broadcast to it.

    Returns:
        int64 ``[..., D]`` with sum ``min(budget, D * max_depth)``, or the sum of the limits if that is less.
    """
    channels = importance.shape[-1]
    thresholds = _plane_thresholds(importance, max_depth)
    if limits is not None:
        missing = torch.arange(max_depth, device=importance.device) >= limits.unsqueeze(-1)
        thresholds = thresholds.masked_fill(missing, -1.0)  # behind all that a channel has, however unimportant
    ordered = thresholds.flatten(-2).sort(dim=-1, descending=True, stable=True)
    places = channels * max_depth
    if isinstance(budget, Tensor):
        spent = (torch.arange(places, device=importance.device) < budget.unsqueeze(-1)).long()
    elif isinstance(budget, int):
        spent = _first_places((budget,), places, importance.device)[0]
    else:
        spent = _first_places(budget, places, importance.device).view(-1, *[1] * (importance.dim() - 2), places)
    if limits is not None:
        spent = spent * (ordered.values >= 0)
    taken = torch.zeros_like(ordered.indices).scatter_(-1, ordered.indices, spent.expand(ordered.indices.shape))
    depths: Tensor = taken.unflatten(-1, (channels, max_depth)).sum(-1)
    return depths


@functools.cache
def _first_places(counts: tuple[int, ...], places: int, device: torch.device, value: int = 1) -> Tensor:
    """int64 ``[len(counts), places]``: a value in the first so many places of each row. Kept: a step must not wait for the device."""
    return ((torch.arange(places) < torch.tensor(counts).unsqueeze(-1)) * value).to(device)


def channel_ranks(importance: Tensor, counts: tuple[int, ...], depth: int) -> Tensor:
    """int64 ``depth`` on each row's ``counts`` most important channels of ``[R, …, D]``, 0 elsewhere; of equal ones the lower is taken."""
    order = importance.sort(dim=-1, descending=True, stable=True).indices
    first = _first_places(counts, importance.shape[-1], importance.device, depth)
    return torch.zeros_like(order).scatter_(-1, order, first.view(-1, *[1] * (importance.dim() - 2), first.shape[-1]).expand(order.shape))


def water_line(importance: Tensor, budget: int, max_depth: int = 4) -> Tensor:
    """The smallest theta of Eq. 4 whose depths fit the budget, ``[...]``; 0 where every plane fits."""
    channels = importance.shape[-1]
    if budget >= channels * max_depth:
        return torch.zeros_like(importance[..., 0], dtype=torch.float32)
    thresholds = _plane_thresholds(importance, max_depth).flatten(-2)
    return thresholds.sort(dim=-1, descending=True).values[..., budget]


def _plane_thresholds(importance: Tensor, max_depth: int) -> Tensor:
    """The theta below which each channel takes its 1st, 2nd, … plane, ``[..., D, max_depth]``."""
    return importance.float().unsqueeze(-1) * _plane_steps(max_depth, importance.device)


@functools.cache
def _plane_steps(max_depth: int, device: torch.device) -> Tensor:
    """4^-(d + 1/2) of every depth d, exact powers of two."""
    return torch.tensor([2.0 ** -(2 * depth + 1) for depth in range(max_depth)]).to(device)
