"""Block landmarks in four bits. The fp16 landmark store is in :mod:`fathom_eval.stores`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fathom_eval.coded import HALF_SCALE, CodedStore, Part
from fathom_eval.entries import BITS, entry_codes, entry_values, unit_of
from fathom_eval.kernels.landmark import landmark_means
from fathom_eval.stores import Store, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer


@dataclass(frozen=True)
class CodedLandmarkSpec(StoreSpec):
    """Mean keys of short runs of tokens, in four bits.

    Attributes:
        size: Tokens a landmark; divides 64 and D.
    """

    size: int = 8

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        heads, _, channels = layer.keys.shape
        store = CodedLandmarkStore((heads,), channels, self.size, unit_of(layer.key_statistics.mean_magnitude))
        store.append(layer.keys[:, :tokens])
        return store


class CodedLandmarkStore(CodedStore):
    """Codes ``[…, n / size, D]`` and scales ``[…, n / 64, D / size]``."""

    parts = (Part(BITS, "other"), HALF_SCALE)

    def __init__(self, lead: tuple[int, ...], channels: int, size: int, unit: Tensor) -> None:
        super().__init__(lead, channels)
        self.run, self._unit = size, unit

    def empty(self, rows: int) -> Store:
        return CodedLandmarkStore((rows, self.lead[-1]), self.channels, self.run, self._unit)

    def encode(self, keys: Tensor) -> tuple[Tensor, ...]:
        return entry_codes(landmark_means(keys, self.run), self._unit, self.run)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        codes, scales = parts
        return entry_values(codes, scales, self._unit, self.run)
