"""What every method is run on: the list of methods, shapes of a model, one layer of keys, and a step over it."""

from __future__ import annotations

import functools

import torch

from fathom_eval.calibration import QueryStatistics
from fathom_eval.methods import PAPER, parse_method
from fathom_eval.models import ModelFacts
from fathom_eval.observations import MeanQueryKeyProduct
from fathom_eval.prefill import Prefix, PrefixLayer

SCANS = tuple(text for text in PAPER if not parse_method(text).method.control)
# What else scores every key, read as the paper defines it, as published, or as a store that a scan reads in full.
FURTHER = (
    "loki:bits=16",
    "loki_published",
    "sparq_published",
    "double_sparsity_published:dense_layers=none",
    "landmark:bits=4",
    "quest",
    "quest:bits=4",
    "quest_published:dense_layers=none",
    "shadowkv:outlier=2",
    "retroinfer",
    "infinigen",
    "infinigen_skewed:dense_layers=none",
    "infinigen_published:dense_layers=none",
    "uniform_depth",
    "self_indexing",
    "kivi",
    "kivi:bits=4:group=64",
    "turboquant",
    "turboquant:bits=3:residual=true",
    "kvquant",
    "kvquant:bits=4",
    "fathom:codes=8bit:basis=raw",
    "fathom:codes=allocated",
    "fathom:scales=fp8",
    "fathom:scales=fp8:basis=raw",
    "fathom:depths=measured:budget=56",
    "fathom:depths=measured:budget=56:basis=raw",
    "fathom:depths=measured:scales=fp8:codes=8bit",
    "fathom:by_ratio=true",
    "fathom:by_ratio=true:codes=allocated:basis=raw",
)
# GQA groups 1, 3, 4, 7; head_dim 64, 96, 128, 256; lengths that are not whole blocks.
SHAPES = ((1, 64, 300), (3, 96, 257), (4, 128, 450), (7, 256, 200))


def facts_of(group: int, head_dim: int, dtype: str = "float32") -> ModelFacts:
    return ModelFacts("tiny", "llama", 1, 2 * group, 2, head_dim, False, 10**6, (0,), dtype, "cpu", "m", "t")


@functools.cache
def layer_prefix(group: int, head_dim: int, tokens: int, dtype: torch.dtype) -> Prefix:
    """One layer of keys with unequal channels and an offset, as real keys have."""
    generator = torch.Generator().manual_seed(head_dim + tokens)
    spread = torch.logspace(0.5, -1.5, head_dim)[torch.randperm(head_dim, generator=generator)]
    keys = (torch.randn(2, tokens, head_dim, generator=generator) + torch.randn(2, 1, head_dim, generator=generator)) * spread
    values = torch.randn(2, tokens, head_dim, generator=generator)
    statistics = QueryStatistics()
    queries = torch.randn(2, group, tokens, head_dim, generator=generator)
    statistics.add(queries)
    observations = {MeanQueryKeyProduct(): (queries * keys.unsqueeze(1)).abs().mean(2)}
    return Prefix(tuple(range(tokens + 1)), (PrefixLayer(keys.to(dtype), values.to(dtype), statistics, observations=observations),))


def step(group: int, head_dim: int, rows: int, dtype: torch.dtype, tail: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    query = torch.randn(rows, 2, group, head_dim, generator=generator)
    own = torch.randn(2, rows, 2, tail, head_dim, generator=generator)
    return query.to(dtype), own[0].to(dtype), own[1].to(dtype)
