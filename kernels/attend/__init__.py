"""Exact attention of a group's query heads over the fetched rows and the unsealed tail."""

from __future__ import annotations

import torch
from torch import Tensor

from fathom_eval.kernels.attend import reference
from fathom_eval.kernels.rows import GroupRows

__all__ = ["PIECE", "attend_rows", "workspace_size"]

PIECE = 64
"""Rows that one program attends to before the parts are joined."""


def workspace_size(rows: int, heads: int, group: int, head_dim: int, capacity: int, tail: int) -> int:
    """fp32 numbers that :func:`attend_rows` needs to hold the parts: an output, its largest logit and its weight for each."""
    return rows * heads * group * (-(-capacity // PIECE) + -(-tail // PIECE)) * (head_dim + 2)


def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    union: GroupRows,
    tail_keys: Tensor,
    tail_values: Tensor,
    workspace: Tensor,
    out: Tensor,
    scaling: float,
) -> None:
    """Softmax attention in fp32 over exactly the rows that each head's bit names.

    Args:
        query: ``[R, H, G, D]``, contiguous.
        keys, values: ``[R, H, C, D]``, contiguous, the fetched rows.
        union: Counts and masks of the rows and of the tail; every head attends to at least one token (its local window).
        tail_keys, tail_values: ``[R, H, T, D]``, contiguous, the unsealed tokens.
        workspace: fp32, at least :func:`workspace_size` numbers.
        out: ``[R, H, G, D]``, contiguous, written.
        scaling: Multiplies q·k, 1/√D as a rule.

    Raises:
        ValueError: The workspace is too small.
    """
    rows, heads, group, head_dim = query.shape
    needed = workspace_size(rows, heads, group, head_dim, keys.shape[-2], tail_keys.shape[-2])
    if workspace.numel() < needed:
        raise ValueError(f"a workspace of {workspace.numel()} numbers is smaller than the {needed} needed")
    if query.is_cuda:
        from fathom_eval.kernels.attend import triton as kernel

        kernel.attend_rows(
            query, keys, values, union.members, union.counts, tail_keys, tail_values, union.tail_members, workspace, out, scaling
        )
        return
    for row, counts in enumerate(union.counts.tolist()):
        for head, count in enumerate(counts):
            # Poisoned rows must not reach a sum: only those that somebody attends to take part.
            late = union.tail_members[row, head]
            some = late != 0
            out[row, head] = reference.attend_rows(
                query[row, head],
                torch.cat([keys[row, head, :count], tail_keys[row, head][some]]),
                torch.cat([values[row, head, :count], tail_values[row, head][some]]),
                torch.cat([union.members[row, head, :count], late[some]]),
                scaling,
            )
