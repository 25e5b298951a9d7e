"""Residual addition and RMSNorm on the GPU, one program a row."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _add_norm(residual, delta, weight, out, width, epsilon, WIDTH: tl.constexpr, DELTA: tl.constexpr):
    row = tl.program_id(0) * width
    column = tl.arange(0, WIDTH)
    inside = column < width
    values = tl.load(residual + row + column, mask=inside, other=0.0)
    if DELTA:
        values = (values.to(tl.float32) + tl.load(delta + row + column, mask=inside, other=0.0).to(tl.float32)).to(values.dtype)
        tl.store(residual + row + column, values, mask=inside)
    wide = values.to(tl.float32)
    scaled = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / width + epsilon)
    scaled = scaled.to(values.dtype).to(tl.float32) * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row + column, scaled.to(out.dtype.element_ty), mask=inside)


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, out: Tensor) -> None:
    """See :func:`fathom_eval.kernels.norm.add_norm`."""
    rows, width = residual.shape
    size = triton.next_power_of_2(width)
    _add_norm[(rows,)](
        residual,
        residual if delta is None else delta,
        weight,
        out,
        width,
        epsilon,
        WIDTH=size,
        DELTA=delta is not None,
        num_warps=min(16, max(1, size // 256)),
    )
