"""What many long sessions cost on several GPUs, computed from one GPU's measurements: the text of ``docs/scale.md``.

    python -P benchmarks/scale.py > reports/published/scale-h200/measured.jsonl
    python -P scripts/scale_plan.py > docs/scale.md

Without measurements of these models, or with ``--extrapolate``, times are extrapolated from published runs of a small one
(``scripts/scale_records.py``), and the text says so.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathom_eval.branches import Branch
from fathom_eval.memory import MemoryEstimate, estimate_memory
from fathom_eval.methods import parse_methods
from fathom_eval.models import ModelFacts

sys.path.append(str(Path(__file__).resolve().parents[1]))

from benchmarks.scale import SHAPES, TWENTY
from scripts import scale_measured
from scripts.scale_measured import Cost, measured_costs
from scripts.scale_records import (
    Rates,
    extrapolation,
    layer_weights,
    operations,
    prefill_rate,
    read_lock_step,
    read_sessions,
    small_runs,
    step_factor,
)
from scripts.scale_tables import GIB, HOUR, gib, seconds_text, span, table, wrapped

ROOT = Path(__file__).resolve().parents[1]
MEASURED = ROOT / "reports" / "published" / "scale-h200" / "measured.jsonl"
KERNELS = ROOT / "reports" / "published" / "kernels-h200" / "bench.jsonl"
QUERY_HEADS, HEAD_DIM = 32, 128
K = 2048
H200_GIB = 139.8


INTRODUCTION = """\
# What a large run costs

This page is printed by `scripts/scale_plan.py`; no number in it is typed by hand."""
MEMORY = """\
## Memory of one session

GiB, estimated as `fathom-eval sessions` does before each prefill (`fathom_eval/memory.py`). A copy of the model takes as many GPUs as its
session needs, 5 % of each left free; its layers then lie on several GPUs, which work one after another, so that a session takes GPU time of
all of them."""
TIME = """\
## Time of one session

`separate` is what the same methods would take with a prefill each, their steps counted as no dearer alone. GPU time is seconds times the
GPUs of a copy, over all sessions."""
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
next ones; a node that leaves costs the sessions in flight on it. `--device cuda:0+cuda:1 --ray ADDRESS` gives each worker two GPUs; a run
can also take shorter sessions, or some methods first and others later, at the price of another prefill."""


@dataclass(frozen=True)
class Plan:
    """What is to be run, and on what."""

    sessions: int
    tokens: int
    new_tokens: int
    k: int
    gpus: int
    gpu_bytes: int


def layers_of(shape: dict[str, Any]) -> int:
    """Weights of the matrices of all layers."""
    widths = shape["hidden_size"], shape["intermediate_size"]
    return layer_weights(shape["layers"], QUERY_HEADS, shape["kv_heads"], HEAD_DIM, *widths)


def parameters_of(shape: dict[str, Any]) -> int:
    """Weights of a decoder of this shape, embeddings in and out included."""
    return int(layers_of(shape) + 2 * shape["vocab"] * shape["hidden_size"])


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


def counted_cost(name: str, branches: Sequence[Branch], rates: Rates) -> Cost:
    """Operations of the prefill and the bytes that a step must read at least once, at the given rates."""
    shape, weights = SHAPES[name], layers_of(SHAPES[name])
    head = shape["vocab"] * shape["hidden_size"]

    def memory(tokens: int) -> MemoryEstimate:
        return estimate_memory(facts_of(name, tokens), branches, tokens, 1, len(branches))

    def step(tokens: int) -> float:
        reading = (2 * (weights + head) + memory(tokens).prefix + memory(tokens).stores) / rates.bytes_a_second
        return float(max(reading * rates.step_factor, shape["layers"] * rates.host_a_layer))

    return Cost(
        lambda tokens: operations(shape["layers"], QUERY_HEADS, HEAD_DIM, weights, tokens) / rates.operations_a_second,
        lambda tokens: (memory(tokens).prefix / 2 + memory(tokens).stores) / rates.bytes_a_second,
        step,
        0,
    )


def gpus_a_copy(name: str, plan: Plan, branches: Sequence[Branch]) -> int:
    """How many GPUs weights and session of a model take."""
    estimate = estimate_memory(facts_of(name, plan.tokens), branches, plan.tokens, plan.new_tokens, len(branches))
    return math.ceil((2 * parameters_of(SHAPES[name]) + estimate.total) / (0.95 * plan.gpu_bytes))


def check_numbers(args: argparse.Namespace) -> None:
    """Raise SystemExit for a number that no run can have."""
    for name in ("sessions", "tokens", "new_tokens", "gpus", "gpu_gib", "tflops"):
        value = getattr(args, name)
        if value is not None and not 0 < value < math.inf:
            raise SystemExit(f"--{name.replace('_', '-')} {value:g} must be above 0 and finite")
    if args.tokens < K:
        raise SystemExit(f"--tokens {args.tokens} are fewer than the k = {K} that a method attends to: it would select all of them")


def check_copies(plan: Plan, names: Iterable[str], branches: Sequence[Branch]) -> None:
    """Raise SystemExit where a copy of a model does not fit the GPUs of the plan."""
    for name in names:
        needed, layers, size = gpus_a_copy(name, plan, branches), SHAPES[name]["layers"], plan.gpu_bytes / GIB
        if needed > layers:
            raise SystemExit(f"GPUs of {size:g} GiB (--gpu-gib) are too small for one of the {layers} layers of {name} and its stores")
        if needed > plan.gpus:
            raise SystemExit(f"--gpus {plan.gpus} are too few: a copy of {name} takes {needed} of {size:g} GiB")


def read_measured(path: Path) -> list[dict[str, Any]]:
    """The lines of ``benchmarks/scale.py``.

    Raises:
        SystemExit: They cannot be read, or no model was measured at two lengths or more.
    """
    try:
        lines: list[dict[str, Any]] = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        usable = any(line["kind"] == "device" for line in lines) and measured_costs(lines)
    except OSError as error:
        raise SystemExit(f"--measured {path} cannot be read: {error.strerror}; --extrapolate does without") from None
    except (ValueError, KeyError, TypeError):
        raise SystemExit(f"--measured {path} holds something else than what benchmarks/scale.py prints") from None
    if not usable:
        raise SystemExit(f"--measured {path} has no device, or no model at two lengths or more; --extrapolate does without")
    return lines


def gpu_hours(plan: Plan, costs: dict[str, Cost], branches: Sequence[Branch]) -> float:
    """Of all models and sessions."""
    hours = 0.0
    for name, cost in costs.items():
        session = cost.prefill(plan.tokens) + cost.stores(plan.tokens) + plan.new_tokens * cost.step(plan.tokens)
        hours += plan.sessions * session * gpus_a_copy(name, plan, branches) / HOUR
    return hours


def text(plan: Plan, costs: dict[str, Cost], branches: Sequence[Branch], source: str, evidence: str) -> str:
    """The document."""
    count = len(branches)
    memory_rows, time_rows, growth_rows, copies_of = [], [], [], {}
    gpu_seconds = wall_seconds = 0.0
    for name, cost in costs.items():
        weights = 2 * parameters_of(SHAPES[name])
        estimate = estimate_memory(facts_of(name, plan.tokens), branches, plan.tokens, plan.new_tokens, count)
        whole = weights + estimate.total
        needed = gpus_a_copy(name, plan, branches)
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
    groups = ", ".join(f"{name} {plan.gpus // copies or 1} copies of {copies}" for name, copies in copies_of.items())
    run = (
        f"The run: {plan.sessions} sessions of {plan.tokens:,} tokens, {count} methods at k = {plan.k:,}, {plan.new_tokens} new tokens\n"
        f"each, {len(costs)} models in bfloat16, {plan.gpus} GPUs of {gib(plan.gpu_bytes)} GiB."
    )
    total = f"**In all: {gpu_seconds / HOUR:,.0f} GPU hours, {wall_seconds / HOUR:,.0f} hours on {plan.gpus} GPUs.**"
    memory_head = ["model", "weights", "prefix", "stores", "tails", "work space", "in all", "GPUs a copy"]
    time_head = ["model", "prefill", "stores", "decoding", "one session", "separate", "GPU time of all"]
    growth_head = ["model", "tokens", "prefill", "stores", "one step", "prefix GiB", "stores GiB"]
    parts_of_text = (
        INTRODUCTION,
        wrapped(source),
        run,
        total,
        MEMORY,
        table(memory_head, memory_rows),
        f"Side by side on {plan.gpus} GPUs: {groups}.",
        TIME,
        table(time_head, time_rows),
        "## What grows how",
        table(growth_head, growth_rows),
        GROWTH,
        evidence,
    )
    return "\n\n".join(parts_of_text) + "\n"


def main() -> int:
    """Print the document."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    times = parser.add_mutually_exclusive_group()
    times.add_argument("--measured", type=Path, metavar="JSONL", help="output of benchmarks/scale.py (default: the published one)")
    times.add_argument("--extrapolate", action="store_true", help="leave measurements of these models out")
    add("--sessions", type=int, default=100)
    add("--tokens", type=int, default=2**20)
    add("--new-tokens", type=int, default=256)
    add("--gpus", type=int, default=8)
    add("--gpu-gib", type=float, help=f"memory of one (default: that of the measured one, or an H200's {H200_GIB})")
    add("--tflops", type=float, default=400.0, help="of the lower bound of a prefill")
    args = parser.parse_args()
    check_numbers(args)
    measured = args.measured or MEASURED
    lines = [] if args.extrapolate or (args.measured is None and not MEASURED.exists()) else read_measured(measured)
    device = next((line for line in lines if line["kind"] == "device"), {})
    gpu_bytes = math.ceil(args.gpu_gib * GIB) if args.gpu_gib else device.get("memory_bytes") or int(H200_GIB * GIB)
    plan = Plan(args.sessions, args.tokens, args.new_tokens, K, args.gpus, gpu_bytes)
    branches = [Branch(spec, None if spec.method.name == "dense" else K) for spec in parse_methods(TWENTY)]
    costs = measured_costs(lines)
    check_copies(plan, costs or SHAPES, branches)
    kernels = [json.loads(line) for line in KERNELS.read_text(encoding="utf-8").splitlines()]
    rate = next(line for line in kernels if line["kind"] == "rate" and "HBM" in line["name"])["gbytes_per_s"] * 1e9
    sessions, step = read_sessions(), read_lock_step()
    rates = Rates(prefill_rate(sessions), rate, step_factor(step, rate), step.wall_a_layer)
    counted = {name: counted_cost(name, branches, rates) for name in SHAPES}
    if costs:
        longest = span((cost.longest for cost in costs.values()), "{:,}")
        source = (
            f"Times come from `{measured.name}` of `benchmarks/scale.py` on one {device['name']}, torch {device['torch']}. "
            "Those of the tables before *What was measured* are values of fits to it, a·n + b·n² for a prefill and c + d·n for stores and "
            "steps; "
            f"**beyond {longest} tokens they are extrapolated** by these."
        )
        shorter = measured_costs(lines, without_longest=1)
        sums = f"with prefills and steps by those fits the run would take {gpu_hours(plan, shorter, branches):,.0f} GPU hours"
        evidence = (
            scale_measured.seen(lines, plan.tokens, sums) + "\n\n" + small_runs(sessions, step, scale_measured.against(lines, counted))
        )
    else:
        costs = counted
        least = {name: counted_cost(name, branches, Rates(args.tflops * 1e12, rate)) for name in SHAPES}
        evidence = small_runs(sessions, step) + "\n" + extrapolation(sessions, step, rates)
        lengths = sorted(one.tokens for one in sessions)
        source = (
            f"**Times are extrapolated** from measurements of a small model at {lengths[0]:,} to {lengths[-1]:,} tokens (below) to these "
            "models and lengths: no session of one of these models was timed. "
            f"At {args.tflops:.0f} TFLOP/s, with steps that only read what they must, all would take "
            f"{gpu_hours(plan, least, branches):,.0f} GPU hours: that is the lower bound. `benchmarks/scale.py` on a GPU replaces both."
        )
    print(text(plan, costs, branches, source, evidence), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
