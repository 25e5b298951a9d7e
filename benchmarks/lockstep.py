"""What decoding many methods in lock-step costs against decoding one dense branch, on the device there is.

A model of random weights and a prefix of random keys and values: neither time depends on their content, apart from ties, which there are
none. The two are timed in turn in one process; ``--profile`` adds where a step's time goes and how many kernels it launches.

    python benchmarks/lockstep.py --context 90000 --branches 12 --steps 32 --repeats 5 --json
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from fathom_eval.branches import Branch
from fathom_eval.calibration import QueryStatistics
from fathom_eval.decode import decode
from fathom_eval.methods import parse_methods
from fathom_eval.models import LoadedModel, ModelFacts
from fathom_eval.prefill import Prefix, PrefixLayer

METHODS = (
    "dense,exact,fathom:budget=48:basis=klt,fathom:budget=40:basis=klt,fathom:budget=64:basis=klt,fathom:budget=48:basis=klt:rerank=2,"
    "fathom:budget=48:basis=raw,sparq:r=D/8,sparq:r=D/4,double_sparsity:c=D/4,loki:r=D/4,landmark,thumbnail"
)
"""Of which the first ``--branches`` are taken. Each is one branch for each k, but dense, which takes none."""

SHAPE = {
    "num_hidden_layers": 24,
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""Of Qwen2.5-0.5B."""


def make_model(layers: int, positions: int, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """A model of that shape with random weights."""
    config = AutoConfig.for_model("qwen2", **{**SHAPE, "num_hidden_layers": layers, "max_position_embeddings": positions})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    # No end token, so that every branch takes the same number of steps.
    kind = str(dtype).removeprefix("torch.")
    facts = ModelFacts("random", "qwen2", layers, 14, 2, 64, False, positions, (), kind, str(device), "random", "random")
    return LoadedModel(model, tokenizer, facts)


def make_prefix(loaded: LoadedModel, tokens: int, device: torch.device, dtype: torch.dtype) -> Prefix:
    """Keys with unequal channels and an offset, as real keys have."""
    facts, layers = loaded.facts, []
    for number in range(facts.layers):
        spread = torch.logspace(0.5, -1.5, facts.head_dim, device=device)
        offset = torch.randn(facts.kv_heads, 1, facts.head_dim, device=device)
        keys, values = torch.randn(2, facts.kv_heads, tokens, facts.head_dim, device=device)
        queries = QueryStatistics()
        queries.add(torch.randn(facts.kv_heads, facts.group, 64, facts.head_dim, device=device))
        layers.append(PrefixLayer(((keys + offset) * spread).to(dtype), values.to(dtype), queries, number))
    return Prefix(tuple([1] * (tokens + 1)), tuple(layers))


def step_times(loaded: LoadedModel, prefix: Prefix, branches: list[Branch], steps: int, device: torch.device) -> list[float]:
    """Milliseconds of every step, from one wait for the device to the next, without the first steps."""
    moments = []

    def note(_: object) -> None:
        synchronise(device)
        moments.append(time.perf_counter())

    warm = 2
    decode(loaded, prefix, branches, steps + warm + 1, progress=note)
    return [1000 * (after - before) for before, after in zip(moments[warm:], moments[warm + 1 :], strict=False)]


def profile(loaded: LoadedModel, prefix: Prefix, branches: list[Branch], steps: int, layers: int) -> dict[str, Any]:
    """The kernels that take most of a step's time on the GPU, how many run and are launched, and which operations wait for the host."""
    from torch.profiler import ProfilerActivity

    activities = [ProfilerActivity.CPU, ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as trace:
        decode(loaded, prefix, branches, steps)
        torch.cuda.synchronize()
    kernels: Counter[str] = Counter()
    times: Counter[str] = Counter()
    waits: Counter[str] = Counter()
    calls = 0
    for event in trace.events():
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation:
            kernels[event.name[:90]] += 1
            times[event.name[:90]] += event.device_time_total
        elif event.name in ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"):
            waits[event.name] += 1
        elif event.name.startswith(("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpyAsync", "cudaMemsetAsync")):
            calls += 1  # a graph is one, however many kernels it holds
    return {
        "gpu_ms_a_step": round(sum(times.values()) / 1000 / steps, 3),
        "kernels_a_layer": round(sum(kernels.values()) / steps / layers, 1),
        "launches_a_layer": round(calls / steps / layers, 1),
        "waits_a_step": {name: round(count / steps, 2) for name, count in waits.items()},
        "top": [
            {"kernel": name, "ms_a_step": round(taken / 1000 / steps, 3), "launches_a_step": round(kernels[name] / steps, 1)}
            for name, taken in times.most_common(20)
        ],
    }


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def summary(values: list[float]) -> dict[str, float]:
    return {"median": round(statistics.median(values), 3), "low": round(min(values), 3), "high": round(max(values), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description="many methods in lock-step against one dense branch")
    parser.add_argument("--context", type=int, default=90000, help="tokens of the prefix (default: 90000)")
    parser.add_argument("--branches", type=int, default=12, help="methods (default: 12)")
    parser.add_argument("--k", default="512", help="comma-separated (default: 512)")
    parser.add_argument("--steps", type=int, default=32, help="timed steps of one turn (default: 32)")
    parser.add_argument("--repeats", type=int, default=5, help="turns (default: 5)")
    parser.add_argument("--layers", type=int, default=24, help="of the model (default: 24)")
    parser.add_argument("--whole", type=int, default=0, help="also time so many tokens of all methods from the start, stores included")
    parser.add_argument("--profile", action="store_true", help="add a profile of both")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    torch.manual_seed(0)
    k_values = [int(k) for k in options.k.split(",")]
    specs = parse_methods(METHODS)[: options.branches]
    branches = [Branch(spec, k) for spec in specs for k in ([None] if spec.method.name == "dense" else k_values)]
    dense = [Branch(parse_methods("dense")[0], None)]
    result: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads",
        "context": options.context,
        "layers": options.layers,
        "branches": len(branches),
        "methods": [spec.label for spec in specs],
        "k": k_values,
    }
    with torch.inference_mode():
        loaded = make_model(options.layers, options.context + 1024, device, dtype)
        prefix = make_prefix(loaded, options.context, device, dtype)
        began = time.perf_counter()
        decode(loaded, prefix, branches, 4)  # stores and compiled kernels are made once
        decode(loaded, prefix, dense, 4)
        synchronise(device)
        result["warm_up_seconds"] = round(time.perf_counter() - began, 2)
        alone, together, ratios = [], [], []
        for turn in range(options.repeats):
            alone.append(statistics.median(step_times(loaded, prefix, dense, options.steps, device)))
            together.append(statistics.median(step_times(loaded, prefix, branches, options.steps, device)))
            ratios.append(together[-1] / alone[-1])
            print(f"turn {turn}: dense {alone[-1]:.2f} ms, {len(branches)} branches {together[-1]:.2f} ms", file=sys.stderr, flush=True)
        result |= {"dense_ms_a_step": summary(alone), "branches_ms_a_step": summary(together), "ratio": summary(ratios)}
        if options.whole:
            fresh = Prefix(
                prefix.token_ids, tuple(PrefixLayer(one.keys, one.values, one.query_statistics, one.number) for one in prefix.layers)
            )
            del prefix  # and its stores
            began = time.perf_counter()
            decode(loaded, fresh, branches, options.whole)
            synchronise(device)
            result["whole"] = {"tokens": options.whole, "seconds": round(time.perf_counter() - began, 2)}
            prefix = fresh
        if device.type == "cuda":
            result["peak_gpu_gib"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
            if options.profile:
                result["profile"] = {
                    "dense": profile(loaded, prefix, dense, 16, options.layers),
                    "branches": profile(loaded, prefix, branches, 16, options.layers),
                }
    print(json.dumps(result, indent=2) if options.json else _words(result))


def _words(result: dict[str, Any]) -> str:
    def spread(name: str, unit: str) -> str:
        found = result[name]
        return f"{found['median']:.2f}{unit} ({found['low']:.2f} to {found['high']:.2f})"

    lines = [
        f"{result['device']}: {result['context']} tokens, {result['layers']} layers, {result['branches']} branches, k {result['k']}",
        f"  one dense branch  {spread('dense_ms_a_step', ' ms a step')}",
        f"  all in lock-step  {spread('branches_ms_a_step', ' ms a step')}",
        f"  ratio             {spread('ratio', '')}",
    ]
    if "whole" in result:
        lines.append(f"  {result['whole']['tokens']} tokens of all, stores included: {result['whole']['seconds']} s")
    if "profile" in result:
        lines.append(json.dumps(result["profile"], indent=2))
    return "\n".join(lines)


if __name__ == "__main__":
    main()
