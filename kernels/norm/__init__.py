"""Add a layer's output to the residual stream and normalise the sum for the next layer."""

from __future__ import annotations

from torch import Tensor

from fathom_eval.kernels.norm import reference

__all__ = ["add_norm"]


def add_norm(residual: Tensor, delta: Tensor | None, weight: Tensor, epsilon: float, out: Tensor) -> None:
    """RMSNorm of ``residual + delta``, which becomes the new residual.

    Args:
        residual: ``[R, E]``, contiguous, updated in place.
        delta: ``[R, E]``, contiguous, or None to add nothing.
        weight: ``[E]``.
        epsilon: Added to the mean square.
        out: ``[R, E]``, contiguous, written.
    """
    if residual.is_cuda:
        from fathom_eval.kernels.norm import triton as kernel

        kernel.add_norm(residual, delta, weight, epsilon, out)
        return
    if delta is not None:
        residual += delta
    out.copy_(reference.rms_norm(residual, weight, epsilon))
