"""Methods that need more than a store and a plan: what their hooks promise, in decoding and in fidelity alike."""

from __future__ import annotations

import dataclasses
import importlib.util
import types
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch, BranchBatch, batch_order
from fathom_eval.decode import decode
from fathom_eval.errors import UserError
from fathom_eval.fidelity import Unit, evaluate
from fathom_eval.fidelity_capture import capture
from fathom_eval.fidelity_layer import LayerComparison, WindowLayer
from fathom_eval.methods import BUILT_IN, MethodSpec, parse_method
from fathom_eval.methods.magicpig import log_sampling_probability
from fathom_eval.methods.sparq import SparQ
from fathom_eval.methods.step import Step
from fathom_eval.models import ModelFacts
from fathom_eval.observations import (
    MeanQueryKeyProduct,
    Observation,
    ReceivedAttention,
    ReceivedLocalAttention,
    RecentQueries,
    needed_observations,
)
from fathom_eval.prefill import PrefixLayer, prefill
from fathom_eval.rehearsal import Rehearsal
from fathom_eval.selection import Policy
from fathom_eval.stores import StoreSpec
from tests.extended_toys import (
    EXTENDED,
    FACTS,
    INDEXED,
    LSH,
    Ahead,
    Infinite,
    Nothing,
    Ratio,
    Remainder,
    Toy,
    attend,
    observed,
    toy,
)
from tests.test_fidelity import FixedWindows, compare, structured_layer, token_ids
from tests.test_methods import FURTHER, SCANS, SHAPES, facts_of, layer_prefix, step
from tests.tiny import tiny_model

# The matrix


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("group", "head_dim", "tokens"), SHAPES)
@pytest.mark.parametrize("text", EXTENDED)
def test_sets_are_no_larger_than_they_may_be_and_bits_are_counted(
    text: str, group: int, head_dim: int, tokens: int, dtype: torch.dtype
) -> None:
    spec, facts = parse_method(text), facts_of(group, head_dim)
    prefix = observed(layer_prefix(group, head_dim, tokens, dtype), group, [spec], facts)
    before = prefix.checksum()
    batch, output = attend(prefix, [Branch(spec, 60), Branch(spec, 90)], facts)
    assert not batch.failures
    assert torch.isfinite(output).all()
    assert batch.counts.fired.tolist() == [1, 1]
    assert batch.counts.scan_tokens.tolist() == [2 * ((tokens + 1 - 32) // 64 * 64)] * 2
    kept = spec.policy.sink + spec.policy.local
    assert (batch.counts.rows > 2 * kept).all(), "something competes and is found"
    if spec.method.capped:
        assert (batch.counts.rows <= 2 * group * torch.tensor([60, 90])).all()
    if spec.method.declares:
        assert torch.equal(batch.counts.scan_bits.double(), batch.counts.declared_bits)
    assert prefix.checksum() == before


def test_every_method_that_is_built_in_is_in_a_matrix() -> None:
    """This one, or that of methods which are a store and a plan; references apart."""
    extended = [one if isinstance(one, str) else str(one.values[0]) for one in EXTENDED]
    in_matrix = {text.partition(":")[0] for text in (*SCANS, *FURTHER, *extended)}
    assert in_matrix == {method.name for method in BUILT_IN if not method.control}


def test_h2o_sums_what_the_heads_of_a_group_give() -> None:
    """Not their maximum: the tokens that one head alone attends to come after those that all attend to."""
    received = torch.zeros(2, 3, 300)
    received[:, 0, 100:130], received[:, :, 150:180] = 2.0, 1.0
    layer = dataclasses.replace(layer_prefix(3, 64, 300, torch.float32).layers[0], observations={ReceivedAttention(): received})
    index = parse_method("h2o").method.index(layer, FACTS)
    assert index[:, 100:180].topk(30).indices.sort(-1).values.tolist() == [list(range(50, 80))] * 2


def test_the_recent_tokens_of_h2o_must_fit_beside_the_sink() -> None:
    parse_method("h2o:recent=0.9").check(FACTS, [60])
    with pytest.raises(UserError, match=r"recent=0\.95 of k=60 are 57 tokens, more than the 56 that the sink of 4 leaves"):
        parse_method("h2o:recent=0.95").check(FACTS, [60])


def test_a_threshold_is_a_margin_in_scaled_logits() -> None:
    scores = torch.tensor([[[[10.0, 7.1, 6.9, -torch.inf]]]])
    step: Any = types.SimpleNamespace(scaling=0.5)
    found = parse_method("threshold:margin=1.5").method.rank(scores, step)
    assert found.tolist() == [[[[10.0, scores[..., 1].item(), -torch.inf, -torch.inf]]]]
    for margin in ("nan", "-1"):
        with pytest.raises(UserError, match="must be at least 0"):
            parse_method(f"threshold:margin={margin}").check(FACTS, [60])


@pytest.mark.parametrize("text", ["threshold", "infllm"])
def test_the_union_of_a_method_with_hooks_is_attended_to(text: str) -> None:
    """What each head finds, against attention to the union of it."""
    own, union = parse_method(f"{text}:share=head"), parse_method(f"{text}:share=head:attend=union")
    prefix = observed(layer_prefix(3, 64, 300, torch.float32), 3, [own], FACTS)
    batch, outputs = attend(prefix, [Branch(own, 60), Branch(union, 60)], FACTS)
    assert batch.counts.rows[0] == batch.counts.rows[1]
    alike = torch.allclose(outputs[0], outputs[1], rtol=1e-3, atol=1e-4)
    assert alike == (batch.counts.rows[0].item() == 2 * 60), "only where the heads find the same"


def test_weights_of_a_sample_need_the_head_that_drew_it() -> None:
    for switch in ("share=group_sum", "share=group_max", "attend=union"):
        with pytest.raises(UserError, match="each head weighs what it has sampled itself"):
            parse_method(f"magicpig:{switch}").check(FACTS, [60])
    parse_method("magicpig").check(FACTS, [60])


def test_one_set_of_h2o_serves_the_group() -> None:
    spec = parse_method("h2o")
    prefix = observed(layer_prefix(4, 128, 450, torch.float32), 4, [spec], facts_of(4, 128))
    batch, _ = attend(prefix, [Branch(spec, 60), Branch(spec, 90)], facts_of(4, 128))
    assert batch.counts.rows.tolist() == [2 * 60, 2 * 90]
    assert batch.counts.scan_bits.tolist() == [0, 0]


# Decoding and fidelity


class _At(Rehearsal):
    """What was rehearsed at one position of a window, for every row of a batch."""

    def __init__(self, window: Rehearsal, position: int, rows: int) -> None:
        self._window, self._position, self._rows = window, position, rows

    def query(self, layer: int) -> Tensor | None:
        found = self._window.query(layer)
        return None if found is None else found[self._position].expand(self._rows, -1, -1, -1)


INDEXES = INDEXED if importlib.util.find_spec("faiss") is not None else ()
STATELESS = (
    *(parse_method(text) for text in ("threshold", "threshold:margin=0.3:rerank=2:share=group_max", LSH, f"{LSH}:attend=union")),
    *(
        parse_method(text)
        for text in (
            *("retroinfer", "retroinfer_published", "retroinfer_published:local=16:attend=union", "infllm", *INDEXES),
            "retrieval_attention:kind=pairs:candidates=150",
        )
    ),
    *(parse_method(text) for text in ("shadowkv:outlier=2", "infinigen", "infinigen_skewed:dense_layers=none", "infinigen:query=own")),
    *(parse_method(text) for text in ("infinigen:query=rehearsed", "infinigen_published:dense_layers=none:local=32")),
    *(parse_method(text) for text in ("fathom:by_ratio=true", "fathom:by_ratio=true:basis=raw:budget=90:local=20")),
    *(toy(method) for method in (Remainder(), Ahead(), Ratio(), Infinite(), Nothing())),
    toy(Infinite(), rerank=2.0, reallocate=True),
    toy(Infinite(), attend="union", keep_tail=True),
)


def test_a_position_gives_what_decoding_gives_there() -> None:
    loaded = tiny_model("qwen2", layers=3, query_heads=6, kv_heads=2, head_dim=16)
    ids, first = token_ids(loaded, 330), 240
    branches = [Branch(spec, k) for spec in STATELESS for k in (110, 150)]
    needs = needed_observations((spec.method for spec in STATELESS), loaded.facts)
    rehearsal = Rehearsal(loaded.model, 3, first=first)
    prefix = prefill(loaded, ids[: first + 1], observations=needs)
    layers = capture(loaded, ids, 330 - first, observations=needs, rehearsal=rehearsal)
    order = batch_order(branches, loaded.facts)
    outcomes = []
    for number, layer in enumerate(layers):
        failures: dict[MethodSpec, str] = {}
        previous = layers[number - 1].queries if number else None
        comparison = LayerComparison(
            layer, number, branches, loaded.facts, full_window=False, failures=failures, previous_queries=previous, rehearsal=rehearsal
        )
        found: dict[Branch, list[Any]] = {}
        for _, branch, outcome in comparison.outcomes():
            found.setdefault(branch, []).append(outcome)
        assert not failures
        outcomes.append(found)
    for position in (first, 286, 287, 329):
        batch = BranchBatch(prefix, [branches[row] for row in order], loaded.facts, _At(rehearsal, position - first, len(branches)))
        for number, layer in enumerate(layers):
            before = batch.counts.rows.clone()
            query = layer.queries[position - first].expand(len(branches), -1, -1, -1)
            keys, values = (part[None, :, first : position + 1].expand(len(branches), -1, -1, -1) for part in (layer.keys, layer.values))
            expected = batch.attend(number, query, keys, values, layer.scaling)
            assert not batch.failures
            for at, row in enumerate(order):
                parts, label = outcomes[number][branches[row]], branches[row].spec.label
                output, rows = (torch.cat([getattr(part, name) for part in parts])[position - first] for name in ("output", "rows"))
                # Logits of 25 and values of 9: this is their rounding in fp32; another set differs by more.
                torch.testing.assert_close(output, expected[at], rtol=1e-4, atol=2e-4, msg=lambda text, label=label: f"{label}: {text}")
                assert rows.sum() == batch.counts.rows[at] - before[at], label


@pytest.mark.parametrize("text", ["h2o", "h2o:recent=0.2:rerank=2", "h2o:local=8:sink=0"])
def test_a_method_with_memory_gives_at_every_position_what_a_branch_fed_with_the_window_gives(text: str) -> None:
    loaded = tiny_model("qwen2", layers=1, query_heads=6, kv_heads=2, head_dim=16)
    ids, first, spec = token_ids(loaded, 330), 250, parse_method(text)
    needs = needed_observations([spec.method], loaded.facts)
    prefix, [layer] = prefill(loaded, ids[: first + 1], observations=needs), capture(loaded, ids, 330 - first, observations=needs)
    branches = [Branch(spec, 60), Branch(spec, 90)]
    outcomes = compare(layer, branches, loaded.facts)
    batch = BranchBatch(prefix, branches, loaded.facts)
    for position in range(first, 330):
        query = layer.queries[position - first].expand(2, -1, -1, -1)
        keys, values = (part[None, :, first : position + 1].expand(2, -1, -1, -1) for part in (layer.keys, layer.values))
        expected = batch.attend(0, query, keys, values, layer.scaling)
        for row, branch in enumerate(branches):
            torch.testing.assert_close(outcomes[branch].output[position - first], expected[row], rtol=1e-4, atol=1e-5)
    assert not batch.failures


@pytest.mark.parametrize("text", ["h2o", "h2o:recent=0:local=8:rerank=3"])
def test_what_was_evicted_never_returns_and_the_heavy_are_kept(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model("llama", layers=2, query_heads=4, kv_heads=2, head_dim=16)
    spec, sets = parse_method(text), list[Tensor]()
    learn = type(spec.method).learn

    def watched(self: Any, attended: Tensor, weights: Tensor, step: Step) -> None:
        if step.layer == 0:
            sets.append(attended[0].any(1))
            assert (weights[~attended] == 0).all()
            torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 2))
        learn(self, attended, weights, step)

    monkeypatch.setattr(type(spec.method), "learn", watched)
    prefix = prefill(loaded, token_ids(loaded, 200), observations=needed_observations([spec.method], loaded.facts))
    [result] = decode(loaded, prefix, [Branch(spec, 60)], 90)
    assert result.finish == "length"
    gone = torch.zeros(2, 0, dtype=torch.bool)
    for kept in sets:
        assert not (kept[:, : gone.shape[1]] & gone).any()
        gone = ~kept
    if spec.policy.rerank == 1:
        assert result.rows == 60
        received = prefix.layers[0].observations[ReceivedAttention()].sum(1)
        received[:, :4] = received[:, 168:] = torch.inf  # sink, and the local window of the first step, the current token apart
        expected = torch.zeros(2, 199, dtype=torch.bool).scatter_(1, received.topk(59).indices, True)
        assert torch.equal(sets[0][:, :199], expected)
    else:
        assert sets[-1].sum() < sets[0].sum(), "what a query has no use for is gone for the next"


# Scores that are not finite


@pytest.mark.parametrize("rerank", [1.0, 3.0])
def test_minus_infinity_is_never_attended_to_and_plus_infinity_is_taken_first(rerank: float) -> None:
    prefix = layer_prefix(3, 64, 300, torch.float32)
    _, output = attend(prefix, [Branch(toy(Infinite(), rerank=rerank), 60), Branch(toy(Infinite(), rerank=rerank), 10**5)], FACTS)
    query, own_keys, own_values = step(3, 64, 1, torch.float32)
    keys = torch.cat([prefix.layers[0].keys, own_keys[0]], dim=1)
    values = torch.cat([prefix.layers[0].values, own_values[0]], dim=1)
    scores, number = query[0] @ keys.transpose(-1, -2), torch.arange(301)
    kept = (number < 4) | (number >= 269)
    ranked = scores.masked_fill((number >= 200) & (number < 220), torch.inf).masked_fill((number % 2 == 0) | kept, -torch.inf)
    for row, count in ((0, 24), (1, 132)):
        inside = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ranked.topk(count).indices, True) & (ranked > -torch.inf) | kept
        weights = (scores / 8).masked_fill(~inside, -torch.inf).softmax(-1)
        torch.testing.assert_close(output[row], weights @ values)


def test_a_method_that_finds_nothing_attends_to_what_is_always_kept() -> None:
    prefix = layer_prefix(3, 64, 300, torch.float32)
    batch, output = attend(prefix, [Branch(toy(Nothing()), 60), Branch(toy(Toy(), rerank=1.0), 60)], FACTS)
    assert batch.counts.rows.tolist()[0] == 2 * 36
    assert torch.isfinite(output).all()


def test_a_method_that_ranks_all_may_not_score_minus_infinity() -> None:
    @dataclass(frozen=True)
    class Liar(Nothing):
        ranks_all: ClassVar[bool] = True

        def rank(self, scores: Tensor, step: Step) -> Tensor:
            return scores

        def store(self, facts: ModelFacts) -> StoreSpec | None:
            return parse_method(LSH).method.store(facts)

    outcome = compare(structured_layer(), [Branch(toy(Liar()), 80)], FACTS)[Branch(toy(Liar()), 80)]
    assert outcome.scan is not None
    assert outcome.scan.broken


# Importance weights


def test_weights_make_sums_over_the_samples_unbiased() -> None:
    """Over many draws of the hashes, every key is counted once: 1/u as often as u."""
    prefix, facts = layer_prefix(1, 64, 300, torch.float32), facts_of(1, 64)
    query, layer = step(1, 64, 1, torch.float32)[0], prefix.layers[0]
    draws, total, squares = 400, torch.zeros(2, 1, 256), torch.zeros(2, 1, 256)
    for seed in range(draws):
        method = parse_method(f"magicpig:bits=3:tables=12:seed={seed}").method
        spec = method.store(facts)
        assert spec is not None
        store = spec.build(layer, 256)
        found, _ = store.scan(query, query, None)
        weights = method.log_weights(Step(0, None, 60, 0.125, 301, torch.tensor([301]), query, None, (store,), {}))
        counted = torch.where(found > -torch.inf, weights, -torch.inf).exp()[0]
        total += counted
        squares += counted.square()
    mean, deviation = total / draws, (squares / draws - (total / draws).square()).clamp_min(0).sqrt() / draws**0.5
    common = log_sampling_probability(store.cosine(query), 3, 12)[0] > -3  # others are seen too seldom to say anything
    assert common.float().mean() > 0.5
    assert ((mean - 1).abs() <= 5 * deviation + 1e-3)[common].all()
    assert (mean[common] - 1).abs().mean() < 0.1


def test_the_probability_that_a_key_is_sampled() -> None:
    cosine = torch.tensor([1 + 1e-6, 1.0, 0.9, 0.0, -1.0, -1 - 1e-6])
    found = log_sampling_probability(cosine, 10, 150)
    assert torch.isfinite(found).all(), "acos of a cosine above 1 is not a number"
    p = (1 - cosine.double().clamp(-1, 1).acos() / torch.pi) ** 10
    expected = 1 - (1 - p) ** 150 - 150 * p * (1 - p) ** 149
    torch.testing.assert_close(found[:4].double().exp(), expected[:4], rtol=1e-4, atol=1e-9)
    assert found[0] == found[1] == 0


def test_keys_are_centred_by_the_mean_of_those_that_can_be_sampled() -> None:
    """As the authors do: neither the sink's keys nor those of the window have a part in it, and nothing else changes with them."""
    layer = layer_prefix(3, 64, 300, torch.float32).layers[0]
    keys = layer.keys.clone()
    keys[:, :4], keys[:, 256:] = 1e3, -1e3
    changed = dataclasses.replace(layer, keys=keys, _stores={})
    query, spec = step(3, 64, 2, torch.float32)[0], parse_method(LSH).method.store(FACTS)
    assert spec is not None
    before, after = (spec.build(one, 256).scan(query, query, None)[0] for one in (layer, changed))
    assert torch.equal(before[..., 4:], after[..., 4:])
    none_sealed, query = spec.build(layer, 0), layer.keys[:, 280:281].mean(1).view(1, 2, 1, 64)
    none_sealed.append(layer.keys[:, :64])
    torch.testing.assert_close(none_sealed.cosine(query)[0, :, 0, 9], cosine(query, layer.keys[:, 9] - layer.keys.mean(1)))  # type: ignore[attr-defined]


def cosine(query: Tensor, keys: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(query[0, :, 0], keys, dim=-1)


def test_the_published_weights_have_a_ceiling() -> None:
    """−log(u + 10⁻⁴), as in the authors' code; the paper's −log u has none."""
    assert parse_method("magicpig_published").method.version == parse_method("magicpig").method.version == 2
    layer, query = layer_prefix(3, 64, 300, torch.float32).layers[0], step(3, 64, 2, torch.float32)[0]
    weights = []
    for name in ("magicpig", "magicpig_published"):
        method = parse_method(name).method
        store = method.store(FACTS).build(layer, 256)  # type: ignore[union-attr]
        weights.append(method.log_weights(Step(0, None, 60, 0.125, 301, torch.tensor([301]), query, None, (store,), {})))
    plain, published = weights
    torch.testing.assert_close((-published).double().exp(), (-plain).double().exp() + 1e-4, rtol=1e-5, atol=1e-9)
    assert published.max() <= 4 * 2.302586
    assert plain.max() > published.max()


def test_a_query_that_is_a_centred_key_finds_it_for_sure() -> None:
    prefix = layer_prefix(1, 64, 300, torch.float32)
    layer = prefix.layers[0]
    method = parse_method("magicpig").method
    store = method.store(FACTS).build(layer, 256)  # type: ignore[union-attr]
    query = (layer.keys[:, 7] - layer.keys[:, 4:256].mean(1)).view(1, 2, 1, 64)
    scores, reads = store.scan(query, query, None)
    assert (scores[..., 7] == 0).all()
    assert (reads.bits >= 150 * 32).all()
    assert ((scores > -torch.inf).sum() < 256).all()
    log_weights = method.log_weights(Step(0, None, 60, 0.125, 301, torch.tensor([301]), query, None, (store,), {}))
    assert log_weights[..., 7].abs().max() < 1e-5


def test_bits_as_touched_are_those_of_the_buckets() -> None:
    layer = layer_prefix(3, 64, 300, torch.float32).layers[0]
    store = parse_method(LSH).method.store(FACTS).build(layer, 256)  # type: ignore[union-attr]
    query = step(3, 64, 2, torch.float32)[0]
    _, reads = store.scan(query, query, None)
    centred = layer.keys[:, :256] - layer.keys[:, 4:256].mean(1, keepdim=True)
    signs = [(part @ store._projections).unflatten(-1, (20, 4)) > 0 for part in (query, centred)]  # type: ignore[attr-defined]
    same = (signs[0].unsqueeze(3) == signs[1].unsqueeze(1).unsqueeze(0)).all(-1)  # [R, H, G, n, L]
    assert torch.equal(reads.bits, same.any(2).sum((-1, -2)) * 32)


def test_weights_of_tokens_that_are_always_kept_stay_one() -> None:
    """Sink tokens are sealed too, but they are not sampled."""
    prefix, facts = layer_prefix(3, 64, 300, torch.float32), FACTS

    @dataclass(frozen=True)
    class Kept(Nothing):
        def log_weights(self, step: Step) -> Tensor:
            return torch.linspace(0, 50, 256).expand(*step.query.shape[:3], 256)

    _, output = attend(prefix, [Branch(toy(Kept()), 60), Branch(toy(Nothing()), 60)], facts)
    torch.testing.assert_close(output[0], output[1])


# Remainder, context, observations


def test_a_remainder_of_all_that_is_left_out_is_dense_attention() -> None:
    prefix = layer_prefix(3, 64, 300, torch.float32)
    # Without a tail beyond the window every token that competes is sealed.
    specs = [parse_method("dense"), toy(Remainder(), keep_tail=True)]
    _, output = attend(prefix, [Branch(specs[0], None), Branch(specs[1], 110)], FACTS)
    torch.testing.assert_close(output[1], output[0], rtol=1e-4, atol=1e-5)
    layer = structured_layer(positions=90, tokens=420)
    outcome = compare(layer, [Branch(specs[1], 110)], FACTS)[Branch(specs[1], 110)]
    assert outcome.dense_error.max() < 1e-4


def test_a_method_learns_k_tokens_and_layer() -> None:
    loaded = tiny_model("llama", layers=2, query_heads=4, kv_heads=2, head_dim=16)
    seen: list[tuple[int, int, int, bool]] = []

    @dataclass(frozen=True)
    class Watching(Ahead):
        name: ClassVar[str] = "watching"

        def scan_query(self, step: Step) -> Tensor:
            seen.append((step.layer, step.k, int(step.tokens[0]), step.previous_query is None))
            return step.query

    prefix = prefill(loaded, token_ids(loaded, 200))
    decode(loaded, prefix, [Branch(toy(Watching()), 60), Branch(toy(Watching()), 80)], 2)
    assert seen[:4] == [(0, 60, 200, True), (0, 80, 200, True), (1, 60, 200, False), (1, 80, 200, False)]
    assert seen[4:] == [(0, 60, 201, True), (0, 80, 201, True), (1, 60, 201, False), (1, 80, 201, False)]


@pytest.mark.parametrize("chunk", [1000, 37])
def test_observations_are_what_the_definitions_say(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fathom_eval.observations.WEIGHT_ELEMENTS", 12 * 150 * 5)  # five queries at a time
    loaded = tiny_model("llama", layers=2, query_heads=6, kv_heads=2, head_dim=16)
    ids = token_ids(loaded, 150)
    needs: tuple[Observation, ...] = (ReceivedAttention(), ReceivedLocalAttention(20), MeanQueryKeyProduct(), RecentQueries(9))
    whole = capture(loaded, ids, 150)
    for full, known in ((False, 120), (True, 150)):
        layers = capture(loaded, ids, 30, chunk=chunk, full_window=full, observations=needs)
        for layer, all_of_it in zip(layers, whole, strict=True):
            queries = all_of_it.queries[:known].permute(1, 2, 0, 3)
            keys = layer.keys[:, :known]
            age = torch.arange(known).unsqueeze(-1) - torch.arange(known)
            weights = (queries @ keys.unsqueeze(1).transpose(-1, -2) * layer.scaling).masked_fill(age < 0, -torch.inf).softmax(-1)
            received, local, products, recent = (layer.observations[need] for need in needs)
            torch.testing.assert_close(received, weights.sum(2), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(local, (weights * ((age >= 1) & (age <= 20))).sum(2), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(products, (queries * keys.unsqueeze(1)).abs().mean(2), rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(recent, queries[:, :, -9:], rtol=1e-4, atol=1e-5)
    prefix = prefill(loaded, ids, chunk=chunk, observations=needs)
    assert prefix.layers[0].observations[ReceivedAttention()].shape == (2, 3, 149)
    assert prefill(loaded, ids).layers[0].observations == {}


@pytest.mark.parametrize("where", ["start", "add", "result"])
def test_an_observation_that_fails_ends_the_methods_that_ask_for_it_only(where: str) -> None:
    class Accumulator:
        def add(self, query: Tensor, keys: Tensor, scaling: float) -> None:
            if where == "add":
                raise ValueError("no add")

        def result(self) -> Any:
            raise ValueError("no result")

    @dataclass(frozen=True)
    class Curious(Observation):
        def start(self) -> Any:
            if where == "start":
                raise ValueError("no start")
            return Accumulator()

    @dataclass(frozen=True)
    class Asking(Toy):
        name: ClassVar[str] = "asking"

        def observes(self, facts: ModelFacts) -> tuple[Observation, ...]:
            return (Curious(),)

        def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
            return layer.observations[Curious()]

    loaded = tiny_model("llama", layers=2, query_heads=4, kv_heads=2, head_dim=16)
    # A plan is what makes a fidelity run ask for the index.
    specs = [MethodSpec(type("Planned", (SparQ, Asking), {"index": Asking.index, "name": "planned"})(), Policy()), parse_method("h2o")]
    [[bad, good]] = evaluate(
        loaded,
        FixedWindows(token_ids(loaded, 200)),
        [Unit(200, 0, tuple(Branch(spec, 60) for spec in specs))],
        positions=4,
        full_window=False,
    )
    assert good["finish"] == "complete"
    assert f"RuntimeError: Curious failed: ValueError: no {where}" in bad["error"]


# Defaults of a method


@dataclass(frozen=True)
class Published(Toy):
    name: ClassVar[str] = "published"

    def policy_defaults(self) -> dict[str, Any]:
        return {"share": "group_sum", "sink": 0, "dense_layers": (0, 1), "dense_every": 16}


def test_a_methods_own_policy_can_be_overridden_and_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fathom_eval.methods.registry", lambda wanted: {"published": Published})
    plain, back = parse_method("published"), parse_method("published:dense_layers=none:sink=4:dense_every=0:share=head")
    assert plain.label == "published"
    assert plain.options == {"share": "group_sum", "sink": 0, "dense_layers": [0, 1], "dense_every": 16}
    assert back.options == {}
    assert back.label == "published sink=4 share=head dense_layers=none dense_every=0"
    assert [plain.policy.is_dense(layer) for layer in (0, 1, 2, 16, 17, 32)] == [True, True, False, True, False, True]
    plain.check(FACTS, [60])  # its own dense layers may lie beyond a small model's
    with pytest.raises(UserError, match=r"dense layer 3 is not in 0\.\.0"):
        parse_method("published:dense_layers=3").check(FACTS, [60])


def test_a_method_of_its_own_size_says_so() -> None:
    assert parse_method("magicpig").label.endswith("(k: of the oracle only)")
    with pytest.raises(UserError, match="rerank does nothing"):
        parse_method("magicpig:rerank=2").check(FACTS, [60])


def test_dense_layers_by_a_step_attend_to_everything() -> None:
    loaded = tiny_model("llama", layers=3, query_heads=4, kv_heads=2, head_dim=16)
    prefix = prefill(loaded, token_ids(loaded, 300))
    branches = [Branch(parse_method(text), 60) for text in (f"{LSH}:dense_every=2", "sparq:dense_every=2")]
    for result in decode(loaded, prefix, branches, 2):
        assert result.finish == "length"
        assert result.rows > (2 * 300) / 3


# Records


def test_records_say_what_is_known_of_each_method() -> None:
    loaded = tiny_model("llama", layers=3, query_heads=4, kv_heads=2, head_dim=16)
    texts = ("exact", "h2o", "threshold", LSH, f"{LSH}:dense_every=2", "dense")
    branches = tuple(Branch(parse_method(text), None if text == "dense" else 60) for text in texts)
    [records] = evaluate(loaded, FixedWindows(token_ids(loaded, 200)), [Unit(200, 0, branches)], positions=8, full_window=False)
    exact, h2o, threshold, sampled, sparser, dense = records
    assert {record["finish"] for record in records} == {"complete"}
    assert h2o["bits"] == h2o["declared_bits"] == 0
    assert threshold["bits"] == threshold["declared_bits"] == 16 * 2.25
    assert sampled["bits"] > 0
    assert sampled["declared_bits"] is None
    assert sparser["layers"]["error_dense"][0] == sparser["layers"]["error_dense"][2] == 0 < sparser["layers"]["error_dense"][1]
    assert 0 <= exact["near_ties"] == h2o["near_ties"] < 3 * 8 * 4
    assert dense["near_ties"] is None


# Near-ties


def test_sets_that_rounding_could_change_are_counted() -> None:
    layer = structured_layer()
    exact = Branch(parse_method("exact"), 80)
    plain = compare(layer, [exact], FACTS)[exact].near_ties
    assert not plain.all()
    keys = layer.keys.clone()
    keys[:, 36:200] = keys[:, 4:5]  # one key many times: whatever is taken of it, another is as good
    tied = compare(WindowLayer(keys, layer.values, layer.queries, layer.query_statistics, layer.scaling), [exact], FACTS)[exact]
    scores = torch.einsum("phgd,hnd->phgn", layer.queries, keys)
    for p, tokens in enumerate(range(361, 401)):
        ranked = scores[p, ..., 4 : tokens - 32].sort(-1, descending=True).values
        gap = ranked[..., 43] - ranked[..., 44]
        assert tied.near_ties[p][gap == 0].all()
        assert not tied.near_ties[p][gap > 1e-4 * scores[p, ..., :tokens].abs().amax(-1)].any()
    assert tied.near_ties.any()
