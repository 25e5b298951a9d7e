"""Fathom: every query decides how many bits of each channel it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.methods.base import Method
from fathom_eval.planes import PlaneSpec
from fathom_eval.stores import StoreSpec
from fathom_eval.waterfill import channel_importance, read_depths

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts
    from fathom_eval.prefill import PrefixLayer


@dataclass(frozen=True)
class Fathom(Method):
    """Reverse water-filling of a bit budget over the channels of a bit-plane store (paper §3).

    Attributes:
        budget: Code bits a key for a head_dim of 128, the paper's unit; it scales with head_dim (48 is 24 bits at 64 channels).
        basis: ``raw`` channels, ``klt`` planes, or ``auto``: raw for models with QK-norm, otherwise klt (paper §3.5).
    """

    name: ClassVar[str] = "fathom"
    family: ClassVar[str] = "Fathom"
    source: ClassVar[str] = "Fathom (arXiv:2609.17652) §3; statistics of the prefix's own keys"

    budget: int = 48
    basis: Literal["auto", "raw", "klt"] = "auto"

    def check(self, facts: ModelFacts) -> None:
        if not 1 <= self.budget <= 4 * 128:
            raise UserError(f"fathom: budget={self.budget} must lie in 1..512 (code bits for a head_dim of 128)")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return PlaneSpec(self._basis(facts))

    def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
        statistics = layer.key_statistics
        variance = statistics.basis.variance if self._basis(facts) == "klt" else statistics.variance
        return variance, self.code_bits(facts.head_dim)

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        variance, bits = index
        return read_depths(channel_importance(query, variance), bits)

    def typical_bits(self, head_dim: int) -> str:
        return f"{self.code_bits(head_dim)} + scales"

    def line(self) -> str:
        return f"Fathom {self.basis}"

    def code_bits(self, head_dim: int) -> int:
        """The budget at this head_dim, at least one bit."""
        return max(1, round(self.budget * head_dim / 128))

    def _basis(self, facts: ModelFacts) -> Literal["raw", "klt"]:
        if self.basis == "auto":
            return "raw" if facts.qk_norm else "klt"
        return self.basis
