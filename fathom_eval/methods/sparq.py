"""SparQ: the query picks the channels, each read at full depth."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fathom_eval import columns
from fathom_eval.methods.base import Method, channel_count, top_channels
from fathom_eval.planes import PlaneSpec
from fathom_eval.reallocation import tempered
from fathom_eval.stores import StoreSpec
from fathom_eval.waterfill import channel_ranks

if TYPE_CHECKING:
    from fathom_eval.methods.step import Step
    from fathom_eval.models import ModelFacts
    from fathom_eval.prefill import PrefixLayer


@dataclass(frozen=True)
class SparQ(Method):
    """The r channels with the largest |q| summed over the group, 4-bit codes (arXiv:2312.04985, its grouped-query rule).

    Attributes:
        r: Channels, a number or a share of head_dim.
        per_head: Every query head picks its own r channels and the group reads the union of the picks (paper §6, A5).
    """

    name: ClassVar[str] = "sparq"
    family: ClassVar[str] = "SparQ"
    source: ClassVar[str] = "SparQ (arXiv:2312.04985), grouped-query rule, 4-bit codes, no reallocation"

    r: str = "D/8"
    per_head: bool = False

    def check(self, facts: ModelFacts) -> None:
        channel_count(self.r, facts.head_dim, "sparq: r")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return PlaneSpec("raw")

    def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
        return channel_count(self.r, facts.head_dim, "sparq: r")

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        magnitude = query.abs()
        picked = top_channels(magnitude, index).any(-2) if self.per_head else top_channels(magnitude.sum(-2), index)
        return picked * 4

    def plan_key(self, index: Any) -> Hashable:
        return None if self.per_head else "group"

    @classmethod
    def plan_together(cls, query: Tensor, members: Sequence[tuple[SparQ, int, int]]) -> Tensor:
        counts = tuple(count for _, count, rows in members for _ in range(rows))
        return channel_ranks(query.abs().sum(-2), counts, 4)

    def typical_bits(self, head_dim: int) -> str:
        bits = 4.25 * channel_count(self.r, head_dim, "sparq: r")
        return f"{bits:g} or more" if self.per_head else f"{bits:g}"

    def line(self) -> str:
        return "SparQ per head" if self.per_head else self.family

    def label(self) -> str:
        return f"sparq r={self.r}" + (" per head" if self.per_head else "")


@dataclass(frozen=True)
class SparQPublished(Method):
    """SparQ as its authors' code runs it: fp16 channels, and one set for the group by the sum of its heads' scores.

    The sum is of scores at each head's temperature, √(D·‖q̂‖₁/‖q‖₁) where the model scales its scores by D^−1/2; tokens that are not sealed
    are scored exactly and have the model's own. Their code keeps no sink, always keeps the local window, and gives the mass of the tokens
    that it leaves out to the mean value.

    Attributes:
        r: Channels, a number or a share of head_dim.
    """

    name: ClassVar[str] = "sparq_published"
    family: ClassVar[str] = "SparQ as published"
    source: ClassVar[str] = (
        "SparQ as graphcore-research/llm-inference-research runs it (arXiv:2312.04985): fp16, one set a group by summed scores, "
        "reallocation onto the mean value, no sink"
    )
    version: ClassVar[int] = 2
    published: ClassVar[bool] = True

    r: str = "D/8"

    def policy_defaults(self) -> Mapping[str, Any]:
        return {"sink": 0, "share": "group_sum", "reallocate": True}

    def check(self, facts: ModelFacts) -> None:
        channel_count(self.r, facts.head_dim, f"{self.name}: r")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return columns.ColumnSpec("raw")

    def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
        return channel_count(self.r, facts.head_dim, f"{self.name}: r")

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        return top_channels(query.abs().sum(-2), index) * columns.BITS

    def rank(self, scores: Tensor, step: Step) -> Tensor:
        magnitude = step.query.float().abs()
        read = magnitude * top_channels(magnitude.sum(-2, keepdim=True), step.index)
        coverage = read.sum(-1) / magnitude.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)
        return tempered(scores, coverage, step.scaling, sum(store.tokens for store in step.stores))

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> Tensor | float:
        assert plan is not None
        return columns.column_bits(plan)

    def typical_bits(self, head_dim: int) -> str:
        return f"{columns.BITS * channel_count(self.r, head_dim, f'{self.name}: r')}"
