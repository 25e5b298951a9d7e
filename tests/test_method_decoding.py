"""Methods that decode with a tiny model: alone as in lock-step, what every switch of a policy does, how a branch ends."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from fathom_eval.branches import Branch, BranchBatch
from fathom_eval.decode import decode
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method, parse_methods
from fathom_eval.models import LoadedModel
from fathom_eval.planes import PlaneSpec
from fathom_eval.prefill import Prefix, PrefixLayer, prefill
from fathom_eval.ruler import all_branches
from tests.method_matrix import step
from tests.tiny import tiny_model, token_ids


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return tiny_model("qwen3", layers=3, query_heads=6, kv_heads=2, head_dim=16)


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
        ids = token_ids(tiny, tokens)
        [dense] = decode(tiny, prefill(tiny, ids, chunk=chunk), [Branch(parse_method("dense"), None)], 40)
        assert list(dense.token_ids) == generate(tiny, ids, 40)


def test_every_method_alone_generates_what_it_does_in_lock_step(tiny: LoadedModel) -> None:
    """100 new tokens, so that blocks are sealed on the way; the prefix is the same before and after."""
    prefix = prefill(tiny, token_ids(tiny, 230))
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
    prefix = prefill(tiny, token_ids(tiny, 230))
    results = decode(tiny, prefix, all_branches(parse_methods("paper"), (1000,), tiny.facts), 60)
    assert {result.token_ids for result in results} == {results[0].token_ids}


SWITCHES = ("share=group_sum", "share=group_max", "reallocate=true", "rerank=2", "attend=union", "keep_tail=true", "dense_layers=0+2")


@pytest.mark.parametrize("switch", SWITCHES)
def test_every_switch_changes_what_is_computed_and_runs_with_any_method(tiny: LoadedModel, switch: str) -> None:
    """A switch that does nothing, without a word, is a known trap."""
    prefix = prefill(tiny, token_ids(tiny, 300))
    plain = [Branch(parse_method(text), 110) for text in ("sparq", "landmark")]
    switched = [Branch(parse_method(f"{text}:{switch}"), 110) for text in ("sparq", "landmark")]
    query, keys, values = (part.expand(4, -1, -1, -1) for part in step(3, 16, 1, torch.float32, tail=10))
    output = BranchBatch(prefix, plain + switched, tiny.facts).attend(0, query, keys, values, 0.25)
    assert not torch.allclose(output[:2], output[2:])
    for result in decode(tiny, prefix, switched, 4):
        assert result.finish in ("length", "eos")


def test_rerank_with_enough_candidates_is_the_oracle(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, token_ids(tiny, 300))
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
    prefix = prefill(tiny, token_ids(tiny, 300))
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


def test_the_temperature_of_reallocation_follows_what_the_scan_covered(tiny: LoadedModel) -> None:
    """The mass that SparQ gives to the mean value: softmax(s / sqrt(D·‖q̂‖₁/‖q‖₁)) outside the selected set, the unsealed scored exactly."""
    prefix = prefill(tiny, token_ids(tiny, 300))
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
    prefix = prefill(tiny, token_ids(tiny, 300))
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


def test_end_tokens_stop_a_branch_and_are_kept(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, token_ids(tiny, 100))
    [free] = decode(tiny, prefix, [Branch(parse_method("dense"), None)], 10)
    stop = free.token_ids[4]
    stopping = LoadedModel(tiny.model, tiny.tokenizer, dataclasses.replace(tiny.facts, eos_token_ids=(1, stop)))
    [result] = decode(stopping, prefix, [Branch(parse_method("dense"), None)], 10)
    assert result.finish == "eos"
    assert result.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert result.steps == len(result.token_ids)


def test_generation_beyond_the_models_positions_is_refused(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, token_ids(tiny, 100))
    with pytest.raises(UserError, match="100 prompt tokens and 3997 to generate exceed the 4096"):
        decode(tiny, prefix, [Branch(parse_method("dense"), None)], 3997)


def test_broken_logits_are_an_error_of_that_branch_alone(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, token_ids(tiny, 100))

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
        prefill(broken, token_ids(broken, 100))


def test_keys_that_a_scale_cannot_hold_name_layer_head_and_method(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, token_ids(tiny, 300))
    keys = prefix.layers[2].keys.clone()
    keys[1, 10, 3] = 7e4
    layers = (*prefix.layers[:2], PrefixLayer(keys, prefix.layers[2].values, prefix.layers[2].query_statistics))
    broken, exact = decode(tiny, Prefix(prefix.token_ids, layers), [Branch(parse_method(text), 60) for text in ("full", "exact")], 2)
    assert broken.finish == "error"
    assert re.match(r"layer 2: ValueError: keys above 65,504.* in KV head 1", broken.error or "")
    assert exact.finish == "length"


def test_a_method_that_is_bypassed_has_not_fired(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = prefill(tiny, token_ids(tiny, 300))
    monkeypatch.setattr(BranchBatch, "_select_and_attend", lambda self, group, context, *_: context.query[group.rows] * 0)
    [result] = decode(tiny, prefix, [Branch(parse_method("sparq"), 60)], 3)
    assert result.fired == 0


def test_active_channels_are_a_mean_over_the_layers_that_are_scanned(tiny: LoadedModel) -> None:
    prefix = prefill(tiny, token_ids(tiny, 300))
    results = decode(tiny, prefix, [Branch(parse_method(text), 60) for text in ("sparq", "sparq:dense_layers=0+2")], 3)
    assert [result.channels for result in results] == [2.0, 2.0]
    assert [result.bits for result in results] == [8.5, 8.5]
