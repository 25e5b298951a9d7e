"""The plane scan, in torch and written for reading: the truth that every other scan is checked against (paper §3.2–3.3)."""

from __future__ import annotations

import torch
from torch import Tensor

from fathom_eval.kernels.pack.reference import BLOCK, unpack_plane


def prefix_values(planes: Tensor, scales: Tensor, depths: Tensor) -> Tensor:
    """The keys as a read of ``depths`` planes sees them: exactly the t-bit mid-rise quantiser of every channel.

    A code c read to depth t is the cell c >> (planes - t) and stands for that cell's centre,
    ``(c >> (planes - t) + 1/2 - 2^(t-1)) * a / 2^(t-1)``; a channel of depth 0 is not read and contributes nothing.

    Args:
        planes: int64 ``[..., D, P, blocks]``.
        scales: fp16 ``[..., D, blocks]``.
        depths: Integers in 0..P, ``[..., D]``.

    Returns:
        fp32 ``[..., D, blocks * 64]``.
    """
    total = planes.shape[-2]
    bits = unpack_plane(planes).long()
    codes = (bits << torch.arange(total - 1, -1, -1, device=planes.device).unsqueeze(-1)).sum(-2)
    t = depths.unsqueeze(-1).to(torch.int64)
    half = torch.pow(2.0, (t - 1).float())
    cells = (codes >> (total - t)).float()
    values = (cells + 0.5 - half) * scales.float().repeat_interleave(BLOCK, dim=-1) / half
    return torch.where(t > 0, values, 0.0)


def scan_planes(query: Tensor, depths: Tensor, planes: Tensor, scales: Tensor) -> Tensor:
    """Approximate scores q·k of every key, for the query heads that share a KV head and one read plan.

    Args:
        query: ``[..., G, D]``, unscaled (no 1/sqrt(D)).
        depths: ``[..., D]``.
        planes, scales: The store, ``[..., D, P, blocks]`` and ``[..., D, blocks]``.

    Returns:
        fp32 ``[..., G, blocks * 64]``.
    """
    return query.float() @ prefix_values(planes, scales, depths)
