"""Scans that read every channel to one depth: the 2-bit thumbnail and the full 4-bit scan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.methods.base import Method
from fathom_eval.planes import PlaneSpec
from fathom_eval.stores import StoreSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts


@dataclass(frozen=True)
class Thumbnail(Method):
    """All channels at the same depth (paper §4).

    Attributes:
        depth: Planes read of every channel, 1 to 4.
    """

    name: ClassVar[str] = "thumbnail"
    family: ClassVar[str] = "thumbnail"
    source: ClassVar[str] = "low-bit thumbnail scan of all channels (Fathom paper §4, after FFD)"

    depth: int = 2

    def check(self, facts: ModelFacts) -> None:
        if not 1 <= self.depth <= 4:
            raise UserError(f"{self.name}: depth={self.depth} must lie in 1..4")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return PlaneSpec("raw")

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        rows, heads, _, channels = query.shape
        return query.new_full((), self.depth).long().expand(rows, heads, channels)

    def typical_bits(self, head_dim: int) -> str:
        return f"{head_dim * (self.depth + 0.25):g}"


@dataclass(frozen=True)
class Full(Thumbnail):
    """Every bit of the 4-bit store: the floor of what a plan over it can reach."""

    name: ClassVar[str] = "full"
    family: ClassVar[str] = "full 4-bit"
    source: ClassVar[str] = "full scan of the 4-bit store (Fathom paper §4)"

    depth: int = 4

    def label(self) -> str:
        return "full 4-bit" if self.depth == 4 else super().label()
