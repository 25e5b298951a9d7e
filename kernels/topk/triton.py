"""Exact top-k on the GPU in two small launches: blocks by their maxima, then tokens inside those blocks."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fathom_eval.kernels.selecting import (
    count_reaching,
    keep_largest,
    kth_largest,
    kth_largest_of_rows,
    ordered_bits,
    places_in_rows,
    raise_threshold,
)
from fathom_eval.kernels.topk import looked_at

CHUNK = 8192
"""Tokens of the chosen blocks that are looked at together: 16 a thread."""

TILE = 2048
"""Candidates that a step of the search looks at together; as many as there are, as a rule."""

ROW = 16
"""Block maxima that a thread ranks."""

RANKED = 2**14
"""Blocks that are ranked at once, 1M tokens: of more, the places where they are put take more shared memory than a program can have."""


@triton.jit
def _candidates(tokens, sink, local):
    """The tokens that compete, ``[start, stop)``."""
    stop = tl.maximum(tokens - local, 0)
    return tl.minimum(sink, stop), stop


@triton.jit
def _block_keys(maxima, block, sealed, start, stop, BITS: tl.constexpr):
    """What blocks are ranked by; 0 for those without a token that competes."""
    inside = (block < sealed) & (block * 64 < stop) & (block * 64 + 64 > start)
    keys = ordered_bits(tl.load(maxima + block, mask=inside, other=0.0))
    # A block with tokens that do not compete may owe its maximum to them: it is taken in any case, beside the others.
    edge = (block * 64 < start) | (block * 64 + 64 > stop)
    top: tl.constexpr = (1 << BITS) - 1
    return tl.where(inside, tl.where(edge, top, keys), 0)


@triton.jit
def _top_blocks(
    maxima,
    blocks,
    tokens,
    scratch,
    lines,
    capacity,
    width,
    sink,
    local,
    count,
    ROWS: tl.constexpr,
    ROW: tl.constexpr,
    SLOTS: tl.constexpr,
    BITS: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = line // lines
    sealed = tl.load(blocks + row)
    start, stop = _candidates(tl.load(tokens + row), sink, local)
    block = tl.arange(0, ROWS)[:, None] * ROW + tl.arange(0, ROW)[None, :]
    keys = _block_keys(maxima + line * capacity, block, sealed, start, stop, BITS)
    wanted = count + 2
    threshold = kth_largest_of_rows(keys, wanted, BITS)
    above = keys > threshold
    level = (keys == threshold) & (keys > 0)
    more = wanted - tl.sum(tl.sum(above.to(tl.int32), axis=1), axis=0)
    # Of equal maxima the first are kept.
    rank, _ = places_in_rows(level)
    kept = above | (level & (rank < more))
    place, held = places_in_rows(kept)
    scratch += line * (1 + 129 * width)
    tl.store(scratch, threshold.to(tl.int32, bitcast=True))
    chosen = scratch + 1
    tl.store(chosen + place, block, mask=kept)
    slot = tl.arange(0, SLOTS)
    tl.store(chosen + slot, -1, mask=(slot >= tl.sum(held, axis=0)) & (slot < wanted))


@triton.jit
def _top_many_blocks(
    maxima,
    blocks,
    tokens,
    scratch,
    lines,
    capacity,
    width,
    sink,
    local,
    count,
    RANKED: tl.constexpr,
    SLOTS: tl.constexpr,
    BITS: tl.constexpr,
):
    """:func:`_top_blocks` of more blocks than are ranked at once: their maxima are read anew for every two bits of the threshold."""
    line = tl.program_id(0).to(tl.int64)
    row = line // lines
    sealed = tl.load(blocks + row)
    start, stop = _candidates(tl.load(tokens + row), sink, local)
    maxima += line * capacity
    offset = tl.arange(0, RANKED)
    wanted = count + 2
    threshold = tl.zeros([], dtype=tl.uint32)
    for step in range(BITS // 2):
        shift = BITS - 2 - 2 * step
        reached = tl.zeros([], dtype=tl.int64)
        for begin in range(0, sealed, RANKED):
            reached += count_reaching(_block_keys(maxima, begin + offset, sealed, start, stop, BITS), threshold, shift)
        threshold = raise_threshold(threshold, reached, shift, wanted)
    above = tl.zeros([], dtype=tl.int32)
    for begin in range(0, sealed, RANKED):
        keys = _block_keys(maxima, begin + offset, sealed, start, stop, BITS)
        above += tl.sum((keys > threshold).to(tl.int32))
    scratch += line * (1 + 129 * width)
    tl.store(scratch, threshold.to(tl.int32, bitcast=True))
    chosen = scratch + 1
    found = tl.zeros([], dtype=tl.int32)
    more = wanted - above
    for begin in range(0, sealed, RANKED):
        keys = _block_keys(maxima, begin + offset, sealed, start, stop, BITS)
        level = (keys == threshold) & (keys > 0)
        kept = (keys > threshold) | (level & (tl.cumsum(level.to(tl.int32), 0) <= more))
        tl.store(chosen + found + tl.cumsum(kept.to(tl.int32), 0) - 1, begin + offset, mask=kept)
        found += tl.sum(kept.to(tl.int32))
        more -= tl.sum(level.to(tl.int32))
    slot = tl.arange(0, SLOTS)
    tl.store(chosen + slot, -1, mask=(slot >= found) & (slot < wanted))


@triton.jit
def _search_few(near_keys, near_tokens, near, indices, count, TILE: tl.constexpr, BITS: tl.constexpr):
    """:func:`_search_many` of keys that are looked at in one step and stay in registers."""
    offset = tl.arange(0, TILE)
    keys = tl.load(near_keys + offset, mask=offset < near, other=0).to(tl.uint32, bitcast=True)
    token = tl.load(near_tokens + offset, mask=offset < near, other=0)
    kept = keep_largest(keys, kth_largest(keys, count, BITS), count)
    tl.store(indices + tl.cumsum(kept.to(tl.int32), 0) - 1, token, mask=kept)
    return tl.sum(kept.to(tl.int32))


@triton.jit
def _search_many(near_keys, near_tokens, near, indices, count, TILE: tl.constexpr, BITS: tl.constexpr):
    """Write the tokens of the ``count`` largest of more keys than one step looks at, in their order; how many there were."""
    offset = tl.arange(0, TILE)
    threshold = tl.zeros([], dtype=tl.uint32)
    for step in range(BITS // 2):
        shift = BITS - 2 - 2 * step
        reached = tl.zeros([], dtype=tl.int64)
        for begin in range(0, near, TILE):
            keys = tl.load(near_keys + begin + offset, mask=begin + offset < near, other=0).to(tl.uint32, bitcast=True)
            reached += count_reaching(keys, threshold, shift)
        threshold = raise_threshold(threshold, reached, shift, count)
    above = tl.zeros([], dtype=tl.int32)
    for begin in range(0, near, TILE):
        keys = tl.load(near_keys + begin + offset, mask=begin + offset < near, other=0).to(tl.uint32, bitcast=True)
        above += tl.sum((keys > threshold).to(tl.int32))
    found = tl.zeros([], dtype=tl.int32)
    wanted = count - above
    for begin in range(0, near, TILE):
        keys = tl.load(near_keys + begin + offset, mask=begin + offset < near, other=0).to(tl.uint32, bitcast=True)
        token = tl.load(near_tokens + begin + offset, mask=begin + offset < near, other=0)
        level = (keys == threshold) & (keys > 0)
        kept = (keys > threshold) | (level & (tl.cumsum(level.to(tl.int32), 0) <= wanted))
        tl.store(indices + found + tl.cumsum(kept.to(tl.int32), 0) - 1, token, mask=kept)
        found += tl.sum(kept.to(tl.int32))
        wanted -= tl.sum(level.to(tl.int32))
    return found


@triton.jit
def _top_tokens(
    scores,
    tail_scores,
    blocks,
    tokens,
    scratch,
    indices,
    lines,
    capacity,
    width,
    tail,
    sink,
    local,
    count,
    SPAN: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    SLOTS: tl.constexpr,
    BITS: tl.constexpr,
    TAIL: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    row = line // lines
    sealed = tl.load(blocks + row)
    start, stop = _candidates(tl.load(tokens + row), sink, local)
    scores += line * capacity
    tail_scores += line * tail
    scratch += line * (1 + 129 * width)
    chosen = scratch + 1
    near_keys = chosen + width
    near_tokens = near_keys + 64 * width
    indices += line * count

    # The blocks' threshold bounds the tokens' from below. What reaches it is set aside: a few more than are wanted, as a rule.
    bound = tl.load(scratch).to(tl.uint32, bitcast=True)
    near = tl.zeros([], dtype=tl.int32)
    slot = tl.arange(0, CHUNK // 64)
    for begin in range(0, count + 2, CHUNK // 64):
        block = tl.load(chosen + begin + slot, mask=begin + slot < count + 2, other=-1)
        token = block[:, None] * 64 + tl.arange(0, 64)[None, :]
        # A chosen block is in the store as a whole, so that its scores come in wide loads.
        stored = (block >= 0)[:, None]
        values = tl.load(scores + (token if SPAN == 1 else token // SPAN), mask=stored, other=0.0)
        keys = tl.where(stored & (token >= start) & (token < stop), ordered_bits(values), 0)
        kept = (keys >= bound) & (keys > 0)
        place, held = places_in_rows(kept)
        tl.store(near_keys + near + place, keys.to(tl.int32, bitcast=True), mask=kept)
        tl.store(near_tokens + near + place, token, mask=kept)
        near += tl.sum(held, axis=0)
    if TAIL:
        behind = tl.arange(0, TAIL)
        token = sealed * 64 + behind
        competes = (behind < tail) & (token >= start) & (token < stop)
        keys = tl.where(competes, ordered_bits(tl.load(tail_scores + behind, mask=competes, other=0.0)), 0)
        kept = (keys >= bound) & (keys > 0)
        place = near + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(near_keys + place, keys.to(tl.int32, bitcast=True), mask=kept)
        tl.store(near_tokens + place, token, mask=kept)
        near += tl.sum(kept.to(tl.int32))
    # Other threads of this program read what was just written.
    tl.debug_barrier()

    found = tl.zeros([], dtype=tl.int32)
    if near <= TILE:
        found += _search_few(near_keys, near_tokens, near, indices, count, TILE, BITS)
    else:
        found += _search_many(near_keys, near_tokens, near, indices, count, TILE, BITS)
    slot = tl.arange(0, SLOTS)
    tl.store(indices + slot, 0x7FFFFFFF, mask=(slot >= found) & (slot < count))


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
    """See :func:`fathom_eval.kernels.topk.top_tokens`."""
    rows, heads, group, count = indices.shape
    capacity = maxima.shape[-1]
    tail = 0 if tail_scores is None else tail_scores.shape[-1]
    width = looked_at(count, tail)
    bits = 8 * scores.element_size()
    ranks = triton.next_power_of_2(capacity)
    slots = triton.next_power_of_2(count + 2)
    lists = (maxima, blocks, tokens, scratch, heads * group, capacity, width, sink, local, count)
    if ranks <= RANKED:
        _top_blocks[(rows * heads * group,)](
            *lists,
            ROWS=triton.cdiv(ranks, ROW),
            ROW=min(ROW, ranks),
            SLOTS=slots,
            BITS=bits,
            num_warps=min(32, max(1, ranks // 512)),
        )
    else:
        _top_many_blocks[(rows * heads * group,)](*lists, RANKED=RANKED // 2, SLOTS=slots, BITS=bits, num_warps=32)
    chunk = min(CHUNK, triton.next_power_of_2((count + 2) * 64))
    _top_tokens[(rows * heads * group,)](
        scores,
        scores if tail_scores is None else tail_scores,
        blocks,
        tokens,
        scratch,
        indices,
        heads * group,
        scores.shape[-1],
        width,
        tail,
        sink,
        local,
        count,
        SPAN=capacity * 64 // scores.shape[-1],
        CHUNK=chunk,
        TILE=min(TILE, chunk),
        SLOTS=triton.next_power_of_2(count),
        BITS=bits,
        TAIL=triton.next_power_of_2(tail) if tail else 0,
        num_warps=max(1, chunk // 512),
    )
