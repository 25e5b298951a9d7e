"""QK-norm, rotary embedding and the append to the tail on the GPU, one program a head."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rotated(low, high, norm, channel, inside, half, epsilon, cosine, sine, NORM: tl.constexpr):
    if NORM:
        scale = tl.rsqrt((tl.sum(low * low, axis=0) + tl.sum(high * high, axis=0)) / (2 * half) + epsilon)
        low = low * scale * tl.load(norm + channel, mask=inside, other=0.0).to(tl.float32)
        high = high * scale * tl.load(norm + half + channel, mask=inside, other=0.0).to(tl.float32)
    return low * cosine - high * sine, high * cosine + low * sine


@triton.jit
def _rotate_heads(
    projected,
    query_norm,
    key_norm,
    cosines,
    sines,
    blocks,
    tokens,
    query,
    tail_keys,
    tail_values,
    epsilon,
    first_position,
    heads,
    query_heads,
    half,
    tail,
    HALF: tl.constexpr,
    NORM: tl.constexpr,
):
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    head_dim = 2 * half
    channel = tl.arange(0, HALF)
    inside = channel < half
    source = projected + (row * (query_heads + 2 * heads) + head) * head_dim + channel
    low = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    total = tl.load(tokens + row)
    angle = (total - 1 - first_position).to(tl.int64) * half + channel
    cosine = tl.load(cosines + angle, mask=inside, other=0.0)
    sine = tl.load(sines + angle, mask=inside, other=0.0)
    slot = total - 1 - 64 * tl.load(blocks + row)
    if head < query_heads:
        low, high = _rotated(low, high, query_norm, channel, inside, half, epsilon, cosine, sine, NORM)
        target = query + (row * query_heads + head) * head_dim + channel
        tl.store(target, low.to(query.dtype.element_ty), mask=inside)
        tl.store(target + half, high.to(query.dtype.element_ty), mask=inside)
    elif head < query_heads + heads:
        low, high = _rotated(low, high, key_norm, channel, inside, half, epsilon, cosine, sine, NORM)
        target = tail_keys + ((row * heads + head - query_heads) * tail + slot) * head_dim + channel
        tl.store(target, low.to(tail_keys.dtype.element_ty), mask=inside)
        tl.store(target + half, high.to(tail_keys.dtype.element_ty), mask=inside)
    else:
        target = tail_values + ((row * heads + head - query_heads - heads) * tail + slot) * head_dim + channel
        tl.store(target, low.to(tail_values.dtype.element_ty), mask=inside)
        tl.store(target + half, high.to(tail_values.dtype.element_ty), mask=inside)


def rotate_heads(
    projected: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    epsilon: float,
    cosines: Tensor,
    sines: Tensor,
    first_position: int,
    blocks: Tensor,
    tokens: Tensor,
    query: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
) -> None:
    """See :func:`fathom_eval.kernels.rotary.rotate_heads`."""
    rows, heads, group, head_dim = query.shape
    _rotate_heads[(heads * group + 2 * heads, rows)](
        projected,
        projected if query_norm is None else query_norm,
        projected if key_norm is None else key_norm,
        cosines,
        sines,
        blocks,
        tokens,
        query,
        tail_keys,
        tail_values,
        epsilon,
        first_position,
        heads,
        heads * group,
        head_dim // 2,
        tail_keys.shape[-2],
        HALF=triton.next_power_of_2(head_dim // 2),
        NORM=query_norm is not None,
        num_warps=1,
    )
