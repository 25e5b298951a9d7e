"""What many long sessions cost on several GPUs, computed from one GPU's measurements: the text of ``docs/scale.md``.

    python -P benchmarks/scale.py > reports/published/scale-h200/measured.jsonl
    python -P scripts/scale_plan.py > docs/scale.md

Without measurements, times are lower bounds from counted operations and bytes at the rates given, and the text says so.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathom_eval.branches import Branch
from fathom_eval.memory import MemoryEstimate, estimate_memory
from fathom_eval.methods import parse_methods
from fathom_eval.models import ModelFacts

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.scale import SHAPES, TWENTY

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "reports" / "published" / "scale-h200" / "measured.jsonl"
KERNELS = ROOT / "reports" / "published" / "kernels-h200" / "bench.jsonl"
QUERY_HEADS, HEAD_DIM = 32, 128
_HOUR, _GIB = 3600, 2**30


INTRODUCTION = """\
# What a large run costs

This page is printed by `scripts/scale_plan.py`; no number in it is typed by hand."""
MEMORY = """\
## Memory of one session

GiB, estimated as `fathom-eval sessions` does before each prefill (`fathom_eval/memory.py`). A copy of the model takes as many GPUs as its
session needs, 5 % of each left free; its layers then lie on several GPUs, which work one after another."""
TIME = """\
## Time of one session

`separate` is what the same methods would take with a prefill each. GPU time is seconds times the GPUs of a copy, over all sessions."""
GROWTH = """\
- **Faster than the context:** the prefill. Its attention grows with the square; it is paid once a session, whatever the number of methods.
- **With the context:** prefix, stores, the time to build them, and what a decode step scans.
- **With methods:** stores, only where a method scans one that no other does; decode steps, less than linearly, since all methods of a
  session share the weights that are read, and those of one store share its scan.
- **With sessions and models:** everything, exactly linearly. Sessions are independent, so copies of the model divide it (`--workers`,
  `--ray`).
- **With none of them:** memory of the process that writes, which holds the places of records in their file and not the records.

## How it would be run

One `fathom-eval sessions` a model, with `--ray ADDRESS` and one worker a copy. A session's records are on the disk before its worker's
next ones; a node that leaves costs the sessions in flight on it. `--workers` and `--ray` give each worker one GPU: a model whose session
needs several must take shorter sessions or fewer methods at a time (a run takes added methods later, at the price of another prefill)."""


@dataclass(frozen=True)
class Plan:
    """What is to be run, and on what."""

    sessions: int
    tokens: int
    new_tokens: int
    k: int
    gpus: int
    gpu_bytes: int


@dataclass(frozen=True)
class Cost:
    """Seconds of one session of ``tokens`` tokens."""

    prefill: Callable[[int], float]
    stores: Callable[[int], float]
    step: Callable[[int], float]
    longest: int
    """Most tokens measured; 0 where nothing was."""


def fit(points: Sequence[tuple[int, float]], powers: Sequence[int]) -> Callable[[int], float]:
    """The sum of c·n^p over ``powers`` with c ≥ 0 that is nearest to the points, errors relative to each point."""
    import numpy

    kept = list(powers)
    while True:
        matrix = numpy.array([[(n**power) / seconds for power in kept] for n, seconds in points])
        found = numpy.linalg.lstsq(matrix, numpy.ones(len(points)), rcond=None)[0]
        if (found >= 0).all() or len(kept) == 1:
            factors = dict(zip(kept, (max(float(factor), 0.0) for factor in found), strict=True))
            return lambda n: sum(factor * n**power for power, factor in factors.items())
        kept.pop(int(found.argmin()))


def parameters_of(shape: dict[str, Any]) -> int:
    """Weights of a decoder of this shape, embeddings in and out included."""
    hidden, inner, layers = shape["hidden_size"], shape["intermediate_size"], shape["layers"]
    attention = hidden * HEAD_DIM * (2 * QUERY_HEADS + 2 * shape["kv_heads"])
    return int(layers * (attention + 3 * hidden * inner) + 2 * shape["vocab"] * hidden)


def facts_of(name: str, tokens: int) -> ModelFacts:
    """The shape as the memory estimate wants it."""
    shape = SHAPES[name]
    return ModelFacts(
        name=name,
        model_type=shape["family"],
        layers=shape["layers"],
        query_heads=QUERY_HEADS,
        kv_heads=shape["kv_heads"],
        head_dim=HEAD_DIM,
        qk_norm=False,
        max_positions=tokens,
        eos_token_ids=(),
        dtype="bfloat16",
        device="cuda:0",
        model_fingerprint="",
        tokenizer_fingerprint="",
    )


def measured_costs(lines: Sequence[dict[str, Any]]) -> dict[str, Cost]:
    """A cost of every model that was measured at two lengths or more."""
    points: dict[tuple[str, str], list[tuple[int, float]]] = defaultdict(list)
    for line in lines:
        if line["kind"] in ("prefill", "stores", "step"):
            points[line["model"], line["kind"]].append((line["tokens"], max(line["seconds"], 1e-6)))
    return {
        name: Cost(
            fit(points[name, "prefill"], (1, 2)),
            fit(points[name, "stores"], (0, 1)),
            fit(points[name, "step"], (0, 1)),
            max(tokens for tokens, _ in points[name, "prefill"]),
        )
        for name in SHAPES
        if len(points[name, "prefill"]) > 1
    }


def counted_cost(name: str, branches: Sequence[Branch], tflops: float, bytes_a_second: float) -> Cost:
    """Lower bounds: operations of the prefill at a rate; bytes that a step must read at least once, at the memory's rate."""
    shape, weights = SHAPES[name], parameters_of(SHAPES[name])

    def prefill(tokens: int) -> float:
        attention = 2 * shape["layers"] * QUERY_HEADS * HEAD_DIM * tokens**2  # Q·K and P·V, half of the square each
        return float((2 * weights * tokens + attention) / (tflops * 1e12))

    def memory(tokens: int) -> MemoryEstimate:
        return estimate_memory(facts_of(name, tokens), branches, tokens, 1, len(branches))

    return Cost(
        prefill,
        lambda tokens: (memory(tokens).prefix / 2 + memory(tokens).stores) / bytes_a_second,
        lambda tokens: (2 * weights + memory(tokens).prefix + memory(tokens).stores) / bytes_a_second,
        0,
    )


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, all columns but the first to the right."""
    marks = ["---", *["---:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in (head, marks, *rows))


def gib(size: float) -> str:
    """Bytes as GiB."""
    return f"{size / _GIB:,.1f}"


def seconds_text(value: float) -> str:
    """Seconds, minutes or hours."""
    return (
        f"{value:.2g} s"
        if value < 10
        else f"{value:.0f} s"
        if value < 600
        else f"{value / 60:.0f} min"
        if value < 36000
        else f"{value / _HOUR:,.0f} h"
    )


def text(plan: Plan, costs: dict[str, Cost], branches: Sequence[Branch], source: str) -> str:
    """The document."""
    count = len(branches)
    memory_rows, time_rows, growth_rows, copies_of = [], [], [], {}
    gpu_seconds = wall_seconds = 0.0
    for name, cost in costs.items():
        weights = 2 * parameters_of(SHAPES[name])
        estimate = estimate_memory(facts_of(name, plan.tokens), branches, plan.tokens, plan.new_tokens, count)
        whole = weights + estimate.total
        needed = math.ceil(whole / (0.95 * plan.gpu_bytes))
        copies_of[name] = needed
        parts = (weights, estimate.prefix, estimate.stores, estimate.tails, estimate.work, whole)
        memory_rows.append([name, *map(gib, parts), needed])
        prefill, stores, steps = cost.prefill(plan.tokens), cost.stores(plan.tokens), plan.new_tokens * cost.step(plan.tokens)
        session = prefill + stores + steps
        separate = count * (prefill + steps / count)
        gpu_seconds += plan.sessions * session * needed
        wall_seconds += plan.sessions * session / max(plan.gpus // needed, 1)
        shares = [f"{seconds_text(part)} ({100 * part / session:.0f} %)" for part in (prefill, stores, steps)]
        time_rows.append([name, *shares, seconds_text(session), seconds_text(separate), seconds_text(plan.sessions * session * needed)])
        for tokens in (plan.tokens // 8, plan.tokens // 4, plan.tokens // 2, plan.tokens):
            held = estimate_memory(facts_of(name, tokens), branches, tokens, plan.new_tokens, count)
            growth_rows.append(
                [
                    name,
                    f"{tokens:,}",
                    seconds_text(cost.prefill(tokens)),
                    seconds_text(cost.stores(tokens)),
                    seconds_text(cost.step(tokens)),
                    gib(held.prefix),
                    gib(held.stores),
                ]
            )
    groups = ", ".join(f"{name} {plan.gpus // copies or 1} of {copies} GPUs" for name, copies in copies_of.items())
    longest = max((cost.longest for cost in costs.values()), default=0)
    if longest:
        source += f" Beyond {longest:,} tokens they are extrapolated by the fits a·n + b·n² (prefill) and c + d·n (stores, steps)."
    run = (
        f"The run: {plan.sessions} sessions of {plan.tokens:,} tokens, {count} methods at k = {plan.k:,}, {plan.new_tokens} new tokens\n"
        f"each, {len(costs)} models in bfloat16, {plan.gpus} GPUs of {gib(plan.gpu_bytes)} GiB."
    )
    total = f"**In all: {gpu_seconds / _HOUR:,.0f} GPU hours, {wall_seconds / _HOUR:,.0f} hours on {plan.gpus} GPUs.**"
    memory_head = ["model", "weights", "prefix", "stores", "tails", "work space", "in all", "GPUs a copy"]
    time_head = ["model", "prefill", "stores", "decoding", "one session", "separate", "GPU time of all"]
    growth_head = ["model", "tokens", "prefill", "stores", "one step", "prefix GiB", "stores GiB"]
    parts_of_text = (
        INTRODUCTION,
        source,
        run,
        total,
        MEMORY,
        table(memory_head, memory_rows),
        f"Copies that work side by side: {groups}.",
        TIME,
        table(time_head, time_rows),
        "## What grows how",
        table(growth_head, growth_rows),
        GROWTH,
    )
    return "\n\n".join(parts_of_text) + "\n"


def main() -> int:
    """Print the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--measured", type=Path, default=MEASURED, help="output of benchmarks/scale.py")
    add("--sessions", type=int, default=100)
    add("--tokens", type=int, default=2**20)
    add("--new-tokens", type=int, default=256)
    add("--gpus", type=int, default=8)
    add("--gpu-gib", type=float, default=139.8, help="memory of one (default: an H200's)")
    add("--tflops", type=float, default=400.0, help="assumed of a prefill where nothing is measured")
    args = parser.parse_args()
    specs = parse_methods(TWENTY)
    k = 2048
    branches = [Branch(spec, None if spec.method.name == "dense" else k) for spec in specs]
    gpu_bytes = int(args.gpu_gib * _GIB)
    costs: dict[str, Cost] = {}
    if args.measured.exists():
        lines = [json.loads(line) for line in args.measured.read_text(encoding="utf-8").splitlines()]
        device = next(line for line in lines if line["kind"] == "device")
        costs, gpu_bytes = measured_costs(lines), device["memory_bytes"] or gpu_bytes
        source = f"Times come from `{args.measured.name}` of `benchmarks/scale.py` on one {device['name']}, torch {device['torch']}."
    if not costs:
        kernels = [json.loads(line) for line in KERNELS.read_text(encoding="utf-8").splitlines()]
        copy = next(line for line in kernels if line["kind"] == "rate" and "HBM" in line["name"])
        rate = copy["gbytes_per_s"] * 1e9
        costs = {name: counted_cost(name, branches, args.tflops, rate) for name in SHAPES}
        source = (
            "**Times are lower bounds, not measurements:** operations of the prefill at an assumed "
            f"{args.tflops:.0f} TFLOP/s, and the bytes that a step reads at least once at {rate / 1e12:.2f} TB/s, the copy rate of "
            "`reports/published/kernels-h200`. `benchmarks/scale.py` on a GPU replaces them."
        )
    plan = Plan(args.sessions, args.tokens, args.new_tokens, k, args.gpus, gpu_bytes)
    print(text(plan, costs, branches, source), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
