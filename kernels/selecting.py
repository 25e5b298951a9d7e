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
def count_reaching(keys, threshold, shift):
    """How many keys reach the threshold with 1, 2 and 3 added at bit ``shift``: three counts of 20 bits in one int64, for one reduction."""
    one = (keys >= (threshold | (1 << shift))).to(tl.int64)
    two = (keys >= (threshold | (2 << shift))).to(tl.int64)
    three = (keys >= (threshold | (3 << shift))).to(tl.int64)
    return tl.sum(one + (two << 20) + (three << 40))


@triton.jit
def raise_threshold(threshold, counts, shift, count):
    """The highest of the thresholds that :func:`count_reaching` looked at, or the old one, that ``count`` keys reach."""
    digit = ((counts & 0xFFFFF) >= count).to(tl.uint32)
    digit += (((counts >> 20) & 0xFFFFF) >= count).to(tl.uint32)
    digit += ((counts >> 40) >= count).to(tl.uint32)
    return threshold | (digit << shift)


@triton.jit
def kth_largest(keys, count, BITS: tl.constexpr):
    """The ``count``-th largest of unsigned keys, built two bits at a time; 0 where there are fewer keys above 0."""
    threshold = tl.zeros([], dtype=tl.uint32)
    for step in tl.static_range(BITS // 2):
        reached = count_reaching(keys, threshold, BITS - 2 - 2 * step)
        threshold = raise_threshold(threshold, reached, BITS - 2 - 2 * step, count)
    return threshold


@triton.jit
def keep_largest(keys, threshold, count):
    """Mask of the ``count`` largest keys given the ``count``-th largest; of equal keys the first are kept, and keys of 0 never."""
    above = keys > threshold
    level = (keys == threshold) & (keys > 0)
    wanted = count - tl.sum(above.to(tl.int32))
    return above | (level & (tl.cumsum(level.to(tl.int32), 0) <= wanted))


@triton.jit
def kth_largest_of_rows(keys, count, BITS: tl.constexpr):
    """:func:`kth_largest` of ``[rows, n]`` with n at most 512: a thread that holds a row counts in 32 bits, and rows are joined in 64."""
    threshold = tl.zeros([], dtype=tl.uint32)
    for step in tl.static_range(BITS // 2):
        shift = BITS - 2 - 2 * step
        one = (keys >= (threshold | (1 << shift))).to(tl.int32)
        two = (keys >= (threshold | (2 << shift))).to(tl.int32)
        three = (keys >= (threshold | (3 << shift))).to(tl.int32)
        packed = tl.sum(one + (two << 10) + (three << 20), axis=1).to(tl.int64)
        reached = tl.sum((packed & 0x3FF) + ((packed & 0xFFC00) << 10) + ((packed >> 20) << 40), axis=0)
        threshold = raise_threshold(threshold, reached, shift, count)
    return threshold


@triton.jit
def places_in_rows(kept):
    """The place of each kept entry of ``[rows, n]`` among all of them, row by row, and how many there are in each row."""
    flags = kept.to(tl.int32)
    held = tl.sum(flags, axis=1)
    return (tl.cumsum(held, 0) - held)[:, None] + tl.cumsum(flags, 1) - 1, held
