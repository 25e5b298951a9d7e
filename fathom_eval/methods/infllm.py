"""InfLLM: blocks seen through a few representative keys, one set of blocks for the whole layer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.methods.base import Method
from fathom_eval.representatives import RepresentativeSpec
from fathom_eval.stores import StoreSpec

if TYPE_CHECKING:
    from fathom_eval.methods.step import Step
    from fathom_eval.models import ModelFacts
    from fathom_eval.observations import Observation


@dataclass(frozen=True)
class InfLLM(Method):
    """Every token scored as its block, by the keys of the block that got the most attention from the tokens after them.

    Scores are summed over all heads of the layer, so a layer has one set (arXiv:2402.04617). Representatives are those of a KV head, by
    the attention of its group; the authors choose them for each query head. Positions are those of the text, where their code gives all
    remembered tokens one position. A block that is sealed while decoding has 64 tokens, and its representatives are the keys with the
    largest product with the mean of the prompt's last queries, since nothing is known yet of the attention that they get. A set ends
    within a block, so that k tokens are k tokens.

    Attributes:
        block: Tokens a block, a multiple of 64.
        representatives: Keys of a block; at least one for 64 tokens.
        window: Tokens after a key whose attention to it counts.
    """

    name: ClassVar[str] = "infllm"
    family: ClassVar[str] = "InfLLM"
    source: ClassVar[str] = (
        "InfLLM (arXiv:2402.04617): blocks of 128 tokens by 4 keys that got the most local attention, fp16, one set a layer; positions as "
        "in the text"
    )

    block: int = 128
    representatives: int = 4
    window: int = 4096

    def check(self, facts: ModelFacts) -> None:
        if self.block < 64 or self.block % 64:
            raise UserError(f"{self.name}: block={self.block} must be a multiple of 64, the tokens of a sealed block")
        least = self.block // 64
        if not least <= self.representatives <= self.block or self.representatives % least:
            raise UserError(f"{self.name}: representatives={self.representatives} must be a multiple of {least} up to block={self.block}")
        if self.window < 1:
            raise UserError(f"{self.name}: window={self.window} must be at least 1")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return self._spec

    def observes(self, facts: ModelFacts) -> tuple[Observation, ...]:
        return self._spec.needs

    def rank(self, scores: Tensor, step: Step) -> Tensor:
        return scores.sum((1, 2), keepdim=True).expand_as(scores)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return 16 * facts.head_dim * self.representatives / self.block

    def typical_bits(self, head_dim: int) -> str:
        return f"{16 * head_dim * self.representatives / self.block:g}"

    @property
    def _spec(self) -> RepresentativeSpec:
        return RepresentativeSpec(self.block, self.representatives, self.window)


@dataclass(frozen=True)
class InfLLMPublished(InfLLM):
    """InfLLM with the first 128 and the last 4,096 tokens always kept, as its authors run it: k must be above 4,224."""

    name: ClassVar[str] = "infllm_published"
    family: ClassVar[str] = "InfLLM as published"
    source: ClassVar[str] = "InfLLM as thunlp/InfLLM runs it (arXiv:2402.04617): first 128 and last 4,096 tokens kept; k must exceed 4,224"
    published: ClassVar[bool] = True

    def policy_defaults(self) -> Mapping[str, Any]:
        return {"sink": 128, "local": 4096}
