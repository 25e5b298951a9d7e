"""Keys as KVQuant stores them: every channel has levels of its own, learnt from its keys (arXiv:2401.18079 §3.3).

Shapes: H KV heads, D channels, n tokens, L levels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.codebooks import merged_levels, nearest_level, scalar_levels
from fathom_eval.coded import CodedStore, Part
from fathom_eval.stores import Store, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer

LEARNT_FROM = 2**14
"""Keys that a codebook is learnt from, evenly spaced over a longer prefix."""


@dataclass(frozen=True)
class NonuniformSpec(StoreSpec):
    """A code a channel into the channel's codebook, which the prefix's keys decide and later blocks use as it is.

    Attributes:
        bits: Of a code.
    """

    bits: int = 2

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        store = self.start(layer)
        store.append(layer.keys[:, :tokens])
        return store

    def start(self, layer: PrefixLayer) -> NonuniformStore:
        """The store of a layer before any key is in it."""
        heads, known, channels = layer.keys.shape
        keys = layer.keys[:, :: -(-known // LEARNT_FROM)]
        levels = scalar_levels(keys.transpose(-1, -2), 2**self.bits)
        return NonuniformStore((heads,), channels, self.bits, levels)


class NonuniformStore(CodedStore):
    """Codes ``[…, n, D]`` into levels ``[H, D, L]``. No scales."""

    def __init__(self, lead: tuple[int, ...], channels: int, bits: int, levels: Tensor) -> None:
        super().__init__(lead, channels)
        self._bits, self._levels = bits, levels
        self.parts = (Part(bits, "code"),)

    def empty(self, rows: int) -> Store:
        return NonuniformStore((rows, self.lead[-1]), self.channels, self._bits, self._levels)

    def encode(self, keys: Tensor) -> tuple[Tensor, ...]:
        return (nearest_level(keys.float(), self._levels),)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        return self.decode_prefix(parts, self._bits)

    def decode_prefix(self, parts: tuple[Tensor, ...], read: int) -> Tensor:
        """The keys from the first ``read`` bits of every code, fp32 ``[…, n, D]``."""
        heads, channels, levels = self._levels.shape
        first = torch.arange(0, heads * channels * levels, levels, dtype=torch.int32, device=parts[0].device)
        return merged_levels(self._levels, read).flatten()[parts[0].int() + first.view(heads, 1, channels)]
