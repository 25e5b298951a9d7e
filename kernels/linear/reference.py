"""A linear layer in torch, summed in fp32."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``[R, I]`` and ``[O, I]`` to fp32 ``[R, O]``."""
    return functional.linear(inputs.float(), weight.float(), None if bias is None else bias.float())
