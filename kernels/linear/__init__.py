"""A linear layer for the few rows of a decode step, where reading the weights is all there is to it."""

from __future__ import annotations

from torch import Tensor

from fathom_eval.kernels.linear import reference

__all__ = ["MOST_ROWS", "linear"]

MOST_ROWS = 8
"""Rows up to which the kernel's sums fit in registers."""


def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> None:
    """``out = inputs · weightᵀ + bias``, sums in fp32, the weights read once for all rows.

    Args:
        inputs: ``[R, I]``, contiguous, R at most :data:`MOST_ROWS`.
        weight: ``[O, I]``, contiguous.
        bias: ``[O]`` or None.
        out: ``[R, O]``, contiguous, written in its own dtype.

    Raises:
        ValueError: More rows than the kernel takes.
    """
    if inputs.shape[0] > MOST_ROWS:
        raise ValueError(f"{inputs.shape[0]} rows are more than the {MOST_ROWS} of a decode step")
    if inputs.is_cuda:
        from fathom_eval.kernels.linear import triton as kernel

        kernel.linear(inputs, weight, bias, out)
        return
    out.copy_(reference.linear(inputs, weight, bias))
