"""Read depths from measured errors."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fathom_eval.methods import parse_method
from fathom_eval.planes import PlaneSpec, PlaneStore
from tests.key_layers import FACTS, TOKENS, queries, real_layer


def table_of(errors: list[list[float]], budget: float, monkeypatch: pytest.MonkeyPatch) -> Any:
    import fathom_eval.depth_tables as module

    monkeypatch.setattr(module, "_measured_errors", lambda layer, spec: torch.tensor(errors).unsqueeze(0))
    return module.measure_depths(real_layer(), PlaneSpec("raw"), budget)


def test_a_sign_that_is_worse_than_nothing_is_skipped_with_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    """A Laplace channel at t = 1 has 1.63 times its variance: two planes or none."""
    bad, good = [1.0, 1.63, 0.4, 0.1, 0.02], [0.5, 0.1, 0.02, 0.005, 0.001]
    query = torch.ones(1, 1, 1, 2)
    for budget, depths in ((1.0, [0, 0]), (1.25, [0, 1]), (3.5, [0, 3]), (4.0, [0, 3]), (4.5, [2, 2]), (8.5, [4, 4])):
        found = table_of([bad, good], budget, monkeypatch).depths(query)
        assert 1 not in found[0, 0, :1].tolist()
        paid = (found + 0.25 * (found > 0)).sum().item()
        assert paid <= budget
        if budget in (1.0, 1.25, 8.5):
            assert found[0, 0].tolist() == depths


def test_measured_depths_are_the_best_that_their_bits_can_buy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against all plans of four channels: none with no more bits has less error."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        factors = 0.1 + 0.9 * torch.rand(4, 4, generator=generator)
        errors = torch.cat([torch.ones(4, 1), factors.cumprod(1)], dim=1) * torch.rand(4, 1, generator=generator)
        query = torch.randn(1, 1, 2, 4, generator=generator)
        budget = float(torch.randint(5, 68, (1,), generator=generator)) / 4
        found = table_of(errors.tolist(), budget, monkeypatch).depths(query)[0, 0]
        energy = query.square().sum((0, 1, 2))
        plans = torch.cartesian_prod(*[torch.arange(5)] * 4)
        costs = (plans + 0.25 * (plans > 0)).sum(-1)
        totals = (energy * errors.gather(1, plans.T).T).sum(-1)
        cost, total = (found + 0.25 * (found > 0)).sum(), (energy * errors.gather(1, found.unsqueeze(-1)).squeeze(-1)).sum()
        assert cost <= budget
        assert total <= totals[costs <= cost].min() + 1e-6


def test_measured_errors_are_those_of_the_store_and_the_first_plane_pays_for_the_scale() -> None:
    layer = real_layer()
    method: Any = parse_method("fathom:depths=measured:basis=raw:budget=56").method
    table = method.index(layer, FACTS)
    assert table.cost.tolist() == [1.25, 1, 1, 1]
    assert table.budget == 28
    store = PlaneSpec("raw").build(layer, TOKENS)
    assert isinstance(store, PlaneStore)
    error = (layer.keys.transpose(-1, -2) - store.segments[0].plane_values(0)).var(-1)
    useful = (layer.keys.var(1) - error) / 1.25
    alone = table.vertex[..., 1] == 1  # a sign pays off by itself
    torch.testing.assert_close(table.gain[..., 0][alone], useful[alone], rtol=1e-4, atol=1e-5)
    plan = method.plan(queries(), table)
    declared = method.declared_bits(plan, FACTS)
    assert (declared <= 28).all()
    assert (declared > 26).all()
    eight = parse_method("fathom:depths=measured:scales=fp8").method.index(layer, FACTS)
    assert eight.cost.tolist() == [1.125, 1, 1, 1]
    tiny = dataclasses.replace(layer, keys=layer.keys[:, :40], values=layer.values[:, :40], _stores={})
    plan = method.plan(queries(), method.index(tiny, FACTS))
    assert (method.declared_bits(plan, FACTS) <= 28).all(), "without a whole block the errors are Eq. 4's"
