"""The budget without water-filling: the most important channels, all of them at one depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.methods.base import top_channels
from fathom_eval.methods.fathom import Fathom
from fathom_eval.models import ModelFacts
from fathom_eval.waterfill import channel_importance


@dataclass(frozen=True)
class UniformDepth(Fathom):
    """Spends Fathom's budget on its most important channels at one depth, so that only the allocation differs (paper §6, A4).

    Attributes:
        depth: Planes read of every channel that is read, 1 to 4.
    """

    name: ClassVar[str] = "uniform_depth"
    family: ClassVar[str] = "uniform depth"
    source: ClassVar[str] = "Fathom's store, importance and budget at one depth instead of water-filled ones (Fathom paper §6, A4)"

    depth: int = 2

    def check(self, facts: ModelFacts) -> None:
        if not 1 <= self.depth <= 4:
            raise UserError(f"{self.name}: depth={self.depth} must lie in 1..4")
        if self.codes != "4bit" or self.depths != "model":
            raise UserError(f"{self.name}: reads every channel to one depth of the 4-bit store, so codes and depths do nothing")
        if self.by_ratio:
            raise UserError(f"{self.name}: shows what allocation is worth at one budget, so by_ratio does nothing")
        super().check(facts)

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        variance, bits = index
        channels = min(max(1, bits // self.depth), variance.shape[-1])
        return top_channels(channel_importance(query, variance), channels) * self.depth

    def typical_bits(self, head_dim: int) -> str:
        channels = min(max(1, self.code_bits(head_dim) // self.depth), head_dim)
        return f"{channels * (self.depth + (0.25 if self.scales == 'fp16' else 0.125)):g}"

    def line(self) -> str:
        return f"{super().line()} depth={self.depth}"
