"""The gated activation on the GPU."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

SIZE = 512


@triton.jit
def _silu_gate(both, out, width, SIZE: tl.constexpr):
    row = tl.program_id(1)
    column = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    inside = column < width
    gate = tl.load(both + row * 2 * width + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(both + (row * 2 + 1) * width + column, mask=inside, other=0.0).to(tl.float32)
    active = (gate / (1 + tl.exp(-gate))).to(out.dtype.element_ty).to(tl.float32)
    tl.store(out + row * width + column, (active * up).to(out.dtype.element_ty), mask=inside)


def silu_gate(both: Tensor, out: Tensor) -> None:
    """See :func:`fathom_eval.kernels.gate.silu_gate`."""
    rows, width = out.shape
    _silu_gate[(triton.cdiv(width, SIZE), rows)](both, out, width, SIZE=SIZE)
