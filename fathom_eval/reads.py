"""What a scan touched, itemised. Bits per token come from these counts, never from a method's word."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Reads:
    """Bits touched by one scan of one layer, for every branch and KV head; all fields int64 ``[R, H]``.

    Attributes:
        code_bits: Bits of key codes.
        scale_bits: Bits of block scales (16 for each scale read).
        other_bits: Anything else a scan reads: landmarks, page bounds, centroids.
        channels: Channels read to any depth.
        tokens: Tokens scanned, that is the sealed ones.
    """

    code_bits: Tensor
    scale_bits: Tensor
    other_bits: Tensor
    channels: Tensor
    tokens: int

    @property
    def bits(self) -> Tensor:
        """All bits touched."""
        return self.code_bits + self.scale_bits + self.other_bits

    def __add__(self, other: Reads) -> Reads:
        """The reads of two parts of one store under one plan."""
        return Reads(
            self.code_bits + other.code_bits,
            self.scale_bits + other.scale_bits,
            self.other_bits + other.other_bits,
            torch.maximum(self.channels, other.channels),
            self.tokens + other.tokens,
        )

    @classmethod
    def none(cls, rows: int, heads: int, device: torch.device) -> Reads:
        """Nothing read."""
        zero = torch.zeros(rows, heads, dtype=torch.int64, device=device)
        return cls(zero, zero, zero, zero, 0)
