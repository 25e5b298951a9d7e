"""Exact top-k with a range and a count of its own for every row, on the GPU in two launches.

The largest of a short span of tokens, for every span: as many of them as are wanted reach a bound, so at least as many tokens do, and few
more as a rule. One program a query head finds that bound, sets aside what reaches it and ranks only that.
"""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom_eval.kernels.selecting import count_reaching, kth_largest, ordered_bits, raise_threshold

MAXIMA = 16384
"""Spans of a query head that are ranked at most."""

TILE = 4096
"""Tokens that one program looks at together."""

PIECE = 256
"""Entries of a list that one program compares with the other lists of its group."""


@triton.jit
def _keys(values, inside):
    """Ordered bits of scores, 0 where there is none; both zeros are one number, and what is no number is above all, whatever its bits."""
    numbers = tl.where(values == values, ordered_bits(tl.where(values == 0.0, 0.0, values)), 0xFFFFFFFF)
    return tl.where(inside, numbers, 0)


@triton.jit
def _line_start(line, heads, row_stride, head_stride, member_stride, GROUP: tl.constexpr):
    pair = line // GROUP
    return (pair // heads) * row_stride + (pair % heads) * head_stride + (line % GROUP) * member_stride


@triton.jit(do_not_specialize=["spans"])
def _span_maxima(
    scores,
    starts,
    stops,
    maxima,
    heads,
    row_stride,
    head_stride,
    member_stride,
    spans,
    capacity,
    GROUP: tl.constexpr,
    SPAN: tl.constexpr,
    SPANS: tl.constexpr,
):
    line = tl.program_id(1).to(tl.int64)
    row = line // (heads * GROUP)
    start = tl.load(starts + row)
    stop = tl.load(stops + row)
    scores += _line_start(line, heads, row_stride, head_stride, member_stride, GROUP)
    span = tl.program_id(0) * SPANS + tl.arange(0, SPANS)
    token = span[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    inside = (token >= start) & (token < stop)
    keys = _keys(tl.load(scores + token, mask=inside, other=0.0), inside)
    tl.store(maxima + line * capacity + span, tl.max(keys, axis=1).to(tl.int32, bitcast=True), mask=span < spans)


@triton.jit
def _load_keys(scores, near, place, size, NEAR: tl.constexpr):
    """Keys and positions of the entries that are ranked: of the tokens set aside, or of all."""
    inside = place < size
    position = tl.load(near + place, mask=inside, other=0) if NEAR else place
    return _keys(tl.load(scores + position, mask=inside, other=0.0), inside), position


@triton.jit(do_not_specialize=["spans"])
def _choose_tokens(
    scores,
    maxima,
    near,
    lists,
    starts,
    stops,
    counts,
    heads,
    row_stride,
    head_stride,
    member_stride,
    spans,
    capacity,
    near_capacity,
    width,
    GROUP: tl.constexpr,
    NEAR: tl.constexpr,
    MAXIMA: tl.constexpr,
    TILE: tl.constexpr,
    LISTED: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = line // (heads * GROUP)
    count = tl.load(counts + row)
    stop = tl.load(stops + row)
    scores += _line_start(line, heads, row_stride, head_stride, member_stride, GROUP)
    near += line * near_capacity
    lists += line * width
    offset = tl.arange(0, TILE)
    size = stop
    if NEAR:
        start = tl.load(starts + row)
        span = tl.arange(0, MAXIMA)
        largest = tl.load(maxima + line * capacity + span, mask=span < spans, other=0).to(tl.uint32, bitcast=True)
        bound = tl.maximum(kth_largest(largest, count, 32), 1)
        size = tl.zeros([], dtype=tl.int32)
        for begin in range(start, stop, TILE):
            token = begin + offset
            inside = token < stop
            kept = _keys(tl.load(scores + token, mask=inside, other=0.0), inside) >= bound
            tl.store(near + size + tl.cumsum(kept.to(tl.int32), 0) - 1, token, mask=kept)
            size += tl.sum(kept.to(tl.int32))
        # Other threads of this program read what was just written.
        tl.debug_barrier()

    threshold = tl.zeros([], dtype=tl.uint32)
    if size <= TILE:
        keys, _ = _load_keys(scores, near, offset, size, NEAR)
        threshold = kth_largest(keys, count, 32)
    else:
        for step in range(16):
            shift = 30 - 2 * step
            reached = tl.zeros([], dtype=tl.int64)
            for begin in range(0, size, TILE):
                keys, _ = _load_keys(scores, near, begin + offset, size, NEAR)
                reached += count_reaching(keys, threshold, shift)
            threshold = raise_threshold(threshold, reached, shift, count)
    above = tl.zeros([], dtype=tl.int32)
    for begin in range(0, size, TILE):
        keys, _ = _load_keys(scores, near, begin + offset, size, NEAR)
        above += tl.sum((keys > threshold).to(tl.int32))
    found = tl.zeros([], dtype=tl.int32)
    wanted = count - above
    for begin in range(0, size, TILE):
        keys, token = _load_keys(scores, near, begin + offset, size, NEAR)
        level = (keys == threshold) & (keys > 0)
        kept = (keys > threshold) | (level & (tl.cumsum(level.to(tl.int32), 0) <= wanted))
        if LISTED:
            # The list is narrowed in place: what is written lies before what later tiles read.
            token = tl.load(lists + token, mask=kept, other=0)
            tl.debug_barrier()
        tl.store(lists + found + tl.cumsum(kept.to(tl.int32), 0) - 1, token, mask=kept)
        found += tl.sum(kept.to(tl.int32))
        wanted -= tl.sum(level.to(tl.int32))
    for begin in range(0, width, TILE):
        place = begin + offset
        tl.store(lists + place, 0x7FFFFFFF, mask=(place >= found) & (place < width))


@triton.jit
def _holds(entries, token, count, STEPS: tl.constexpr):
    """Whether each token is in an ascending list of ``count`` entries."""
    low = tl.zeros_like(token)
    size = tl.zeros_like(token) + count
    for _ in tl.static_range(STEPS):
        half = size // 2
        right = tl.load(entries + low + half, mask=size > 0, other=0x7FFFFFFF) < token
        low = tl.where(right, low + half + 1, low)
        size = tl.where(right, size - half - 1, half)
    return tl.load(entries + low, mask=low < count, other=0x7FFFFFFF) == token


@triton.jit
def _count_rows(lists, counts, out, heads, width, row_stride, GROUP: tl.constexpr, PIECE: tl.constexpr, STEPS: tl.constexpr):
    line = tl.program_id(1).to(tl.int64)
    pair = line // GROUP
    member = line % GROUP
    count = tl.load(counts + pair // heads)
    if tl.program_id(0) * PIECE >= count:
        return
    place = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    token = tl.load(lists + line * width + place, mask=place < count, other=0x7FFFFFFF)
    fresh = token < 0x7FFFFFFF
    # A token counts in the list of the first head that selected it.
    for other in tl.static_range(GROUP - 1):
        if other < member:
            fresh = fresh & (_holds(lists + (pair * GROUP + other) * width, token, count, STEPS) == 0)
    tl.atomic_add(out + (pair // heads) * row_stride + pair % heads, tl.sum(fresh.to(tl.int32)))


def choose_tokens(scores: Tensor, starts: Tensor, stops: Tensor, counts: Tensor, most: int) -> Tensor:
    """See :func:`fathom_eval.kernels.choose.choose_tokens`."""
    rows, heads, group, tokens = scores.shape
    lines = rows * heads * group
    span = 4
    while triton.cdiv(tokens, span) > MAXIMA:
        span *= 2
    spans = triton.cdiv(tokens, span)
    padded = triton.next_power_of_2(spans)
    maxima = torch.empty(lines, padded, dtype=torch.int32, device=scores.device)
    near_capacity = triton.cdiv(tokens, 16) * 16
    near = torch.empty(lines, near_capacity, dtype=torch.int32, device=scores.device)
    lists = torch.empty(rows, heads, group, most, dtype=torch.int32, device=scores.device)
    block = min(padded, max(1, TILE // span))
    _span_maxima[(triton.cdiv(spans, block), lines)](
        scores, starts, stops, maxima, heads, *scores.stride()[:3], spans, padded, GROUP=group, SPAN=span, SPANS=block, num_warps=8
    )
    tile = min(TILE, triton.next_power_of_2(tokens))
    _choose_tokens[(lines,)](
        scores,
        maxima,
        near,
        lists,
        starts,
        stops,
        counts,
        heads,
        *scores.stride()[:3],
        spans,
        padded,
        near_capacity,
        most,
        GROUP=group,
        NEAR=True,
        MAXIMA=padded,
        TILE=tile,
        LISTED=False,
        num_warps=16,
    )
    return lists


def narrow_lists(scores: Tensor, lists: Tensor, fetched: Tensor, counts: Tensor) -> None:
    """Keep each list's ``counts`` best of its ``fetched`` entries, in place. ``scores``: fp32 of the lists' shape, contiguous."""
    rows, heads, group, width = lists.shape
    _choose_tokens[(rows * heads * group,)](
        scores,
        lists,
        lists,
        lists,
        fetched,
        fetched,
        counts,
        heads,
        *scores.stride()[:3],
        0,
        0,
        0,
        width,
        GROUP=group,
        NEAR=False,
        MAXIMA=1,
        TILE=min(TILE, triton.next_power_of_2(width)),
        LISTED=True,
        num_warps=8,
    )


def count_rows(lists: Tensor, counts: Tensor, most: int, out: Tensor) -> None:
    """See :func:`fathom_eval.kernels.choose.count_rows`."""
    rows, heads, group, width = lists.shape
    _count_rows[(triton.cdiv(most, PIECE), rows * heads * group)](
        lists, counts, out, heads, width, out.stride(0), GROUP=group, PIECE=PIECE, STEPS=width.bit_length(), num_warps=4
    )
