"""Block landmarks: score fewer things instead of fewer bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.methods.base import Method
from fathom_eval.stores import LandmarkSpec, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts


@dataclass(frozen=True)
class Landmark(Method):
    """The mean key of short blocks in fp16, every token scored as its block (after ShadowKV, arXiv:2410.21465; paper §2).

    Attributes:
        size: Tokens a landmark; divides 64.
    """

    name: ClassVar[str] = "landmark"
    family: ClassVar[str] = "block landmark"
    source: ClassVar[str] = "ShadowKV-style landmark (arXiv:2410.21465): fp16 mean key of 8-token blocks (Fathom paper §2)"

    size: int = 8

    def check(self, facts: ModelFacts) -> None:
        if self.size < 1 or 64 % self.size:
            raise UserError(f"landmark: size={self.size} must divide 64, the tokens of a sealed block")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return LandmarkSpec(self.size)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return 16 * facts.head_dim / self.size

    def typical_bits(self, head_dim: int) -> str:
        return f"{16 * head_dim / self.size:g}"
