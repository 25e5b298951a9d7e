"""Queries of the layer before's input through this layer's projection, as InfiniGen speculates."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch
from fathom_eval.decode import decode
from fathom_eval.fidelity import Unit, evaluate
from fathom_eval.fidelity_capture import capture
from fathom_eval.methods import parse_method
from fathom_eval.methods.infinigen import InfiniGen
from fathom_eval.methods.step import Step
from fathom_eval.models import LoadedModel
from fathom_eval.prefill import prefill
from fathom_eval.rehearsal import Rehearsal, attention_modules, needed_rehearsal
from tests.made_windows import FixedWindows
from tests.tiny import tiny_model, token_ids

FAMILIES = ("llama", "qwen2", "qwen3")
LAYERS = 3


def model_of(family: str) -> LoadedModel:
    return tiny_model(family, layers=LAYERS, query_heads=6, kv_heads=2, head_dim=16)


def by_hand(loaded: LoadedModel, ids: Sequence[int], layer: int) -> Tensor:
    """``[n, H, G, D]``: the norm and the attention input of the layer before, and this layer's weights, norm and rotary embedding."""
    model, position = loaded.model.model, torch.arange(len(ids)).unsqueeze(0)
    hidden = model(input_ids=torch.tensor([list(ids)]), position_ids=position, output_hidden_states=True).hidden_states[layer - 1]
    attention = model.layers[layer].self_attn
    query = model.layers[layer - 1].input_layernorm(hidden) @ attention.q_proj.weight.T
    if attention.q_proj.bias is not None:
        query = query + attention.q_proj.bias
    query = query.unflatten(-1, (6, 16))
    if hasattr(attention, "q_norm"):
        query = attention.q_norm(query)
    cosine, sine = model.rotary_emb(hidden, position)
    turn = importlib.import_module(type(attention).__module__).apply_rotary_pos_emb
    return turn(query.transpose(1, 2), query.transpose(1, 2), cosine, sine)[0][0].transpose(0, 1).unflatten(1, (2, 3))


@pytest.mark.parametrize("chunk", [1000, 37])
@pytest.mark.parametrize("family", FAMILIES)
def test_of_a_window_it_is_this_layers_projection_of_the_layer_befores_input(family: str, chunk: int) -> None:
    loaded = model_of(family)
    ids = token_ids(loaded, 120)
    rehearsal = Rehearsal(loaded.model, LAYERS, first=70)
    layers = capture(loaded, ids, 50, chunk=chunk, rehearsal=rehearsal)
    assert rehearsal.query(0) is None
    for number in (1, 2):
        found = rehearsal.query(number)
        assert found is not None
        torch.testing.assert_close(found, by_hand(loaded, ids, number)[70:], rtol=1e-4, atol=1e-4)
        assert (found - layers[number].queries).norm() > 0.1 * found.norm(), "not this layer's own query"


@pytest.mark.parametrize("family", FAMILIES)
def test_in_decoding_every_branch_rehearses_with_its_own_input(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A branch that attends to everything has what a window of prompt and generation has; one that does not has something else."""
    loaded, seen = model_of(family), list[tuple[int, int, int, Tensor | None]]()
    plain = InfiniGen.scan_query

    def watched(self: Any, step: Step) -> Tensor:
        seen.append((step.k, step.layer, int(step.tokens[0]), step.rehearsed_query))
        return plain(self, step)

    monkeypatch.setattr(InfiniGen, "scan_query", watched)
    ids, spec = token_ids(loaded, 100), parse_method("infinigen:query=rehearsed")
    branches = [Branch(parse_method("dense"), None), Branch(spec, 45), Branch(parse_method("sparq"), 60), Branch(spec, 1000)]
    dense, _, _, full = decode(loaded, prefill(loaded, ids), branches, 4)
    assert full.token_ids == dense.token_ids
    rehearsal = Rehearsal(loaded.model, LAYERS, first=0)
    window = [*ids, *dense.token_ids]
    capture(loaded, window, len(window) - 2, rehearsal=rehearsal)
    few = []
    for k, layer, tokens, found in seen:
        expected = rehearsal.query(layer)
        if expected is None:
            assert found is None
            continue
        assert found is not None
        if k == 1000:
            torch.testing.assert_close(found[0], expected[tokens - 1], rtol=1e-4, atol=1e-4)
        else:
            few.append(torch.allclose(found[0], expected[tokens - 1], rtol=1e-4, atol=1e-4))
    assert len(seen) == 2 * LAYERS * 4
    assert not all(few)


@pytest.mark.parametrize("family", ["phi3", "olmo2"])
def test_a_fused_projection_or_another_norm_is_the_models_affair(family: str) -> None:
    """Heads that attend to the same input as the layer before's have the query of it: with equal layers, the layer before's own."""
    loaded = tiny_model(family, layers=2, query_heads=6, kv_heads=2, head_dim=16, **({"pad_token_id": 0} if family == "phi3" else {}))
    first, second = loaded.model.model.layers
    second.self_attn.load_state_dict(first.self_attn.state_dict())
    rehearsal = Rehearsal(loaded.model, 2, first=20)
    layers = capture(loaded, token_ids(loaded, 60), 40, rehearsal=rehearsal)
    found = rehearsal.query(1)
    assert found is not None
    torch.testing.assert_close(found, layers[0].queries, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(found, layers[1].queries, rtol=1e-2, atol=1e-2)


def test_rehearsing_changes_nothing_and_leaves_no_hook() -> None:
    loaded = model_of("qwen3")
    ids = token_ids(loaded, 150)
    rehearsal = Rehearsal(loaded.model, LAYERS, first=100)
    plain, watched = capture(loaded, ids, 50), capture(loaded, ids, 50, rehearsal=rehearsal)
    for left, right in zip(plain, watched, strict=True):
        assert torch.equal(left.keys, right.keys)
        assert torch.equal(left.queries, right.queries)
        assert left.query_statistics.count == right.query_statistics.count
    others = [Branch(parse_method(text), 60) for text in ("exact", "sparq", "h2o:local=8:sink=0")]
    prefix = prefill(loaded, ids, observations=others[2].spec.method.observes(loaded.facts))
    alone = decode(loaded, prefix, others, 5)
    beside = decode(loaded, prefix, [*others, Branch(parse_method("infinigen:query=rehearsed"), 60)], 5)
    assert [one.token_ids for one in alone] == [one.token_ids for one in beside[:3]]
    assert [one.bits for one in alone] == [one.bits for one in beside[:3]]
    assert not any(module._forward_pre_hooks for module in loaded.model.modules())


def test_nothing_is_rehearsed_unless_a_method_asks() -> None:
    loaded = model_of("llama")
    methods = [parse_method(text).method for text in ("infinigen", "infinigen_skewed", "infinigen_published:query=own")]
    assert needed_rehearsal(methods, loaded.model, LAYERS) is None
    for text in ("infinigen:query=rehearsed", "infinigen_published", "infinigen_skewed:query=rehearsed"):
        assert needed_rehearsal([parse_method(text).method], loaded.model, LAYERS) is not None


def test_the_published_reading() -> None:
    spec = parse_method("infinigen_published")
    assert spec.method.published
    assert (spec.policy.sink, spec.policy.local, spec.policy.dense_layers) == (0, 1, (0, 1)), "the authors begin with the input of layer 1"
    assert spec.method.rehearses
    assert spec.options == {"sink": 0, "local": 1, "dense_layers": [0, 1]}
    assert (spec.label, spec.line) == ("infinigen_published r=D/4", "InfiniGen as published")
    assert parse_method("infinigen:query=rehearsed").line == "InfiniGen rehearsed query"


@pytest.mark.parametrize("how", ["numbers", "raises", "silent"])
def test_a_model_that_cannot_rehearse_fails_this_method_alone(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = model_of("llama")
    attention = loaded.model.model.layers[1].self_attn
    forward = attention.forward
    if how == "numbers":
        said = "of its 3 layers not every one has one attention module with a layer_idx"
        monkeypatch.setattr("fathom_eval.rehearsal._is_numbered", lambda module: module is not attention and hasattr(module, "layer_idx"))
    elif how == "raises":
        said = "layer 1: ValueError: no rehearsals here"

        def refuse(*args: Any, rehearsal: Any = None, **kwargs: Any) -> Any:
            if rehearsal is not None:
                raise ValueError("no rehearsals here")
            return forward(*args, **kwargs)

        monkeypatch.setattr(attention, "forward", refuse)
    else:
        said = "layer 1: RuntimeError: its attention module went round the attention interface"
        monkeypatch.setattr(
            attention, "forward", lambda *args, rehearsal=None, **kwargs: None if rehearsal is not None else forward(*args, **kwargs)
        )
    specs = [parse_method(text) for text in ("infinigen:query=rehearsed", "infinigen", "sparq")]
    branches = tuple(Branch(spec, 60) for spec in specs)
    ids = token_ids(loaded, 150)
    [records] = evaluate(loaded, FixedWindows(ids), [Unit(150, 0, branches)], positions=20, full_window=False)
    assert [record["finish"] for record in records] == ["error", "complete", "complete"]
    assert f"no query could be rehearsed: {said}" in records[0]["error"]
    results = decode(loaded, prefill(loaded, ids), branches, 3)
    assert [result.finish for result in results] == ["error", "length", "length"]
    assert results[0].error is not None
    assert said in results[0].error


def test_the_attention_modules_are_the_innermost_that_know_their_layer() -> None:
    loaded = model_of("llama")
    for number, layer in enumerate(loaded.model.model.layers):
        layer.layer_idx = number  # as some families have it
    assert attention_modules(loaded.model, LAYERS) == [layer.self_attn for layer in loaded.model.model.layers]
    with pytest.raises(LookupError, match="of its 4 layers"):
        attention_modules(loaded.model, LAYERS + 1)


@pytest.mark.model
def test_on_a_trained_model_the_input_speaks_of_the_next_layers_keys(smollm2: LoadedModel) -> None:
    text = "The committee reported that the northern bridge had been closed for repairs since early spring. " * 40
    ids = smollm2.tokenizer.encode(text)[:500]
    branches = tuple(Branch(parse_method(f"infinigen:query={query}"), 80) for query in ("previous", "rehearsed", "own"))
    [records] = evaluate(smollm2, FixedWindows(ids), [Unit(len(ids), 0, branches)], positions=8, full_window=False)
    previous, rehearsed, own = (record["recall"] for record in records)
    assert previous < 0.5 * rehearsed
    assert rehearsed < own
