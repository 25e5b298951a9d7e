"""Exact top-k of every query head's scores from the block maxima that the scan wrote.

The k-th largest block maximum bounds the k-th largest score from below, so the k best scores lie in the k blocks with the largest maxima:
k of n/64 numbers and k of k·64 replace k of n. This is exact; equal scores at the boundary may fall either way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fathom_eval.kernels.topk import reference
from fathom_eval.kernels.topk.reference import NONE

__all__ = ["LARGEST_CAPACITY", "NONE", "looked_at", "scratch_size", "top_tokens"]

LARGEST_CAPACITY = 2**16
"""Blocks a query head that one program can rank: 4M tokens."""


def looked_at(count: int, tail: int) -> int:
    """Blocks whose tokens are looked at one by one: ``count``, two at the edges of the candidates, and those of ``tail`` tokens."""
    return count + 2 + -(-tail // 64)


def scratch_size(count: int, tail: int) -> int:
    """int32 numbers of scratch a query head: a threshold, the blocks looked at, and keys and tokens of what may be selected."""
    return 1 + 129 * looked_at(count, tail)


def top_tokens(
    scores: Tensor,
    maxima: Tensor,
    tail_scores: Tensor | None,
    blocks: Tensor,
    tokens: Tensor,
    sink: int,
    local: int,
    scratch: Tensor,
    indices: Tensor,
) -> None:
    """The best ``count`` of the tokens between the first ``sink`` and the last ``local`` ones, for every query head.

    Two launches of fixed size, no allocation, no waiting. Scores must not be NaN.

    Args:
        scores: fp16 or fp32 ``[R, H, G, B·64 / span]``; one score stands for ``span`` tokens (1, or a landmark's size).
        maxima: The scores' largest of each block, same dtype, ``[R, H, G, B]`` with B at most :data:`LARGEST_CAPACITY`.
        tail_scores: Scores of the unsealed tokens, same dtype, ``[R, H, G, T]``, or None.
        blocks, tokens: int32 ``[R]``, sealed blocks and all tokens of each row. What lies behind them is not looked at.
        sink, local: Tokens at either end that do not compete.
        scratch: int32, contiguous, ``[R, H, G, scratch_size(count, T)]``.
        indices: int32 ``[R, H, G, count]``, written in ascending order and filled up with :data:`NONE` where fewer tokens compete.

    Raises:
        ValueError: More blocks than one program can rank, or the scratch is not of the size above.
    """
    tail = 0 if tail_scores is None else tail_scores.shape[-1]
    if maxima.shape[-1] > LARGEST_CAPACITY:
        raise ValueError(f"{maxima.shape[-1]} blocks are more than the {LARGEST_CAPACITY} that one program can rank")
    if scratch.shape[-1] != scratch_size(indices.shape[-1], tail):
        raise ValueError(f"scratch of {scratch.shape[-1]} numbers a query head must have {scratch_size(indices.shape[-1], tail)}")
    if scores.is_cuda:
        from fathom_eval.kernels.topk import triton as kernel

        kernel.top_tokens(scores, maxima, tail_scores, blocks, tokens, sink, local, scratch, indices)
        return
    span = maxima.shape[-1] * 64 // scores.shape[-1]
    for row, (sealed, total) in enumerate(zip(blocks.tolist(), tokens.tolist(), strict=True)):
        known = scores[row, ..., : sealed * 64 // span].repeat_interleave(span, dim=-1)
        if tail_scores is not None:
            known = torch.cat([known, tail_scores[row, ..., : total - sealed * 64]], dim=-1)
        stop = min(max(total - local, 0), known.shape[-1])
        indices[row] = reference.top_tokens(known, indices.shape[-1], min(sink, stop), stop)
