"""Quantised key caches as stores that a scan reads in full: what their bits are worth for ranking keys.

Each published system attends to its codes. Here they only rank; attention is exact over the selected set, as for every method.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.kivi import KiviSpec
from fathom_eval.methods.base import IF_CHANGED, Method
from fathom_eval.nonuniform import NonuniformSpec
from fathom_eval.rotated import RotatedSpec
from fathom_eval.stores import StoreSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts

KIVI_GROUPS = (16, 32, 64)


@dataclass(frozen=True)
class Kivi(Method):
    """All channels in asymmetric codes, a step and a smallest level for each channel of every group of tokens.

    Attributes:
        bits: Of a code, 1 to 8.
        group: Tokens of a group: 16, 32 (the published setting) or 64.
    """

    name: ClassVar[str] = "kivi"
    family: ClassVar[str] = "KIVI"
    source: ClassVar[str] = "KIVI keys (arXiv:2402.02750) as a store: asymmetric per channel in sealed blocks, no full-precision residual"

    bits: int = 2
    group: int = field(default=32, metadata=IF_CHANGED)

    def check(self, facts: ModelFacts) -> None:
        _check_bits(self.name, self.bits, 1)
        if self.group not in KIVI_GROUPS:
            raise UserError(f"kivi: group={self.group} must be {', '.join(map(str, KIVI_GROUPS[:-1]))} or {KIVI_GROUPS[-1]} tokens")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return KiviSpec(self.bits, self.group)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return facts.head_dim * (self.bits + 32 / self.group)

    def typical_bits(self, head_dim: int) -> str:
        return f"{head_dim * (self.bits + 32 / self.group):g}"


@dataclass(frozen=True)
class TurboQuant(Method):
    """All coordinates of the randomly rotated key in one fixed codebook, and its fp16 norm.

    Attributes:
        bits: Of a coordinate, 1 to 8.
        residual: Spend the last of them on the sign of a random projection of what the others leave over, with its fp16 norm.
    """

    name: ClassVar[str] = "turboquant"
    family: ClassVar[str] = "TurboQuant"
    source: ClassVar[str] = "TurboQuant (arXiv:2504.19874) as a store: random rotation, Lloyd-Max levels; residual=true adds the QJL bit"

    bits: int = 2
    residual: bool = field(default=False, metadata=IF_CHANGED)

    def check(self, facts: ModelFacts) -> None:
        _check_bits(self.name, self.bits, 2 if self.residual else 1)

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return RotatedSpec(self.bits, self.residual)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return self._bits(facts.head_dim)

    def typical_bits(self, head_dim: int) -> str:
        return f"{self._bits(head_dim)}"

    def line(self) -> str:
        return f"{self.family} with residual" if self.residual else self.family

    def _bits(self, head_dim: int) -> int:
        return self.bits * head_dim + (32 if self.residual else 16)


@dataclass(frozen=True)
class KVQuant(Method):
    """All channels in codes of the channel's own levels, k-means of the prefix's keys.

    Attributes:
        bits: Of a code, 1 to 8.
    """

    name: ClassVar[str] = "kvquant"
    family: ClassVar[str] = "KVQuant"
    source: ClassVar[str] = (
        "after KVQuant (arXiv:2401.18079) as a store: k-means levels of every channel, of keys after RoPE, where the paper takes them "
        "before it; without its outliers and sensitivity weights"
    )

    bits: int = 2

    def check(self, facts: ModelFacts) -> None:
        _check_bits(self.name, self.bits, 1)

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return NonuniformSpec(self.bits)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return facts.head_dim * self.bits

    def typical_bits(self, head_dim: int) -> str:
        return f"{head_dim * self.bits}"


def _check_bits(name: str, bits: int, least: int) -> None:
    if not least <= bits <= 8:
        raise UserError(f"{name}: bits={bits} must lie in {least}..8")
