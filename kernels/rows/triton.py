"""Union of a group's selections and the fetch of its rows on the GPU."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom_eval.kernels.rows import GroupRows
from fathom_eval.kernels.segments import SegmentTable

ROWS = 8
"""Rows that a program fetches at once."""

PROGRAMS: dict[str, int | None] = {"device": None, "host": 132}
"""Programs of a fetch by where the segments lie, which go through all lists; None for one a piece of a list. In host memory few in flight,
close together in an ascending list, fetch sooner than many: ``reports/published/step-h200/rows.jsonl``."""


@triton.jit
def _search(indices, token, count, GROUP: tl.constexpr, PADDED: tl.constexpr, STEPS: tl.constexpr):
    """Each token in every head's ascending list: how many entries lie below it, and whether it is one, both ``[token, head]``."""
    member = tl.arange(0, PADDED)[None, :]
    lists = indices + member * count
    low = token[:, None] * 0 + member * 0
    size = low + tl.where(member < GROUP, count, 0)
    for _ in tl.static_range(STEPS):
        half = size // 2
        right = tl.load(lists + low + half, mask=size > 0, other=0x7FFFFFFF) < token[:, None]
        low = tl.where(right, low + half + 1, low)
        size = tl.where(right, size - half - 1, half)
    inside = (low < count) & (member < GROUP)
    return low, tl.load(lists + low, mask=inside, other=0x7FFFFFFF) == token[:, None]


@triton.jit
def _head_bits(found, PADDED: tl.constexpr):
    """Bit masks of the heads, from one flag a head."""
    return tl.sum(found.to(tl.int32) << tl.arange(0, PADDED)[None, :], axis=1)


@triton.jit
def _union_rows(
    indices,
    blocks,
    tokens,
    rows,
    members,
    tail_members,
    counts,
    heads,
    count,
    capacity,
    tail,
    sink,
    local,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    SLOTS: tl.constexpr,
    STEPS: tl.constexpr,
    SINK: tl.constexpr,
    TAIL: tl.constexpr,
    SHARED: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    row = pair // heads
    sealed = tl.load(blocks + row) * 64
    total = tl.load(tokens + row)
    stop = tl.maximum(total - local, 0)
    everyone: tl.constexpr = (1 << GROUP) - 1
    indices += pair * GROUP * count
    rows += pair * capacity
    members += pair * capacity

    first = tl.arange(0, SINK)
    held = tl.minimum(tl.minimum(sink, stop), sealed)
    tl.store(rows + first, first, mask=first < held)

    element = tl.arange(0, PADDED * SLOTS)
    owner = element // SLOTS
    slot = element % SLOTS
    token = tl.load(indices + owner * count + slot, mask=(owner < GROUP) & (slot < count), other=0x7FFFFFFF)
    below, listed = _search(indices, token, count, GROUP, PADDED, STEPS)
    found = _head_bits(listed, PADDED)
    # A token is kept in the list of the first head that selected it.
    kept = (token >= held) & (token < tl.minimum(sealed, stop)) & ((found & ((1 << owner) - 1)) == 0)
    # Ascending order brings rows of one page together. A token's place is how many kept ones of each list lie below it: running counts of
    # the kept are laid down where masks will stand, and read where the token would be in each list.
    running = tl.cumsum(kept.to(tl.int32), 0)
    tl.store(members + owner * count + slot, running, mask=(owner < GROUP) & (slot < count))
    tl.debug_barrier()
    member = tl.arange(0, PADDED)[None, :]
    entry = member * count + below
    lower = tl.load(members + entry - 1, mask=(member < GROUP) & (entry > 0), other=0)
    before = tl.load(members + member * count - 1, mask=(member < GROUP) & (member > 0), other=0)
    place = held + tl.sum(lower - before, axis=1)
    tl.debug_barrier()
    tl.store(members + first, everyone, mask=first < held)
    tl.store(rows + place, token, mask=kept)
    tl.store(members + place, everyone if SHARED else found, mask=kept)
    # The local window may reach into sealed blocks where the caller seals early.
    late = tl.arange(0, TAIL)
    recent = stop + late
    taken = held + tl.sum(kept.to(tl.int32))
    extra = tl.maximum(sealed - stop, 0)
    tl.store(rows + taken + late, recent, mask=late < extra)
    tl.store(members + taken + late, everyone, mask=late < extra)
    tl.store(counts + pair, taken + extra)

    position = sealed + late
    _, listed = _search(indices, position, count, GROUP, PADDED, STEPS)
    picked = _head_bits(listed, PADDED)
    if SHARED:
        picked = tl.where(picked > 0, everyone, 0)
    picked = tl.where((position >= stop) | (position < sink), everyone, picked)
    tl.store(tail_members + pair * tail + late, tl.where(position < total, picked, 0), mask=late < tail)


@triton.jit
def _fetch_rows(
    table,
    rows,
    members,
    counts,
    out,
    pairs,
    heads,
    capacity,
    segments,
    segment_tokens,
    width,
    stored,
    first,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    MEMBERS: tl.constexpr,
):
    # Programs that start together read the same stretch of tokens in every head.
    pair = tl.program_id(0).to(tl.int64)
    wanted = tl.load(counts + pair)
    word = tl.arange(0, WORDS)
    part = word // width if PARTS > 1 else word * 0
    for begin in range(tl.program_id(1) * ROWS, wanted, tl.num_programs(1) * ROWS):
        slot = begin + tl.arange(0, ROWS)
        token = tl.load(rows + pair * capacity + slot, mask=slot < wanted, other=0)
        address = tl.load(table + (pair // heads) * segments + token // segment_tokens) * 16
        # All parts of a token are one run, read by neighbouring threads in one piece.
        start = ((pair % heads) * segment_tokens + token % segment_tokens) * stored + first
        inside = (slot < wanted)[:, None] & (word < PARTS * width)[None, :]
        if MEMBERS:
            inside &= (tl.load(members + pair * capacity + slot, mask=slot < wanted, other=0) != 0)[:, None]
        source = (address.to(tl.pointer_type(tl.int32)) + start)[:, None] + word[None, :]
        # Rows are whole multiples of 16 bytes, which the compiler cannot see in an address that comes from memory.
        source = tl.multiple_of(tl.max_contiguous(source, [1, 4]), [1, 16])
        target = out + ((part[None, :] * pairs + pair) * capacity + slot[:, None]) * width + (word - part * width)[None, :]
        target = tl.multiple_of(tl.max_contiguous(target, [1, 4]), [1, 16])
        tl.store(target, tl.load(source, mask=inside), mask=inside)


def union_rows(indices: Tensor, blocks: Tensor, tokens: Tensor, sink: int, local: int, shared: bool, union: GroupRows) -> None:
    """See :func:`fathom_eval.kernels.rows.union_rows`."""
    rows, heads, group, count = indices.shape
    tail = union.tail_members.shape[-1]
    slots = triton.next_power_of_2(count)
    padded = triton.next_power_of_2(group)
    _union_rows[(rows * heads,)](
        indices,
        blocks,
        tokens,
        union.rows,
        union.members,
        union.tail_members,
        union.counts,
        heads,
        count,
        union.rows.shape[-1],
        tail,
        sink,
        local,
        GROUP=group,
        PADDED=padded,
        SLOTS=slots,
        STEPS=count.bit_length(),
        SINK=triton.next_power_of_2(max(sink, 1)),
        TAIL=triton.next_power_of_2(max(tail, local, 1)),
        SHARED=shared,
        num_warps=min(32, max(1, padded * slots // 64)),
    )


def fetch_rows(
    table: SegmentTable, union: GroupRows, out: Tensor, first_part: int, members_only: bool, programs: int | None = None
) -> None:
    """See :func:`fathom_eval.kernels.rows.fetch_rows`."""
    example = table.example
    rows, heads, capacity = union.rows.shape
    _, tokens, stored, width = example.shape
    words, parts = width * example.element_size() // 4, out.shape[0]
    pieces = triton.cdiv(capacity, ROWS)
    limits = [limit for limit in (PROGRAMS["device" if example.is_cuda else "host"], programs) if limit is not None]
    most = max(1, min(limits) // (rows * heads)) if limits else pieces
    _fetch_rows[(rows * heads, min(pieces, most))](
        table.addresses,
        union.rows,
        union.members,
        union.counts,
        out.view(torch.int32),
        rows * heads,
        heads,
        capacity,
        table.capacity,
        tokens,
        words,
        stored * words,
        first_part * words,
        PARTS=parts,
        WORDS=triton.next_power_of_2(parts * words),
        ROWS=ROWS,
        MEMBERS=members_only,
    )
