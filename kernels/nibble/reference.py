"""4-bit codes packed two a byte, in torch: the store of the fixed-depth channel scans (Double Sparsity, SparQ, Loki; paper §4)."""

from __future__ import annotations

import torch
from torch import Tensor

from fathom_eval.kernels.pack.reference import BLOCK

WORDS = 8
"""32-bit words that hold the 64 codes of a block."""


def pack_nibbles(codes: Tensor) -> Tensor:
    """Pack codes so that word i of a block holds its tokens 8i to 8i + 7, four bits each, lowest bits first.

    Args:
        codes: uint8 ``[..., D, n]`` below 16, n a multiple of 64.

    Returns:
        int32 ``[..., D, 8, n / 64]``: one channel is contiguous over the sequence, and neighbouring blocks lie side by side.
    """
    split = codes.unflatten(-1, (-1, WORDS, 8)).to(torch.int64)
    words = (split << torch.arange(0, 32, 4, device=codes.device)).sum(-1)
    # The upper half of the unsigned range is the negative half of int32.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32).transpose(-1, -2).contiguous()


def nibble_values(words: Tensor, scales: Tensor) -> Tensor:
    """The keys as 4-bit codes hold them, ``(c - 8 + 1/2) · a / 8``: fp32 ``[..., D, blocks · 64]``."""
    shifts = torch.arange(0, 32, 4, device=words.device)
    codes = (words.transpose(-1, -2).unsqueeze(-1) >> shifts) & 15
    return (codes.flatten(-3).float() - 7.5) * (scales.float() / 8).repeat_interleave(BLOCK, dim=-1)


def scan_nibbles(query: Tensor, channels: Tensor, words: Tensor, scales: Tensor) -> Tensor:
    """Approximate scores from selected channels alone.

    Args:
        query: ``[H, G, D]``.
        channels: ``[H, c]``.
        words, scales: ``[H, D, 8, blocks]`` and ``[H, D, blocks]``.

    Returns:
        fp32 ``[H, G, blocks · 64]``.
    """
    index = channels.long()
    head = torch.arange(index.shape[0], device=index.device).unsqueeze(-1)
    part = query.float().gather(-1, index.unsqueeze(-2).expand(-1, query.shape[-2], -1))
    return part @ nibble_values(words[head, index], scales[head, index])
