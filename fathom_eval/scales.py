"""Block scales in eight bits.

Shapes: H KV heads, D channels, B blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = 448.0
"""The largest number of fp8 e4m3."""


def scale_unit(mean: Tensor, variance: Tensor) -> Tensor:
    """A power of two of the size of each channel's keys, to divide scales by before they become fp8: fp32 ``[H, D]``.

    fp8 spans 2^-9 to 448. With the root mean square at 1 to 2, blocks may be some hundred times larger or smaller than the prefix was. A
    power of two, so that the product with an fp8 number is exact in fp16. A layer has it once, so it is not counted.
    """
    size = (mean.square() + variance).sqrt()
    return torch.exp2(size.log2().floor()).masked_fill(size == 0, 1.0)


def eight_bit_scales(scales: Tensor, unit: Tensor) -> Tensor:
    """Scales fp16 ``[…, H, D, B]`` as unit × fp8 e4m3, of the same shape and type. The largest ones saturate: their keys are clipped."""
    unit = unit.unsqueeze(-1)
    rounded = (scales.float() / unit).clamp_max(LARGEST).to(torch.float8_e4m3fn).float()
    return (rounded * unit).to(torch.float16)
