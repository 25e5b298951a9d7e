"""Every store against what its paper says, computed in the plainest way, and what holds of all of them."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from fathom_eval.calibration import Basis, QueryStatistics
from fathom_eval.codebooks import nearest_level, scalar_levels, sphere_levels
from fathom_eval.coded import CodedStore
from fathom_eval.errors import UserError
from fathom_eval.methods import BUILT_IN, parse_method
from fathom_eval.planes import PlaneStore
from fathom_eval.prefill import PrefixLayer
from fathom_eval.stores import Store
from tests.key_layers import CHANNELS, FACTS, GROUP, STORES, TOKENS, facts_of, queries, real_layer, scanned


@pytest.mark.parametrize("page", [8, 16, 32])
def test_a_quest_page_scores_the_most_that_its_bounds_allow(page: int) -> None:
    layer, query = real_layer(), queries()
    scores, reads = scanned(f"quest:page={page}")
    expected = torch.empty_like(scores)
    for start in range(0, TOKENS, page):
        keys = layer.keys[:, start : start + page]
        low, high = keys.amin(1).half().float(), keys.amax(1).half().float()
        best = torch.maximum(query * low.unsqueeze(1), query * high.unsqueeze(1)).sum(-1)
        expected[..., start : start + page] = best.unsqueeze(-1)
    torch.testing.assert_close(scores, expected)
    exact = query @ layer.keys.transpose(-1, -2)
    assert (scores >= exact - 2e-3 * exact.abs().amax()).all(), "fp16 bounds are bounds up to their rounding"
    assert reads.bits.unique().tolist() == [2 * 16 * CHANNELS * TOKENS // page]


def test_coded_bounds_are_within_half_a_cell_and_take_68_bits_at_128_channels() -> None:
    layer, query = real_layer(channels=128), queries(channels=128)
    facts = facts_of(128)
    for name, run, value in (("quest:bits=4", 16, 68.0), ("landmark:bits=4", 8, 68.0), ("quest", 16, 256.0), ("landmark", 8, 256.0)):
        method = parse_method(name).method
        assert method.declared_bits(None, facts) == value
        assert method.typical_bits(128) == f"{value:g}"
        spec = method.store(facts)
        assert spec is not None
        store = spec.build(layer, TOKENS)
        scores, reads = store.scan(query, query, None)
        assert (reads.bits == value * TOKENS).all()
        assert torch.equal(scores[..., ::run].repeat_interleave(run, dim=-1), scores), "all tokens of an entry score alike"
    unit = layer.key_statistics.mean_magnitude.unsqueeze(1)
    coded = parse_method("landmark:bits=4").method.store(facts)
    assert coded is not None
    store = coded.build(layer, TOKENS)
    assert isinstance(store, CodedStore)
    means = layer.keys.unflatten(1, (-1, 8)).mean(2)
    values = store.decode(store.segments[0].parts)
    # One scale for eight landmarks of eight channels, relative to the channels' sizes.
    scales = (means / unit).unflatten(1, (-1, 8)).unflatten(-1, (-1, 8)).abs().amax((2, 4), keepdim=True)
    half_cell = (scales / 16).expand(-1, -1, 8, -1, 8).flatten(-2).flatten(1, 2) * unit
    assert ((values - means).abs() <= half_cell * 1.01 + 2e-3 * means.abs().amax()).all()
    assert (values - means).square().mean() < 0.02 * means.square().mean()


@pytest.mark.parametrize(("bits", "group"), [(2, 32), (4, 64), (1, 16)])
def test_kivi_rounds_between_the_extremes_of_a_channel_and_group(bits: int, group: int) -> None:
    layer = real_layer()
    scores, reads = scanned(f"kivi:bits={bits}:group={group}")
    values = torch.empty_like(layer.keys)
    for start in range(0, TOKENS, group):
        keys = layer.keys[:, start : start + group]
        low = keys.amin(1, keepdim=True).half().float()
        step = ((keys.amax(1, keepdim=True) - low) / (2**bits - 1)).half().float()
        values[:, start : start + group] = torch.round((keys - low) / step).clamp(0, 2**bits - 1) * step + low
    torch.testing.assert_close(scores, queries() @ values.transpose(-1, -2), rtol=1e-4, atol=1e-3)
    assert reads.code_bits.unique().tolist() == [bits * CHANNELS * TOKENS]
    assert reads.scale_bits.unique().tolist() == [2 * 16 * CHANNELS * TOKENS // group]


def test_kvquant_codes_are_the_nearest_of_the_channels_own_levels() -> None:
    layer = real_layer()
    scores, reads = scanned("kvquant:bits=3")
    values = torch.empty_like(layer.keys)
    for head in range(2):
        for channel in range(CHANNELS):
            keys = layer.keys[head, :, channel]
            levels = scalar_levels(keys, 8)
            values[head, :, channel] = levels[(keys.unsqueeze(-1) - levels).abs().argmin(-1)]
    torch.testing.assert_close(scores, queries() @ values.transpose(-1, -2), rtol=1e-4, atol=1e-3)
    assert reads.bits.unique().tolist() == [3 * CHANNELS * TOKENS]


def test_scalar_levels_are_as_good_as_those_of_scikit_learn() -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    values = real_layer().keys[0, :, :6].T
    levels = scalar_levels(values, 8)
    for number, row in enumerate(values):
        found = (row.unsqueeze(-1) - levels[number]).square().amin(-1).sum().item()
        reference = cluster.KMeans(8, n_init=10, random_state=0).fit(row.unsqueeze(-1).numpy()).inertia_
        assert found < 1.1 * reference  # the best of its ten random starts
        assert (levels[number].diff() > 0).all()
    # A fixed point of Lloyd's algorithm: every level is the mean of its cell.
    codes = nearest_level(values[0].unsqueeze(-1), levels[0]).squeeze(-1)
    means = torch.stack([values[0][codes == number].mean() for number in range(8)])
    torch.testing.assert_close(levels[0], means, rtol=1e-3, atol=1e-4)


def test_levels_for_a_rotated_key_are_those_of_max_for_a_normal_distribution() -> None:
    """Max (1960), table I; at 4,096 channels a coordinate is normal."""
    for bits, positive in ((1, [0.7980]), (2, [0.4528, 1.510]), (3, [0.2451, 0.7560, 1.344, 2.152])):
        levels, mass = sphere_levels(4096, bits, torch.device("cpu"))
        torch.testing.assert_close(levels[2 ** (bits - 1) :], torch.tensor(positive), rtol=3e-3, atol=0)
        torch.testing.assert_close(levels.flip(0), -levels, rtol=1e-3, atol=1e-4)
        assert mass.sum().item() == pytest.approx(1)


def test_turboquant_loses_what_its_paper_says_and_its_residual_removes_the_bias() -> None:
    """Mean squared error 0.117 of ‖k‖² at 2 bits (arXiv:2504.19874, Theorem 1); products shrink by as much unless the residual is used."""
    generator = torch.Generator().manual_seed(3)
    keys = torch.randn(2, 1024, CHANNELS, generator=generator)
    layer = PrefixLayer(keys, keys, QueryStatistics())
    query = keys[:, : 32 * GROUP].unflatten(1, (32, GROUP)).transpose(0, 1) + torch.randn(32, 2, GROUP, CHANNELS, generator=generator)
    exact = query @ keys.transpose(-1, -2)

    def slope(text: str) -> tuple[float, float]:
        found, _ = scanned(text, layer, query)
        return ((found * exact).sum() / exact.square().sum()).item(), (found - exact).square().mean().item()

    plain, error = slope("turboquant:bits=2")
    unbiased, residual_error = slope("turboquant:bits=2:residual=true")
    assert plain == pytest.approx(1 - 0.117, abs=0.02)
    assert unbiased == pytest.approx(1, abs=0.02)
    assert residual_error > error / 4
    assert slope("turboquant:bits=4")[1] < error / 4


def test_self_indexing_scores_by_the_mean_key_of_four_signs() -> None:
    layer, query = real_layer(), queries()
    scores, reads = scanned("self_indexing")
    median = layer.keys.median(1).values
    centred = layer.keys - median.unsqueeze(1)
    values = torch.empty_like(centred)
    for head in range(2):
        for first in range(0, CHANNELS, 4):
            part = centred[head, :, first : first + 4]
            same = ((part >= 0).unsqueeze(0) == (part >= 0).unsqueeze(1)).all(-1).float()
            values[head, :, first : first + 4] = same @ part / same.sum(-1, keepdim=True)
    expected = query @ (values + median.unsqueeze(1)).transpose(-1, -2)
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-3)
    assert reads.bits.unique().tolist() == [CHANNELS * TOKENS]


def test_signs_that_the_prefix_never_showed_have_a_centroid_all_the_same() -> None:
    """The authors' code divides by zero there."""
    layer = real_layer()
    same = dataclasses.replace(layer, keys=layer.keys[:, :1].expand(-1, 64, -1) * torch.linspace(1, 2, 64).view(1, -1, 1), _stores={})
    spec = parse_method("self_indexing").method.store(FACTS)
    assert spec is not None
    own = spec.build(same, 64).empty(1)
    own.append(layer.keys[None, :, :64])
    scores, _ = own.scan(queries(1), queries(1), None)
    assert torch.isfinite(scores).all()
    assert scores.std() > 0


def contents(store: Store) -> list[Tensor]:
    """What a store holds, joined over its segments along the sequence."""
    if isinstance(store, PlaneStore):
        used = [(segment.planes[..., : segment.blocks], segment.scales[..., : segment.blocks]) for segment in store.segments]
        return [torch.cat(parts, dim=-1) for parts in zip(*used, strict=True)]
    if isinstance(store, CodedStore):
        return [torch.cat(parts, dim=-2) for parts in zip(*(segment.parts for segment in store.segments), strict=True)]
    return [store._landmarks]  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", STORES)
def test_sealed_blocks_stay_and_growing_block_by_block_is_sealing_at_once(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fathom_eval.coded.SEGMENT_TOKENS", 128)
    layer = real_layer()
    spec = parse_method(text).method.store(FACTS)
    assert spec is not None
    whole, grown = spec.build(layer, TOKENS), spec.build(layer, 64)
    for stop in range(128, TOKENS + 1, 64):
        before = [part.clone() for part in contents(grown)]
        grown.append(layer.keys[:, stop - 64 : stop])
        for old, new in zip(before, contents(grown), strict=True):
            dimension = next(d for d in range(old.dim()) if old.shape[d] != new.shape[d])
            assert torch.equal(new.narrow(dimension, 0, old.shape[dimension]), old), "nothing sealed is rewritten"
    assert grown.tokens == whole.tokens == TOKENS
    for one, other in zip(contents(whole), contents(grown), strict=True):
        assert torch.equal(one, other)
    own = grown.empty(2)
    own.append(layer.keys[None, :, :64].expand(2, -1, -1, -1))
    assert own.tokens == 64
    assert own.bytes > 0


@pytest.mark.parametrize("text", [text for text in STORES if text != "landmark"])  # fp16 landmarks do not look at what they hold
def test_keys_that_are_not_finite_are_refused_with_their_head(text: str) -> None:
    spec = parse_method(text).method.store(FACTS)
    assert spec is not None
    layer = real_layer()
    store = spec.build(layer, 64)
    keys = layer.keys[:, :64].clone()
    keys[1, 10, 3] = torch.inf
    with pytest.raises(ValueError, match=r"not finite in KV head 1"):
        store.append(keys)


def test_a_store_too_large_to_stay_decoded_scores_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("kivi", "turboquant:bits=3:residual=true", "quest:bits=4", "double_sparsity_published"):
        kept, _ = scanned(text)
        monkeypatch.setattr("fathom_eval.coded.DECODED_LIMIT", 0)
        assert torch.equal(scanned(text)[0], kept)
        monkeypatch.undo()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("quest:page=24", "page=24 must divide 64"),
        ("quest:bits=8", r"bits=8 must be 16 \(fp16\) or 4"),
        ("landmark:bits=2", r"bits=2 must be 16 \(fp16\) or 4"),
        ("loki:bits=8", r"bits=8 must be 4 or 16 \(fp16\)"),
        ("self_indexing:group=5", "group=5 must lie in 1..8 and divide the head_dim 64"),
        ("kivi:bits=0", "bits=0 must lie in 1..8"),
        ("turboquant:bits=1:residual=true", "bits=1 must lie in 2..8"),
        ("kvquant:bits=9", "bits=9 must lie in 1..8"),
        ("fathom:depths=measured:codes=allocated", "give one of them"),
        ("uniform_depth:codes=8bit", "codes and depths do nothing"),
        ("loki_published:r=65", "must lie in 1..64"),
        ("sparq_published:r=D/7", "not a multiple of 7"),
    ],
)
def test_options_that_cannot_work_are_errors(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(text).check(FACTS, [128])


def test_channels_that_do_not_fill_a_scale_are_refused() -> None:
    with pytest.raises(UserError, match="page=16 must divide the head_dim 40: 16 channels share a scale"):
        parse_method("quest:bits=4").check(facts_of(40), [128])
    parse_method("quest").check(facts_of(40), [128])


def test_bits_of_every_method_here_at_64_and_128_channels() -> None:
    kinds = {kind.name: kind for kind in BUILT_IN}
    for name, at_64, at_128 in (
        ("quest", "128", "256"),
        ("self_indexing", "64", "128"),
        ("kivi", "192", "384"),
        ("turboquant", "144", "272"),
        ("kvquant", "128", "256"),
        ("sparq_published", "128", "256"),
        ("loki_published", "256", "512"),
        ("double_sparsity_published", "96 a query head", "160 a query head"),
        ("streaming_llm", "0", "0"),
    ):
        assert (kinds[name]().typical_bits(64), kinds[name]().typical_bits(128)) == (at_64, at_128)
    assert math.isclose(parse_method("turboquant:bits=3:residual=true").method.declared_bits(None, FACTS), 3 * 64 + 32)  # type: ignore[arg-type]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("text", STORES)
def test_a_gpu_scores_what_the_cpu_scores(text: str) -> None:
    layer = real_layer()
    method = parse_method(text).method
    spec = method.store(FACTS)
    assert spec is not None
    # One set of statistics and one plan for both, so that only the store differs.
    start = spec.build(layer, 0)
    projected = start.project(queries())
    plan = method.plan(projected, method.index(layer, FACTS))
    here, there = spec.build(layer, 64).empty(2), _moved(spec.build(layer, 64)).empty(2)
    keys = layer.keys[None].expand(2, -1, -1, -1)
    here.append(keys)
    there.append(keys.cuda())
    expected, reads = here.scan(queries(), projected, plan)
    found, counted = there.scan(queries().cuda(), projected.cuda(), plan.cuda() if plan is not None else None)
    assert torch.equal(counted.bits.cpu(), reads.bits)
    # A key on the edge of a cell may fall on either side.
    assert ((found.cpu() - expected).abs() > 1e-3 * expected.abs().amax()).float().mean() < 0.01


def _moved(store: Store) -> Store:
    for name, value in vars(store).items():
        if isinstance(value, Tensor):
            setattr(store, name, value.cuda())
        elif isinstance(value, Basis):
            setattr(store, name, Basis(value.mean.cuda(), value.vectors.cuda(), value.variance.cuda()))
        elif isinstance(value, torch.device):
            setattr(store, name, torch.device("cuda"))
    return store
