"""Read plans in torch: depths by the water line, and the channels in the order in which a scan walks them (paper §3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from fathom_eval.selection import top_indices
from fathom_eval.waterfill import channel_importance, read_depths


def plan_depths(query: Tensor, variance: Tensor, budget: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The depths of a budget and the channels sorted by them.

    Args:
        query: ``[R, H, G, D]`` in the store's basis.
        variance: fp32 ``[H, D]``.
        budget: Code bits a key.

    Returns:
        int32 tensors: depths ``[R, H, D]`` a channel; channels ``[R, H, D]``, deepest first and lower channel first; the depths of those
        slots ``[R, H, D]``, zero where a slot is inactive; counts ``[R, H, 4]`` of channels with at least 1, 2, 3 and 4 planes.
    """
    depths = read_depths(channel_importance(query, variance), budget)
    channels = depths.sort(dim=-1, descending=True, stable=True).indices
    slots = depths.gather(-1, channels)
    counts = torch.stack([(depths >= depth).sum(-1) for depth in (1, 2, 3, 4)], dim=-1)
    return depths.int(), channels.int(), slots.int(), counts.int()


def top_channels(query: Tensor, weight: Tensor | None, count: int) -> Tensor:
    """The ``count`` channels with the largest sum of |q| over the group, times ``weight [H, D]``; int32 ``[R, H, count]``, ascending."""
    mass = query.float().abs().sum(-2)
    if weight is not None:
        mass = mass * weight
    return top_indices(mass, count).sort(-1).values.int()
