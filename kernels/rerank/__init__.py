"""Rescore a union of candidates with their own keys and keep each head's best (paper §3, "rerank")."""

from __future__ import annotations

import torch
from torch import Tensor

from fathom_eval.kernels.rerank import reference
from fathom_eval.kernels.rows import GroupRows

__all__ = ["keep_best", "ordered_size"]


def ordered_size(rows: int, heads: int, group: int, capacity: int, tail: int) -> int:
    """int32 numbers that :func:`keep_best` needs for the exact scores."""
    return rows * heads * group * (capacity + tail)


def keep_best(
    query: Tensor,
    keys: Tensor,
    tail_keys: Tensor,
    blocks: Tensor,
    tokens: Tensor,
    sink: int,
    local: int,
    count: int,
    union: GroupRows,
    kept: GroupRows,
    ordered: Tensor,
    *,
    shared: bool = False,
) -> None:
    """Narrow the heads' candidates to their ``count`` best by exact q·k. The lists keep their length; rows that no head keeps get mask 0.

    Two launches of fixed size, no allocation, no waiting. Of equal scores the first in the list is kept.

    Args:
        query: ``[R, H, G, D]``, contiguous.
        keys: ``[R, H, C, D]``, contiguous, the fetched keys of ``union.rows``.
        tail_keys: ``[R, H, T, D]``, contiguous.
        blocks, tokens: int32 ``[R]``.
        sink, local: Tokens at either end that every head attends to and that do not compete.
        count: Tokens that a head keeps of those that compete.
        union: Candidates from :func:`fathom_eval.kernels.rows.union_rows`.
        kept: Its lists with masks of their own, which are written.
        ordered: int32, at least :func:`ordered_size` numbers of scratch.
        shared: Every head attends to what any head keeps.
    """
    if query.is_cuda:
        from fathom_eval.kernels.rerank import triton as kernel

        kernel.keep_best(query, keys, tail_keys, blocks, tokens, sink, local, count, union, kept, ordered, shared)
        return
    capacity = union.rows.shape[-1]
    for row, (sealed, total) in enumerate(zip((64 * blocks).tolist(), tokens.tolist(), strict=True)):
        for head, used in enumerate(union.counts[row].tolist()):
            late = total - sealed
            positions = torch.cat([union.rows[row, head, :used], torch.arange(sealed, total, dtype=torch.int32)])
            members = torch.cat([union.members[row, head, :used], union.tail_members[row, head, :late]])
            rows = torch.cat([keys[row, head, :used], tail_keys[row, head, :late]])
            always = (positions < min(sink, max(total - local, 0))) | (positions >= max(total - local, 0))
            found = reference.keep_best(query[row, head], rows, members, always, count, shared)
            kept.members[row, head, :used] = found[:used]
            kept.members[row, head, used:capacity] = 0
            kept.tail_members[row, head, :late] = found[used:]
            kept.tail_members[row, head, late:] = 0
