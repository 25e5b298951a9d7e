"""Indexes for the largest inner products, made by faiss: inverted lists and a navigable graph.

Keys are indexed less their mean, which changes no order among them for any query. faiss is an optional extra and is imported where an
index is built.

Shapes: R branches, H KV heads, G query heads a KV head, n sealed tokens, L lists, D channels.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fathom_eval.reads import Reads
from fathom_eval.stores import Store, StoreSpec, batched_scores

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer

KEY_BITS = 16
"""Of a key's channel or a centroid's, as a step reads it; faiss itself holds fp32."""


@dataclass(frozen=True)
class InvertedSpec(StoreSpec):
    """faiss' IndexIVFFlat for inner products: spherical k-means of the prefix's keys.

    Attributes:
        size: Keys a list on average.
        probes: Share of the lists that a query looks into.
    """

    size: int = 64
    probes: float = 0.05

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        keys, mean = layer.keys[:, :tokens], layer.key_statistics.mean
        heads, _, channels = keys.shape
        lists = max(1, tokens // self.size)
        centroids = torch.zeros(heads, lists, channels)
        if tokens:
            centred = (keys.float() - mean.unsqueeze(-2)).cpu().contiguous()
            centroids = torch.stack([_trained_centroids(part, lists) for part in centred])
        store = InvertedStore(self, centroids.to(keys.device), mean, layer.keys[:, :0], is_shared=True)
        store.append(keys)
        return store


class InvertedStore(Store):
    """Inverted lists over the model's own keys.

    The keys of the lists that a query looks into have their exact score, all others −∞. Centroids stay as the prefix made them; later
    keys go into the lists of the nearest. What is read are all centroids, and the keys of the lists that any head of the group looks into.

    Args:
        centroids: Unit vectors, fp32 ``[H, L, D]``.
        keys: None yet, ``[…, H, 0, D]``.
        is_shared: Of the prefix: reading the centroids is counted here, not again for what branches sealed themselves.
    """

    def __init__(self, spec: InvertedSpec, centroids: Tensor, mean: Tensor, keys: Tensor, *, is_shared: bool) -> None:
        self._spec, self._centroids, self._mean, self._is_shared = spec, centroids, mean, is_shared
        self._keys = keys
        self._labels = torch.empty(keys.shape[:-1], dtype=torch.int64, device=keys.device)

    @property
    def bytes(self) -> int:
        return self._labels.nbytes + (self._centroids.nbytes if self._is_shared else 0)

    def append(self, keys: Tensor) -> None:
        centred = keys.float() - self._mean.unsqueeze(-2)
        nearest = (centred @ self._centroids.transpose(-1, -2)).argmax(-1)
        self._keys = torch.cat([self._keys, keys], dim=-2) if self.tokens else keys
        self._labels = torch.cat([self._labels, nearest], dim=-1)
        self.tokens = self._labels.shape[-1]

    def empty(self, rows: int) -> Store:
        keys = self._keys.new_empty(rows, self._keys.shape[-3], 0, self._keys.shape[-1])
        return InvertedStore(self._spec, self._centroids, self._mean, keys, is_shared=False)

    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Reads]:
        query = query.float()
        lists, channels = self._centroids.shape[-2:]
        near = batched_scores(query, self._centroids.transpose(-1, -2))  # [R, H, G, L]
        probed = near.topk(max(1, round(self._spec.probes * lists)), dim=-1).indices
        looked = torch.zeros_like(near, dtype=torch.bool).scatter_(-1, probed, True)
        labels = self._labels if self._labels.dim() == 3 else self._labels.unsqueeze(0)
        found = looked.gather(-1, labels.unsqueeze(2).expand(*query.shape[:3], -1))
        scores = batched_scores(query, self._keys.float().transpose(-1, -2)).masked_fill(~found, -torch.inf)
        touched = found.any(2).sum(-1) + (lists if self._is_shared else 0)
        zero = torch.zeros_like(touched)
        return scores, Reads(zero, zero, touched * (KEY_BITS * channels), zero, self.tokens)


@dataclass(frozen=True)
class GraphSpec(StoreSpec):
    """faiss' IndexHNSWFlat for inner products over the prefix's keys.

    Attributes:
        links: Of a node of the graph.
        candidates: Keys that a search keeps in view and returns, its ``ef``.
    """

    links: int = 32
    candidates: int = 256

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        faiss = _faiss()
        mean = layer.key_statistics.mean
        graphs = []
        for centred in (layer.keys[:, :tokens].float() - mean.unsqueeze(-2)).cpu():
            graph = faiss.IndexHNSWFlat(centred.shape[-1], self.links, faiss.METRIC_INNER_PRODUCT)
            graph.add(centred.contiguous().numpy())
            graphs.append(graph)
        return GraphStore(self, graphs, mean, layer.keys[:, :0], tokens)


class GraphStore(Store):
    """A graph for each KV head over the prefix's keys, searched by every query head; later keys are all scored.

    The keys that a search returns have their inner product as score, all others −∞. What is read are the keys whose distance faiss has
    computed for any head of the group, by its own count and at most all of them, and all later keys. The count is one number of the
    process, so searches must not run at the same time in several threads. Graphs live in the host's memory, and each step waits for them.

    Args:
        graphs: One a KV head; none for blocks that branches sealed themselves.
        keys: Later keys, none yet, ``[…, H, 0, D]``.
        indexed: Tokens of the graphs.
    """

    def __init__(self, spec: GraphSpec, graphs: list[Any], mean: Tensor, keys: Tensor, indexed: int) -> None:
        self._spec, self._graphs, self._mean, self._keys, self._indexed = spec, graphs, mean, keys, indexed
        self.tokens = indexed

    @property
    def bytes(self) -> int:
        row = self._keys.shape[-1] * 4 + self._spec.links * 2 * 4
        return len(self._graphs) * self._indexed * row

    def append(self, keys: Tensor) -> None:
        self._keys = torch.cat([self._keys, keys], dim=-2)
        self.tokens += keys.shape[-2]

    def empty(self, rows: int) -> Store:
        keys = self._keys.new_empty(rows, self._keys.shape[-3], 0, self._keys.shape[-1])
        return GraphStore(self._spec, [], self._mean, keys, 0)

    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Reads]:
        rows, heads, group, channels = query.shape
        query = query.float()
        later = self._keys.shape[-2]
        touched = torch.full((rows, heads), later, dtype=torch.int64)
        parts = []
        if self._indexed:
            found = torch.full((rows, heads, group, self._indexed), -torch.inf)
            host = query.cpu().contiguous()
            for row in range(rows):
                for head, graph in enumerate(self._graphs):
                    products, tokens, visited = _searched(graph, host[row, head], min(self._spec.candidates, self._indexed))
                    # What was not found has the number -1 and goes into a column of its own.
                    scores = torch.full((group, self._indexed + 1), -torch.inf)
                    found[row, head] = scores.scatter_(-1, tokens % (self._indexed + 1), products)[:, :-1]
                    # A key that several heads of the group look at is read once, but the count names no keys.
                    touched[row, head] += min(visited, self._indexed)
            parts.append(found.to(query.device) + query @ self._mean.unsqueeze(-1))
        if later:
            parts.append(batched_scores(query, self._keys.float().transpose(-1, -2)))
        bits = (touched * (KEY_BITS * channels)).to(query.device)
        zero = torch.zeros_like(bits)
        return torch.cat(parts, dim=-1), Reads(zero, zero, bits, zero, self.tokens)


def _trained_centroids(keys: Tensor, lists: int) -> Tensor:
    """Unit vectors ``[L, D]`` that faiss trains an inverted file with on keys ``[n, D]`` of the CPU."""
    faiss = _faiss()
    channels = keys.shape[-1]
    quantizer = faiss.IndexFlatIP(channels)
    index = faiss.IndexIVFFlat(quantizer, channels, lists, faiss.METRIC_INNER_PRODUCT)
    index.cp.min_points_per_centroid = 1  # faiss prints a warning below its usual 39
    index.train(keys.numpy())
    return torch.from_numpy(quantizer.reconstruct_n(0, lists))


def _searched(graph: Any, query: Tensor, count: int) -> tuple[Tensor, Tensor, int]:
    """Products and tokens, ``[G, count]``, that a graph finds for queries ``[G, D]``, and how many keys it looked at."""
    faiss = _faiss()
    statistics = faiss.cvar.hnsw_stats
    statistics.reset()
    products, tokens = graph.search(query.numpy(), count, params=faiss.SearchParametersHNSW(efSearch=count))
    return torch.from_numpy(products), torch.from_numpy(tokens), int(statistics.ndis)


def _faiss() -> Any:
    """The package, whose wrappers carry no complete types."""
    return importlib.import_module("faiss")
