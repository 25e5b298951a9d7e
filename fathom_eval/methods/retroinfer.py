"""RetroInfer: clusters of keys, the best of them retrieved and the next estimated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fathom_eval.clusters import ClusterSpec, ClusterStore
from fathom_eval.errors import UserError
from fathom_eval.methods.base import Method
from fathom_eval.stores import StoreSpec

if TYPE_CHECKING:
    from fathom_eval.methods.step import Step
    from fathom_eval.models import ModelFacts


@dataclass(frozen=True)
class RetroInfer(Method):
    """Every token scored as the mean key of its cluster, found by spherical k-means of the centred keys (arXiv:2505.02922).

    Tokens are selected one by one and per query head, so that k tokens are k tokens: the last cluster may be cut. The prefix is clustered
    in segments of 8,192 tokens; a block of 64 tokens that is sealed while decoding is clustered on its own.

    Attributes:
        size: Tokens a centroid on average; divides 64.
    """

    name: ClassVar[str] = "retroinfer"
    family: ClassVar[str] = "RetroInfer"
    source: ClassVar[str] = (
        "RetroInfer (arXiv:2505.02922): centroids of centred spherical k-means, one for 16 keys, fp16; tokens selected one by one, "
        "nothing estimated"
    )

    size: int = 16

    def check(self, facts: ModelFacts) -> None:
        if self.size < 1 or 64 % self.size:
            raise UserError(f"{self.name}: size={self.size} must divide 64, the tokens of a sealed block")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return ClusterSpec(self.size)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return 16 * facts.head_dim / self.size

    def typical_bits(self, head_dim: int) -> str:
        return f"{16 * head_dim / self.size:g}"


@dataclass(frozen=True)
class RetroInferPublished(RetroInfer):
    """RetroInfer as its authors run it: whole clusters, one set for the group, and an estimate of the clusters that follow.

    Clusters are ranked by the softmax over all centroids, summed over the group. The first ``retrieve`` of them are attended to, token by
    token; each of the next ``estimate`` stands as one pseudo-key for its tokens: q·centroid plus the logarithm of their number, and the
    mean of the cluster's values. How many tokens that makes is up to the clusters, so k is only that of the exact set beside it. What is
    attended to anyway (the sink) is taken off a cluster's number, not out of its two means. Tokens that are not sealed are all attended
    to; the authors cluster every 1,024 new tokens, here each sealed block of 64. Bits are the centroids, and the mean values and numbers of
    the clusters that are estimated.

    Attributes:
        retrieve: Share of the clusters that is retrieved.
        estimate: Share of the clusters that is estimated.
    """

    name: ClassVar[str] = "retroinfer_published"
    family: ClassVar[str] = "RetroInfer as published"
    source: ClassVar[str] = (
        "RetroInfer as microsoft/RetrievalAttention runs it (arXiv:2505.02922): 1.8 % of the clusters retrieved for the group, 23.2 % "
        "estimated, local window 64"
    )
    published: ClassVar[bool] = True
    ranks_all: ClassVar[bool] = False
    capped: ClassVar[bool] = False
    declares: ClassVar[bool] = False

    retrieve: float = 0.018
    estimate: float = 0.232

    def policy_defaults(self) -> Mapping[str, Any]:
        return {"local": 64}

    def check(self, facts: ModelFacts) -> None:
        super().check(facts)
        if not 0 < self.retrieve <= 1:
            raise UserError(f"{self.name}: retrieve={self.retrieve:g} must lie above 0 and at most at 1, a share of the clusters")
        if not 0 <= self.estimate <= 1 - self.retrieve:
            raise UserError(f"{self.name}: estimate={self.estimate:g} must lie in 0..{1 - self.retrieve:g}, what retrieve leaves")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return ClusterSpec(self.size, self.estimate)

    def rank(self, scores: Tensor, step: Step) -> Tensor:
        stores = _cluster_stores(step)
        if not stores:
            return scores
        order = self._order(stores, step)
        retrieved = (order < self._retrieved(stores)).expand(*scores.shape[:3], -1)
        parts = retrieved.split([store.clusters for store in stores], dim=-1)
        found = torch.cat([store.of_tokens(part) for store, part in zip(stores, parts, strict=True)], dim=-1)[..., : scores.shape[-1]]
        # Whatever is not sealed is in no cluster and stays.
        found = torch.nn.functional.pad(found, (0, scores.shape[-1] - found.shape[-1]), value=True)
        return scores.masked_fill(~found, -torch.inf)

    def remainder(self, attended: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        stores, query = _cluster_stores(step), step.query
        rows, heads, group, channels = query.shape
        if not stores:
            return query.new_zeros(rows, heads, group, 0, dtype=torch.float32), query.new_zeros(1, heads, 1, 0, channels)
        order, first = self._order(stores, step), self._retrieved(stores)
        estimated = (order >= first) & (order < first + round(self.estimate * order.shape[-1]))
        gone = attended | (torch.arange(attended.shape[-1], device=query.device) >= step.tokens.view(-1, 1, 1, 1))
        counts, start = [], 0
        for store in stores:
            counts.append(store.sizes.unsqueeze(-2) - store.counted(gone[..., start : start + store.tokens]))
            start += store.tokens
        left = torch.cat(counts, dim=-1)
        logits = torch.cat([store.cluster_scores(query) for store in stores], dim=-1) * step.scaling + left.clamp_min(1).log()
        means = [store.means if store.means.dim() == 4 else store.means.unsqueeze(0) for store in stores]
        most = max(len(mean) for mean in means)
        values = torch.cat([mean.expand(most, -1, -1, -1) for mean in means], dim=-2)
        return logits.masked_fill(~estimated | (left < 1), -torch.inf), values.unsqueeze(2)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        raise NotImplementedError("what is estimated is a whole number of clusters, which only counting tells")

    def typical_bits(self, head_dim: int) -> str:
        return f"{16 * head_dim / self.size:g} + {self.estimate * 16 * (head_dim + 1) / self.size:.3g} estimated"

    def _retrieved(self, stores: list[ClusterStore]) -> int:
        return max(1, round(self.retrieve * sum(store.clusters for store in stores)))

    def _order(self, stores: list[ClusterStore], step: Step) -> Tensor:
        """The place of each cluster, the best first, one for the group, ``[R, H, 1, C]``; empty clusters come last."""
        logits = torch.cat([store.cluster_scores(step.query) for store in stores], dim=-1) * step.scaling
        sizes = [store.sizes if store.sizes.dim() == 3 else store.sizes.expand(len(step.query), -1, -1) for store in stores]
        empty = (torch.cat(sizes, dim=-1) == 0).unsqueeze(2)
        mass = logits.masked_fill(empty, -torch.inf).softmax(-1).sum(2, keepdim=True).masked_fill(empty, -1.0)
        return mass.sort(dim=-1, descending=True, stable=True).indices.argsort(-1)


def _cluster_stores(step: Step) -> list[ClusterStore]:
    return [store for store in step.stores if isinstance(store, ClusterStore)]
