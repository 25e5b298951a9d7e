"""From the heads' selections to the rows of a group: the distinct tokens, and their K/V rows fetched from host memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fathom_eval.kernels.rows import reference
from fathom_eval.kernels.segments import SegmentTable

__all__ = ["GroupRows", "fetch_rows", "union_rows"]


@dataclass(frozen=True)
class GroupRows:
    """The rows that each group attends to, in lists of a fixed capacity with a count on the device.

    Attributes:
        rows: int32 ``[R, H, C]``, distinct sealed tokens, ascending.
        members: int32 ``[R, H, C]``, bit g set where query head g attends to the row.
        counts: int32 ``[R, H]``, entries in use.
        tail_members: int32 ``[R, H, T]``, the same mask for the unsealed tokens, 0 where there is none.
    """

    rows: Tensor
    members: Tensor
    counts: Tensor
    tail_members: Tensor

    @classmethod
    def allocate(
        cls, rows: int, heads: int, group: int, count: int, sink: int, local: int, tail: int, device: torch.device | str
    ) -> GroupRows:
        """Room for ``count`` tokens of each of ``group`` heads, all different, beside the always-kept ones."""
        capacity = group * count + sink + local
        lists, members = (torch.zeros(rows, heads, capacity, dtype=torch.int32, device=device) for _ in range(2))
        counts = torch.zeros(rows, heads, dtype=torch.int32, device=device)
        return cls(lists, members, counts, torch.zeros(rows, heads, tail, dtype=torch.int32, device=device))

    def with_own_masks(self) -> GroupRows:
        """The same lists and counts with masks of their own, which are to be written."""
        return GroupRows(self.rows, torch.zeros_like(self.members), self.counts, torch.zeros_like(self.tail_members))


def union_rows(indices: Tensor, blocks: Tensor, tokens: Tensor, sink: int, local: int, union: GroupRows, *, shared: bool = False) -> None:
    """Join the selections of a group's query heads with the always-kept tokens.

    Args:
        indices: int32 ``[R, H, G, k]``, ascending, from :func:`fathom_eval.kernels.topk.top_tokens`; G is at most 31.
        blocks, tokens: int32 ``[R]``, sealed blocks and all tokens.
        sink, local: Tokens at either end that every head attends to.
        union: Written.
        shared: Every head attends to the whole union.
    """
    if indices.is_cuda:
        from fathom_eval.kernels.rows import triton as kernel

        kernel.union_rows(indices, blocks, tokens, sink, local, shared, union)
        return
    union.tail_members.zero_()
    for row, (sealed, total) in enumerate(zip(blocks.tolist(), tokens.tolist(), strict=True)):
        for head in range(indices.shape[1]):
            rows, members, late = reference.union_rows(indices[row, head], sealed * 64, total, sink, local, shared)
            union.rows[row, head, : len(rows)] = rows
            union.members[row, head, : len(rows)] = members
            union.counts[row, head] = len(rows)
            union.tail_members[row, head, : len(late)] = late


def fetch_rows(
    table: SegmentTable, union: GroupRows, out: Tensor, *, first_part: int = 0, members_only: bool = False, programs: int | None = None
) -> None:
    """Copy the rows of each group's list out of a store in HBM or pinned host memory. Rows behind the count are not touched.

    Args:
        table: Segments ``[H, 64·B, P, W]``: the parts of a token, its key and its value, lie side by side, so that both are one run.
            A part is a multiple of 16 bytes.
        union: Lists from :func:`union_rows`.
        out: ``[p, R, H, C, W]`` of the same dtype, contiguous: parts ``first_part`` to ``first_part + p``.
        members_only: Leave out rows that no query head attends to.
        programs: On a GPU fetch with no more programs than these, at least one a list; None for what is fastest alone.

    Raises:
        ValueError: A part is not a multiple of 16 bytes.
    """
    example = table.example
    if example.shape[-1] * example.element_size() % 16:
        raise ValueError(f"rows of {example.shape[-1] * example.element_size()} bytes are not multiples of 16")
    if out.is_cuda:
        from fathom_eval.kernels.rows import triton as kernel

        kernel.fetch_rows(table, union, out, first_part, members_only, programs)
        return
    for row, counts in enumerate(union.counts.tolist()):
        stored = torch.cat(table.segments[row], dim=1)
        for head, count in enumerate(counts):
            slots = torch.arange(count)
            if members_only:
                slots = slots[union.members[row, head, :count] != 0]
            for part in range(out.shape[0]):
                out[part, row, head, slots] = reference.fetch_rows(stored[head, :, first_part + part], union.rows[row, head, slots])
