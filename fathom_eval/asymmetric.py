"""Asymmetric round-to-nearest codes: what KIVI stores and what Double Sparsity quantises its labels to."""

from __future__ import annotations

from torch import Tensor

from fathom_eval.coded import half


def asymmetric_codes(values: Tensor, dim: int, bits: int, head: int = -3) -> tuple[Tensor, Tensor, Tensor]:
    """Round to the nearest of ``2^bits`` levels from the smallest to the largest value of a group.

    Step and smallest level are rounded to fp16 before anything is divided by them, so that the codes fit what is stored.

    Args:
        values: Any shape.
        dim: The dimension that a group runs along.
        head: The dimension of the KV heads once ``dim`` is gone, for the message of the error.

    Returns:
        Codes uint8 of the shape of ``values``; step and smallest level, fp16, without ``dim``.

    Raises:
        ValueError: A step or smallest level overflows fp16.
    """
    values = values.float()
    low = half(values.amin(dim), head)
    step = half((values.amax(dim) - low.float()).clamp_min(0) / (2**bits - 1), head)
    divisor = step.float().masked_fill(step == 0, 1.0).unsqueeze(dim)
    codes = ((values - low.float().unsqueeze(dim)) / divisor).round_().clamp_(0, 2**bits - 1)
    return codes.byte(), step, low


def asymmetric_values(codes: Tensor, step: Tensor, low: Tensor, dim: int) -> Tensor:
    """The levels that codes stand for, fp32 of their shape. Codes may be fractional: the middle of several levels."""
    return codes.float() * step.float().unsqueeze(dim) + low.float().unsqueeze(dim)


def prefix_level(codes: Tensor, bits: int, read: int) -> Tensor:
    """The mean of the codes that begin with the same ``read`` of ``bits`` bits, fp32."""
    width = 1 << (bits - read)
    return (codes >> (bits - read)).float() * width + (width - 1) / 2


def rounded(values: Tensor, dim: int, bits: int) -> Tensor:
    """:func:`asymmetric_codes` and back with an fp32 step, for what is not stored: a query."""
    low = values.amin(dim, keepdim=True)
    step = (values.amax(dim, keepdim=True) - low) / (2**bits - 1)
    found: Tensor = ((values - low) / step.masked_fill(step == 0, 1.0)).round_() * step + low
    return found
