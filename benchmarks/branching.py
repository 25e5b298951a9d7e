"""What branching saves: ten methods from one prefill against ten separate ``generate`` runs of the same prompt and length.

Both are timed in turn in one process; time and memory are printed with their spread, and as JSON with ``--json``.

    python benchmarks/branching.py --context 2048 --new-tokens 12 --repeats 3
"""

from __future__ import annotations

import argparse
import ctypes
import dataclasses
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from fathom_eval.branches import Branch
from fathom_eval.decode import decode
from fathom_eval.methods import parse_methods
from fathom_eval.models import LoadedModel, load_model
from fathom_eval.prefill import Prefix, prefill, use_attention
from fathom_eval.tasks.haystack import load_haystack
from fathom_eval.tasks.samples import SampleBuilder

METHODS = (
    "dense,exact,fathom:budget=48:basis=raw,fathom:budget=48:basis=klt,sparq:r=D/8,sparq:r=D/4,"
    "double_sparsity:c=D/4,loki:r=D/4,thumbnail,landmark"
)


def main() -> None:
    parser = argparse.ArgumentParser(description="ten methods from one prefill against ten separate generate runs")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--k", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--haystack", default="python-docs")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()

    loaded = load_model(args.model, offline=True)
    # No end token, so that every branch and every run takes the same number of steps.
    loaded = LoadedModel(loaded.model, loaded.tokenizer, dataclasses.replace(loaded.facts, eos_token_ids=()))
    specs = parse_methods(METHODS)
    branches = [Branch(spec, None if spec.method.name == "dense" else args.k) for spec in specs]
    builder = SampleBuilder(loaded.tokenizer, load_haystack(args.haystack))
    prompt = builder.build("niah_single", args.context, 0).prompt_ids
    _together(loaded, prompt, branches[:1], args.new_tokens)  # warm up both ways
    _separately(loaded, prompt, args.new_tokens)

    together, apart, memory = [], [], {}
    for _ in range(args.repeats):
        seconds, memory = _measure_memory(lambda: _together(loaded, prompt, branches, args.new_tokens))
        together.append(seconds)
        began = time.perf_counter()
        for _ in specs:
            _separately(loaded, prompt, args.new_tokens)
        apart.append(time.perf_counter() - began)
    ratios = [b / a for a, b in zip(together, apart, strict=True)]
    budget = 1.5 * (memory["prefix_bytes"] + memory["store_bytes"])
    result = {
        "model": loaded.facts.name,
        "dtype": loaded.facts.dtype,
        "device": loaded.facts.device,
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "context": len(prompt),
        "new_tokens": args.new_tokens,
        "methods": len(specs),
        "branched_seconds": together,
        "separate_seconds": apart,
        "ratio": {"median": statistics.median(ratios), "low": min(ratios), "high": max(ratios)},
        **memory,
        "peak_growth_over_prefix_and_stores": memory["peak_growth_bytes"] / (memory["prefix_bytes"] + memory["store_bytes"]),
    }
    if args.json:
        print(json.dumps(result, indent=2))
        return
    setting = f"{len(prompt)} prompt tokens, {args.new_tokens} new, {len(specs)} methods"
    print(f"{result['model']} {result['dtype']} on {result['machine']}: {setting}")
    print(f"  one prefill, {len(specs)} branches   {_spread(together)}")
    print(f"  {len(specs)} generate runs           {_spread(apart)}")
    print(f"  ratio                       {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")
    megabytes = {name: value / 2**20 for name, value in memory.items()}
    print(
        f"  memory: prefix {megabytes['prefix_bytes']:.0f} MB, stores {megabytes['store_bytes']:.0f} MB; "
        f"peak growth while branches decode {megabytes['peak_growth_bytes']:.0f} MB (1.5 × (prefix + stores) is {budget / 2**20:.0f} MB)"
    )


def _together(loaded: LoadedModel, prompt: tuple[int, ...], branches: list[Branch], new_tokens: int) -> Prefix:
    prefix = prefill(loaded, prompt)
    decode(loaded, prefix, branches, new_tokens)
    return prefix


def _separately(loaded: LoadedModel, prompt: tuple[int, ...], new_tokens: int) -> None:
    loaded.model.set_attn_implementation("sdpa")
    inputs = torch.tensor([prompt], device=loaded.model.device)
    loaded.model.generate(
        inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=new_tokens, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    use_attention(loaded)


def _measure_memory(work: Callable[[], Prefix]) -> tuple[float, dict[str, int]]:
    """Seconds of ``work`` and how far resident memory rose above what it was before."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier work has freed must not hide what this work takes
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # starts the high-water mark anew
    before = _status("VmRSS")
    began = time.perf_counter()
    prefix = work()
    seconds = time.perf_counter() - began
    return seconds, {"prefix_bytes": prefix.bytes, "store_bytes": prefix.store_bytes, "peak_growth_bytes": _status("VmHWM") - before}


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {name} in /proc/self/status")


def _spread(seconds: list[float]) -> str:
    return f"{statistics.median(seconds):6.2f} s ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    main()
