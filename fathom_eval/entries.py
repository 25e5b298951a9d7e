"""Four-bit codes of what stands for a few tokens: block landmarks and page bounds.

A block of 64 tokens has 64 / r entries a channel, so r channels make 64 entries with one fp16 scale: 4.25 bits an entry, and a block is
sealed without waiting for another. Channels that share a scale must be of one size, so all are divided by their mean magnitude in the
prefix first, which is known before any block is sealed.

Shapes: r tokens an entry, D channels, m = n / r entries of n tokens.
"""

from __future__ import annotations

from torch import Tensor

from fathom_eval.coded import half

BITS = 4
_CELLS = 2**BITS


def entry_codes(entries: Tensor, unit: Tensor, run: int) -> tuple[Tensor, Tensor]:
    """Uniform mid-rise codes, as the bit-plane store's.

    Args:
        entries: ``[…, m, D]``, D a multiple of ``run``.
        unit: Each channel's size, ``[H, 1, D]``.
        run: r.

    Returns:
        Codes uint8 ``[…, m, D]`` and scales fp16 ``[…, m·r / 64, D / r]``.

    Raises:
        ValueError: A scale overflows fp16.
    """
    grouped = _grouped(entries.float() / unit, run)
    scales = half(grouped.abs().amax((-3, -1)))
    width = _spread(scales.float()) / (_CELLS // 2)
    codes = (grouped / width.masked_fill(width == 0, 1.0)).floor_().clamp_(-(_CELLS // 2), _CELLS // 2 - 1) + _CELLS // 2
    return codes.masked_fill_(width == 0, _CELLS // 2).byte().flatten(-2).flatten(-3, -2), scales


def entry_values(codes: Tensor, scales: Tensor, unit: Tensor, run: int) -> Tensor:
    """What the codes stand for, fp32 ``[…, m, D]``."""
    middles = (_grouped(codes, run).float() + (0.5 - _CELLS // 2)) * (_spread(scales.float()) / (_CELLS // 2))
    values: Tensor = middles.flatten(-2).flatten(-3, -2) * unit
    return values


def unit_of(mean_magnitude: Tensor) -> Tensor:
    """Channel sizes ``[H, 1, D]`` to divide by, from mean magnitudes ``[H, D]``."""
    return mean_magnitude.masked_fill(mean_magnitude == 0, 1.0).unsqueeze(-2)


def _grouped(entries: Tensor, run: int) -> Tensor:
    """``[…, m, D]`` as ``[…, blocks, 64 / r, D / r, r]``."""
    grouped: Tensor = entries.unflatten(-2, (-1, 64 // run)).unflatten(-1, (-1, run))
    return grouped


def _spread(scales: Tensor) -> Tensor:
    """A scale for every group of :func:`_grouped`."""
    return scales.unsqueeze(-2).unsqueeze(-1)
