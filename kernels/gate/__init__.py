"""The gated activation between the two halves of an MLP."""

from __future__ import annotations

from torch import Tensor

from fathom_eval.kernels.gate import reference

__all__ = ["silu_gate"]


def silu_gate(both: Tensor, out: Tensor) -> None:
    """``silu(gate) · up`` of ``both = [gate, up]``: ``[R, 2F]`` to ``[R, F]``, both contiguous."""
    if both.is_cuda:
        from fathom_eval.kernels.gate import triton as kernel

        kernel.silu_gate(both, out)
        return
    out.copy_(reference.silu_gate(both))
