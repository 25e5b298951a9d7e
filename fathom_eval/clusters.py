"""Clusters of keys by spherical k-means, and the mean value of each: RetroInfer's index (arXiv:2505.02922 §4.2).

Shapes: R branches, H KV heads, G query heads a KV head, n sealed tokens, C clusters, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.coded import half
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.reads import Reads
from fathom_eval.stores import Store, StoreSpec, batched_scores

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer

SEGMENT_TOKENS = 8192
"""Tokens that are clustered together at most: a segment takes time and memory by its square."""

ITERATIONS = 10


@dataclass(frozen=True)
class ClusterSpec(StoreSpec):
    """One centroid for every ``size`` keys.

    The prefix is clustered in segments of :data:`SEGMENT_TOKENS`; each block that is sealed later is a segment of its own.

    Attributes:
        size: Tokens a centroid on average; divides 64.
        estimated: The share of the clusters whose mean value and size a step reads beside all centroids.
    """

    size: int = 16
    estimated: float = 0.0

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        store = ClusterStore(self, layer.key_statistics.mean, layer.keys[:, :0], layer.values[:, :0])
        for start in range(0, tokens, SEGMENT_TOKENS):
            part = slice(start, min(start + SEGMENT_TOKENS, tokens))
            store.add_segment(layer.keys[:, part], layer.values[:, part])
        return store


class ClusterStore(Store):
    """Centroids, the mean keys of clusters, in fp16; each token scores as its cluster does.

    Args:
        mean: What keys are centred by before their directions are compared, fp32 ``[H, D]``.
        keys, values: None yet, ``[…, H, 0, D]``.

    Attributes:
        labels: The cluster of each token, int64 ``[…, H, n]``.
        centroids: fp16 ``[…, H, C, D]``.
        means: Mean value of each cluster, in the values' dtype, ``[…, H, C, D]``.
        sizes: Tokens of each cluster, int64 ``[…, H, C]``; a cluster can be empty.
    """

    def __init__(self, spec: ClusterSpec, mean: Tensor, keys: Tensor, values: Tensor) -> None:
        self._spec, self._mean = spec, mean
        self.labels = torch.empty(keys.shape[:-1], dtype=torch.int64, device=keys.device)
        self.centroids = keys.to(torch.float16)
        self.means = values
        self.sizes = torch.empty(keys.shape[:-1], dtype=torch.int64, device=keys.device)

    @property
    def bytes(self) -> int:
        return sum(part.nbytes for part in (self.labels, self.centroids, self.means, self.sizes))

    @property
    def clusters(self) -> int:
        """C."""
        return self.centroids.shape[-2]

    def append(self, keys: Tensor) -> None:
        """Not to be had: a cluster holds its mean value. See :meth:`seal`."""
        raise TypeError("clusters hold values too; seal keys and values together")

    def seal(self, keys: Tensor, values: Tensor) -> None:
        for start in range(0, keys.shape[-2], BLOCK):
            self.add_segment(keys[..., start : start + BLOCK, :], values[..., start : start + BLOCK, :])

    def add_segment(self, keys: Tensor, values: Tensor) -> None:
        """Cluster keys ``[…, H, n, D]``, n a multiple of 64.

        Raises:
            ValueError: A centroid overflows fp16 or is not finite; the message names the KV heads.
        """
        keys = keys.float()
        found = spherical_kmeans(keys - self._mean.unsqueeze(-2), keys.shape[-2] // self._spec.size)
        members = _members(found, keys.shape[-2] // self._spec.size)
        sizes = members.sum(-1)
        count = sizes.clamp_min(1).unsqueeze(-1)
        self.labels = torch.cat([self.labels, found + self.clusters], dim=-1)
        self.centroids = torch.cat([self.centroids, half(members @ keys / count)], dim=-2)
        self.means = torch.cat([self.means, (members @ values.float() / count).to(values.dtype)], dim=-2)
        self.sizes = torch.cat([self.sizes, sizes.long()], dim=-1)
        self.tokens = self.labels.shape[-1]

    def empty(self, rows: int) -> Store:
        heads, channels = self.centroids.shape[-3], self.centroids.shape[-1]
        nothing = self.means.new_empty(rows, heads, 0, channels)
        return ClusterStore(self._spec, self._mean, nothing, nothing)

    def cluster_scores(self, query: Tensor) -> Tensor:
        """q·centroid, fp32 ``[R, H, G, C]``."""
        return batched_scores(query.float(), self.centroids.float().transpose(-1, -2))

    def of_tokens(self, of_clusters: Tensor) -> Tensor:
        """What a token's cluster has, ``[R, H, G, C]`` to ``[R, H, G, n]``."""
        labels = self.labels if self.labels.dim() == 3 else self.labels.unsqueeze(0)
        return of_clusters.gather(-1, labels.unsqueeze(2).expand(*of_clusters.shape[:3], -1))

    def counted(self, tokens: Tensor) -> Tensor:
        """How many tokens of each cluster are True, ``[R, H, G, n]`` to ``[R, H, G, C]``."""
        labels = self.labels if self.labels.dim() == 3 else self.labels.unsqueeze(0)
        found = torch.zeros(*tokens.shape[:3], self.clusters, dtype=torch.int32, device=tokens.device)
        return found.scatter_add_(-1, labels.unsqueeze(2).expand(tokens.shape), tokens.int())

    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Reads]:
        scores = self.of_tokens(self.cluster_scores(query))
        channels = query.shape[-1]
        zero = torch.zeros(query.shape[:2], dtype=torch.int64, device=query.device)
        bits = 16 * channels * self.clusters + round(self._spec.estimated * self.clusters * 16 * (channels + 1))
        return scores, Reads(zero, zero, zero + bits, zero + channels, self.tokens)


def spherical_kmeans(points: Tensor, count: int, iterations: int = ITERATIONS) -> Tensor:
    """Assign points to ``count`` directions so that the sum of cosines grows, batch by batch.

    The first directions are those of points at even distances. A cluster that loses all of its points keeps its direction. Sums are
    matrix products, whose order is fixed, where an indexed addition has none on a GPU.

    Args:
        points: fp32 ``[…, n, D]``; a zero point goes to the first cluster.
        count: At most n.

    Returns:
        Labels, int64 ``[…, n]`` in 0..count - 1; of equally near directions the first.
    """
    directions = torch.nn.functional.normalize(points, dim=-1)
    stride = points.shape[-2] / count
    start = ((torch.arange(count, dtype=torch.float64, device=points.device) + 0.5) * stride).long()
    centres = directions.index_select(-2, start)
    for _ in range(iterations):
        sums = _members((directions @ centres.transpose(-1, -2)).argmax(-1), count) @ directions
        length = sums.norm(dim=-1, keepdim=True)
        centres = torch.where(length > 0, sums / length.masked_fill(length == 0, 1.0), centres)
    return (directions @ centres.transpose(-1, -2)).argmax(-1)


def _members(labels: Tensor, count: int) -> Tensor:
    """1 where a point is in a cluster, fp32 ``[…, C, n]``."""
    numbers = torch.arange(count, device=labels.device).unsqueeze(-1)
    return (labels.unsqueeze(-2) == numbers).float()
