"""What methods ask of the prefill: observations are what their definitions say, and one that fails fails alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch
from fathom_eval.fidelity import Unit, evaluate
from fathom_eval.fidelity_capture import capture
from fathom_eval.methods import MethodSpec, parse_method
from fathom_eval.methods.sparq import SparQ
from fathom_eval.models import ModelFacts
from fathom_eval.observations import MeanQueryKeyProduct, Observation, ReceivedAttention, ReceivedLocalAttention, RecentQueries
from fathom_eval.prefill import PrefixLayer, prefill
from fathom_eval.selection import Policy
from tests.extended_toys import Toy
from tests.made_windows import FixedWindows
from tests.tiny import tiny_model, token_ids


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
