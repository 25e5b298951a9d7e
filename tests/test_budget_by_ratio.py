"""Fathom's budget by the share of the tokens that k is."""

from __future__ import annotations

import pytest
import torch

from fathom_eval.branches import Branch, BranchBatch
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method
from fathom_eval.methods.fathom import ratio_bits
from fathom_eval.prefill import Prefix
from fathom_eval.waterfill import read_depths
from tests.key_layers import CHANNELS, FACTS, TOKENS, queries, real_layer


def test_the_budget_follows_the_share_of_the_tokens() -> None:
    tokens = torch.tensor([4000, 8000, 1000, 500_000, 2000])
    assert ratio_bits(48, tokens, 64, 128).tolist() == [48, 56, 32, 104, 40]
    assert ratio_bits(48, tokens, 64, 64).tolist() == [24, 28, 16, 52, 20]
    assert ratio_bits(48, torch.tensor([100, 10**9]), 64, 128).tolist() == [24, 128]


def test_each_row_is_planned_with_its_own_budget() -> None:
    importance = torch.rand(5, 2, 32, generator=torch.Generator().manual_seed(3)).exp()
    importance[1] = 1.0  # ties
    budgets = torch.tensor([0, 7, 30, 128, 500])
    limits = torch.randint(0, 5, (2, 32), generator=torch.Generator().manual_seed(4))
    for limit in (None, limits):
        found = read_depths(importance, budgets.unsqueeze(-1), limits=limit)
        for row, budget in enumerate(budgets.tolist()):
            assert torch.equal(found[row], read_depths(importance[row], budget, limits=limit))
    spec = parse_method("fathom:by_ratio=true:basis=raw:budget=100")
    layer = real_layer()
    batch = BranchBatch(Prefix(tuple(range(TOKENS + 1)), (layer,)), [Branch(spec, k) for k in (40, 300)], FACTS)
    own = torch.zeros(2, 2, 2, 1, CHANNELS)
    batch.attend(0, queries(), own[0], own[1], 0.125)
    expected = [int(ratio_bits(100, torch.tensor(TOKENS + 1), k, CHANNELS)) for k in (40, 300)]
    assert expected[0] > expected[1]
    assert torch.equal(batch.counts.scan_bits.double(), batch.counts.declared_bits)
    spent = (batch.counts.scan_bits - batch.counts.channels * 16 * 4) / batch.counts.scan_tokens
    assert spent.tolist() == expected
    assert not parse_method("fathom").method.extended
    assert spec.method.line() == "Fathom raw by ratio"
    assert "by_ratio" not in parse_method("fathom").label
    assert "by_ratio=True" in spec.label


@pytest.mark.parametrize("text", ["fathom:by_ratio=true:depths=measured", "uniform_depth:by_ratio=true"])
def test_a_budget_by_ratio_needs_a_budget_that_is_free(text: str) -> None:
    with pytest.raises(UserError, match=r"by_ratio (takes the budget|does nothing)"):
        parse_method(text).check(FACTS, [128])
