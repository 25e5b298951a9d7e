"""The plane scan on the GPU, over segments in HBM or in pinned host memory."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def byte_to_float(packed, byte, PTX: tl.constexpr):
    """1.xxxxxxx from byte ``byte`` of a packed word: its high bit is the exponent's last, the others lead the mantissa."""
    if PTX:
        # One byte permute places the byte below 0x3F; written with shifts it takes two instructions.
        selector = 0x7044 | (byte << 8)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=f,r,r,r", [packed, 0x3F000000, selector], dtype=tl.float32, is_pure=True, pack=1
        )
    return ((((packed >> (byte * 8)) & 0xFF) << 16) | 0x3F000000).to(tl.float32, bitcast=True)


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
    tile = tl.program_id(0)
    pair = tl.program_id(1)
    row = pair // heads
    head = (pair % heads).to(tl.int64)
    tiles: tl.constexpr = 2 * CAPACITY // WORDS
    segment = tile // tiles
    first = (tile % tiles) * WORDS
    begin = segment * 2 * CAPACITY + first
    words = 2 * tl.load(blocks + row)
    if begin >= words:
        return
    # 32-bit words: word w of a segment holds tokens 32w to 32w + 31. They lie along the last axis, so that a thread owns whole words.
    word = tl.arange(0, WORDS)[None, None, None, :]
    shift = tl.arange(0, 8)[None, None, :, None]
    byte = tl.arange(0, 4)[None, :, None, None]
    member = tl.arange(0, PADDED)[:, None, None, None]

    plane_base = (tl.load(plane_table + row * segments + segment) * 16).to(tl.pointer_type(tl.uint32))
    plane_base += head * head_dim * (8 * CAPACITY) + first
    scale_base = (tl.load(scale_table + row * segments + segment) * 16).to(tl.pointer_type(tl.uint32))
    scale_base += head * head_dim * (CAPACITY // 2) + first // 4
    query += pair.to(tl.int64) * GROUP * head_dim
    channels += pair * head_dim
    active = tl.load(counts + pair * 4)
    two = tl.load(counts + pair * 4 + 1)
    three = tl.load(counts + pair * 4 + 2)
    four = tl.load(counts + pair * 4 + 3)

    total = tl.zeros([PADDED, 4, 8, WORDS], dtype=tl.float32)
    constant = tl.zeros([PADDED, 1, 1, WORDS], dtype=tl.float32)
    for slot in tl.range(0, active, num_stages=STAGES):
        channel = tl.load(channels + slot)
        # Slots are sorted by depth. A plane that the plan does not read is masked off: nothing is transferred, and its bits are 0.
        pointer = plane_base + channel * (8 * CAPACITY) + word
        deep = slot < three
        word0 = tl.load(pointer)
        word1 = tl.load(pointer + 2 * CAPACITY, mask=(slot < two) & (word >= 0), other=0)
        word2 = tl.load(pointer + 4 * CAPACITY, mask=deep & (word >= 0), other=0)
        word3 = tl.load(pointer + 6 * CAPACITY, mask=(slot < four) & (word >= 0), other=0)
        pair_of_scales = tl.load(scale_base + channel * (CAPACITY // 2) + word // 4)
        values = tl.load(query + member * head_dim + channel, mask=member < GROUP, other=0.0).to(tl.float32)
        packed = place_bit(word0, shift, 0) | place_bit(word1, shift, 1) | 0x80808080
        if deep:
            packed |= place_bit(word2, shift, 2) | place_bit(word3, shift, 3)
        # With x = 1 + cell / 2^t the mid-rise value is a·(2x - 3 + 2^-t), whatever the depth t.
        coefficient = (values * (2 * scaling)) * half_of_pair(pair_of_scales, (word // 2) & 1)
        depth = 1 + (slot < two).to(tl.int32) + deep.to(tl.int32) + (slot < four).to(tl.int32)
        centre = ((126 - depth) << 23).to(tl.float32, bitcast=True) - 1.5
        constant += coefficient * centre
        total += coefficient * byte_to_float(packed, byte, PTX)
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
