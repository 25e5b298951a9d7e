"""Page bounds: the smallest and largest value of every channel in short pages (Quest, arXiv:2406.10774 §3.2).

Shapes: D channels, n tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.coded import HALF_SCALE, CodedStore, Part, half
from fathom_eval.entries import BITS, entry_codes, entry_values, unit_of
from fathom_eval.stores import Store, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer


@dataclass(frozen=True)
class PageSpec(StoreSpec):
    """Both bounds of every page.

    Attributes:
        page: Tokens a page; divides 64, and D where the bounds are coded.
        bits: Of a bound: 16 for fp16, or 4 for codes.
    """

    page: int = 16
    bits: int = 16

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        heads, _, channels = layer.keys.shape
        unit = unit_of(layer.key_statistics.mean_magnitude) if self.bits == BITS else None
        store = PageStore((heads,), channels, self.page, unit)
        store.append(layer.keys[:, :tokens])
        return store


class PageStore(CodedStore):
    """Bounds ``[…, n / page, D]``, each with its scales where they are coded.

    Every token scores as its page: Σ_j max(q_j·min_j, q_j·max_j), which no key of the page exceeds as long as the bounds are not coded.
    A bound's code is the middle of its cell, so a coded page can score below its best key.

    Args:
        unit: Channel sizes ``[H, 1, D]`` for coded bounds, None for fp16.
    """

    def __init__(self, lead: tuple[int, ...], channels: int, page: int, unit: Tensor | None) -> None:
        super().__init__(lead, channels)
        self.run, self._unit = page, unit
        self.parts = (Part(16, "other"),) * 2 if unit is None else (Part(BITS, "other"), HALF_SCALE) * 2

    def empty(self, rows: int) -> Store:
        return PageStore((rows, self.lead[-1]), self.channels, self.run, self._unit)

    def encode(self, keys: Tensor) -> tuple[Tensor, ...]:
        pages = keys.unflatten(-2, (-1, self.run))
        bounds = pages.amin(-2), pages.amax(-2)
        if self._unit is None:
            return half(bounds[0]), half(bounds[1])
        return (*entry_codes(bounds[0], self._unit, self.run), *entry_codes(bounds[1], self._unit, self.run))

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        if self._unit is None:
            return torch.cat(parts, dim=-1).float()
        bounds = [entry_values(codes, scales, self._unit, self.run) for codes, scales in (parts[:2], parts[2:])]
        return torch.cat(bounds, dim=-1)

    def operand(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> Tensor:
        # max(q·min, q·max) is q·min where q is negative and q·max where it is not.
        return torch.cat([projected.clamp_max(0), projected.clamp_min(0)], dim=-1)
