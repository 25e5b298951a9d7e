"""Score all keys of a bit-plane store with a read depth a channel."""

from __future__ import annotations

import torch
from torch import Tensor

from fathom_eval.kernels.pack import BLOCK
from fathom_eval.kernels.plan import ReadPlan
from fathom_eval.kernels.scan.reference import prefix_values, scan_planes
from fathom_eval.kernels.segments import SegmentTable

__all__ = ["prefix_values", "scan_planes", "scan_segments", "score_tail"]


def scan_segments(
    query: Tensor,
    plan: ReadPlan,
    planes: SegmentTable,
    scales: SegmentTable,
    blocks: Tensor,
    scores: Tensor,
    maxima: Tensor,
    scaling: float = 1.0,
) -> None:
    """Approximate q·k of every sealed key, read to the plan's depths from segments in HBM or in pinned host memory (paper §3.3, §3.6).

    One launch of a size that depends on the capacity alone: no allocation, no waiting. Planes that the plan leaves out are not
    transferred. The sums are fp32; fp16 scores overflow above 65,504, which ``scaling`` can prevent.

    Args:
        query: ``[R, H, G, D]``, contiguous, in the store's basis.
        plan: Which channels to read, and how deep.
        planes: Segments int64 ``[H, D, 4, B]`` (``B`` blocks each, a power of two of at least 2).
        scales: Segments fp16 ``[H, D, B]``.
        blocks: int32 ``[R]``, sealed blocks of each row.
        scores: fp16 or fp32 ``[R, H, G, S·B·64]`` for S segments a row; written up to ``64 · blocks``.
        maxima: The largest score of each block, in the scores' dtype, ``[R, H, G, S·B]``; written up to ``blocks``.
        scaling: Multiplies the scores.
    """
    if query.is_cuda:
        from fathom_eval.kernels.scan import triton as kernel

        kernel.scan_segments(query, plan, planes, scales, blocks, scores, maxima, scaling)
        return
    for row, count in enumerate(blocks.tolist()):
        if not count:
            continue
        stored = torch.cat(planes.segments[row], dim=-1)[..., :count]
        found = scan_planes(query[row], plan.depths[row], stored, torch.cat(scales.segments[row], dim=-1)[..., :count]) * scaling
        scores[row, ..., : count * BLOCK] = found
        maxima[row, ..., :count] = found.unflatten(-1, (count, BLOCK)).amax(-1)


def score_tail(
    query: Tensor,
    keys: Tensor,
    offset: Tensor | None,
    blocks: Tensor,
    tokens: Tensor,
    scores: Tensor,
    scaling: float = 1.0,
) -> None:
    """Exact q·k of the tokens that are not sealed yet, on the scale of the scan's scores.

    Args:
        query: ``[R, H, G, D]``, contiguous, as the model has it.
        keys: ``[R, H, T, D]``, contiguous, in the model's basis; the first ``tokens - 64 · blocks`` are in use.
        offset: fp32 ``[R, H, G]`` to subtract: q·μ where the store is centred, so that a key scores alike before and after sealing.
        blocks, tokens: int32 ``[R]``, sealed blocks and tokens of each row.
        scores: fp16 or fp32 ``[R, H, G, T]``, written where there is a token.
        scaling: As given to the scan.
    """
    if query.is_cuda:
        from fathom_eval.kernels.scan import triton as kernel

        kernel.score_tail(query, keys, offset, blocks, tokens, scores, scaling)
        return
    found = query.float() @ keys.float().transpose(-1, -2)
    if offset is not None:
        found = found - offset.unsqueeze(-1)
    for row, (sealed, total) in enumerate(zip(blocks.tolist(), tokens.tolist(), strict=True)):
        scores[row, ..., : total - sealed * BLOCK] = found[row, ..., : total - sealed * BLOCK] * scaling
