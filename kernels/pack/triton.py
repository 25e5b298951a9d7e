"""Quantise and pack on the GPU, bit for bit as the reference does."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCKS_A_PROGRAM = 4
CHANNELS_A_PROGRAM = 32


@triton.jit
def _pack(
    keys,
    planes,
    scales,
    flags,
    key_head,
    head_dim,
    blocks,
    offset,
    capacity,
    PLANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    block = tl.program_id(0) * BLOCKS + tl.arange(0, BLOCKS)
    channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    head = tl.program_id(2).to(tl.int64)
    inside = (block < blocks)[:, None] & (channel < head_dim)[None, :]  # [block, channel]
    bit = tl.arange(0, 64)
    token = (block[:, None] * 64 + bit[None, :]).to(tl.int64)[:, :, None]
    pointers = keys + head * key_head + token * head_dim + channel[None, None, :]
    values = tl.load(pointers, mask=inside[:, None, :], other=0.0).to(tl.float32)
    magnitude = tl.abs(values)
    # 65,520 is the first magnitude that fp16 rounds to infinity; the comparison is false for NaN too.
    if tl.sum((~(magnitude < 65520.0)).to(tl.int32)) > 0:
        tl.atomic_max(flags + head, 1)
    scale = tl.max(magnitude, axis=1).to(tl.float16)  # [block, channel]
    half: tl.constexpr = 2 ** (PLANES - 1)
    width = scale.to(tl.float32) / half
    empty = (width == 0.0)[:, None, :]
    # Triton's own division is approximate; a code next to a cell's edge needs the rounded one.
    cells = tl.floor(tl.div_rn(values, tl.where(empty, 1.0, width[:, None, :])))
    codes = tl.where(empty, half, tl.minimum(tl.maximum(cells, -half), half - 1).to(tl.int32) + half)
    row = (head * head_dim + channel)[None, :]  # [1, channel]
    out = offset + block[:, None]
    tl.store(scales + row * capacity + out, scale, mask=inside)
    for plane in tl.static_range(PLANES):
        bits = ((codes >> (PLANES - 1 - plane)) & 1).to(tl.int64) << bit.to(tl.int64)[None, :, None]
        word = tl.sum(bits, axis=1)
        tl.store(planes + (row * PLANES + plane) * capacity + out, word, mask=inside)


def pack_blocks(keys: Tensor, planes: Tensor, scales: Tensor, flags: Tensor, offset: int) -> None:
    """See :func:`fathom_eval.kernels.pack.pack_blocks`."""
    heads, tokens, head_dim = keys.shape
    blocks = tokens // 64
    grid = (triton.cdiv(blocks, BLOCKS_A_PROGRAM), triton.cdiv(head_dim, CHANNELS_A_PROGRAM), heads)
    _pack[grid](
        keys,
        planes,
        scales,
        flags,
        keys.stride(0),
        head_dim,
        blocks,
        offset,
        scales.shape[-1],
        PLANES=planes.shape[-2],
        BLOCKS=BLOCKS_A_PROGRAM,
        CHANNELS=CHANNELS_A_PROGRAM,
    )
