"""Methods over all stores at positions of a window, as a fidelity run has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch
from fathom_eval.fidelity_layer import LayerComparison, WindowLayer
from fathom_eval.methods import parse_method
from tests.key_layers import CHANNELS, FACTS, GROUP, STORES, real_layer


def window(positions: int = 40, tokens: int = 400, change: int = 0) -> WindowLayer:
    """Structured keys; the last ``change`` keys, values and queries are others."""
    layer = real_layer(tokens)
    query = torch.randn(positions, 2, GROUP, CHANNELS, generator=torch.Generator().manual_seed(6))
    keys, values = layer.keys.clone(), layer.values.clone()
    if change:
        keys[:, -change:] *= -3
        values[:, -change:] += 2
        query[-change:] *= 2
    return WindowLayer(keys, values, query, layer.query_statistics, CHANNELS**-0.5, layer.observations)


def outcomes(layer: WindowLayer, texts: Sequence[str], k: int = 90) -> dict[str, tuple[Tensor, float]]:
    """Outputs ``[P, H, G, D]`` and the mean error against exact top-k of every method."""
    branches = {Branch(parse_method(text), k): text for text in texts}
    failures: dict[Any, str] = {}
    parts: dict[str, list[Any]] = {}
    for _, branch, outcome in LayerComparison(layer, 0, list(branches), FACTS, full_window=False, failures=failures).outcomes():
        parts.setdefault(branches[branch], []).append(outcome)
    assert not failures
    return {
        text: (torch.cat([part.output for part in found]), torch.cat([part.exact_error for part in found]).mean().item())
        for text, found in parts.items()
    }


def test_nothing_after_a_position_reaches_it() -> None:
    """Levels, medians, centroids, units, tables and labels are those of the keys before the first position."""
    texts = [*STORES, "streaming_llm", "fathom:depths=measured", "loki_published", "quest_published:dense_layers=none"]
    texts = [f"{text}:dense_layers=none" if text == "double_sparsity_published" else text for text in texts]
    before, after = outcomes(window(), texts), outcomes(window(change=20), texts)
    for text in texts:
        assert torch.equal(before[text][0][:20], after[text][0][:20]), text
        assert not torch.allclose(before[text][0][20:], after[text][0][20:]), text


@pytest.mark.parametrize(
    "family",
    [
        [f"quest:page={page}" for page in (64, 16, 4, 1)],
        [f"quest:bits=4:page={page}" for page in (64, 16, 4)],
        [f"landmark:bits=4:size={size}" for size in (16, 8, 4, 2)],
        [f"loki:bits=16:r=D/{divisor}" for divisor in (16, 8, 4, 2)],
        [f"loki_published:r=D/{divisor}" for divisor in (8, 4, 2)],
        [f"sparq_published:r=D/{divisor}" for divisor in (8, 4, 2)],
        [f"double_sparsity_published:dense_layers=none:c=D/{divisor}" for divisor in (8, 4, 2)],
        [f"kivi:bits={bits}" for bits in (1, 2, 3, 4)],
        [f"turboquant:bits={bits}" for bits in (1, 2, 3, 4)],
        [f"kvquant:bits={bits}" for bits in (1, 2, 3, 4)],
        [f"fathom:codes=8bit:budget={budget}" for budget in (24, 48, 96, 192)],
        [f"fathom:codes=allocated:budget={budget}" for budget in (24, 48, 96)],
        [f"fathom:scales=fp8:budget={budget}" for budget in (24, 48, 96, 192)],
        [f"fathom:depths=measured:basis=raw:budget={budget}" for budget in (28, 56, 112, 224)],
        ["self_indexing:group=2", "exact"],
    ],
    ids=lambda family: family[0].partition("=")[0],
)
def test_error_falls_with_bits_within_a_family(family: list[str]) -> None:
    found = outcomes(window(), family)
    errors = [found[text][1] for text in family]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.8 * errors[0]
