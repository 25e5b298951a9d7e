"""Copy the runs of chosen channels, in torch: the staged transfer of the paper's §3.6."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_channels(segment: Tensor, channels: Tensor, lengths: Tensor, out: Tensor) -> None:
    """Copy the first ``lengths`` bytes of each chosen channel of a segment to the same place in another.

    Args:
        segment, out: ``[H, D, ...]``, one shape and dtype, contiguous.
        channels: ``[H, N]``.
        lengths: Bytes, ``[H, N]``, 0 where a slot is inactive.
    """
    source, target = (tensor.view(torch.uint8).reshape(*tensor.shape[:2], -1) for tensor in (segment, out))
    for head, (picked, sizes) in enumerate(zip(channels.tolist(), lengths.tolist(), strict=True)):
        for channel, size in zip(picked, sizes, strict=True):
            target[head, channel, :size] = source[head, channel, :size]
