"""Selection by threshold inside one program: shared by the plan and the top-k kernels."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def ordered_bits(values):
    """Floats as unsigned integers of the same order: uint32 of 32 bits for fp32, of 16 bits for fp16. No number maps to 0 or to the top."""
    if values.dtype == tl.float32:
        bits = values.to(tl.int32, bitcast=True)
        keys = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.uint32, bitcast=True) ^ 0x80000000
    else:
        bits = values.to(tl.int16, bitcast=True).to(tl.int32)
        keys = ((bits ^ ((bits >> 31) & 0x7FFF)) + 0x8000).to(tl.uint32)
    return keys


@triton.jit
def kth_largest(keys, count, BITS: tl.constexpr):
    """The ``count``-th largest of unsigned keys, built bit by bit; 0 where there are fewer keys above 0."""
    threshold = tl.zeros([], dtype=tl.uint32)
    for step in tl.static_range(BITS):
        higher = threshold | (1 << (BITS - 1 - step))
        enough = tl.sum((keys >= higher).to(tl.int32)) >= count
        threshold = tl.where(enough, higher, threshold)
    return threshold


@triton.jit
def keep_largest(keys, threshold, count):
    """Mask of the ``count`` largest keys given the ``count``-th largest; of equal keys the first are kept, and keys of 0 never."""
    above = keys > threshold
    level = (keys == threshold) & (keys > 0)
    wanted = count - tl.sum(above.to(tl.int32))
    return above | (level & (tl.cumsum(level.to(tl.int32), 0) <= wanted))
