"""Methods that need more than a store and a plan: their matrix, and what each hook of theirs promises."""

from __future__ import annotations

import dataclasses
import types
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch
from fathom_eval.decode import decode
from fathom_eval.errors import UserError
from fathom_eval.fidelity import Unit, evaluate
from fathom_eval.fidelity_layer import WindowLayer
from fathom_eval.methods import BUILT_IN, parse_method
from fathom_eval.methods.step import Step
from fathom_eval.models import ModelFacts
from fathom_eval.observations import ReceivedAttention
from fathom_eval.prefill import prefill
from fathom_eval.stores import StoreSpec
from tests.extended_toys import EXTENDED, FACTS, LSH, Ahead, Infinite, Nothing, Remainder, Toy, attend, observed, toy
from tests.made_windows import FixedWindows, compare, structured_layer
from tests.method_matrix import FURTHER, SCANS, SHAPES, facts_of, layer_prefix, step
from tests.tiny import tiny_model, token_ids

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


def test_one_set_of_h2o_serves_the_group() -> None:
    spec = parse_method("h2o")
    prefix = observed(layer_prefix(4, 128, 450, torch.float32), 4, [spec], facts_of(4, 128))
    batch, _ = attend(prefix, [Branch(spec, 60), Branch(spec, 90)], facts_of(4, 128))
    assert batch.counts.rows.tolist() == [2 * 60, 2 * 90]
    assert batch.counts.scan_bits.tolist() == [0, 0]


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


# Remainder and context


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
