"""Exact attention over fetched rows and tail on the GPU: pieces of rows in parallel, then one pass that joins them."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fathom_eval.kernels.attend import PIECE


@triton.jit
def _attend_pieces(
    query,
    keys,
    values,
    members,
    counts,
    tail_keys,
    tail_values,
    tail_members,
    workspace,
    scaling,
    capacity,
    tail,
    head_dim,
    row_pieces,
    pieces,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIECE: tl.constexpr,
):
    piece = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    if piece < row_pieces:
        slot = piece * PIECE + tl.arange(0, PIECE)
        inside = slot < tl.load(counts + pair)
        line = pair * capacity + slot
        key_base = keys
        value_base = values
        mask_base = members
    else:
        slot = (piece - row_pieces) * PIECE + tl.arange(0, PIECE)
        inside = slot < tail
        line = pair * tail + slot
        key_base = tail_keys
        value_base = tail_values
        mask_base = tail_members
    taking = tl.load(mask_base + line, mask=inside, other=0)
    channel = tl.arange(0, CHANNELS)
    # Rows that nobody attends to are not read: what lies there may be anything.
    load = (taking != 0)[:, None] & (channel < head_dim)[None, :]
    place = line[:, None] * head_dim + channel[None, :]
    key = tl.load(key_base + place, mask=load, other=0.0).to(tl.float32)
    value = tl.load(value_base + place, mask=load, other=0.0).to(tl.float32)
    for member in tl.static_range(GROUP):
        q = tl.load(query + (pair * GROUP + member) * head_dim + channel, mask=channel < head_dim, other=0.0).to(tl.float32)
        logits = tl.sum(key * (q * scaling)[None, :], axis=1)
        logits = tl.where(((taking >> member) & 1) == 1, logits, float("-inf"))
        largest = tl.max(logits, axis=0)
        weights = tl.exp(logits - tl.where(largest == float("-inf"), 0.0, largest))
        mixed = tl.sum(weights[:, None] * value, axis=0)
        out = workspace + ((pair * GROUP + member) * pieces + piece) * (head_dim + 2)
        tl.store(out + channel, mixed, mask=channel < head_dim)
        tl.store(out + head_dim, largest)
        tl.store(out + head_dim + 1, tl.sum(weights, axis=0))


@triton.jit
def _join_pieces(workspace, out, head_dim, pieces, PIECES: tl.constexpr, CHANNELS: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    channel = tl.arange(0, CHANNELS)
    base = workspace + (line * pieces + piece) * (head_dim + 2)
    largest = tl.load(base + head_dim, mask=piece < pieces, other=float("-inf"))
    weight = tl.exp(largest - tl.max(largest, axis=0))
    total = tl.sum(weight * tl.load(base + head_dim + 1, mask=piece < pieces, other=0.0), axis=0)
    inside = (piece < pieces)[:, None] & (channel < head_dim)[None, :]
    mixed = tl.load(base[:, None] + channel[None, :], mask=inside, other=0.0)
    found = tl.sum(mixed * weight[:, None], axis=0) / total
    tl.store(out + line * head_dim + channel, found.to(out.dtype.element_ty), mask=channel < head_dim)


def attend_rows(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    members: Tensor,
    counts: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
    tail_members: Tensor,
    workspace: Tensor,
    out: Tensor,
    scaling: float,
) -> None:
    """See :func:`fathom_eval.kernels.attend.attend_rows`."""
    rows, heads, group, head_dim = query.shape
    capacity, tail = keys.shape[-2], tail_keys.shape[-2]
    row_pieces = triton.cdiv(capacity, PIECE)
    pieces = row_pieces + triton.cdiv(tail, PIECE)
    channels = triton.next_power_of_2(head_dim)
    _attend_pieces[(pieces, rows * heads)](
        query,
        keys,
        values,
        members,
        counts,
        tail_keys,
        tail_values,
        tail_members,
        workspace,
        scaling,
        capacity,
        tail,
        head_dim,
        row_pieces,
        pieces,
        GROUP=group,
        CHANNELS=channels,
        PIECE=PIECE,
    )
    _join_pieces[(rows * heads * group,)](workspace, out, head_dim, pieces, PIECES=triton.next_power_of_2(pieces), CHANNELS=channels)
