"""Toy methods with one hook each, and what attends for a test of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch, BranchBatch
from fathom_eval.methods import MethodSpec
from fathom_eval.methods.base import Method
from fathom_eval.methods.sparq import SparQ
from fathom_eval.methods.step import Step
from fathom_eval.models import ModelFacts
from fathom_eval.observations import (
    LayerObservers,
    needed_observations,
)
from fathom_eval.prefill import Prefix, PrefixLayer
from fathom_eval.selection import Policy
from fathom_eval.stores import ExactStore, StoreSpec
from tests.key_layers import needs_faiss
from tests.method_matrix import facts_of, step

FACTS = facts_of(3, 64)
LSH = "magicpig:bits=4:tables=20"
INDEXED = ("retrieval_attention:size=32:probes=0.3", "retrieval_attention:kind=hnsw:candidates=40")
EXTENDED = (
    *("h2o", "threshold", "threshold:margin=0.5:rerank=2", LSH, "h2o:recent=0:rerank=2", f"{LSH}:reallocate=true:sink=0"),
    *("infllm", "infllm:rerank=2", "retroinfer_published:local=32", "retroinfer_published:local=32:retrieve=0.1:estimate=0"),
    *("retrieval_attention:kind=pairs:candidates=100", "retrieval_attention_published:sink=4:local=32:candidates=100"),
    *("streaming_llm", f"magicpig_published:{LSH.partition(':')[2]}:dense_every=0:local=32", "infllm_published:sink=4:local=32"),
    *(pytest.param(text, marks=needs_faiss) for text in INDEXED),
)


def observed(prefix: Prefix, group: int, specs: Sequence[MethodSpec], facts: ModelFacts) -> Prefix:
    """The prefix with what these methods ask of its prefill, for queries of the test's own."""
    layer = prefix.layers[0]
    heads, tokens, head_dim = layer.keys.shape
    queries = torch.randn(heads, group, tokens, head_dim, generator=torch.Generator().manual_seed(2))
    observers = LayerObservers(needed_observations((spec.method for spec in specs), facts), 1)
    observers.add(0, queries, layer.keys, head_dim**-0.5)
    return Prefix(prefix.token_ids, (dataclasses.replace(layer, observations=observers.results(0), _stores={}),))


def attend(prefix: Prefix, branches: Sequence[Branch], facts: ModelFacts, tail: int = 1) -> tuple[BranchBatch, Tensor]:
    batch = BranchBatch(prefix, branches, facts)
    query, keys, values = step(facts.query_heads // 2, facts.head_dim, 1, prefix.layers[0].keys.dtype, tail)
    rows = (part.expand(len(branches), -1, -1, -1) for part in (query, keys, values))
    return batch, batch.attend(0, *rows, facts.head_dim**-0.5)


# Toy methods: one hook each, over the keys themselves


@dataclass(frozen=True)
class KeysSpec(StoreSpec):
    """The keys themselves, as a store whose reads are counted."""

    def build(self, layer: PrefixLayer, tokens: int) -> ExactStore:
        return Keys(layer.keys[:, :tokens], layer.values[:, :tokens])


class Keys(ExactStore):
    def __init__(self, keys: Tensor, values: Tensor) -> None:
        super().__init__(keys)
        self.keys, self.values = keys, values

    def seal(self, keys: Tensor, values: Tensor) -> None:
        self.append(keys)
        self.keys, self.values = self._keys, torch.cat([self.values, values], dim=-2)

    def empty(self, rows: int) -> ExactStore:
        keys = self._keys.new_empty(rows, self._keys.shape[-3], 0, self._keys.shape[-1])
        return Keys(keys, keys)

    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Any]:
        scores, reads = super().scan(query, projected, plan)
        return scores, dataclasses.replace(reads, tokens=self.tokens)


@dataclass(frozen=True)
class Toy(Method):
    name: ClassVar[str] = "toy"
    family: ClassVar[str] = "toy"
    source: ClassVar[str] = "test"

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return KeysSpec()

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return 0.0


@dataclass(frozen=True)
class Remainder(Toy):
    """Every sealed token that is not attended to, as a pseudo-key of its own: nothing is left out."""

    name: ClassVar[str] = "remainder"

    def remainder(self, attended: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        logits, values, at = [], [], 0
        for store in step.stores:
            assert isinstance(store, Keys)
            found = step.query.float() @ store.keys.float().transpose(-1, -2) * step.scaling
            logits.append(found.masked_fill(attended[..., at : at + store.tokens], -torch.inf))
            held = store.values.float()
            rows = step.query.shape[0]
            values.append((held if held.dim() == 4 else held.unsqueeze(0).expand(rows, -1, -1, -1)).unsqueeze(2))
            at += store.tokens
        heads, group, head_dim = step.query.shape[1:]
        if not logits:
            return step.query.new_zeros(step.query.shape[0], heads, group, 0), step.query.new_zeros(1, heads, 1, 0, head_dim)
        return torch.cat(logits, -1), torch.cat(values, -2)


@dataclass(frozen=True)
class Ahead(Toy):
    """Ranks with the queries of the layer before."""

    name: ClassVar[str] = "ahead"

    def scan_query(self, step: Step) -> Tensor:
        return step.query if step.previous_query is None else step.previous_query


@dataclass(frozen=True)
class Ratio(SparQ):
    """One channel for every 0.4 % of the tokens that k is."""

    name: ClassVar[str] = "ratio"

    def plan_step(self, query: Tensor, step: Step) -> Tensor | None:
        order = query.abs().sum(-2).argsort(dim=-1, descending=True, stable=True).argsort(-1)
        count = (250 * step.k / step.tokens).round().clamp(1, query.shape[-1])
        return (order < count.view(-1, 1, 1)) * 4


@dataclass(frozen=True)
class Infinite(Toy):
    """Even tokens are never attended to; those from 200 to 220 are taken first."""

    name: ClassVar[str] = "infinite"
    ranks_all: ClassVar[bool] = False
    forces: ClassVar[bool] = True

    def rank(self, scores: Tensor, step: Step) -> Tensor:
        number = torch.arange(scores.shape[-1])
        scores = scores.masked_fill((number >= 200) & (number < 220), torch.inf)
        return scores.masked_fill(number % 2 == 0, -torch.inf)


@dataclass(frozen=True)
class Nothing(Toy):
    """Finds nothing."""

    name: ClassVar[str] = "nothing"
    ranks_all: ClassVar[bool] = False

    def rank(self, scores: Tensor, step: Step) -> Tensor:
        return torch.full_like(scores, -torch.inf)


def toy(method: Method, **policy: Any) -> MethodSpec:
    return MethodSpec(method, Policy(**policy))
