"""QK-norm and rotary embedding in torch (the halves of a head are the two coordinates of its rotations, as in Llama and Qwen)."""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(values: Tensor, norm: Tensor | None, epsilon: float, cosines: Tensor, sines: Tensor) -> Tensor:
    """RMSNorm (where there is a weight) and rotation in fp32: ``[..., D]`` and angles ``[..., D / 2]`` to ``[..., D]``."""
    wide = values.float()
    if norm is not None:
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * norm.float()
    low, high = wide.chunk(2, dim=-1)
    return torch.cat([low * cosines - high * sines, high * cosines + low * sines], dim=-1).to(values.dtype)
