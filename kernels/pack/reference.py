"""Quantise and pack, in torch: the truth that every packing kernel is checked against (paper §3.2, Eq. 2)."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK = 64
"""Tokens that share one fp16 scale a channel, and the bits of one plane word."""


def block_scales(keys: Tensor) -> Tensor:
    """The largest magnitude of every channel in every block, rounded to fp16 before anything is divided by it.

    Args:
        keys: ``[..., n, D]`` with n a multiple of 64.

    Returns:
        fp16 ``[..., D, n / 64]``.

    Raises:
        ValueError: n is not a multiple of 64, a key is not finite, or a magnitude overflows fp16 (above 65,504);
            the message names the heads (the last leading dimension).
    """
    *lead, tokens, channels = keys.shape
    if tokens % BLOCK:
        raise ValueError(f"{tokens} tokens are not whole blocks of {BLOCK}")
    blocks = keys.float().reshape(*lead, tokens // BLOCK, BLOCK, channels)
    scales = blocks.abs().amax(dim=-2).transpose(-1, -2).to(torch.float16)
    # abs().amax() carries NaN along, and fp16 turns what it cannot hold into inf: one look finds both.
    if not torch.isfinite(scales).all():
        bad = (~torch.isfinite(scales)).any(-1).any(-1).reshape(-1, lead[-1] if lead else 1).any(0)
        heads = ", ".join(str(head) for head in bad.nonzero().flatten().tolist())
        what = "keys above 65,504, which an fp16 scale cannot hold" if torch.isfinite(keys).all() else "keys that are not finite"
        raise ValueError(f"{what} in KV head {heads}")
    return scales


def quantise(keys: Tensor, scales: Tensor, planes: int = 4) -> Tensor:
    """Uniform mid-rise codes: ``clip(floor(k / (a / 2^(planes-1))), -2^(planes-1), 2^(planes-1) - 1) + 2^(planes-1)``.

    The division is done in fp32 with the fp16-rounded scale, so a key of exactly +a is clipped to the last cell. Where the
    scale is 0 every code is the middle one and nothing is divided.

    Args:
        keys: ``[..., n, D]``.
        scales: fp16 ``[..., D, n / 64]`` from :func:`block_scales`.
        planes: Bits of a code, 1 to 8.

    Returns:
        uint8 ``[..., D, n]``, channel-major.
    """
    half = 1 << (planes - 1)
    width = scales.float().repeat_interleave(BLOCK, dim=-1) / half
    cells = torch.floor(keys.float().transpose(-1, -2) / width.masked_fill(width == 0, 1.0))
    codes = cells.clamp_(-half, half - 1) + half
    return codes.masked_fill_(width == 0, half).to(torch.uint8)


def pack_planes(codes: Tensor, planes: int = 4) -> Tensor:
    """Pack codes into bit planes: bit i of the word of (channel, plane, block) belongs to token i of the block.

    Plane 0 holds the most significant bits, so the first t planes are the codes' t-bit prefixes.

    Args:
        codes: uint8 ``[..., D, n]``.

    Returns:
        int64 ``[..., D, planes, n / 64]``: one plane of one channel is contiguous over the sequence.
    """
    shifts = torch.arange(planes - 1, -1, -1, device=codes.device, dtype=torch.uint8).view(-1, 1)
    bits = (codes.unsqueeze(-2) >> shifts) & 1
    # Bytes first: eight times less to move than one 64-bit integer a bit. A word's first byte is its lowest (little-endian).
    octets: Tensor = (bits.unflatten(-1, (-1, 8)) << _bit_numbers(codes.device)).sum(-1, dtype=torch.uint8)
    return octets.view(torch.int64)


def unpack_plane(words: Tensor) -> Tensor:
    """The bits of plane words ``[..., blocks]`` as uint8 zeros and ones ``[..., blocks * 64]``."""
    octets = words.contiguous().view(torch.uint8)
    return ((octets.unsqueeze(-1) >> _bit_numbers(words.device)) & 1).flatten(-2)


def _bit_numbers(device: torch.device) -> Tensor:
    return torch.arange(8, device=device, dtype=torch.uint8)
