"""Keys as TurboQuant stores them: rotated at random, then one fixed codebook for every coordinate (arXiv:2504.19874).

Shapes: R branches, H KV heads, G query heads a KV head, D channels, n tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.codebooks import merged_levels, nearest_level, sphere_levels
from fathom_eval.coded import HALF_SCALE, CodedStore, Part, half
from fathom_eval.stores import Store, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer

SEED = 0


@dataclass(frozen=True)
class RotatedSpec(StoreSpec):
    """A key's fp16 norm, and codes of its direction's coordinates after one random rotation that all heads share.

    Attributes:
        bits: Of a coordinate, all of them.
        residual: The last bit is not the codebook's but the sign of a random projection of what the others leave over (the quantised
            Johnson–Lindenstrauss transform), whose fp16 norm is kept too: scores without bias (TurboQuant's inner-product quantiser).
    """

    bits: int = 2
    residual: bool = False

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        store = self.start(layer)
        store.append(layer.keys[:, :tokens])
        return store

    def start(self, layer: PrefixLayer) -> RotatedStore:
        """The store of a layer before any key is in it."""
        heads, _, channels = layer.keys.shape
        return RotatedStore((heads,), channels, self.bits, self.residual)


class RotatedStore(CodedStore):
    """Codes ``[…, n, D]`` and norms ``[…, n, 1]``; with a residual also signs ``[…, n, D]`` and norms of what is left over."""

    def __init__(self, lead: tuple[int, ...], channels: int, bits: int, residual: bool) -> None:
        super().__init__(lead, channels)
        self._bits, self._residual = bits, residual
        self._code_bits = bits - residual
        self.parts = (Part(self._code_bits, "code"), HALF_SCALE, *((Part(1, "code"), HALF_SCALE) if residual else ()))

    def empty(self, rows: int) -> Store:
        return RotatedStore((rows, self.lead[-1]), self.channels, self._bits, self._residual)

    def project(self, query: Tensor) -> Tensor:
        return query.float() @ rotation(self.channels, query.device)

    def operand(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> Tensor:
        if not self._residual:
            return projected
        return torch.cat([projected, projected @ projection(self.channels, query.device)], dim=-1)

    def encode(self, keys: Tensor) -> tuple[Tensor, ...]:
        keys = keys.float()
        norm = keys.norm(dim=-1, keepdim=True)
        stored = half(norm)
        # √D times a direction's coordinates, which are close to normal.
        direction = (keys @ rotation(self.channels, keys.device)) * (math.sqrt(self.channels) / norm.masked_fill(norm == 0, 1.0))
        levels, _ = sphere_levels(self.channels, self._code_bits, keys.device)
        codes = nearest_level(direction, levels)
        if not self._residual:
            return codes, stored
        left = direction - levels[codes.int()]
        signs = (left @ projection(self.channels, keys.device)) >= 0
        return codes, stored, signs.byte(), half(left.norm(dim=-1, keepdim=True) * norm / math.sqrt(self.channels))

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        keys = self.decode_prefix(parts, self._code_bits)
        if not self._residual:
            return keys
        # E[⟨s, x⟩ sign⟨s, r⟩] = √(2/π) ⟨x, r⟩ / ‖r‖ for a normal s: the mean over D projections, rid of that factor.
        signs = (parts[2].float() * 2 - 1) * (parts[3].float() * (math.sqrt(math.pi / 2) / self.channels))
        return torch.cat([keys, signs], dim=-1)

    def decode_prefix(self, parts: tuple[Tensor, ...], read: int) -> Tensor:
        """The rotated keys from the first ``read`` bits of every code, fp32 ``[…, n, D]``.

        A reader of fewer bits takes the mean of the merged cells, which is known: the codebook's distribution is no one's data.
        """
        levels, mass = sphere_levels(self.channels, self._code_bits, parts[0].device)
        return merged_levels(levels, read, mass)[parts[0].int()] * (parts[1].float() / math.sqrt(self.channels))


@lru_cache
def rotation(channels: int, device: torch.device) -> Tensor:
    """A fixed random orthogonal matrix, fp32 ``[D, D]``."""
    generator = torch.Generator().manual_seed(SEED)
    orthogonal, upper = torch.linalg.qr(torch.randn(channels, channels, generator=generator, dtype=torch.float64))
    uniform: Tensor = orthogonal * upper.diagonal().sign()  # the signs make it uniform over the rotations
    return uniform.float().to(device)


@lru_cache
def projection(channels: int, device: torch.device) -> Tensor:
    """A fixed matrix of normal numbers, fp32 ``[D, D]``."""
    generator = torch.Generator().manual_seed(SEED + 1)
    return torch.randn(channels, channels, generator=generator).to(device)
