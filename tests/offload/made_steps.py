"""Decode steps of a tiny model over a prompt's cache, several over the same one or each over its own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from fathom_eval.devices import current
from fathom_eval.methods import parse_method
from fathom_eval.models import LoadedModel, describe_model
from fathom_eval.offload.arena import Arena, SegmentShape
from fathom_eval.offload.cache import TieredCache, lanes_of
from fathom_eval.offload.gatherer import RowGatherer
from fathom_eval.offload.scans import scan_of_prefix
from fathom_eval.offload.step import DecodeStep
from fathom_eval.offload.weights import weights_of
from fathom_eval.prefill import prefill
from tests.tiny import tiny_model

Way = tuple[str, int, int | None]
"""Who brings the rows of a step, its lanes, and the KV heads of the last one."""


def tiny_on(device: str, head_dim: int = 64, **options: int) -> LoadedModel:
    loaded = tiny_model("qwen3", head_dim=head_dim, **options)
    return describe_model(loaded.model.to(device), loaded.tokenizer, "tiny-qwen3")


def prompt(count: int, seed: int | None = None) -> list[int]:
    generator = torch.Generator().manual_seed(count if seed is None else seed)
    return torch.randint(2, 380, (count,), generator=generator).tolist()


@contextlib.contextmanager
def steps_by(
    ways: Sequence[Way],
    text: str = "fathom",
    *,
    device: str = "cuda",
    seeds: Sequence[int] | None = None,
    k: int = 60,
    tokens: int = 1500,
    positions: int = 4096,
    head_dim: int = 64,
) -> Iterator[list[DecodeStep]]:
    """Captured steps, one a way, over the same prompt, or over one of its own seed each.

    What comes before a step is made is done with its device as the current one, the rest with the caller's.
    """
    loaded, spec = tiny_on(device, head_dim, max_positions=positions), parse_method(text)
    heads, layers = loaded.facts.kv_heads, loaded.facts.layers
    with contextlib.ExitStack() as stack:
        with current(torch.device(device)):
            chosen = list(seeds or [tokens] * len(ways))
            prefixes = {seed: prefill(loaded, prompt(tokens, seed)) for seed in dict.fromkeys(chosen)}
            first = prefixes[chosen[0]]
            weights = weights_of(loaded, first.tokens, 1100)
            store = scan_of_prefix(spec, loaded.facts, first.layers).store
            arena = stack.enter_context(Arena(SegmentShape(heads, head_dim, 8, first.layers[0].keys.dtype, (store,)), weights.device))
        gatherer = stack.enter_context(RowGatherer(weights.device, 2))
        stack.enter_context(torch.inference_mode())
        made = []
        for (rows_by, lanes, last), seed in zip(ways, chosen, strict=True):
            prefix = prefixes[seed]
            with current(weights.device):
                scan = scan_of_prefix(spec, loaded.facts, prefix.layers)
                cache = TieredCache.allocate(
                    arena, layers, 1, lanes_of(1, heads, lanes, last), tokens + 1200, spec.policy.local, scan.bases
                )
                for number, layer in enumerate(prefix.layers):
                    cache.load(number, 0, layer.keys, layer.values)
                cache.set_length(0, prefix.tokens)
            own = None if rows_by == "gpu" else gatherer
            step = DecodeStep(weights, cache, scan, k, spec.policy, rows_by=rows_by, gatherer=own)
            stack.callback(step.release)
            step.token_ids.fill_(prefix.token_ids[-1])
            step.capture()
            made.append(step)
        yield made


def run_alike(steps: Sequence[DecodeStep], count: int) -> None:
    """Run steps of the same state and see that nothing of what they give differs between those that have as many lanes."""
    like: dict[int, DecodeStep] = {}
    for step in steps:
        like.setdefault(len(step.cache.lanes), step)
    assert len(like) < len(steps)
    for _ in range(count):
        for step in steps:
            step.run()
        if steps[0].weights.device.type == "cuda":
            torch.cuda.synchronize()
        for step in steps:
            step.check()
            other = like[len(step.cache.lanes)]
            assert torch.equal(step.logits, other.logits)
            assert torch.equal(step.mixed, other.mixed)
            assert torch.equal(step.union_counts, other.union_counts)
            assert torch.equal(step.token_ids, other.token_ids)
