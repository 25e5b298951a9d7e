"""A model whose layers lie on several devices."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
import torch

import fathom_eval.memory as memory_module
from fathom_eval.branches import Branch, BranchBatch, batch_order
from fathom_eval.calibration import QueryStatistics
from fathom_eval.decode import decode
from fathom_eval.devices import resolve_devices
from fathom_eval.errors import UserError
from fathom_eval.fingerprints import fingerprint_model
from fathom_eval.memory import MemoryEstimate, check_memory
from fathom_eval.methods import parse_methods
from fathom_eval.models import LoadedModel, describe_model
from fathom_eval.observations import Observation, needed_observations
from fathom_eval.prefill import Prefix, PrefixLayer, prefill
from fathom_eval.stores import LandmarkStore
from fathom_eval.worker_slots import process_slots
from tests.claimed_devices import claim, claimed_devices
from tests.tiny import tiny_model

METHODS = (
    "dense;exact;fathom:budget=48:basis=raw;fathom:budget=48:basis=klt:rerank=2;sparq;sparq:reallocate=true;landmark;loki;quest;h2o;"
    "infinigen;shadowkv;retroinfer:attend=union;streaming_llm;magicpig"
)
STEPS = 9


def branches_of() -> list[Branch]:
    specs = [spec for part in METHODS.split(";") for spec in parse_methods(part)]
    return [Branch(spec, k) for spec in specs for k in ((None,) if spec.method.name == "dense" else (60, 100))]


@functools.cache
def model() -> LoadedModel:
    return tiny_model("llama", layers=4, query_heads=4, kv_heads=2, head_dim=16)


def prefix_of(loaded: LoadedModel) -> Prefix:
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(2, loaded.model.config.vocab_size, (280,), generator=generator).tolist()
    observations = needed_observations((branch.spec.method for branch in branches_of()), loaded.facts)
    return prefill(loaded, ids, observations=observations)


def moved(prefix: Prefix, split: int) -> Prefix:
    """The same prefix with its layers from ``split`` on claimed to be on another device than those before."""

    def layer_on(layer: PrefixLayer, device: int) -> PrefixLayer:
        statistics = QueryStatistics()
        statistics.__dict__.update({name: _claimed(value, device) for name, value in vars(layer.query_statistics).items()})
        observations: dict[Observation, Any] = {name: _claimed(value, device) for name, value in layer.observations.items()}
        return PrefixLayer(claim(layer.keys, device), claim(layer.values, device), statistics, layer.number, observations)

    return dataclasses.replace(prefix, layers=tuple(layer_on(layer, int(layer.number >= split)) for layer in prefix.layers))


def _claimed(value: Any, device: int) -> Any:
    return claim(value, device) if isinstance(value, torch.Tensor) else value


def steps_of(batch: BranchBatch, layers: int, device: Any) -> list[torch.Tensor]:
    """Outputs of all layers of some steps, whose queries, keys and values are random."""
    generator = torch.Generator().manual_seed(7)
    rows, outputs = len(batch.branches), []
    tails = [[torch.zeros(rows, 2, 0, 16) for _ in range(2)] for _ in range(layers)]
    for _ in range(STEPS):
        for layer in range(layers):
            query = torch.randn(rows, 2, 2, 16, generator=generator)
            tails[layer] = [torch.cat([tail, torch.randn(rows, 2, 1, 16, generator=generator)], 2) for tail in tails[layer]]
            output = batch.attend(layer, *(device(tensor, layer) for tensor in (query, *tails[layer])), 0.25)
            outputs.append(output.cpu())
    return outputs


@torch.inference_mode()
def test_branches_give_the_same_where_layers_lie_on_two_devices() -> None:
    loaded, branches = model(), branches_of()
    prefix, order = prefix_of(loaded), batch_order(branches, loaded.facts)
    branches = [branches[row] for row in order]
    whole = BranchBatch(prefix, branches, loaded.facts)
    expected = steps_of(whole, 4, lambda tensor, layer: tensor)
    assert not whole.failures
    prefix = moved(prefix_of(loaded), 2)
    with claimed_devices():
        apart = BranchBatch(prefix, branches, loaded.facts)
        found = steps_of(apart, 4, lambda tensor, layer: claim(tensor, int(layer >= 2)))
        assert not apart.failures
        assert [layer.keys.device.index for layer in prefix.layers] == [0, 0, 1, 1]
        counts = {name: getattr(apart.counts, name).cpu() for name in vars(apart.counts)}
        assert not apart.broken(prefix.layers[0].keys.device).cpu().any()
    assert len(found) == len(expected)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    for name, values in vars(whole.counts).items():
        assert torch.equal(counts[name].nan_to_num(-1), values.nan_to_num(-1)), name


class _Spread(torch.nn.Module):
    """A model whose tensors claim to lie on two devices, or on none in particular."""

    def __init__(self, loaded: LoadedModel, spread: bool) -> None:
        super().__init__()
        self.config, self._loaded, self._spread = loaded.model.config, loaded, spread

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        tensors = self._loaded.model.state_dict()
        return {name: claim(tensor, place % 2) if self._spread else tensor for place, (name, tensor) in enumerate(sorted(tensors.items()))}


@torch.inference_mode()
def test_a_model_on_two_devices_has_the_fingerprint_that_it_has_on_one() -> None:
    expected = model().facts.model_fingerprint
    assert fingerprint_model(_Spread(model(), spread=False)) == expected
    with claimed_devices():
        assert fingerprint_model(_Spread(model(), spread=True)) == expected


def test_what_mixes_devices_is_found() -> None:
    with claimed_devices(), pytest.raises(RuntimeError, match="mixes meta:0, meta:1"):
        claim(torch.ones(3), 0) + claim(torch.ones(3), 1)
    with claimed_devices(), pytest.raises(RuntimeError, match="mixes cpu, meta:1"):
        claim(torch.ones(3), 1)[torch.tensor([1, 2])]


@torch.inference_mode()
def test_a_method_without_numbers_changes_no_bit_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded, branches = model(), branches_of()
    prefix = prefix_of(loaded)
    whole = decode(loaded, prefix, branches, 12)
    logits = _logits_of(loaded, prefix, branches)
    scan = LandmarkStore.scan

    def broken(self: LandmarkStore, *args: Any) -> Any:
        scores, reads = scan(self, *args)
        scores[..., 70] = torch.nan
        return scores, reads

    monkeypatch.setattr(LandmarkStore, "scan", broken)
    found = decode(loaded, prefix, branches, 12)
    bad = [result.finish == "error" for result in found]
    # ShadowKV scans such landmarks too.
    assert {result.branch.spec.method.name for result in found if result.finish == "error"} == {"landmark", "shadowkv"}
    for without, mine, theirs in zip(bad, found, whole, strict=True):
        if without:
            assert (mine.finish, mine.error) == ("error", f"layer 0: {mine.branch.spec.label} gives scores that are not numbers")
            assert theirs.finish != "error"
        else:
            assert mine == theirs
    again = _logits_of(loaded, prefix, branches)
    order = batch_order(branches, loaded.facts)
    kept = torch.tensor([not bad[row] for row in order])
    assert torch.equal(torch.stack(logits)[:, kept], torch.stack(again)[:, kept])


def _logits_of(loaded: LoadedModel, prefix: Prefix, branches: list[Branch]) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    hook = loaded.model.register_forward_hook(lambda module, args, output: seen.append(output.logits[:, -1].clone()))
    try:
        decode(loaded, prefix, branches, 12)
    finally:
        hook.remove()
    return seen


def spread(first: str, second: str) -> LoadedModel:
    """The model anew, its first and last parts on one device and two of its layers on another."""
    from accelerate import dispatch_model

    loaded = tiny_model("llama", layers=4, query_heads=4, kv_heads=2, head_dim=16)
    names = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head", *(f"model.layers.{number}" for number in range(4)))
    places = {name: second if name in ("model.layers.1", "model.layers.2") else first for name in names}
    # With the CPU as its main device accelerate computes there, instead of fetching the weights from there.
    dispatched = dispatch_model(loaded.model, places, main_device="cpu", force_hooks=True)
    return describe_model(dispatched, loaded.tokenizer, "spread")


@pytest.mark.parametrize(
    "second", ["cpu", pytest.param("cuda:0", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]
)
def test_a_spread_model_generates_what_it_does_on_one_device(second: str) -> None:
    loaded = spread("cpu", second)
    assert loaded.facts.place == ("cpu" if second == "cpu" else "cpu+cuda:0")
    branches = branches_of()
    found = decode(loaded, prefix_of(loaded), branches, 12)
    expected = decode(model(), prefix_of(model()), branches, 12)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert [result.bits for result in found] == [result.bits for result in expected]


def test_a_spread_model_says_where_its_layers_are() -> None:
    facts = dataclasses.replace(model().facts, device="cuda:0", layer_devices=("cuda:0", "cuda:1", "cuda:1", "cuda:1"))
    assert facts.devices == {"cuda:0": 0.25, "cuda:1": 0.75}
    assert facts.place == "cuda:0+cuda:1"
    assert model().facts.devices == {"cpu": 1.0}


def test_memory_is_checked_on_each_device(monkeypatch: pytest.MonkeyPatch) -> None:
    estimate = MemoryEstimate(prefix=4 * 2**30, stores=4 * 2**30, tails=0, work=2**30)
    free = {torch.device("cuda:0"): 4 * 2**30, torch.device("cuda:1"): 6 * 2**30}
    monkeypatch.setattr(memory_module, "free_bytes", free.__getitem__)
    check_memory(estimate, {"cuda:0": 0.375, "cuda:1": 0.625}, "session 0")
    with pytest.raises(UserError, match=r"session 0 needs about 5\.0 GiB .* 4\.0 GiB are free on cuda:0"):
        check_memory(estimate, {"cuda:0": 0.5, "cuda:1": 0.5}, "session 0")


@pytest.mark.parametrize(
    ("device", "message"),
    [
        ("cuda:0+cuda:0", "names a GPU twice"),
        ("cuda:0+cpu", "spread over GPUs alone"),
        ("cuda:0+cuda:7", "'cuda:7' is not available: torch .* sees 2 CUDA devices"),
        ("cuda:0,cuda:1", "unknown device"),
    ],
)
def test_devices_that_are_none_are_named(device: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch)
    with pytest.raises(UserError, match=message):
        resolve_devices(device)


def test_devices_are_resolved_in_the_order_given(monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch)
    assert resolve_devices("cuda:1+cuda:0") == [torch.device("cuda:1"), torch.device("cuda:0")]
    assert resolve_devices("cuda:all") == [torch.device("cuda:0"), torch.device("cuda:1")]


def test_each_worker_gets_a_gpu_of_its_own_unless_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    two_gpus(monkeypatch)
    places = {device: [slot._arguments[1] for slot in process_slots(None, 3, device)] for device in ("cuda", "cuda:1", "cuda:0+cuda:1")}  # type: ignore[arg-type, attr-defined]
    assert places == {"cuda": ["cuda:0", "cuda:1", "cuda:0"], "cuda:1": ["cuda:1"] * 3, "cuda:0+cuda:1": ["cuda:0+cuda:1"] * 3}


def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
