"""Block landmarks: score fewer things instead of fewer bits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.landmarks import CodedLandmarkSpec
from fathom_eval.methods.base import IF_CHANGED, Method
from fathom_eval.methods.quest import check_entry_bits, entry_bits
from fathom_eval.stores import LandmarkSpec, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts


@dataclass(frozen=True)
class Landmark(Method):
    """The mean key of short blocks, every token scored as its block (after ShadowKV, arXiv:2410.21465; paper §2).

    Attributes:
        size: Tokens a landmark; divides 64, and head_dim where landmarks are coded.
        bits: Of a landmark's channel: 16 for fp16, 4 for codes with one fp16 scale for 64 of them.
    """

    name: ClassVar[str] = "landmark"
    family: ClassVar[str] = "block landmark"
    source: ClassVar[str] = "ShadowKV-style landmark (arXiv:2410.21465): mean key of 8-token blocks, fp16 or 4-bit (Fathom paper §2)"

    size: int = 8
    bits: int = field(default=16, metadata=IF_CHANGED)

    def check(self, facts: ModelFacts) -> None:
        if self.size < 1 or 64 % self.size:
            raise UserError(f"landmark: size={self.size} must divide 64, the tokens of a sealed block")
        check_entry_bits(self.name, self.bits, "size", self.size, facts.head_dim)

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return LandmarkSpec(self.size) if self.bits == 16 else CodedLandmarkSpec(self.size)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return entry_bits(self.bits) * facts.head_dim / self.size

    def typical_bits(self, head_dim: int) -> str:
        return f"{entry_bits(self.bits) * head_dim / self.size:g}"

    def line(self) -> str:
        return self.family if self.bits == 16 else f"{self.family} {self.bits}-bit"
