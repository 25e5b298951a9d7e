"""Keys as KIVI stores them: few bits, per channel, in groups of consecutive tokens (arXiv:2402.02750 §3.2)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fathom_eval.asymmetric import asymmetric_codes, asymmetric_values, prefix_level
from fathom_eval.coded import HALF_SCALE, CodedStore, Part
from fathom_eval.stores import Store, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer


@dataclass(frozen=True)
class KiviSpec(StoreSpec):
    """Asymmetric codes with one fp16 step and smallest level for every channel of a group.

    Attributes:
        bits: Of a code.
        group: Tokens of a group, a divisor of 64. Groups lie in sealed blocks, so that none is ever short: a group of one or two tokens
            is exact, and a tail quantised in such groups would look better than the store is.
    """

    bits: int = 2
    group: int = 32

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        store = self.start(layer)
        store.append(layer.keys[:, :tokens])
        return store

    def start(self, layer: PrefixLayer) -> KiviStore:
        """The store of a layer before any key is in it."""
        heads, _, channels = layer.keys.shape
        return KiviStore((heads,), channels, self.bits, self.group)


class KiviStore(CodedStore):
    """Codes ``[…, n, D]``, steps and smallest levels ``[…, n / group, D]``."""

    def __init__(self, lead: tuple[int, ...], channels: int, bits: int, group: int) -> None:
        super().__init__(lead, channels)
        self._bits, self._group = bits, group
        self.parts = (Part(bits, "code"), HALF_SCALE, HALF_SCALE)

    def empty(self, rows: int) -> Store:
        return KiviStore((rows, self.lead[-1]), self.channels, self._bits, self._group)

    def encode(self, keys: Tensor) -> tuple[Tensor, ...]:
        codes, step, low = asymmetric_codes(keys.unflatten(-2, (-1, self._group)), -2, self._bits)
        return codes.flatten(-3, -2), step, low

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        return self.decode_prefix(parts, self._bits)

    def decode_prefix(self, parts: tuple[Tensor, ...], read: int) -> Tensor:
        """The keys from the first ``read`` bits of every code, fp32 ``[…, n, D]``."""
        codes, step, low = parts
        levels = prefix_level(codes, self._bits, read).unflatten(-2, (-1, self._group))
        return asymmetric_values(levels, step, low, -2).flatten(-3, -2)
