"""The two references: dense attention, and exact top-k, the oracle that every scan is built to reproduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fathom_eval.methods.base import Method
from fathom_eval.stores import ExactSpec, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts


@dataclass(frozen=True)
class Dense(Method):
    """Attention to every token."""

    name: ClassVar[str] = "dense"
    family: ClassVar[str] = "dense"
    source: ClassVar[str] = "control: attends to every token, as the model was trained"
    control: ClassVar[bool] = True

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return None


@dataclass(frozen=True)
class ExactTopK(Method):
    """Top-k by fp32 scores of the model's own keys."""

    name: ClassVar[str] = "exact"
    family: ClassVar[str] = "exact top-k"
    source: ClassVar[str] = "control: the oracle, top-k by fp32 scores of the model's own keys (paper §2)"
    control: ClassVar[bool] = True

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return ExactSpec()

    def declared_bits(self, plan: None, facts: ModelFacts) -> float:  # type: ignore[override]
        return 0.0
