"""The list of all methods: which of them can run, what their stores take, and errors that fall with bits within a family."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch
from fathom_eval.errors import UserError
from fathom_eval.fidelity_layer import LayerComparison, WindowLayer
from fathom_eval.methods import EVERY, PAPER, MethodSpec, parse_method, parse_methods
from fathom_eval.methods.possible import Possible
from fathom_eval.store_sizes import store_bytes
from tests.key_layers import CHANNELS, FACTS, GROUP, TOKENS, facts_of, needs_faiss, observed_layer, queries


def test_all_is_a_list_of_distinct_methods_of_which_those_that_cannot_run_are_left_out() -> None:
    specs = parse_methods("all")
    assert len(specs) == len(EVERY) == len({spec.label for spec in specs})
    assert len(specs) >= 40
    assert all(spec.optional for spec in specs)
    assert set(PAPER) < set(EVERY)
    said: list[str] = []
    facts = facts_of(layers=3)
    possible = Possible(specs)
    possible.keep([128], lambda spec, at: spec.check(facts, at), said.append)
    kept = possible.specs
    assert {spec.method.name for spec in specs} - {spec.method.name for spec in kept} <= {
        "infllm_published",
        "retrieval_attention_published",
    }
    assert len(kept) + len(said) == len(specs)
    assert any("shadowkv" in line and "384 tokens" in line for line in said)
    assert any("infllm_published" in line and "4224" in line for line in said)


def test_a_method_that_is_named_beside_all_must_run() -> None:
    [named] = [spec for spec in parse_methods("all,infllm_published") if spec.method.name == "infllm_published"]
    assert not named.optional
    assert named == parse_method("infllm_published")
    with pytest.raises(UserError, match="k=128 leaves nothing"):
        Possible([named]).keep([128], MethodSpec.check_k, lambda line: None)
    assert parse_methods("infllm_published,all")[0].optional is False


def test_every_built_in_method_is_in_the_list() -> None:
    from fathom_eval.methods import BUILT_IN

    assert {spec.method.name for spec in parse_methods("all")} == {method.name for method in BUILT_IN}


@pytest.mark.parametrize("text", [text for text in EVERY if text != "dense"])
def test_the_estimated_size_of_a_store_is_what_it_takes(text: str) -> None:
    if text.startswith("retrieval_attention"):
        pytest.importorskip("faiss")
    method = parse_method(text).method
    spec = method.store(FACTS)
    assert spec is not None
    layer = observed_layer("infllm", text)
    store = spec.build(layer, TOKENS)
    projected = store.project(queries())
    plan = None if text == "h2o" else method.plan(projected, method.index(layer, FACTS))
    store.scan(queries(), projected, plan)
    assert store_bytes(spec, FACTS, TOKENS + 40, 4) == pytest.approx(store.bytes, rel=0.02)


def errors(texts: list[str], k: int = 90) -> list[float]:
    """Mean error against exact top-k at 40 positions of a window."""
    layer = observed_layer(*texts, tokens=400)
    query = torch.randn(40, 2, GROUP, CHANNELS, generator=torch.Generator().manual_seed(6))
    window = WindowLayer(layer.keys, layer.values, query, layer.query_statistics, CHANNELS**-0.5, layer.observations)
    branches, failures = [Branch(parse_method(text), k) for text in texts], dict[Any, str]()
    found: dict[Branch, list[Tensor]] = {}
    for _, branch, outcome in LayerComparison(window, 0, branches, FACTS, full_window=False, failures=failures).outcomes():
        found.setdefault(branch, []).append(outcome.exact_error)
    assert not failures
    return [torch.cat(found[branch]).mean().item() for branch in branches]


@pytest.mark.parametrize(
    "family",
    [
        [f"retroinfer:size={size}" for size in (64, 16, 4, 1)],
        [f"infinigen:query=own:r=D/{divisor}" for divisor in (16, 8, 4, 2)],
        [f"infinigen_skewed:query=own:dense_layers=none:r=D/{divisor}" for divisor in (8, 4, 2)],
        pytest.param([f"retrieval_attention:size=20:probes={share}" for share in (0.1, 0.3, 0.6)], marks=needs_faiss),
        [f"fathom:by_ratio=true:budget={budget}" for budget in (40, 80, 160)],
    ],
    ids=lambda family: family[0].partition(":")[0],
)
def test_error_falls_with_bits_within_a_family(family: list[str]) -> None:
    found = errors(family)
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.8 * found[0]
