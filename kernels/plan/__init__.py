"""Decide which channels a scan reads, and how deep (paper §3.3, Eq. 3-4)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fathom_eval.kernels.plan import reference

__all__ = ["ReadPlan", "plan_depths", "top_channels"]


@dataclass(frozen=True)
class ReadPlan:
    """A read plan of fixed size on the device: one slot a channel, deepest first, inactive slots last.

    Attributes:
        depths: int32 ``[R, H, D]``, planes to read of each channel.
        channels: int32 ``[R, H, D]``, the channel of each slot.
        slots: int32 ``[R, H, D]``, the depth of each slot, 0 where it is inactive.
        counts: int32 ``[R, H, 4]``, slots with at least 1, 2, 3 and 4 planes.
    """

    depths: Tensor
    channels: Tensor
    slots: Tensor
    counts: Tensor

    @classmethod
    def allocate(cls, rows: int, heads: int, head_dim: int, device: torch.device | str) -> ReadPlan:
        shape = (rows, heads, head_dim)
        depths, channels, slots = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(3))
        return cls(depths, channels, slots, torch.zeros(rows, heads, 4, dtype=torch.int32, device=device))


def plan_depths(query: Tensor, variance: Tensor, budget: int, plan: ReadPlan) -> None:
    """Spend ``budget`` bits a key on the channels by reverse water-filling and sort the channels by depth (Eq. 3-4).

    The depths equal :func:`fathom_eval.waterfill.read_depths` bit for bit, ties included. Nothing is allocated on a GPU.

    Args:
        query: ``[R, H, G, D]``, contiguous, in the store's basis.
        variance: fp32 ``[H, D]``, of the keys in that basis.
        budget: Code bits a key.
        plan: Written.
    """
    if query.is_cuda:
        from fathom_eval.kernels.plan import triton as kernel

        kernel.plan_depths(query, variance, budget, plan)
        return
    for out, found in zip(
        (plan.depths, plan.channels, plan.slots, plan.counts), reference.plan_depths(query, variance, budget), strict=True
    ):
        out.copy_(found)


def top_channels(query: Tensor, weight: Tensor | None, channels: Tensor) -> None:
    """Pick the channels with the largest sum of |q| over the group, times a weight (SparQ, arXiv:2312.04985, with none).

    Args:
        query: ``[R, H, G, D]``, contiguous.
        weight: fp32 ``[H, D]`` or None.
        channels: int32 ``[R, H, c]``, written in ascending order; of equal channels the lower is taken first.
    """
    if query.is_cuda:
        from fathom_eval.kernels.plan import triton as kernel

        kernel.top_channels(query, weight, channels)
        return
    channels.copy_(reference.top_channels(query, weight, channels.shape[-1]))
