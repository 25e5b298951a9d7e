"""Block landmarks in torch: one fp16 mean key for a few tokens (after ShadowKV, arXiv:2410.21465; paper §2)."""

from __future__ import annotations

import torch
from torch import Tensor


def landmark_means(keys: Tensor, size: int) -> Tensor:
    """Mean keys of runs of ``size`` tokens: ``[..., n, D]`` to fp16 ``[..., n / size, D]``."""
    runs: Tensor = keys.float().unflatten(-2, (-1, size))
    return runs.mean(-2).to(torch.float16)


def scan_landmarks(query: Tensor, means: Tensor) -> Tensor:
    """q·(mean key): query ``[..., G, D]`` and means ``[..., m, D]`` to fp32 ``[..., G, m]``."""
    return query.float() @ means.float().transpose(-1, -2)
