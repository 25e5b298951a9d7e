"""What a fidelity run refuses: numbers that are not finite, reads that no scan can give, keys that a scale cannot hold."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch
from fathom_eval.errors import UserError
from fathom_eval.fidelity_capture import capture
from fathom_eval.fidelity_layer import LayerComparison, WindowLayer
from fathom_eval.fidelity_sums import Totals, outcome_sums, settle
from fathom_eval.methods import MethodSpec
from fathom_eval.methods.landmark import Landmark
from fathom_eval.models import ModelFacts
from fathom_eval.selection import Policy
from fathom_eval.stores import LandmarkStore, StoreSpec
from tests.made_windows import FACTS, branch, compare, structured_layer
from tests.tiny import tiny_model, token_ids


def test_keys_that_are_not_finite_are_an_error_that_names_layer_and_head() -> None:
    loaded = tiny_model("llama", layers=2, query_heads=4, kv_heads=2, head_dim=16)
    with torch.no_grad():
        loaded.model.model.layers[1].self_attn.k_proj.weight[16:] = torch.inf
    with pytest.raises(UserError, match=r"gave keys that are not finite in layer 1, KV head 1$"):
        capture(loaded, token_ids(loaded, 100), 10)


@pytest.mark.parametrize(("part", "first"), [("values", 16), ("queries", 32)])
def test_values_and_queries_that_are_not_finite_are_too(part: str, first: int) -> None:
    loaded = tiny_model("llama", layers=2, query_heads=4, kv_heads=2, head_dim=16)
    with torch.no_grad():
        getattr(loaded.model.model.layers[1].self_attn, f"{part[0]}_proj").weight[first:] = torch.inf
    with pytest.raises(UserError, match=rf"gave {part} that are not finite in layer 1, KV head 1$"):
        capture(loaded, token_ids(loaded, 100), 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"channels": 65}, "channels read outside 0 to head_dim"),
        ({"channels": -1}, "channels read outside 0 to head_dim"),
        ({"bits": 1025 * 64}, "more than 1024 bits per token and channel"),
        ({"score": torch.inf}, "from one that forces none"),
    ],
)
def test_what_no_scan_can_give_is_a_failure(change: dict[str, float], message: str) -> None:
    class Lying(LandmarkStore):
        def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Any]:
            scores, reads = super().scan(query, projected, plan)
            bits = reads.other_bits + int(change.get("bits", 0)) * self.tokens
            reads = dataclasses.replace(reads, other_bits=bits, channels=reads.channels * 0 + int(change.get("channels", 64)))
            return scores + change.get("score", 0.0), reads

    @dataclasses.dataclass(frozen=True)
    class LyingSpec(StoreSpec):
        def build(self, layer: Any, tokens: int) -> Any:
            store = Lying(layer.keys[:, :0], 8)
            store.append(layer.keys[:, :tokens])
            return store

    class Liar(Landmark):
        name: ClassVar[str] = "liar"
        declares: ClassVar[bool] = False

        def store(self, facts: ModelFacts) -> StoreSpec | None:
            return LyingSpec()

    this = Branch(MethodSpec(Liar(), Policy()), 80)
    [outcome] = compare(structured_layer(positions=1), [this], FACTS).values()
    failures: dict[MethodSpec, str] = {}
    settle(3, {this: outcome_sums(outcome)}, {this: Totals()}, failures)
    assert failures[this.spec].startswith("layer 3: ")
    assert message in failures[this.spec]


def test_keys_beyond_fp16_fail_the_methods_that_store_scales() -> None:
    layer = structured_layer()
    keys = layer.keys.clone()
    keys[1, 10, 3] = 1e5
    failures: dict[MethodSpec, str] = {}
    large = WindowLayer(keys, layer.values, layer.queries, layer.query_statistics, layer.scaling)
    branches = [branch("exact", 80), branch("full", 80), branch("landmark:size=1", 80)]
    done = {this for _, this, _ in LayerComparison(large, 7, branches, FACTS, full_window=False, failures=failures).outcomes()}
    assert done == {branches[0]}
    assert failures[branches[1].spec].startswith("layer 7: ValueError: keys above 65,504")
    assert "KV head 1" in failures[branches[1].spec]
    assert failures[branches[2].spec] == "layer 7: ValueError: keys above 65,504, which fp16 cannot hold in KV head 1"
