"""One matrix for every registered method: what any of them must get right, whatever it does."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any

import pytest
import torch

from fathom_eval.branches import Branch, BranchBatch
from fathom_eval.calibration import QueryStatistics
from fathom_eval.decode import decode
from fathom_eval.errors import UserError
from fathom_eval.kernels.scan import scan_planes
from fathom_eval.methods import PAPER, MethodSpec, parse_method, parse_methods, registry
from fathom_eval.models import LoadedModel, ModelFacts
from fathom_eval.observations import MeanQueryKeyProduct
from fathom_eval.planes import PlaneSpec, PlaneStore
from fathom_eval.prefill import Prefix, PrefixLayer, prefill
from fathom_eval.ruler import all_branches
from fathom_eval.selection import Policy
from tests.tiny import tiny_model

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


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return tiny_model("qwen3", layers=3, query_heads=6, kv_heads=2, head_dim=16)


def prompt(tiny: LoadedModel, tokens: int) -> list[int]:
    generator = torch.Generator().manual_seed(tokens)
    return torch.randint(2, len(tiny.tokenizer), (tokens,), generator=generator).tolist()


def generate(tiny: LoadedModel, ids: list[int], new_tokens: int) -> list[int]:
    """Greedy generation by transformers itself."""
    tiny.model.set_attn_implementation("sdpa")
    inputs = torch.tensor([ids])
    output = tiny.model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=new_tokens,
        do_sample=False,
        eos_token_id=list(tiny.facts.eos_token_ids),
        pad_token_id=0,
    )
    return list(output[0, len(ids) :].tolist())


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("chunk", [2048, 37])
def test_dense_branch_equals_generate(family: str, chunk: int) -> None:
    tiny = tiny_model(family, layers=3, query_heads=6, kv_heads=2, head_dim=16, seed=1)
    for tokens in (3, 64, 250):
        ids = prompt(tiny, tokens)
        [dense] = decode(tiny, prefill(tiny, ids, chunk=chunk), [Branch(parse_method("dense"), None)], 40)
        assert list(dense.token_ids) == generate(tiny, ids, 40)


def test_every_method_alone_generates_what_it_does_in_lock_step(tiny: LoadedModel) -> None:
    """100 new tokens, so that blocks are sealed on the way; the prefix is the same before and after."""
    prefix = prefill(tiny, prompt(tiny, 230))
    before = prefix.checksum()
    specs = parse_methods("paper,sparq:reallocate=true,full:attend=union,loki:share=group_sum,sparq:rerank=2")
    branches = list(all_branches(specs, (60, 90), tiny.facts))
    together = decode(tiny, prefix, branches, 100)
    for branch, result in zip(branches, together, strict=True):
        [alone] = decode(tiny, prefix, [branch], 100)
        assert alone.token_ids == result.token_ids, branch.spec.label
        assert alone.bits == result.bits
        assert alone.finish == result.finish
        assert result.fired == result.steps * 3
    assert prefix.checksum() == before
    assert len({result.token_ids for result in together}) > 5


def test_k_of_all_tokens_generates_what_dense_does(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, prompt(tiny, 230))
    results = decode(tiny, prefix, all_branches(parse_methods("paper"), (1000,), tiny.facts), 60)
    assert {result.token_ids for result in results} == {results[0].token_ids}


SWITCHES = ("share=group_sum", "share=group_max", "reallocate=true", "rerank=2", "attend=union", "keep_tail=true", "dense_layers=0+2")


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_changes_what_is_computed_and_runs_with_any_method(tiny: LoadedModel, switch: str) -> None:
    """A switch that does nothing, without a word, is a known trap."""
    prefix = prefill(tiny, prompt(tiny, 300))
    plain = [Branch(parse_method(text), 110) for text in ("sparq", "landmark")]
    switched = [Branch(parse_method(f"{text}:{switch}"), 110) for text in ("sparq", "landmark")]
    query, keys, values = (part.expand(4, -1, -1, -1) for part in step(3, 16, 1, torch.float32, tail=10))
    output = BranchBatch(prefix, plain + switched, tiny.facts).attend(0, query, keys, values, 0.25)
    assert not torch.allclose(output[:2], output[2:])
    for result in decode(tiny, prefix, switched, 4):
        assert result.finish in ("length", "eos")


def test_rerank_with_enough_candidates_is_the_oracle(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, prompt(tiny, 300))
    branches = [Branch(parse_method(text), 60) for text in ("exact", "sparq:r=1:rerank=100", "sparq:r=1:rerank=2", "sparq:r=1")]
    query, keys, values = (part.expand(4, -1, -1, -1) for part in step(3, 16, 1, torch.float32))
    batch = BranchBatch(prefix, branches, tiny.facts)
    output = batch.attend(0, query, keys, values, 0.25)
    torch.testing.assert_close(output[1], output[0])
    errors = (output - output[0]).norm(dim=-1).mean((-1, -2))
    assert errors[2] < errors[3]
    assert batch.counts.candidates[0] == batch.counts.candidates[3] == 0
    assert 0 < batch.counts.candidates[2] < batch.counts.candidates[1]


def test_reallocation_gives_the_unselected_mass_to_the_mean_value(tiny: LoadedModel) -> None:
    """With full depth SparQ's temperature is sqrt(D), so the mass is the true one and the mixture can be written down."""
    prefix = prefill(tiny, prompt(tiny, 300))
    branches = [Branch(parse_method(text), 60) for text in ("exact", "exact:reallocate=true")]
    query, keys, values = (part.expand(2, -1, -1, -1) for part in step(3, 16, 1, torch.float32))
    output = BranchBatch(prefix, branches, tiny.facts).attend(0, query, keys, values, 16**-0.5)
    all_keys = torch.cat([prefix.layers[0].keys, keys[0]], dim=1)
    all_values = torch.cat([prefix.layers[0].values, values[0]], dim=1)
    weights = (query[0] @ all_keys.transpose(-1, -2) / 4).softmax(-1)
    inside = torch.zeros_like(weights, dtype=torch.bool)
    inside[..., :4] = inside[..., -32:] = True
    best = (query[0] @ all_keys.transpose(-1, -2))[..., 4:-32].topk(24).indices + 4
    inside.scatter_(-1, best, True)
    alpha = (weights * inside).sum(-1, keepdim=True)
    expected = alpha * output[0] + (1 - alpha) * all_values.mean(1).unsqueeze(1)
    torch.testing.assert_close(output[1], expected)


def test_end_tokens_stop_a_branch_and_are_kept(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, prompt(tiny, 100))
    [free] = decode(tiny, prefix, [Branch(parse_method("dense"), None)], 10)
    stop = free.token_ids[4]
    stopping = LoadedModel(tiny.model, tiny.tokenizer, dataclasses.replace(tiny.facts, eos_token_ids=(1, stop)))
    [result] = decode(stopping, prefix, [Branch(parse_method("dense"), None)], 10)
    assert result.finish == "eos"
    assert result.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert result.steps == len(result.token_ids)


def test_generation_beyond_the_models_positions_is_refused(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, prompt(tiny, 100))
    with pytest.raises(UserError, match="100 prompt tokens and 3997 to generate exceed the 4096"):
        decode(tiny, prefix, [Branch(parse_method("dense"), None)], 3997)


def test_broken_logits_are_an_error_of_that_branch_alone(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, prompt(tiny, 100))

    class Broken(BranchBatch):
        def attend(self, layer: int, *args: Any) -> torch.Tensor:
            output = super().attend(layer, *args)
            output[1] = torch.nan
            return output

    import fathom_eval.decode as module

    original, module.BranchBatch = module.BranchBatch, Broken  # type: ignore[misc]
    try:
        results = decode(tiny, prefix, [Branch(parse_method("dense"), None), Branch(parse_method("full"), 60)], 5)
    finally:
        module.BranchBatch = original  # type: ignore[misc]
    assert [result.finish for result in results] == ["length", "error"]
    assert results[1].error is not None
    assert "not finite" in results[1].error


def test_keys_that_are_not_finite_name_layer_and_head(tiny: LoadedModel) -> None:
    broken = tiny_model("llama", layers=2, query_heads=4, kv_heads=2, head_dim=16)
    with torch.no_grad():
        broken.model.model.layers[1].self_attn.k_proj.weight[16:] = torch.inf
    with pytest.raises(UserError, match="not finite in layer 1, KV head 1"):
        prefill(broken, prompt(broken, 100))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fathm", "unknown method 'fathm'; did you mean 'fathom'"),
        ("sparq:rank=4", "has no option 'rank'; did you mean 'rerank'"),
        ("sparq:r", "'r' is not option=value"),
        ("sparq:r=4:r=8", "twice"),
        ("fathom:basis=pca", "'pca' is not one of auto, raw, klt"),
        ("fathom:budget=many", "'many' is not a whole number"),
        ("sparq:per_head=yes", "'yes' is not true or false"),
        ("sparq:dense_layers=0+x", "'x' is not a whole number"),
    ],
)
def test_misspelt_methods_and_options_are_errors(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fathom:budget=0", "budget=0 must lie in 1..512"),
        ("sparq:r=D/7", "head_dim 64 is not a multiple of 7"),
        ("sparq:r=65", "must lie in 1..64"),
        ("loki:r=0", "must lie in 1..64"),
        ("double_sparsity:c=D/0", "not a number of channels"),
        ("thumbnail:depth=5", "depth=5 must lie in 1..4"),
        ("landmark:size=6", "size=6 must divide 64"),
        ("sparq:dense_layers=0+1", "dense layer 1 is not in 0..0"),
        ("sparq:sink=64:local=64", "k=128 leaves nothing to select"),
    ],
)
def test_options_that_cannot_work_are_errors_before_any_prefill(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(text).check(facts_of(3, 64), [128])


def test_budgets_scale_with_head_dim() -> None:
    fathom: Any = parse_method("fathom:budget=48").method
    assert [fathom.code_bits(head_dim) for head_dim in (64, 96, 128, 256)] == [24, 36, 48, 96]


def test_options_that_are_the_default_do_not_change_a_methods_identity() -> None:
    assert parse_method("sparq:r=D/8") == parse_method("sparq")
    assert parse_method("sparq:r=D/8").options == {}
    assert parse_method("sparq:r=D/4:rerank=2:dense_layers=0+1").options == {"r": "D/4", "rerank": 2.0, "dense_layers": [0, 1]}
    assert parse_methods("exact,paper,exact").count(MethodSpec(parse_method("exact").method, Policy())) == 1


def test_every_method_says_what_it_is() -> None:
    for name, kind in registry().items():
        assert kind.name == name
        assert kind.source
        assert kind.family
        assert kind.__doc__
        assert kind().typical_bits(128)


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


def test_auto_basis_is_raw_with_qk_norm_and_klt_without() -> None:
    plain = facts_of(3, 64)
    assert parse_method("fathom").method.store(plain) == PlaneSpec("klt")
    assert parse_method("fathom").method.store(dataclasses.replace(plain, qk_norm=True)) == PlaneSpec("raw")


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


def test_the_temperature_of_reallocation_follows_what_the_scan_covered(tiny: LoadedModel) -> None:
    """The mass that SparQ gives to the mean value: softmax(s / sqrt(D·‖q̂‖₁/‖q‖₁)) outside the selected set, the unsealed scored exactly."""
    prefix = prefill(tiny, prompt(tiny, 300))
    query, keys, values = step(3, 16, 1, torch.float32)
    plain, found = (
        BranchBatch(prefix, [Branch(parse_method(text), 60)], tiny.facts).attend(0, query, keys, values, 0.25)
        for text in ("sparq:r=1", "sparq:r=1:reallocate=true")
    )
    mean = torch.cat([prefix.layers[0].values, values[0]], dim=1).mean(1).unsqueeze(1)
    missed = ((found - plain) * (mean - plain)).sum(-1) / (mean - plain).square().sum(-1)

    all_keys = torch.cat([prefix.layers[0].keys, keys[0]], dim=1)
    channel = query[0].abs().sum(1).argmax(-1)  # the one channel of each KV head
    store = prefix.layers[0].store(PlaneSpec("raw"), 256)
    plan = torch.nn.functional.one_hot(channel, 16).unsqueeze(0) * 4
    scores = torch.cat([store.scan(query, query, plan)[0][0], query[0] @ all_keys[:, 256:].transpose(-1, -2)], dim=-1)
    picked = query[0].abs().gather(-1, channel[:, None, None].expand(2, 3, 1)).squeeze(-1)
    logits = scores / 4
    logits[..., :256] /= (picked / query[0].abs().sum(-1)).sqrt().unsqueeze(-1)
    weights = logits.softmax(-1)
    best = scores[..., 4:-32].topk(24).indices + 4
    expected = weights[..., 4:-32].sum(-1) - weights.gather(-1, best).sum(-1)
    torch.testing.assert_close(missed[0], expected, rtol=1e-3, atol=1e-4)


def test_union_attends_to_every_token_of_the_group_once(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, prompt(tiny, 300))
    query, keys, values = step(3, 16, 1, torch.float32)
    found = BranchBatch(prefix, [Branch(parse_method("exact:attend=union"), 60)], tiny.facts).attend(0, query, keys, values, 0.25)
    all_keys = torch.cat([prefix.layers[0].keys, keys[0]], dim=1)
    all_values = torch.cat([prefix.layers[0].values, values[0]], dim=1)
    scores = query[0] @ all_keys.transpose(-1, -2)
    inside = torch.zeros(2, 300, dtype=torch.bool)
    inside[:, :4] = inside[:, -32:] = True
    inside.scatter_(1, (scores[..., 4:-32].topk(24).indices + 4).flatten(1), True)
    weights = (scores * 0.25).masked_fill(~inside.unsqueeze(1), -torch.inf).softmax(-1)
    torch.testing.assert_close(found[0], weights @ all_values)


def test_a_method_that_is_bypassed_has_not_fired(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = prefill(tiny, prompt(tiny, 300))
    monkeypatch.setattr(BranchBatch, "_select_and_attend", lambda self, group, context, *_: context.query[group.rows] * 0)
    [result] = decode(tiny, prefix, [Branch(parse_method("sparq"), 60)], 3)
    assert result.fired == 0


def test_active_channels_are_a_mean_over_the_layers_that_are_scanned(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, prompt(tiny, 300))
    results = decode(tiny, prefix, [Branch(parse_method(text), 60) for text in ("sparq", "sparq:dense_layers=0+2")], 3)
    assert [result.channels for result in results] == [2.0, 2.0]
    assert [result.bits for result in results] == [8.5, 8.5]


def test_keys_that_a_scale_cannot_hold_name_layer_head_and_method(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, prompt(tiny, 300))
    keys = prefix.layers[2].keys.clone()
    keys[1, 10, 3] = 7e4
    layers = (*prefix.layers[:2], PrefixLayer(keys, prefix.layers[2].values, prefix.layers[2].query_statistics))
    broken, exact = decode(tiny, Prefix(prefix.token_ids, layers), [Branch(parse_method(text), 60) for text in ("full", "exact")], 2)
    assert broken.finish == "error"
    assert re.match(r"layer 2: ValueError: keys above 65,504.* in KV head 1", broken.error or "")
    assert exact.finish == "length"
