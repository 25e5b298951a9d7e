"""Layers of made-up keys, and one scan or one step over them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch, BranchBatch
from fathom_eval.calibration import QueryStatistics
from fathom_eval.methods import parse_method
from fathom_eval.models import ModelFacts
from fathom_eval.observations import LayerObservers, MeanQueryKeyProduct, needed_observations
from fathom_eval.prefill import Prefix, PrefixLayer

GROUP, CHANNELS, TOKENS, LOCAL = 3, 64, 320, 32
CPU = torch.device("cpu")
needs_faiss = pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="faiss is not installed")


def facts_of(head_dim: int = CHANNELS, layers: int = 1, group: int = GROUP) -> ModelFacts:
    return ModelFacts("tiny", "llama", layers, 2 * group, 2, head_dim, False, 10**6, (0,), "float32", "cpu", "m", "t")


FACTS = facts_of()


@functools.cache
def real_layer(tokens: int = TOKENS, channels: int = CHANNELS, seed: int = 0) -> PrefixLayer:
    """Keys with unequal channels, an offset and heavy tails, as real keys have."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.logspace(0.5, -1.0, channels)[torch.randperm(channels, generator=generator)]
    noise = torch.randn(2, tokens, channels, generator=generator)
    keys = (noise * noise.abs().sqrt() + torch.randn(2, 1, channels, generator=generator)) * spread
    queries = torch.randn(2, GROUP, tokens, channels, generator=generator)
    statistics = QueryStatistics()
    statistics.add(queries)
    observations = {MeanQueryKeyProduct(): (queries * keys.unsqueeze(1)).abs().mean(2)}
    return PrefixLayer(keys, torch.randn(2, tokens, channels, generator=generator), statistics, observations=observations)


def observed_layer(*texts: str, tokens: int = TOKENS) -> PrefixLayer:
    """The real layer with what these methods ask of its prefill."""
    layer = real_layer(tokens)
    prompt = torch.randn(2, GROUP, tokens, CHANNELS, generator=torch.Generator().manual_seed(11))
    observers = LayerObservers(needed_observations((parse_method(text).method for text in texts), FACTS), 1)
    observers.add(0, prompt, layer.keys, CHANNELS**-0.5)
    return dataclasses.replace(layer, observations={**layer.observations, **observers.results(0)}, _stores={})


def queries(rows: int = 2, channels: int = CHANNELS) -> Tensor:
    return torch.randn(rows, 2, GROUP, channels, generator=torch.Generator().manual_seed(9))


def scanned(text: str, layer: PrefixLayer | None = None, query: Tensor | None = None) -> tuple[Tensor, Any]:
    """Scores and reads of a method over all whole blocks of a layer."""
    layer = real_layer() if layer is None else layer
    query = queries() if query is None else query
    method = parse_method(text).method
    spec = method.store(FACTS)
    assert spec is not None
    store = spec.build(layer, layer.keys.shape[1] // 64 * 64)
    projected = store.project(query)
    return store.scan(query, projected, method.plan(projected, method.index(layer, FACTS)))


STORES = (
    "quest", "quest:bits=4", "landmark", "landmark:bits=4", "self_indexing", "kivi", "turboquant", "turboquant:bits=3:residual=true",
    "kvquant", "loki:bits=16", "sparq_published", "double_sparsity_published", "full", "fathom:codes=8bit", "fathom:scales=fp8",
    "fathom:codes=allocated",
)  # fmt: skip


def one_layer_output(
    text: str, k: int, layer: PrefixLayer | None = None, scaling: float = CHANNELS**-0.5
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output of a decode step, its query, and the keys and values of all tokens."""
    layer = real_layer() if layer is None else layer
    generator = torch.Generator().manual_seed(4)
    own = torch.randn(2, 1, 2, 10, CHANNELS, generator=generator)
    query = queries(1)
    prefix = Prefix(tuple(range(layer.keys.shape[1] + 1)), (layer,))
    output = BranchBatch(prefix, [Branch(parse_method(text), k)], FACTS).attend(0, query, own[0], own[1], scaling)
    return output[0], query[0], torch.cat([layer.keys, own[0, 0]], dim=1), torch.cat([layer.values, own[1, 0]], dim=1)


def attention(query: Tensor, keys: Tensor, values: Tensor, inside: Tensor, scaling: float = CHANNELS**-0.5) -> Tensor:
    """Over the tokens where ``inside`` is True."""
    weights = (query @ keys.transpose(-1, -2) * scaling).masked_fill(~inside, -torch.inf).softmax(-1)
    return weights @ values
