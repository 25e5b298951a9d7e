"""Score all keys from selected channels in 4-bit codes: what Double Sparsity, SparQ and Loki read in the paper's comparison (§4)."""

from __future__ import annotations

import torch
from torch import Tensor

from fathom_eval.kernels.nibble import reference
from fathom_eval.kernels.nibble.reference import nibble_values, pack_nibbles
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.kernels.segments import SegmentTable

__all__ = ["nibble_values", "pack_nibbles", "scan_nibbles"]


def scan_nibbles(
    query: Tensor,
    channels: Tensor,
    nibbles: SegmentTable,
    scales: SegmentTable,
    blocks: Tensor,
    scores: Tensor,
    maxima: Tensor,
    scaling: float = 1.0,
) -> None:
    """Approximate q·k of every sealed key from c channels at four bits, from HBM or from pinned host memory.

    As :func:`fathom_eval.kernels.scan.scan_segments`, with:

    Args:
        channels: int32 ``[R, H, c]``, distinct.
        nibbles: Segments int32 ``[H, D, 8, B]`` from :func:`pack_nibbles`.
    """
    if query.is_cuda:
        from fathom_eval.kernels.nibble import triton as kernel

        kernel.scan_nibbles(query, channels, nibbles, scales, blocks, scores, maxima, scaling)
        return
    for row, count in enumerate(blocks.tolist()):
        if not count:
            continue
        stored = torch.cat(nibbles.segments[row], dim=-1)[..., :count]
        scale = torch.cat(scales.segments[row], dim=-1)[..., :count]
        found = reference.scan_nibbles(query[row], channels[row], stored, scale) * scaling
        scores[row, ..., : count * BLOCK] = found
        maxima[row, ..., :count] = found.unflatten(-1, (count, BLOCK)).amax(-1)
