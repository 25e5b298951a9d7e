"""Read plans on the GPU: one warp a row and KV head."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fathom_eval.kernels.plan import ReadPlan
from fathom_eval.kernels.selecting import keep_largest, kth_largest, ordered_bits


@triton.jit
def _plan_depths(
    query,
    variance,
    depths,
    channels,
    slots,
    counts,
    heads,
    head_dim,
    budget,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    pair = tl.program_id(0)
    channel = tl.arange(0, CHANNELS)
    inside = channel < head_dim
    query += pair.to(tl.int64) * GROUP * head_dim
    total = tl.zeros([CHANNELS], dtype=tl.float32)
    for member in tl.static_range(GROUP):
        value = tl.load(query + member * head_dim + channel, mask=inside, other=0.0).to(tl.float32)
        total += value * value
    importance = total * tl.load(variance + (pair % heads) * head_dim + channel, mask=inside, other=0.0)
    # A channel takes its d-th plane below the water line g·4^-(d - 1/2) = g·2^(1 - 2d), an exact power of two.
    plane = tl.arange(0, 4)[None, :]
    step = ((126 - 2 * plane) << 23).to(tl.float32, bitcast=True)
    keys = ordered_bits(importance[:, None] * step)
    keys = tl.reshape(tl.where(inside[:, None], keys, 0), [CHANNELS * 4])
    count = tl.minimum(budget, 4 * head_dim)
    taken = keep_largest(keys, kth_largest(keys, count, 32), count)
    depth = tl.sum(tl.reshape(taken.to(tl.int32), [CHANNELS, 4]), axis=1)
    row = pair.to(tl.int64) * head_dim
    tl.store(depths + row + channel, depth, mask=inside)
    before = tl.zeros([], dtype=tl.int32)
    for offset in tl.static_range(5):
        level = 4 - offset
        here = (depth == level) & inside
        place = before + tl.cumsum(here.to(tl.int32), 0) - 1
        tl.store(channels + row + place, channel, mask=here)
        tl.store(slots + row + place, depth, mask=here)
        before += tl.sum(here.to(tl.int32))
        if level > 0:
            tl.store(counts + pair * 4 + level - 1, before)


@triton.jit
def _top_channels(query, weight, channels, heads, head_dim, count, GROUP: tl.constexpr, CHANNELS: tl.constexpr, WEIGHTED: tl.constexpr):
    pair = tl.program_id(0)
    channel = tl.arange(0, CHANNELS)
    inside = channel < head_dim
    query += pair.to(tl.int64) * GROUP * head_dim
    mass = tl.zeros([CHANNELS], dtype=tl.float32)
    for member in tl.static_range(GROUP):
        mass += tl.abs(tl.load(query + member * head_dim + channel, mask=inside, other=0.0).to(tl.float32))
    if WEIGHTED:
        mass *= tl.load(weight + (pair % heads) * head_dim + channel, mask=inside, other=0.0)
    keys = tl.where(inside, ordered_bits(mass), 0)
    kept = keep_largest(keys, kth_largest(keys, count, 32), count)
    place = tl.cumsum(kept.to(tl.int32), 0) - 1
    tl.store(channels + pair.to(tl.int64) * count + place, channel, mask=kept)


def plan_depths(query: Tensor, variance: Tensor, budget: int, plan: ReadPlan) -> None:
    """See :func:`fathom_eval.kernels.plan.plan_depths`."""
    rows, heads, group, head_dim = query.shape
    # Fused multiply-adds would round the importance unlike the reference, and a tie could fall the other way.
    _plan_depths[(rows * heads,)](
        query,
        variance,
        plan.depths,
        plan.channels,
        plan.slots,
        plan.counts,
        heads,
        head_dim,
        budget,
        GROUP=group,
        CHANNELS=triton.next_power_of_2(head_dim),
        num_warps=1,
        enable_fp_fusion=False,
    )


def top_channels(query: Tensor, weight: Tensor | None, channels: Tensor) -> None:
    """See :func:`fathom_eval.kernels.plan.top_channels`."""
    rows, heads, group, head_dim = query.shape
    _top_channels[(rows * heads,)](
        query,
        query if weight is None else weight,
        channels,
        heads,
        head_dim,
        channels.shape[-1],
        GROUP=group,
        CHANNELS=triton.next_power_of_2(head_dim),
        WEIGHTED=weight is not None,
        num_warps=1,
        enable_fp_fusion=False,
    )
