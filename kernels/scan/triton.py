"""The plane scan on the GPU, over segments in HBM or in pinned host memory."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fathom_eval.kernels.plan import ReadPlan
from fathom_eval.kernels.segments import SegmentTable

WORDS = {"device": 32, "host": 128}
"""32-bit words of a tile (32 tokens each) by where the segments lie: on an H200 one warp was fastest in HBM; four reach the link's rate."""

TOKENS = 32
"""Tokens whose sums a thread keeps, for four query heads: 128 registers."""

STAGES = 4
"""Channels whose words are on their way at once."""

REGISTERS = 168
"""Registers a thread may use with up to four heads: without spilling, three warps a scheduler in place of two."""

PROGRAMS: dict[str, int | None] = {"device": None, "host": 132}
"""Programs of a launch by where the segments lie, None for one a tile. Host memory needs few to be read at the link's rate, and those few
leave room on the GPU for what runs beside the scan."""

INTERPRETED = triton.knobs.runtime.interpret
"""Whether the kernels run in Triton's interpreter, which knows no PTX."""


@triton.jit
def byte_to_float(packed, byte, PTX: tl.constexpr):
    """(1 + b / 128) / 2 for byte b < 128 of a packed word: its seven bits lead the mantissa of a float between 1/2 and 1."""
    if PTX:
        # One byte permute places the byte below 0x3F; written with shifts it takes two instructions.
        selector = 0x7044 | (byte << 8)
        value = tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=f,r,r,r", [packed, 0x3F000000, selector], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        value = ((((packed >> (byte * 8)) & 0xFF) << 16) | 0x3F000000).to(tl.float32, bitcast=True)
    return value


@triton.jit
def place_bit(word, shift, plane: tl.constexpr):
    """Bits ``shift + 8y`` of the words (y = 0..3), moved to bit ``6 - plane`` of byte y; the rest is zero."""
    turned = (word << (6 - plane)) | (word >> (26 + plane))
    turned = (turned >> shift) | (turned << ((32 - shift) & 31))
    return turned & (0x40404040 >> plane)


@triton.jit
def half_of_pair(pair, odd):
    """The even or odd fp16 of two in a 32-bit word, as fp32."""
    return ((pair >> (odd * 16)) & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _read_slots(
    total,
    constant,
    begin,
    end,
    four,
    query,
    channels,
    plane_base,
    scale_base,
    scaling,
    head_dim,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    CAPACITY: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    """Add the channels of slots ``begin`` to ``end``, read ``DEPTH`` planes deep, to the sums ``[head, byte, bit, word]``."""
    # 32-bit words: word w of a segment holds tokens 32w to 32w + 31. They lie along the last axis, so that a thread owns whole words.
    word = tl.arange(0, WORDS)[None, None, None, :]
    shift = tl.arange(0, 8)[None, None, :, None]
    byte = tl.arange(0, 4)[None, :, None, None]
    member = tl.arange(0, PADDED)[:, None, None, None]
    for slot in tl.range(begin, end, num_stages=STAGES):
        channel = tl.load(channels + slot)
        pointer = plane_base + channel * (8 * CAPACITY) + word
        packed = place_bit(tl.load(pointer), shift, 0)
        if DEPTH > 1:
            packed |= place_bit(tl.load(pointer + 2 * CAPACITY), shift, 1)
        centre = 0.5 ** (DEPTH + 2) - 0.75
        if DEPTH > 2:
            # Slots of four planes are few and share a loop with those of three: the last plane's bits are 0 where it is not read.
            packed |= place_bit(tl.load(pointer + 4 * CAPACITY), shift, 2)
            deepest = slot < four
            packed |= place_bit(tl.load(pointer + 6 * CAPACITY, mask=deepest & (word >= 0), other=0), shift, 3)
            centre = tl.where(deepest, 0.5**6 - 0.75, 0.5**5 - 0.75)
        pair_of_scales = tl.load(scale_base + channel * (CAPACITY // 2) + word // 4)
        values = tl.load(query + member * head_dim + channel, mask=member < GROUP, other=0.0).to(tl.float32)
        # With x = (1 + cell / 2^t) / 2 the mid-rise value is 4a·(x - 3/4 + 2^-(t + 2)).
        coefficient = values * (half_of_pair(pair_of_scales, (word // 2) & 1) * (4 * scaling))
        constant += coefficient * centre
        total += coefficient * byte_to_float(packed, byte, PTX)
    return total, constant


@triton.jit
def _scan_planes(
    query,
    channels,
    counts,
    plane_table,
    scale_table,
    blocks,
    scores,
    maxima,
    scaling,
    pairs,
    heads,
    head_dim,
    segments,
    GROUP: tl.constexpr,
    PADDED: tl.constexpr,
    CAPACITY: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    PTX: tl.constexpr,
):
    tiles: tl.constexpr = 2 * CAPACITY // WORDS
    # A program walks over tiles of all heads, so that a launch can be smaller than its work.
    for index in range(tl.program_id(0), pairs * segments * tiles, tl.num_programs(0)):
        tile = index % (segments * tiles)
        pair = index // (segments * tiles)
        row = pair // heads
        head = (pair % heads).to(tl.int64)
        segment = tile // tiles
        first = (tile % tiles) * WORDS
        begin = segment * 2 * CAPACITY + first
        words = 2 * tl.load(blocks + row)
        if begin < words:
            plane_base = (tl.load(plane_table + row * segments + segment) * 16).to(tl.pointer_type(tl.uint32))
            plane_base += head * head_dim * (8 * CAPACITY) + first
            scale_base = (tl.load(scale_table + row * segments + segment) * 16).to(tl.pointer_type(tl.uint32))
            scale_base += head * head_dim * (CAPACITY // 2) + first // 4
            queries = query + pair.to(tl.int64) * GROUP * head_dim
            slots = channels + pair * head_dim
            active = tl.load(counts + pair * 4)
            two = tl.load(counts + pair * 4 + 1)
            three = tl.load(counts + pair * 4 + 2)
            four = tl.load(counts + pair * 4 + 3)

            total = tl.zeros([PADDED, 4, 8, WORDS], dtype=tl.float32)
            constant = tl.zeros([PADDED, 1, 1, WORDS], dtype=tl.float32)
            # Slots are sorted by depth, so there is a loop for each, without a test in it.
            total, constant = _read_slots(
                total,
                constant,
                0,
                three,
                four,
                queries,
                slots,
                plane_base,
                scale_base,
                scaling,
                head_dim,
                3,
                GROUP,
                PADDED,
                CAPACITY,
                WORDS,
                STAGES,
                PTX,
            )
            total, constant = _read_slots(
                total,
                constant,
                three,
                two,
                four,
                queries,
                slots,
                plane_base,
                scale_base,
                scaling,
                head_dim,
                2,
                GROUP,
                PADDED,
                CAPACITY,
                WORDS,
                STAGES,
                PTX,
            )
            total, constant = _read_slots(
                total,
                constant,
                two,
                active,
                four,
                queries,
                slots,
                plane_base,
                scale_base,
                scaling,
                head_dim,
                1,
                GROUP,
                PADDED,
                CAPACITY,
                WORDS,
                STAGES,
                PTX,
            )
            total += constant

            maximum = tl.reshape(tl.max(tl.max(total, axis=2), axis=1), [PADDED, WORDS // 2, 2])
            maximum = tl.max(maximum, axis=2)
            group = tl.arange(0, PADDED)[:, None]
            out = (pair.to(tl.int64) * GROUP + group) * (segments * CAPACITY)
            block = begin // 2 + tl.arange(0, WORDS // 2)[None, :]
            tl.store(maxima + out + block, maximum.to(maxima.dtype.element_ty), mask=(group < GROUP) & (block < words // 2))
            ordered = tl.permute(total.to(scores.dtype.element_ty), [0, 3, 1, 2]).reshape([PADDED, WORDS * 32])
            token = begin * 32 + tl.arange(0, WORDS * 32)[None, :]
            tl.store(scores + out * 64 + token, ordered, mask=(group < GROUP) & (token < words * 32))


@triton.jit
def _score_tail(
    query,
    keys,
    offset,
    blocks,
    tokens,
    scores,
    scaling,
    heads,
    head_dim,
    tail,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    TOKENS: tl.constexpr,
    OFFSET: tl.constexpr,
):
    pair = tl.program_id(0).to(tl.int64)
    row = pair // heads
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    held = tl.load(tokens + row) - 64 * tl.load(blocks + row)
    channel = tl.arange(0, CHANNELS)
    inside = (token < tl.minimum(held, tail))[:, None] & (channel < head_dim)[None, :]
    key = tl.load(keys + (pair * tail + token[:, None]) * head_dim + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    for member in tl.static_range(GROUP):
        line = pair * GROUP + member
        value = tl.load(query + line * head_dim + channel, mask=channel < head_dim, other=0.0).to(tl.float32)
        found = tl.sum(key * value[None, :], axis=1)
        if OFFSET:
            found -= tl.load(offset + line)
        tl.store(scores + line * tail + token, (found * scaling).to(scores.dtype.element_ty), mask=token < tl.minimum(held, tail))


def scan_segments(
    query: Tensor,
    plan: ReadPlan,
    planes: SegmentTable,
    scales: SegmentTable,
    blocks: Tensor,
    scores: Tensor,
    maxima: Tensor,
    scaling: float,
) -> None:
    """See :func:`fathom_eval.kernels.scan.scan_segments`."""
    rows, heads, group, head_dim = query.shape
    capacity = planes.example.shape[-1]
    padded = triton.next_power_of_2(group)
    place = "device" if planes.example.is_cuda else "host"
    words = min(WORDS[place], 2 * capacity)
    # A larger group shares its words among more threads.
    warps = max(1, words // TOKENS * max(1, padded // 4))
    tiles = rows * heads * planes.capacity * 2 * capacity // words
    _scan_planes[(min(tiles, PROGRAMS[place] or tiles),)](
        query,
        plan.channels,
        plan.counts,
        planes.addresses,
        scales.addresses,
        blocks,
        scores,
        maxima,
        scaling,
        rows * heads,
        heads,
        head_dim,
        planes.capacity,
        GROUP=group,
        PADDED=padded,
        CAPACITY=capacity,
        WORDS=words,
        STAGES=STAGES,
        PTX=not INTERPRETED,
        num_warps=warps,
        maxnreg=REGISTERS if padded <= 4 else None,
    )


def score_tail(query: Tensor, keys: Tensor, offset: Tensor | None, blocks: Tensor, tokens: Tensor, scores: Tensor, scaling: float) -> None:
    """See :func:`fathom_eval.kernels.scan.score_tail`."""
    rows, heads, group, head_dim = query.shape
    tail = keys.shape[-2]
    _score_tail[(rows * heads, triton.cdiv(tail, 32))](
        query,
        keys,
        query if offset is None else offset,
        blocks,
        tokens,
        scores,
        scaling,
        heads,
        head_dim,
        tail,
        GROUP=group,
        CHANNELS=triton.next_power_of_2(head_dim),
        TOKENS=32,
        OFFSET=offset is not None,
    )
