"""Exact rescoring of candidates on the GPU: pieces of rows in parallel, then one program a query head that keeps the best."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fathom_eval.kernels.rows import GroupRows
from fathom_eval.kernels.selecting import keep_largest, kth_largest, ordered_bits

PIECE = 64
"""Rows that one program rescores."""


@triton.jit
def _rescore_rows(
    query,
    keys,
    tail_keys,
    rows,
    members,
    tail_members,
    kept,
    tail_kept,
    counts,
    blocks,
    tokens,
    ordered,
    heads,
    head_dim,
    capacity,
    tail,
    row_pieces,
    sink,
    local,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIECE: tl.constexpr,
):
    piece = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    sealed = 64 * tl.load(blocks + pair // heads)
    total = tl.load(tokens + pair // heads)
    stop = tl.maximum(total - local, 0)
    if piece < row_pieces:
        slot = piece * PIECE + tl.arange(0, PIECE)
        inside = slot < tl.load(counts + pair)
        written = slot < capacity
        line = pair * capacity + slot
        token = tl.load(rows + line, mask=inside, other=0)
        mask_base = members
        kept_base = kept
        key_base = keys
        column = slot
    else:
        slot = (piece - row_pieces) * PIECE + tl.arange(0, PIECE)
        token = sealed + slot
        written = slot < tail
        inside = written & (token < total)
        line = pair * tail + slot
        mask_base = tail_members
        kept_base = tail_kept
        key_base = tail_keys
        column = capacity + slot
    taking = tl.load(mask_base + line, mask=inside, other=0)
    always = inside & ((token < tl.minimum(sink, stop)) | (token >= stop))
    competing = tl.where(always, 0, taking)
    everyone: tl.constexpr = (1 << GROUP) - 1
    # What the heads keep is added to these masks by the next launch. They are not the candidates' own: several threads hold one mask, and
    # one that reads it late must not find what another has written.
    tl.store(kept_base + line, tl.where(always, everyone, 0), mask=written)
    channel = tl.arange(0, CHANNELS)
    load = (competing != 0)[:, None] & (channel < head_dim)[None, :]
    key = tl.load(key_base + line[:, None] * head_dim + channel[None, :], mask=load, other=0.0).to(tl.float32)
    for member in tl.static_range(GROUP):
        q = tl.load(query + (pair * GROUP + member) * head_dim + channel, mask=channel < head_dim, other=0.0).to(tl.float32)
        found = ordered_bits(tl.sum(key * q[None, :], axis=1))
        found = tl.where(((competing >> member) & 1) == 1, found, 0)
        out = ordered + (pair * GROUP + member) * (capacity + tail) + column
        tl.store(out, found.to(tl.int32, bitcast=True), mask=written)


@triton.jit
def _keep_best(
    ordered,
    kept,
    tail_kept,
    capacity,
    tail,
    count,
    GROUP: tl.constexpr,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    pair = line // GROUP
    member = line % GROUP
    slot = tl.arange(0, SIZE)
    keys = tl.load(ordered + line * (capacity + tail) + slot, mask=slot < capacity + tail, other=0).to(tl.uint32, bitcast=True)
    best = keep_largest(keys, kth_largest(keys, count, 32), count)
    everyone: tl.constexpr = (1 << GROUP) - 1
    bits = tl.zeros([SIZE], dtype=tl.int32) + (everyone if SHARED else (1 << member).to(tl.int32))
    tl.atomic_or(kept + pair * capacity + slot, bits, mask=best & (slot < capacity))
    tl.atomic_or(tail_kept + pair * tail + slot - capacity, bits, mask=best & (slot >= capacity))


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
    shared: bool,
) -> None:
    """See :func:`fathom_eval.kernels.rerank.keep_best`."""
    rows, heads, group, head_dim = query.shape
    capacity, tail = keys.shape[-2], tail_keys.shape[-2]
    row_pieces = triton.cdiv(capacity, PIECE)
    _rescore_rows[(row_pieces + triton.cdiv(tail, PIECE), rows * heads)](
        query,
        keys,
        tail_keys,
        union.rows,
        union.members,
        union.tail_members,
        kept.members,
        kept.tail_members,
        union.counts,
        blocks,
        tokens,
        ordered,
        heads,
        head_dim,
        capacity,
        tail,
        row_pieces,
        sink,
        local,
        GROUP=group,
        CHANNELS=triton.next_power_of_2(head_dim),
        PIECE=PIECE,
    )
    size = triton.next_power_of_2(capacity + tail)
    _keep_best[(rows * heads * group,)](
        ordered,
        kept.members,
        kept.tail_members,
        capacity,
        tail,
        count,
        GROUP=group,
        SIZE=size,
        SHARED=shared,
        num_warps=min(32, max(1, size // 256)),
    )
