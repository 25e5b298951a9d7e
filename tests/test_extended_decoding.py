"""Methods that need more than a store and a plan: they give in fidelity what they give in decoding, those with a memory too."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch, BranchBatch, batch_order
from fathom_eval.decode import decode
from fathom_eval.fidelity_capture import capture
from fathom_eval.fidelity_layer import LayerComparison
from fathom_eval.methods import MethodSpec, parse_method
from fathom_eval.methods.step import Step
from fathom_eval.observations import ReceivedAttention, needed_observations
from fathom_eval.prefill import prefill
from fathom_eval.rehearsal import Rehearsal
from tests.extended_toys import INDEXED, LSH, Ahead, Infinite, Nothing, Ratio, Remainder, toy
from tests.made_windows import compare
from tests.tiny import tiny_model, token_ids


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
