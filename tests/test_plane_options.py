"""What a plane store can be beside four planes with fp16 scales (paper §6, B1)."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from fathom_eval.kernels.pack import block_scales
from fathom_eval.methods import parse_method
from fathom_eval.planes import PlaneSpec, PlaneStore, stored_depths
from fathom_eval.scales import eight_bit_scales, scale_unit
from fathom_eval.waterfill import read_depths
from tests.key_layers import CHANNELS, FACTS, TOKENS, queries, real_layer


def test_what_a_plane_store_of_any_kind_does_not_read_cannot_reach_a_score() -> None:
    layer, query = real_layer(), queries(1)
    for text in (
        "fathom:codes=8bit:basis=raw",
        "fathom:scales=fp8:basis=klt",
        "fathom:codes=allocated:basis=raw",
        "fathom:depths=measured",
    ):
        method = parse_method(text).method
        spec = method.store(FACTS)
        assert spec is not None
        clean, spoiled = spec.build(layer, 256), spec.build(layer, 256)
        assert isinstance(spoiled, PlaneStore)
        projected = clean.project(query)
        plan = method.plan(projected, method.index(layer, FACTS))
        assert plan is not None
        for segment in spoiled.segments:
            unread = plan[0].unsqueeze(-1) <= torch.arange(segment.planes.shape[-2])
            segment.planes[unread] = ~segment.planes[unread]
            segment.scales[plan[0] == 0] = 1e4
        expected, reads = clean.scan(query, projected, plan)
        assert torch.equal(spoiled.scan(query, projected, plan)[0], expected)
        assert reads.scale_bits.tolist() == ((plan > 0).sum(-1) * 4 * (8 if "fp8" in text else 16)).tolist()


def test_eight_planes_read_to_any_depth_are_that_quantiser() -> None:
    layer = real_layer()
    deep = PlaneSpec("raw", 8).build(layer, TOKENS)
    for depth in range(1, 9):
        plan = torch.full((1, 2, CHANNELS), depth)
        shallow = PlaneSpec("raw", depth).build(layer, TOKENS)
        found, own = (store.scan(queries(1), queries(1), plan)[0] for store in (deep, shallow))
        torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-4)
    exact = queries(1) @ layer.keys.transpose(-1, -2)
    assert (found - exact).abs().max() < 0.02 * exact.abs().max()


def test_fp8_scales_are_fp8_and_no_scale_that_is_sealed_changes() -> None:
    layer = real_layer()
    unit = scale_unit(layer.key_statistics.mean, layer.key_statistics.variance)
    assert torch.equal(unit, torch.exp2(unit.log2().round())), "powers of two, so that products are exact in fp16"
    scales = block_scales(layer.keys)
    found = eight_bit_scales(scales, unit)
    relative = found.float() / unit.unsqueeze(-1)
    assert torch.equal(relative.to(torch.float8_e4m3fn).float(), relative)
    assert ((found.float() - scales.float()).abs() <= scales.float() / 16).all()
    assert torch.isfinite(eight_bit_scales(scales * 2000, unit)).all(), "saturates"
    assert parse_method("fathom:scales=fp8").method.declared_bits(torch.tensor([[[4, 1, 0, 0]]]), FACTS).item() == 5.25  # type: ignore[union-attr]


@pytest.mark.parametrize("basis", ["raw", "klt"])
def test_a_rate_allocated_store_keeps_head_dim_bits_a_key_and_is_never_read_deeper(basis: str) -> None:
    layer, query = real_layer(), queries()
    method: Any = parse_method(f"fathom:codes=allocated:basis={basis}:budget=96").method
    spec = method.store(FACTS)
    limits = stored_depths(layer, spec)
    assert limits.sum(-1).tolist() == [CHANNELS, CHANNELS]
    assert limits.unique().numel() > 2, "channels are unequal"
    store = spec.build(layer, TOKENS)
    projected = store.project(query)
    plan = method.plan(projected, method.index(layer, FACTS))
    assert (plan <= limits).all()
    assert (plan.sum(-1) == 48).all()
    for segment in store.segments:
        assert (segment.planes[limits.unsqueeze(-1) <= torch.arange(4)] == 0).all()
    found, reads = store.scan(query, projected, plan)
    uniform = dataclasses.replace(spec, stored=0).build(layer, TOKENS)
    assert torch.equal(found, uniform.scan(query, projected, plan)[0]), "what is kept is the uniform store's"
    assert (reads.bits == method.declared_bits(plan, FACTS) * TOKENS).all()
    _, deeper = store.scan(query, projected, torch.full_like(plan, 4))
    assert (deeper.code_bits == CHANNELS * TOKENS).all(), "a plan that ignores the limits reads no more than there is"


def test_limits_of_single_channels_hold_and_the_rest_is_spent_elsewhere() -> None:
    importance = torch.tensor([[100.0, 10.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
    limits = torch.tensor([[1, 4, 2, 1], [0, 0, 3, 1]])
    found = read_depths(importance, 6, limits=limits)
    assert found.tolist() == [[1, 3, 2, 0], [0, 0, 3, 1]]
    assert torch.equal(read_depths(importance, 6, limits=torch.full((4,), 4)), read_depths(importance, 6))
