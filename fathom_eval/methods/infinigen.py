"""InfiniGen: rank a layer's keys ahead of its own query."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from fathom_eval import columns
from fathom_eval.methods.base import IF_CHANGED, Method, channel_count, top_channels
from fathom_eval.planes import PlaneSpec
from fathom_eval.skewed import SkewedSpec
from fathom_eval.stores import StoreSpec

if TYPE_CHECKING:
    from fathom_eval.methods.step import Step
    from fathom_eval.models import ModelFacts
    from fathom_eval.prefill import PrefixLayer


@dataclass(frozen=True)
class InfiniGen(Method):
    """The r channels with the largest |q| of the layer before, summed over the group, and its query for the scores (arXiv:2406.19707).

    The authors give the attention input of the layer before to this layer's query projection: that is ``query=rehearsed``, for which the
    attention module of every layer runs once more. ``previous`` is the query that the layer before made of that input with its own
    weights; little makes the heads of two layers speak of the same channels, so it is a lower bound of their speculation. ``query=own`` is
    the upper one, as if the two inputs were equal. The first layer has its own query.

    Attributes:
        r: Channels, a number or a share of head_dim.
        query: Whose query: ``previous``, ``rehearsed`` or ``own``.
    """

    name: ClassVar[str] = "infinigen"
    family: ClassVar[str] = "InfiniGen"
    source: ClassVar[str] = (
        "after InfiniGen (arXiv:2406.19707): 4-bit partial channels by the query of the layer before; query=rehearsed is this layer's "
        "projection of that layer's input, as the authors speculate"
    )

    r: str = "D/4"
    query: Literal["previous", "rehearsed", "own"] = field(default="previous", metadata=IF_CHANGED)

    def check(self, facts: ModelFacts) -> None:
        channel_count(self.r, facts.head_dim, f"{self.name}: r")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return PlaneSpec("raw")

    def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
        return channel_count(self.r, facts.head_dim, f"{self.name}: r")

    @property
    def rehearses(self) -> bool:
        return self.query == "rehearsed"

    def scan_query(self, step: Step) -> Tensor:
        ahead = {"previous": step.previous_query, "rehearsed": step.rehearsed_query, "own": None}[self.query]
        return step.query if ahead is None else ahead

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        return top_channels(query.abs().sum(-2), index) * 4

    def typical_bits(self, head_dim: int) -> str:
        return f"{4.25 * channel_count(self.r, head_dim, f'{self.name}: r'):g}"

    def line(self) -> str:
        return self.family if self.query == "previous" else f"{self.family} {self.query} query"


@dataclass(frozen=True)
class InfiniGenSkewed(InfiniGen):
    """InfiniGen's skewing without its speculation: the first r coordinates along the singular vectors of the queries, in fp16.

    This is not the published method, which is :class:`InfiniGenPublished`; of the query that is used here see :class:`InfiniGen`. What it
    takes from the authors' code is the rest: the skewing, a first layer that is dense, and a selection that keeps no sink and no window
    beyond the current token. The coordinates are those where queries are largest, in the mean of their squares; the authors sum magnitudes,
    skew each query head and take 0.1 to 0.3 of the columns. Their number of tokens follows the scores, where here k is k.
    """

    name: ClassVar[str] = "infinigen_skewed"
    family: ClassVar[str] = "InfiniGen, previous query, skewed"
    source: ClassVar[str] = (
        "after InfiniGen (arXiv:2406.19707), not as published: fp16 columns along the singular vectors of the queries after RoPE, layer 0 "
        "dense, no sink, no local window; query of the layer before"
    )

    def policy_defaults(self) -> Mapping[str, Any]:
        return {"sink": 0, "local": 1, "dense_layers": (0,)}

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return SkewedSpec()

    def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
        count = channel_count(self.r, facts.head_dim, f"{self.name}: r")
        leading = torch.arange(facts.head_dim, device=layer.keys.device) < count
        return leading.expand(layer.keys.shape[0], -1) * columns.BITS

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        depths: Tensor = index
        return depths.expand(query.shape[0], -1, -1)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> Tensor | float:
        assert plan is not None
        return columns.column_bits(plan)

    def typical_bits(self, head_dim: int) -> str:
        return f"{columns.BITS * channel_count(self.r, head_dim, f'{self.name}: r')}"

    def line(self) -> str:
        return self.family if self.query == "previous" else f"InfiniGen, {self.query} query, skewed"


@dataclass(frozen=True)
class InfiniGenPublished(InfiniGenSkewed):
    """InfiniGen as its authors' code runs it: this layer's projection of the layer before's attention input, skewed, decides the tokens.

    Layers 0 and 1 are dense, as there: speculation begins with the input of layer 1. Of what differs see :class:`InfiniGenSkewed`.
    """

    name: ClassVar[str] = "infinigen_published"
    family: ClassVar[str] = "InfiniGen as published"
    source: ClassVar[str] = (
        "InfiniGen as snu-comparch/InfiniGen runs it (arXiv:2406.19707): the layer before's attention input through this layer's query "
        "projection and rotary embedding, fp16 columns along the singular vectors of the queries, layers 0 and 1 dense, no sink, no local "
        "window; k tokens, where theirs follow the scores"
    )
    published: ClassVar[bool] = True

    query: Literal["previous", "rehearsed", "own"] = field(default="rehearsed", metadata=IF_CHANGED)

    def policy_defaults(self) -> Mapping[str, Any]:
        return {"sink": 0, "local": 1, "dense_layers": (0, 1)}

    def line(self) -> str:
        return self.family if self.query == "rehearsed" else f"{self.family}, {self.query} query"
