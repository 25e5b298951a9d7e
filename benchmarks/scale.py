"""What one long session costs on one GPU: prefill, stores, decode steps of many methods, and memory, at growing lengths.

Weights are random and so is the text: neither changes what is computed. The output, one JSON line a measurement, is what
``scripts/scale_plan.py`` computes from.

    python -P benchmarks/scale.py --contexts 16384,32768,65536,131072 > reports/published/scale-h200/measured.jsonl
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fathom_eval.branches import Branch
from fathom_eval.decode import decode
from fathom_eval.memory import estimate_memory
from fathom_eval.methods import parse_methods
from fathom_eval.models import LoadedModel, describe_model
from fathom_eval.prefill import prefill

sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.tiny import tiny_config, tiny_tokenizer

SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-4B": {"family": "qwen3", "layers": 36, "kv_heads": 8, "hidden_size": 2560, "intermediate_size": 9728, "vocab": 151936},
    "Qwen3-8B": {"family": "qwen3", "layers": 36, "kv_heads": 8, "hidden_size": 4096, "intermediate_size": 12288, "vocab": 151936},
    "Llama-3.1-8B": {"family": "llama", "layers": 32, "kv_heads": 8, "hidden_size": 4096, "intermediate_size": 14336, "vocab": 128256},
}
"""Shapes of published models; 32 query heads of 128 channels each."""
TWENTY = (
    "dense,exact,fathom:budget=32,fathom:budget=48,fathom:budget=64,fathom:budget=96,fathom:budget=48:basis=raw,sparq:r=D/8,sparq:r=D/4,"
    "sparq:r=D/8:share=group_sum,double_sparsity:c=D/8,double_sparsity:c=D/4,loki:r=D/8,loki:r=D/4,loki:r=D/2,thumbnail,thumbnail:depth=1,"
    "quest,landmark,landmark:size=16"
)
_STEPS = 6


def main() -> None:
    """Print the measurements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(SHAPES), help=f"default: {','.join(SHAPES)}")
    parser.add_argument(
        "--contexts", default="16384,32768,65536,131072", help="tokens, ascending; the run of a model ends where memory does"
    )
    parser.add_argument("--methods", default=TWENTY)
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shrink", type=int, default=1, metavar="N", help="divide layers and widths by N, to try the script")
    args = parser.parse_args()
    contexts = [int(context) for context in args.contexts.split(",")]
    specs = parse_methods(args.methods)
    branches = [Branch(spec, None if spec.method.name == "dense" else args.k) for spec in specs]
    name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    memory = torch.cuda.mem_get_info()[1] if args.device.startswith("cuda") else None
    _say(kind="device", name=name, memory_bytes=memory, torch=torch.__version__, methods=[spec.label for spec in specs], k=args.k)
    for model in args.models.split(","):
        loaded = _random_model(model, max(contexts) + 64, args.device, args.shrink)
        facts = loaded.facts
        parameters = sum(parameter.numel() for parameter in loaded.model.parameters())
        shape = {"layers": facts.layers, "query_heads": facts.query_heads, "kv_heads": facts.kv_heads, "head_dim": facts.head_dim}
        _say(kind="model", model=model, parameters=parameters, **shape)
        _session(loaded, model, branches, contexts[0])  # warm up
        for context in contexts:
            try:
                for line in _session(loaded, model, branches, context):
                    _say(**line)
            except torch.OutOfMemoryError as error:
                _say(kind="out of memory", model=model, tokens=context, error=str(error).partition(".")[0])
                break
        del loaded
        gc.collect()


def _random_model(name: str, positions: int, device: str, shrink: int) -> LoadedModel:
    from transformers import AutoModelForCausalLM

    shape = dict(SHAPES[name])
    for field in ("layers", "hidden_size", "intermediate_size", "vocab"):
        shape[field] = max(shape[field] // shrink, 2)
    heads = {"query_heads": 32, "head_dim": 128, "initializer_range": 0.02, "max_positions": positions}
    config = tiny_config(**{**heads, **shape, "vocab": max(shape["vocab"], 1024)})
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16 if device.startswith("cuda") else torch.float32)
    return describe_model(model.eval().requires_grad_(False), tiny_tokenizer(), name)


def _session(loaded: LoadedModel, model: str, branches: list[Branch], context: int) -> list[dict[str, Any]]:
    """One prefill and a few steps of all branches."""
    rng = random.Random(context)
    tokens = [rng.randrange(3, 300) for _ in range(context + 1)]
    cuda = loaded.facts.device.startswith("cuda")
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    weights = torch.cuda.memory_allocated() if cuda else 0
    began = time.perf_counter()
    prefix = prefill(loaded, tokens)
    if cuda:
        torch.cuda.synchronize()
    prefilled = time.perf_counter()
    times = [prefilled]
    decode(loaded, prefix, branches, _STEPS, progress=lambda step: times.append(time.perf_counter()))
    steps = [after - before for before, after in itertools.pairwise(times)]
    estimate = estimate_memory(loaded.facts, branches, context, _STEPS, len(branches))
    step = statistics.median(steps[1:])
    return [
        {"kind": "prefill", "model": model, "tokens": context, "seconds": round(prefilled - began, 4)},
        {"kind": "stores", "model": model, "tokens": context, "seconds": round(steps[0] - step, 4)},
        {"kind": "step", "model": model, "tokens": context, "branches": len(branches), "seconds": round(step, 5)},
        {
            "kind": "memory",
            "model": model,
            "tokens": context,
            "weights_bytes": weights,
            "prefix_bytes": prefix.bytes,
            "store_bytes": prefix.store_bytes,
            "peak_bytes": torch.cuda.max_memory_allocated() if cuda else None,
            "estimated_bytes": estimate.total,
        },
    ]


def _say(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
