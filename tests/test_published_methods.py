"""Methods as their authors run them, and the traps of their codes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from fathom_eval.asymmetric import asymmetric_codes, asymmetric_values
from fathom_eval.branches import Branch, BranchBatch
from fathom_eval.calibration import QueryStatistics
from fathom_eval.coded import CodedStore
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method
from fathom_eval.observations import MeanQueryKeyProduct
from fathom_eval.prefill import Prefix, PrefixLayer
from tests.key_layers import CHANNELS, FACTS, GROUP, TOKENS, attention, facts_of, one_layer_output, queries, real_layer, scanned


def test_loki_in_fp16_and_as_published() -> None:
    layer, query = real_layer(), queries()
    basis = layer.key_statistics.basis
    for text, columns, mean in (
        ("loki:r=16:bits=16", parse_method("loki:r=16").method.index(layer, FACTS) > 0, basis.mean.unsqueeze(1)),
        ("loki_published:r=16", (torch.arange(CHANNELS) < 16).expand(2, -1), torch.zeros(2, 1, CHANNELS)),
    ):
        scores, reads = scanned(text)
        coordinates = ((layer.keys - mean) @ basis.vectors).half().float()
        read = (query @ basis.vectors) * columns.unsqueeze(1)
        # What all keys have in common where they are not read: of μ all that was subtracted, or all but what is read.
        common = query @ basis.mean.unsqueeze(-1) - read @ ((basis.mean.unsqueeze(1) - mean) @ basis.vectors).transpose(-1, -2)
        expected = read @ coordinates.transpose(-1, -2) + common
        torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-3)
        assert reads.bits.unique().tolist() == [16 * 16 * TOKENS]
    for text in ("loki_published", "quest_published", "double_sparsity_published", "infinigen_skewed", "infinigen_published"):
        assert (parse_method(text).policy.sink, parse_method(text).policy.local) == (0, 1), "the authors' selection keeps neither"
    assert parse_method("loki:bits=16").method.typical_bits(128) == "512"


def test_what_a_column_store_does_not_read_cannot_reach_a_score() -> None:
    layer, query = real_layer(), queries()
    for text in ("sparq_published", "loki_published", "loki:bits=16"):
        method = parse_method(text).method
        spec = method.store(FACTS)
        assert spec is not None
        clean, spoiled = spec.build(layer, TOKENS), spec.build(layer, TOKENS)
        assert isinstance(spoiled, CodedStore)
        projected = clean.project(query)
        plan = method.plan(projected, method.index(layer, FACTS))
        assert plan is not None
        unread = (plan == 0).all(0).unsqueeze(1)
        spoiled.segments[0].parts[0].masked_fill_(unread, 6e4)
        assert torch.equal(spoiled.scan(query[:1], projected[:1], plan[:1])[0], clean.scan(query[:1], projected[:1], plan[:1])[0])
        spoiled.segments[0].parts[0].masked_fill_(~unread, 6e4)
        spoiled.segments[0].decoded = None
        assert not torch.equal(spoiled.scan(query[:1], projected[:1], plan[:1])[0], clean.scan(query[:1], projected[:1], plan[:1])[0])


@pytest.mark.parametrize("scaling", [CHANNELS**-0.5, 0.3])
def test_sparq_as_published_selects_one_set_by_scores_at_each_heads_temperature(scaling: float) -> None:
    output, query, keys, values = one_layer_output("sparq_published:r=8", 80, scaling=scaling)
    magnitude = query.abs()
    read = torch.zeros(2, CHANNELS).scatter_(-1, magnitude.sum(1).topk(8).indices, 1.0).unsqueeze(1)
    sealed = (len(keys[0]) - 32) // 64 * 64
    rounded = torch.cat([keys[:, :sealed].half().float(), keys[:, sealed:]], dim=1)
    # Tokens that are not sealed are scored exactly.
    scores = torch.cat([(query * read) @ rounded[:, :sealed].transpose(-1, -2), query @ rounded[:, sealed:].transpose(-1, -2)], dim=-1)
    scores = scores * scaling
    # With a scaling of D^−1/2 this is √(D·‖q̂‖₁/‖q‖₁).
    scores[..., :sealed] /= ((magnitude * read).sum(-1) / magnitude.sum(-1)).sqrt().unsqueeze(-1)
    inside = torch.zeros(2, 1, len(keys[0]), dtype=torch.bool)
    inside[..., -32:] = True
    inside.scatter_(-1, scores.sum(1, keepdim=True)[..., :-32].topk(80 - 32).indices, True)
    mass = (scores.softmax(-1) * inside).sum(-1, keepdim=True)
    expected = mass * attention(query, keys, values, inside, scaling) + (1 - mass) * values.mean(1).unsqueeze(1)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_double_sparsity_as_published_reads_a_label_for_each_query_head() -> None:
    layer, query = real_layer(), queries()
    importance = layer.observations[MeanQueryKeyProduct()]
    scores, reads = scanned("double_sparsity_published:c=16")

    def rounded(values: Tensor, stored: bool) -> Tensor:
        low = values.amin(-1, keepdim=True)
        step = (values.amax(-1, keepdim=True) - low) / 15
        if stored:
            low = low.half().float()
            step = ((values.amax(-1, keepdim=True) - low) / 15).half().float()
        return ((values - low) / step).round().clamp(0, 15) * step + low

    for head in range(2):
        for member in range(GROUP):
            chosen = importance[head, member].topk(16).indices
            keys = rounded(layer.keys[head][:, chosen], True)
            expected = rounded(query[:, head, member][:, chosen], False) @ keys.T
            torch.testing.assert_close(scores[:, head, member], expected, rtol=1e-4, atol=1e-3)
    assert reads.code_bits.unique().tolist() == [GROUP * 4 * 16 * TOKENS]
    assert reads.scale_bits.unique().tolist() == [GROUP * 32 * TOKENS]


def test_streaming_llm_attends_to_the_sink_and_the_most_recent_tokens() -> None:
    for k in (60, 120, 200):  # within the unsealed tail, into the sealed blocks, far into them
        output, query, keys, values = one_layer_output("streaming_llm", k)
        inside = torch.zeros(len(keys[0]), dtype=torch.bool)
        inside[:4] = inside[-(k - 4) :] = True
        torch.testing.assert_close(output, attention(query, keys, values, inside), rtol=1e-4, atol=1e-5)
    method = parse_method("streaming_llm").method
    assert not method.ranks_all
    assert method.declared_bits(None, FACTS) == 0


def test_a_calibration_uses_all_of_its_blocks_and_not_the_last_alone() -> None:
    """Double Sparsity's hook looks its sum up under another name than it stores it under, so that every block replaces the one before."""
    generator = torch.Generator().manual_seed(2)
    early, late = torch.ones(16), torch.ones(16)
    early[:4], late[8:12] = 30.0, 10.0
    parts = [torch.randn(2, GROUP, 200, 16, generator=generator) * scale for scale in (early, early, late)]
    keys = torch.randn(2, 600, 16, generator=generator)
    pooled, products = QueryStatistics(), MeanQueryKeyProduct().start()
    for number, part in enumerate(parts):
        pooled.add(part)
        products.add(part, keys[:, : 200 * (number + 1)], 1.0)
    layer = PrefixLayer(keys, keys, pooled, observations={MeanQueryKeyProduct(): products.result()})
    facts = facts_of(16)
    assert parse_method("double_sparsity:c=4").method.index(layer, facts)[0].nonzero().flatten().tolist() == [0, 1, 2, 3]
    spec: Any = parse_method("double_sparsity_published:c=4").method.store(facts)
    assert spec.build(layer, 0)._chosen.sort(-1).values.unique(dim=1).tolist() == [[[0, 1, 2, 3]], [[0, 1, 2, 3]]]


@pytest.mark.parametrize("layers", [3, 24, 32, 48])
def test_dense_layers_are_the_first_two_of_a_model_of_any_depth(layers: int) -> None:
    """Quest numbers its layers down from 32."""
    for text in ("quest_published", "double_sparsity_published"):
        spec = parse_method(text)
        assert spec.policy.dense_layers == (0, 1)
        spec.check(facts_of(layers=layers), [128])
    layer = real_layer()
    prefix = Prefix(tuple(range(TOKENS + 1)), (layer,) * layers)
    batch = BranchBatch(prefix, [Branch(parse_method("quest_published"), 60), Branch(parse_method("dense"), None)], facts_of(layers=layers))
    own = torch.randn(2, 2, 2, 1, CHANNELS, generator=torch.Generator().manual_seed(4))
    query = queries(1).expand(2, -1, -1, -1)
    own = own[:, :1].expand(-1, 2, -1, -1, -1)
    for number in range(layers):
        output = batch.attend(number, query, own[0], own[1], 0.125)
        assert torch.equal(output[0], output[1]) == (number < 2)


def test_a_group_of_one_or_two_keys_is_exact_and_so_refused() -> None:
    keys = real_layer().keys
    for group, exact in ((1, True), (2, True), (32, False)):
        codes, step, low = asymmetric_codes(keys.unflatten(1, (-1, group)), 2, 2)
        values = asymmetric_values(codes.float(), step, low, 2).flatten(1, 2)
        off = (values - keys).abs().max() / keys.abs().max()
        assert off < 1e-3 if exact else off > 0.05
        text = f"kivi:group={group}"
        if exact:
            with pytest.raises(UserError, match=r"group=\d must be 16, 32 or 64"):
                parse_method(text).check(FACTS, [128])
        else:
            parse_method(text).check(FACTS, [128])


def test_kivi_quantises_nothing_before_its_block_is_sealed() -> None:
    """A decoded token in a group of its own would be bit-exact; here it is scored as it is, and costs and counts nothing."""
    layer = real_layer()
    short = dataclasses.replace(layer, keys=layer.keys[:, :190], values=layer.values[:, :190], _stores={})
    batch = BranchBatch(Prefix(tuple(range(191)), (short,)), [Branch(parse_method("kivi"), 100)], FACTS)
    batch.attend(0, queries(1), layer.keys[None, :, 190:195], layer.values[None, :, 190:195], 0.125)
    assert batch.counts.scan_tokens.item() == 2 * 128
    assert batch.counts.scan_bits.item() == 2 * 128 * CHANNELS * 3


def test_equal_scores_take_the_first_tokens_of_a_page() -> None:
    """All 16 tokens of a page score alike, so almost every selection ends within one; torch.topk leaves open where."""
    output, query, keys, values = one_layer_output("quest", 90)
    sealed = (len(keys[0]) - 32) // 64 * 64
    low, high = (
        bound.half().float() for bound in (keys[:, :sealed].unflatten(1, (-1, 16)).amin(2), keys[:, :sealed].unflatten(1, (-1, 16)).amax(2))
    )
    pages = torch.maximum(query.unsqueeze(2) * low.unsqueeze(1), query.unsqueeze(2) * high.unsqueeze(1)).sum(-1)
    scores = torch.cat([pages.repeat_interleave(16, dim=-1), query @ keys[:, sealed:].transpose(-1, -2)], dim=-1)
    inside = torch.zeros_like(scores, dtype=torch.bool)
    inside[..., :4] = inside[..., -32:] = True
    candidates = scores[..., 4:-32]
    best = candidates.sort(dim=-1, descending=True, stable=True).indices[..., : 90 - 36] + 4
    inside.scatter_(-1, best, True)
    torch.testing.assert_close(output, attention(query, keys, values, inside), rtol=1e-4, atol=1e-5)
