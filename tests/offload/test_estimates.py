"""What a session with the runtime takes of memory: estimated for one branch at a time, and checked before the prefill."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from fathom_eval.branches import Branch
from fathom_eval.errors import UserError
from fathom_eval.memory import check_memory, estimate_memory
from fathom_eval.methods import parse_method
from fathom_eval.models import LoadedModel, ModelFacts
from fathom_eval.offload.branches import _bytes_of, estimate_split
from fathom_eval.offload.generate import open_step
from fathom_eval.offload.scans import scan_of_prefix
from fathom_eval.offload.weights import weights_of
from fathom_eval.prefill import Prefix
from tests.offload.test_branches import branch


def test_the_estimate_is_of_one_branch_at_a_time(loaded: LoadedModel) -> None:
    facts, tokens = loaded.facts, 100_000
    branches = [Branch(parse_method("dense"), None), branch("landmark"), branch("full"), branch("quest:page=16")]
    plain = estimate_memory(facts, branches, tokens, 64, 8)
    assert estimate_split(facts, branches, tokens, 64, 8, None) == plain
    assert "host memory" not in str(plain)
    rest = estimate_memory(facts, [branches[0], branches[3]], tokens, 64, 8)
    rows = facts.layers * 2 * facts.kv_heads * tokens * facts.head_dim * 4
    sizes = {}
    for device, index in itertools.product(("cpu", "cuda:0"), ("host", "hbm")):
        there = dataclasses.replace(facts, device=device)
        found = sizes[device, index] = estimate_split(there, branches, tokens, 64, 8, index)
        assert (found.prefix, found.stores, found.tails) == (rest.prefix, rest.stores, rest.tails)
        assert (found.pinned >= rows) == (device != "cpu")
    codes = rows // 2 // 4 * 4 // 8
    assert sizes["cuda:0", "host"].pinned >= sizes["cuda:0", "hbm"].pinned + codes
    assert sizes["cuda:0", "host"].work == rest.work, "buffers alone take less than a prefill"
    assert sizes["cpu", "hbm"].work == sizes["cpu", "host"].work >= rows + codes
    assert "of host memory" in str(sizes["cuda:0", "hbm"])


@pytest.mark.parametrize("text", ["sparq", "fathom:basis=klt:rerank=2:attend=union", "landmark:size=2"])
@pytest.mark.parametrize("k", [60, 400])
def test_the_estimate_holds_what_a_step_allocates(loaded: LoadedModel, prefix: Prefix, text: str, k: int) -> None:
    one, most = branch(text, k), prefix.tokens + 1 + 8
    scan = scan_of_prefix(one.spec, loaded.facts, prefix.layers)
    opened = open_step(weights_of(loaded, prefix.tokens, 9), loaded.facts, prefix, one, scan, 8, index="host")
    with torch.inference_mode(), opened as step:
        [work] = step._work
        parts = [*vars(work).values(), *vars(work.unions[0]).values(), *vars(work.kept[0]).values(), step.tail_scores, step.cache.tail]
        held = {part.data_ptr(): part.nbytes for part in parts if isinstance(part, torch.Tensor) and part.numel()}
        segments = sum(tensor.nbytes for segment in step.cache.arena.segments for tensor in segment.tensors.values())
    host, device = _bytes_of(one, loaded.facts, most, torch.device("cpu"), "host")
    assert host >= segments
    written = 3 * 2 * 16 * most * 8
    assert sum(held.values()) <= device <= 1.6 * sum(held.values()) + written


def test_the_bases_of_a_long_prompt_are_in_the_estimate(loaded: LoadedModel) -> None:
    there, tokens = dataclasses.replace(loaded.facts, device="cuda:0"), 1_000_000
    raw, klt = (_step_work(there, branch(f"fathom:basis={basis}"), tokens) for basis in ("raw", "klt"))
    assert raw <= klt
    assert klt >= 2 * tokens * loaded.facts.kv_heads * loaded.facts.head_dim * 8


def _step_work(facts: ModelFacts, one: Branch, tokens: int) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fathom_eval.memory.CHUNK", 0)  # the prefill takes more than anything else
        return estimate_split(facts, [one], tokens, 64, 1, "host").work


def test_a_lack_of_pinned_memory_is_found_before_the_prefill(loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    there = dataclasses.replace(loaded.facts, device="cuda:0")
    estimate = estimate_split(there, [branch("sparq")], 10_000, 64, 1, "host")
    assert estimate.pinned
    monkeypatch.setattr("fathom_eval.memory.host_bytes", lambda: estimate.pinned)
    check_memory(estimate, {"meta": 1.0}, "session 3")
    monkeypatch.setattr("fathom_eval.memory.host_bytes", lambda: estimate.pinned - 1)
    with pytest.raises(UserError, match=r"session 3 needs about .* of pinned host memory, and .* are free"):
        check_memory(estimate, {"meta": 1.0}, "session 3")
    check_memory(dataclasses.replace(estimate, pinned=0), {"meta": 1.0}, "session 3")
