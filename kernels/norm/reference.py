"""RMSNorm in torch, as transformers computes it: the mean square in fp32, the weight applied in the input's dtype."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(values: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """``[..., E]`` to the same shape and dtype."""
    wide = values.float()
    scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return weight * scaled.to(values.dtype)
