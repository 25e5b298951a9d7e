"""Device side of the handover: a list into host memory, a wait that ends in any case, and a copy of contiguous rows."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom_eval.kernels import handover
from fathom_eval.kernels.handover import DONE, FAILED, LINE, REQUEST, TOTAL, Mailbox
from fathom_eval.kernels.rows import GroupRows
from fathom_eval.kernels.segments import SegmentTable

ROWS = 8
"""Rows that a program copies at once."""

LISTED = 1024
"""Entries that a program lists at once."""


@triton.jit
def _list_rows(
    table,
    rows,
    counts,
    wanted,
    total,
    pairs,
    heads,
    capacity,
    segments,
    segment_tokens,
    units,
    PAIRS: tl.constexpr,
    LISTED: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    other = tl.arange(0, PAIRS)
    every = tl.load(counts + other, mask=other < pairs, other=0)
    if pair == 0:
        tl.store(total, tl.sum(every, axis=0).to(tl.int64))
    count = tl.load(counts + pair)
    wanted += tl.sum(tl.where(other < pair, every, 0), axis=0)
    for begin in range(tl.program_id(1) * LISTED, count, tl.num_programs(1) * LISTED):
        slot = begin + tl.arange(0, LISTED)
        inside = slot < count
        token = tl.load(rows + pair * capacity + slot, mask=inside, other=0)
        address = tl.load(table + (pair // heads) * segments + token // segment_tokens, mask=inside, other=0)
        number = address // units + (pair % heads) * segment_tokens + token % segment_tokens - 1
        tl.store(wanted + slot, number, mask=inside)


@triton.jit
def _await_rows(
    flags,
    ticket,
    given_up,
    patience,
    LINE: tl.constexpr,
    REQUEST: tl.constexpr,
    DONE: tl.constexpr,
    FAILED: tl.constexpr,
):
    # The list was written by the kernel before; this makes it visible to the host before the flag is. An atomic on the device's own memory,
    # since one on the host's would depend on what the link can do.
    mine = tl.atomic_add(ticket, 1, sem="acq_rel", scope="sys") + 1
    tl.store(flags + REQUEST * LINE, mine, cache_modifier=".wt")
    looks = tl.load(given_up) * patience
    answered = tl.load(flags + DONE * LINE, volatile=True)
    while (answered >= 0) & (answered < mine) & (looks < patience):
        answered = tl.load(flags + DONE * LINE, volatile=True)
        looks += 1
    late = (answered < mine).to(tl.int32)
    # Also orders the answer before what later kernels read.
    tl.atomic_max(given_up, late, sem="acq_rel", scope="sys")
    tl.store(flags + FAILED * LINE, mine, mask=late != 0)


@triton.jit
def _take_rows(
    staged,
    counts,
    out,
    pairs,
    capacity,
    width,
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    ROWS: tl.constexpr,
    PAIRS: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    other = tl.arange(0, PAIRS)
    first = tl.sum(tl.load(counts + other, mask=other < pair, other=0), axis=0)
    count = tl.load(counts + pair)
    word = tl.arange(0, WORDS)
    part = word // width
    for begin in range(tl.program_id(1) * ROWS, count, tl.num_programs(1) * ROWS):
        slot = begin + tl.arange(0, ROWS)
        inside = (slot < count)[:, None] & (word < PARTS * width)[None, :]
        source = staged + (first + slot).to(tl.int64)[:, None] * (PARTS * width) + word[None, :]
        source = tl.multiple_of(tl.max_contiguous(source, [1, 4]), [1, 16])
        target = out + ((part[None, :] * pairs + pair) * capacity + slot[:, None]) * width + (word - part * width)[None, :]
        target = tl.multiple_of(tl.max_contiguous(target, [1, 4]), [1, 16])
        # The host writes the buffer anew in every layer: nothing of it is worth keeping in a cache.
        tl.store(target, tl.load(source, mask=inside, cache_modifier=".cg"), mask=inside)


def list_rows(table: SegmentTable, union: GroupRows, mailbox: Mailbox, units: int) -> None:
    """See :func:`fathom_eval.kernels.handover.list_rows`."""
    rows, heads, capacity = union.rows.shape
    pairs = rows * heads
    _list_rows[(pairs, triton.cdiv(capacity, LISTED))](
        table.addresses,
        union.rows,
        union.counts,
        mailbox.wanted,
        mailbox.flags[TOTAL],
        pairs,
        heads,
        capacity,
        table.capacity,
        table.example.shape[1],
        units,
        PAIRS=triton.next_power_of_2(pairs),
        LISTED=LISTED,
    )


def await_rows(mailbox: Mailbox) -> None:
    """See :func:`fathom_eval.kernels.handover.await_rows`."""
    _await_rows[(1,)](
        mailbox.flags,
        mailbox.ticket,
        mailbox.given_up,
        handover.PATIENCE,
        LINE=LINE,
        REQUEST=REQUEST,
        DONE=DONE,
        FAILED=FAILED,
        num_warps=1,
    )


def take_rows(mailbox: Mailbox, union: GroupRows, out: Tensor) -> None:
    """See :func:`fathom_eval.kernels.handover.take_rows`."""
    parts, rows, heads, capacity, width = out.shape
    words, pairs = width * out.element_size() // 4, rows * heads
    _take_rows[(pairs, triton.cdiv(capacity, ROWS))](
        mailbox.rows.view(torch.int32),
        union.counts,
        out.view(torch.int32),
        pairs,
        capacity,
        words,
        PARTS=parts,
        WORDS=triton.next_power_of_2(parts * words),
        ROWS=ROWS,
        PAIRS=triton.next_power_of_2(pairs),
    )
