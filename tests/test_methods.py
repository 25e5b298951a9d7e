"""One matrix for every registered method: what any of them must get right, whatever it does."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fathom_eval.branches import Branch, BranchBatch
from fathom_eval.calibration import QueryStatistics
from fathom_eval.kernels.scan import scan_planes
from fathom_eval.methods import parse_method
from fathom_eval.planes import PlaneSpec, PlaneStore
from fathom_eval.prefill import Prefix, PrefixLayer
from tests.method_matrix import FURTHER, SCANS, SHAPES, facts_of, layer_prefix, step


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim", "tokens"), SHAPES)
@pytest.mark.parametrize("text", [*SCANS, *FURTHER])
def test_counted_bits_equal_the_declared_and_the_output_is_attention_over_k_tokens(
    text: str, group: int, head_dim: int, tokens: int, dtype: torch.dtype
) -> None:
    spec, facts = parse_method(text), facts_of(group, head_dim)
    prefix = layer_prefix(group, head_dim, tokens, dtype)
    before = prefix.checksum()
    batch = BranchBatch(prefix, [Branch(spec, 60), Branch(spec, 90)], facts)
    query, keys, values = step(group, head_dim, 2, dtype)
    output = batch.attend(0, query, keys, values, head_dim**-0.5)
    assert output.shape == query.shape
    assert torch.isfinite(output).all()
    assert batch.counts.fired.tolist() == [1, 1]
    sealed = (tokens + 1 - spec.policy.local) // 64 * 64
    assert batch.counts.scan_tokens.tolist() == [2 * sealed, 2 * sealed]
    torch.testing.assert_close(batch.counts.scan_bits.double(), batch.counts.declared_bits, rtol=0, atol=0)
    assert (batch.counts.scan_bits > 0).all()
    assert (batch.counts.rows >= 2 * torch.tensor([60, 90])).all()
    assert (batch.counts.rows <= 2 * group * torch.tensor([60, 90])).all()
    assert prefix.checksum() == before


@pytest.mark.parametrize(("group", "head_dim", "tokens"), SHAPES)
@pytest.mark.parametrize("text", [*SCANS, *FURTHER, "exact"])
def test_k_of_all_tokens_is_dense_attention(text: str, group: int, head_dim: int, tokens: int) -> None:
    spec, facts = parse_method(text), facts_of(group, head_dim)
    assert spec.method.ranks_all
    prefix = layer_prefix(group, head_dim, tokens, torch.float32)
    batch = BranchBatch(prefix, [Branch(parse_method("dense"), None), Branch(spec, tokens + 1), Branch(spec, 10**6)], facts)
    query, keys, values = step(group, head_dim, 1, torch.float32)
    output = batch.attend(0, *(part.expand(3, *part.shape[1:]) for part in (query, keys, values)), head_dim**-0.5)
    torch.testing.assert_close(output[1], output[0], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output[2], output[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", [text for text in SCANS if "landmark" not in text])
def test_nothing_that_is_not_counted_can_reach_a_score(text: str) -> None:
    """Flip every bit that the plan does not read, and every scale of a channel that it skips: the scores stay."""
    spec, facts = parse_method(text), facts_of(3, 64)
    layer = layer_prefix(3, 64, 300, torch.float32).layers[0]
    store_spec = spec.method.store(facts)
    assert isinstance(store_spec, PlaneSpec)
    clean, spoiled = store_spec.build(layer, 256), store_spec.build(layer, 256)
    assert isinstance(clean, PlaneStore)
    assert isinstance(spoiled, PlaneStore)
    query = step(3, 64, 1, torch.float32)[0]
    projected = clean.project(query)
    plan = spec.method.plan(projected, spec.method.index(layer, facts))
    assert plan is not None
    for segment in spoiled.segments:
        unread = plan[0].unsqueeze(-1) <= torch.arange(4)
        segment.planes[unread] = ~segment.planes[unread]
        segment.scales[plan[0] == 0] = 1e4
    expected, reads = clean.scan(query, projected, plan)
    found, _ = spoiled.scan(query, projected, plan)
    assert torch.equal(found, expected)
    assert reads.code_bits.tolist() == (plan.sum(-1) * 256).tolist()
    assert reads.scale_bits.tolist() == ((plan > 0).sum(-1) * 4 * 16).tolist()


FULL_DEPTH = ("full", "fathom:budget=512:basis=klt", "fathom:budget=512:basis=raw", "loki:r=D", "landmark:size=1", "exact")


@pytest.mark.parametrize("text", FULL_DEPTH)
def test_a_key_scores_alike_before_and_after_its_block_is_sealed(text: str) -> None:
    """At full depth the scores of a block differ from the exact ones only by quantisation, in shared and in a branch's own blocks."""
    spec, facts = parse_method(text), facts_of(3, 64)
    layer = layer_prefix(3, 64, 300, torch.float32).layers[0]
    store_spec = spec.method.store(facts)
    assert store_spec is not None
    shared = store_spec.build(layer, 192)
    own = shared.empty(2)
    own.append(layer.keys[:, 192:256].expand(2, -1, -1, -1))
    query = step(3, 64, 2, torch.float32)[0]
    projected = shared.project(query)
    plan = spec.method.plan(projected, spec.method.index(layer, facts))
    exact = query @ layer.keys[:, :256].transpose(-1, -2)
    found = torch.cat([store.scan(query, projected, plan)[0] for store in (shared, own)], dim=-1)
    # Half a cell of every channel is the most that a code can be off.
    bound = query.abs() @ (layer.keys.abs().amax(1) / 8).unsqueeze(-1) * (1.5 if "klt" in text or "loki" in text else 1.0)
    assert ((found - exact).abs() <= bound + 1e-3).all()
    for part in ((found - exact)[..., :192], (found - exact)[..., 192:]):
        assert part.abs().mean() < 0.12 * exact.abs().mean()
        assert part.mean().abs() < 0.02 * exact.abs().mean()  # no offset between sealed and unsealed keys


@pytest.mark.parametrize("text", [*SCANS, *FURTHER])
def test_sealing_in_a_branch_changes_nothing_but_quantisation(text: str) -> None:
    """A prefix that holds a block and a branch that seals it itself scan the same keys with the same number of bits a token."""
    spec, facts = parse_method(text), facts_of(4, 128)
    layer = layer_prefix(4, 128, 450, torch.float32).layers[0]
    short_layer = dataclasses.replace(layer, keys=layer.keys[:, :300], values=layer.values[:, :300], _stores={})
    short = Prefix(tuple(range(301)), (short_layer,))
    batch = BranchBatch(short, [Branch(spec, 100)], facts)
    query = step(4, 128, 1, torch.float32)[0]
    keys, values = layer.keys[None, :, 300:400], layer.values[None, :, 300:400]
    batch.attend(0, query, keys, values, 0.1)
    # 400 tokens less the local window are five whole blocks, of which the prefix had sealed four; six without that window.
    assert batch.counts.scan_tokens.item() == 2 * (384 if spec.policy.local == 1 else 320)
    assert batch.counts.scan_bits.double().item() == batch.counts.declared_bits.item()


def test_full_four_bit_scan_nearly_selects_what_the_oracle_does() -> None:
    """What the matrix above cannot see: that a scan at full depth ranks by the keys, and not by something else."""
    prefix, facts = layer_prefix(4, 128, 450, torch.float32), facts_of(4, 128)
    query, keys, values = step(4, 128, 1, torch.float32)
    branches = [Branch(parse_method(text), 90) for text in ("exact", "full", "fathom:budget=512:basis=klt", "thumbnail:depth=1")]
    output = BranchBatch(prefix, branches, facts).attend(0, *(part.expand(4, -1, -1, -1) for part in (query, keys, values)), 128**-0.5)
    errors = (output[1:] - output[0]).norm(dim=-1).mean((-1, -2)) / output[0].norm(dim=-1).mean()
    assert errors[0] < 0.2
    assert errors[1] < 0.2
    assert errors[2] > errors[0]


def test_fathom_at_equal_bits_is_nearer_to_the_oracle_than_fixed_depths() -> None:
    prefix, facts = layer_prefix(4, 128, 450, torch.float32), facts_of(4, 128)
    query, keys, values = step(4, 128, 1, torch.float32)
    branches = [Branch(parse_method(text), 90) for text in ("exact", "fathom:budget=64:basis=raw", "sparq:r=16")]
    output = BranchBatch(prefix, branches, facts).attend(0, *(part.expand(3, -1, -1, -1) for part in (query, keys, values)), 128**-0.5)
    errors = (output[1:] - output[0]).norm(dim=-1).mean((-1, -2))
    assert errors[0] < errors[1]


def test_a_store_too_large_to_decode_scores_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long contexts unpack plane by plane; the scores are those of the decoded store and of the reference."""
    layer = layer_prefix(3, 64, 300, torch.float32).layers[0]
    query = step(3, 64, 2, torch.float32)[0]
    plan = torch.randint(0, 5, (2, 2, 64), generator=torch.Generator().manual_seed(3))
    decoded = PlaneSpec("raw").build(layer, 256).scan(query, query, plan)[0]
    monkeypatch.setattr("fathom_eval.planes.DECODED_LIMIT", 0)
    store = PlaneSpec("raw").build(layer, 256)
    assert isinstance(store, PlaneStore)
    found = store.scan(query, query, plan)[0]
    assert store.segments[0].decoded is None
    torch.testing.assert_close(found, decoded, rtol=1e-5, atol=1e-4)
    for row in range(2):
        reference = scan_planes(query[row], plan[row], store.segments[0].planes, store.segments[0].scales)
        torch.testing.assert_close(found[row], reference, rtol=1e-5, atol=1e-4)


def test_a_block_is_sealed_when_it_has_left_the_local_window_and_not_before() -> None:
    facts, spec = facts_of(3, 64), parse_method("full")
    for tokens, sealed in ((95, 64), (94, 0), (159, 128), (158, 64)):  # tokens of the prefix; the step's own makes one more
        keys, values = torch.randn(2, 2, tokens, 64, generator=torch.Generator().manual_seed(0))
        prefix = Prefix(tuple(range(tokens + 1)), (PrefixLayer(keys, values, QueryStatistics()),))
        batch = BranchBatch(prefix, [Branch(spec, 60)], facts)
        batch.attend(0, *step(3, 64, 1, torch.float32), 0.125)
        assert batch.counts.scan_tokens.item() == 2 * sealed


def test_loki_orders_by_score_variance_and_double_sparsity_by_both_magnitudes() -> None:
    """Queries that ignore the keys' widest directions: an order by the keys alone would take them."""
    generator = torch.Generator().manual_seed(5)
    keys = torch.randn(2, 300, 16, generator=generator) * torch.tensor([8.0, 4.0, 2.0, 1.0]).repeat(4)
    queries = torch.randn(2, 3, 300, 16, generator=generator) * torch.tensor([0.01, 1.0, 1.0, 1.0]).repeat(4)
    statistics = QueryStatistics()
    statistics.add(queries)
    layer, facts = PrefixLayer(keys, keys, statistics), facts_of(3, 16)
    sparsity = parse_method("double_sparsity:c=4").method.index(layer, facts)
    assert (sparsity.nonzero()[:, 1] % 4 == 1).all(), "wide keys and wide queries"
    loki = parse_method("loki:r=4").method.index(layer, facts)
    basis = layer.key_statistics.basis
    expected = (basis.variance * (queries.flatten(1, 2) @ basis.vectors).square().mean(1)).topk(4).indices
    assert torch.equal(loki.nonzero()[:, 1].view(2, 4), expected.sort(-1).values)
    assert (loki[:, :4] == 0).any(), "not simply the widest directions of the keys"


def test_double_sparsity_goes_by_the_magnitude_of_keys_and_not_by_their_variance() -> None:
    """A channel of one large value all along has no variance, and is what the paper's statistic takes first."""
    generator = torch.Generator().manual_seed(6)
    keys = torch.randn(2, 300, 16, generator=generator)
    keys[..., :4] = 5.0
    statistics = QueryStatistics()
    statistics.add(torch.randn(2, 3, 300, 16, generator=generator))
    index = parse_method("double_sparsity:c=4").method.index(PrefixLayer(keys, keys, statistics), facts_of(3, 16))
    assert index.nonzero()[:, 1].tolist() == [0, 1, 2, 3] * 2


def test_fathom_plans_with_the_variance_of_its_own_basis() -> None:
    layer, facts = layer_prefix(3, 64, 300, torch.float32).layers[0], facts_of(3, 64)
    for basis, variance in (("raw", layer.keys.var(1)), ("klt", layer.key_statistics.basis.variance)):
        index = parse_method(f"fathom:basis={basis}").method.index(layer, facts)
        torch.testing.assert_close(index[0], variance, rtol=1e-4, atol=1e-6)
