"""The 4-bit channel scan on the GPU, built and tuned as the plane scan is, so that the two can be compared."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fathom_eval.kernels.scan.triton import INTERPRETED, byte_to_float, half_of_pair
from fathom_eval.kernels.segments import SegmentTable

BLOCKS = {"device": 16, "host": 64}
"""Blocks of a tile (64 tokens each) by where the segments lie, chosen as for the plane scan."""

TOKENS = 32
"""Tokens whose sums a thread keeps, for four query heads: 128 registers."""

STAGES = 4
"""Channels whose words are on their way at once."""

REGISTERS = 168
"""Registers a thread may use with up to four heads: without spilling, three warps a scheduler in place of two."""

PROGRAMS: dict[str, int | None] = {"device": None, "host": 132}
"""Programs of a launch, as for the plane scan."""


@triton.jit
def _scan_nibbles(
    query,
    channels,
    nibble_table,
    scale_table,
    blocks,
    scores,
    maxima,
    scaling,
    pairs,
    heads,
    head_dim,
    count,
    segments,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCKS: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    tiles: tl.constexpr = CAPACITY // BLOCKS
    # Axes: query head, nibble of a byte, byte of a word, word of a block, block. Blocks lie last, so that a thread owns whole words.
    block = tl.arange(0, BLOCKS)[None, None, None, None, :]
    word = tl.arange(0, 8)[None, None, None, :, None]
    byte = tl.arange(0, 4)[None, None, :, None, None]
    odd = tl.arange(0, 2)[None, :, None, None, None]
    member = tl.arange(0, PADDED)[:, None, None, None, None]
    # A program walks over tiles of all heads, so that a launch can be smaller than its work.
    for index in range(tl.program_id(0), pairs * segments * tiles, tl.num_programs(0)):
        tile = index % (segments * tiles)
        pair = index // (segments * tiles)
        row = pair // heads
        head = (pair % heads).to(tl.int64)
        segment = tile // tiles
        first = (tile % tiles) * BLOCKS
        begin = segment * CAPACITY + first
        sealed = tl.load(blocks + row)
        if begin < sealed:
            nibble_base = (tl.load(nibble_table + row * segments + segment) * 16).to(tl.pointer_type(tl.uint32))
            nibble_base += head * head_dim * (8 * CAPACITY) + first
            scale_base = (tl.load(scale_table + row * segments + segment) * 16).to(tl.pointer_type(tl.uint32))
            scale_base += head * head_dim * (CAPACITY // 2) + first // 2
            queries = query + pair.to(tl.int64) * GROUP * head_dim
            slots = channels + pair * count

            total = tl.zeros([PADDED, 2, 4, 8, BLOCKS], dtype=tl.float32)
            constant = tl.zeros([PADDED, 1, 1, 1, BLOCKS], dtype=tl.float32)
            for slot in tl.range(0, count, num_stages=STAGES):
                channel = tl.load(slots + slot)
                words = tl.load(nibble_base + channel * (8 * CAPACITY) + word * CAPACITY + block)
                pair_of_scales = tl.load(scale_base + channel * (CAPACITY // 2) + block // 2)
                values = tl.load(queries + member * head_dim + channel, mask=member < GROUP, other=0.0).to(tl.float32)
                packed = tl.where(odd == 0, words << 3, words >> 1) & 0x78787878
                # With x = (1 + c / 16) / 2 the value of code c is 4a·(x - 3/4 + 1/64).
                coefficient = values * (half_of_pair(pair_of_scales, block & 1) * (4 * scaling))
                constant += coefficient * (1 / 64 - 0.75)
                total += coefficient * byte_to_float(packed, byte, PTX)
            total += constant

            maximum = tl.max(tl.max(tl.max(total, axis=1), axis=1), axis=1)
            group = tl.arange(0, PADDED)[:, None]
            out = (pair.to(tl.int64) * GROUP + group) * (segments * CAPACITY)
            place = begin + tl.arange(0, BLOCKS)[None, :]
            tl.store(maxima + out + place, maximum.to(maxima.dtype.element_ty), mask=(group < GROUP) & (place < sealed))
            ordered = tl.permute(total.to(scores.dtype.element_ty), [0, 4, 3, 2, 1]).reshape([PADDED, BLOCKS * 64])
            token = begin * 64 + tl.arange(0, BLOCKS * 64)[None, :]
            tl.store(scores + out * 64 + token, ordered, mask=(group < GROUP) & (token < sealed * 64))


def scan_nibbles(
    query: Tensor,
    channels: Tensor,
    nibbles: SegmentTable,
    scales: SegmentTable,
    blocks: Tensor,
    scores: Tensor,
    maxima: Tensor,
    scaling: float,
) -> None:
    """See :func:`fathom_eval.kernels.nibble.scan_nibbles`."""
    rows, heads, group, head_dim = query.shape
    capacity = nibbles.example.shape[-1]
    padded = triton.next_power_of_2(group)
    place = "device" if nibbles.example.is_cuda else "host"
    size = min(BLOCKS[place], capacity)
    tiles = rows * heads * nibbles.capacity * capacity // size
    _scan_nibbles[(min(tiles, PROGRAMS[place] or tiles),)](
        query,
        channels,
        nibbles.addresses,
        scales.addresses,
        blocks,
        scores,
        maxima,
        scaling,
        rows * heads,
        heads,
        head_dim,
        channels.shape[-1],
        nibbles.capacity,
        GROUP=group,
        PADDED=padded,
        CAPACITY=capacity,
        BLOCKS=size,
        STAGES=STAGES,
        PTX=not INTERPRETED,
        num_warps=max(1, 2 * size // TOKENS * max(1, padded // 4)),
        maxnreg=REGISTERS if padded <= 4 else None,
    )
