"""StreamingLLM: the first and the most recent tokens, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fathom_eval.methods.base import Method
from fathom_eval.stores import StoreSpec, UnreadSpec

if TYPE_CHECKING:
    from fathom_eval.methods.step import Step
    from fathom_eval.models import ModelFacts


@dataclass(frozen=True)
class StreamingLLM(Method):
    """Sink tokens and as many of the most recent ones as k leaves room for. It reads nothing to find them.

    It evicts where the others rank, so it is exempt from what they promise of k ≥ n. Keys stay where they are: positions are those of
    the text, not of the cache.
    """

    name: ClassVar[str] = "streaming_llm"
    family: ClassVar[str] = "StreamingLLM"
    source: ClassVar[str] = "StreamingLLM (arXiv:2309.17453): sink and most recent tokens, positions as in the text"
    ranks_all: ClassVar[bool] = False

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return UnreadSpec()

    def rank(self, scores: Tensor, step: Step) -> Tensor:
        return torch.arange(scores.shape[-1], dtype=torch.float32, device=scores.device).expand_as(scores)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return 0.0

    def typical_bits(self, head_dim: int) -> str:
        return "0"
