"""Copy runs between segments on the GPU; the source may be pinned host memory."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fathom_eval.kernels.segments import SegmentTable

PIECE = 1024
"""32-bit words that one program copies."""


@triton.jit
def _gather_channels(
    source_table,
    target_table,
    channels,
    depths,
    blocks,
    heads,
    head_dim,
    slots,
    segments,
    segment_blocks,
    stride,
    unit,
    limit,
    PIECE: tl.constexpr,
):
    piece = tl.program_id(0)
    segment = tl.program_id(1) // slots
    slot = tl.program_id(1) % slots
    pair = tl.program_id(2)
    row = pair // heads
    length = tl.minimum(tl.load(depths + pair * slots + slot), limit) * unit
    used = segment * segment_blocks < tl.load(blocks + row)
    if (piece * PIECE < length) & used:
        channel = tl.load(channels + pair * slots + slot)
        begin = ((pair % heads).to(tl.int64) * head_dim + channel) * stride + piece * PIECE
        word = tl.arange(0, PIECE)
        source = (tl.load(source_table + row * segments + segment) * 16).to(tl.pointer_type(tl.int32)) + begin
        target = (tl.load(target_table + row * segments + segment) * 16).to(tl.pointer_type(tl.int32)) + begin
        inside = piece * PIECE + word < length
        # The addresses come from memory, so the compiler must be told that they are aligned.
        source = tl.multiple_of(tl.max_contiguous(source + word, 4), 16)
        target = tl.multiple_of(tl.max_contiguous(target + word, 4), 16)
        tl.store(target, tl.load(source, mask=inside), mask=inside)


def gather_channels(
    source: SegmentTable, target: SegmentTable, channels: Tensor, depths: Tensor, blocks: Tensor, unit: int, limit: int, segment_blocks: int
) -> None:
    """See :func:`fathom_eval.kernels.gather.gather_channels`."""
    rows, heads, slots = channels.shape
    example = source.example
    head_dim = example.shape[1]
    stride = example.stride(1) * example.element_size() // 4
    _gather_channels[(triton.cdiv(limit * unit // 4, PIECE), source.capacity * slots, rows * heads)](
        source.addresses,
        target.addresses,
        channels,
        depths,
        blocks,
        heads,
        head_dim,
        slots,
        source.capacity,
        segment_blocks,
        stride,
        unit // 4,
        limit,
        PIECE=PIECE,
    )
