"""Matrix times a few vectors on the GPU: every program streams whole rows of the weights."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

OUTPUTS = 4
"""Rows of the weights that one program reads side by side."""

INPUTS = 1024
"""Columns of a tile: 16 bytes a thread of bf16."""


@triton.jit
def _linear(
    inputs,
    weight,
    bias,
    out,
    width,
    outputs,
    rows,
    ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    INPUTS: tl.constexpr,
    BIAS: tl.constexpr,
):
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, INPUTS)
    total = tl.zeros([ROWS, OUTPUTS, INPUTS], dtype=tl.float32)
    lines = weight + output.to(tl.int64)[:, None] * width
    for begin in range(0, width, INPUTS):
        place = begin + column
        inside = (output < outputs)[:, None] & (place < width)[None, :]
        part = tl.load(lines + place[None, :], mask=inside, other=0.0).to(tl.float32)
        value = tl.load(inputs + row[:, None] * width + place[None, :], mask=(row < rows)[:, None] & (place < width)[None, :], other=0.0)
        total += value.to(tl.float32)[:, None, :] * part[None, :, :]
    found = tl.sum(total, axis=2)
    if BIAS:
        found += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)[None, :]
    inside = (row < rows)[:, None] & (output < outputs)[None, :]
    tl.store(out + row[:, None] * outputs + output[None, :], found.to(out.dtype.element_ty), mask=inside)


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """See :func:`fathom_eval.kernels.linear.linear`."""
    rows, width = inputs.shape
    outputs = weight.shape[0]
    size = min(INPUTS, triton.next_power_of_2(width))
    _linear[(triton.cdiv(outputs, OUTPUTS),)](
        inputs,
        weight,
        weight if bias is None else bias,
        out,
        width,
        outputs,
        rows,
        ROWS=triton.next_power_of_2(rows),
        OUTPUTS=OUTPUTS,
        INPUTS=size,
        BIAS=bias is not None,
        num_warps=max(1, size // 256) * (1 if rows <= 2 else 2),
    )
