"""Windows of given ids, a layer of made-up keys in one, and what a fidelity run makes of its positions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import torch

from fathom_eval.branches import Branch
from fathom_eval.calibration import QueryStatistics
from fathom_eval.fidelity_chunk import Outcome
from fathom_eval.fidelity_layer import LayerComparison, WindowLayer
from fathom_eval.fidelity_windows import Windows
from fathom_eval.methods import MethodSpec, parse_method
from fathom_eval.models import ModelFacts

SWITCHED = (
    "sparq:reallocate=true,full:attend=union,loki:share=group_sum,sparq:rerank=2,sparq:keep_tail=true,landmark:share=group_max,"
    "sparq:dense_layers=1,sparq:local=16:sink=0,landmark:reallocate=true,"
    "sparq:rerank=1.5:share=group_max:attend=union:reallocate=true:keep_tail=true"
)

SCANS = "fathom:basis=raw,fathom:basis=klt,sparq,sparq:per_head=true,double_sparsity,loki,thumbnail,full,landmark"

FACTS = ModelFacts("tiny", "llama", 1, 6, 2, 64, False, 10**6, (0,), "float32", "cpu", "m", "t")


def branch(text: str, k: int | None) -> Branch:
    return Branch(parse_method(text), k)


class FixedWindows(Windows):
    """One window of given ids."""

    def __init__(self, ids: list[int]) -> None:
        self._fixed = ids

    def token_ids(self, context: int, index: int) -> list[int]:
        return self._fixed

    def start(self, context: int, index: int) -> int:
        return 0


def compare(
    layer: WindowLayer, branches: Sequence[Branch], facts: ModelFacts, number: int = 0, *, full_window: bool = False, **ahead: Any
) -> dict[Branch, Outcome]:
    """The outcomes of all positions, chunks put together; no method may fail."""
    failures: dict[MethodSpec, str] = {}
    found: dict[Branch, list[Outcome]] = {}
    comparison = LayerComparison(layer, number, branches, facts, full_window=full_window, failures=failures, **ahead)
    for _, branch, outcome in comparison.outcomes():
        found.setdefault(branch, []).append(outcome)
    assert not failures
    names = [field.name for field in dataclasses.fields(Outcome) if field.name != "scan"]
    return {
        branch: Outcome(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names}, scan=parts[0].scan)
        for branch, parts in found.items()
    }


@functools.cache
def structured_layer(positions: int = 40, tokens: int = 400, group: int = 3, head_dim: int = 64) -> WindowLayer:
    """Keys with unequal channels and an offset, as real keys have."""
    generator = torch.Generator().manual_seed(5)
    spread = torch.logspace(0.3, -1.3, head_dim)[torch.randperm(head_dim, generator=generator)]
    keys = (torch.randn(2, tokens, head_dim, generator=generator) + torch.randn(2, 1, head_dim, generator=generator)) * spread
    values = torch.randn(2, tokens, head_dim, generator=generator)
    queries = torch.randn(tokens, 2, group, head_dim, generator=generator) * 2
    statistics = QueryStatistics()
    statistics.add(queries[:-positions].permute(1, 2, 0, 3))
    return WindowLayer(keys, values, queries[-positions:], statistics, head_dim**-0.5)
