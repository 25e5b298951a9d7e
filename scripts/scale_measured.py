"""What ``benchmarks/scale.py`` measured on a GPU, and what that makes of other lengths, for ``scripts/scale_plan.py``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.scale import SHAPES
from scripts.scale_records import operations
from scripts.scale_tables import gib, seconds_text, table, wrapped

POWERS = {"prefill": (1, 2), "stores": (0, 1), "step": (0, 1)}
"""Of the length, of which the cost of each part is a sum."""
SEEN = """\
## What was measured

Random weights in the shapes of these models, bfloat16, on one {device}, torch {torch}: `reports/published/scale-h200/measured.jsonl`. A \
prefill, and {branches} methods decoding together at k = {k:,}; the first step less the others is the time of the stores.

{rows}

- **Extrapolation.** Fitted to all lengths but a model's longest, the prefill of that would have been foretold within {prefill:.0%} and a \
step within {step:.0%}.
- **Memory** at most at once was {low:.2f} to {high:.2f} times what weights and estimate say together.
- No session of more than {longest:,} tokens and no model on several GPUs was timed."""


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


def points_of(lines: Sequence[dict[str, Any]], name: str) -> dict[str, list[tuple[int, float]]]:
    """Seconds by length of each part of a model's sessions."""
    own = [line for line in lines if line.get("model") == name]
    return {kind: [(line["tokens"], max(line["seconds"], 1e-6)) for line in own if line["kind"] == kind] for kind in POWERS}


def measured_costs(lines: Sequence[dict[str, Any]]) -> dict[str, Cost]:
    """A cost of every model that was measured at two lengths or more."""
    found = {}
    for name in SHAPES:
        points = points_of(lines, name)
        if len(points["prefill"]) > 1:
            fitted = {kind: fit(points[kind], powers) for kind, powers in POWERS.items()}
            found[name] = Cost(**fitted, longest=max(tokens for tokens, _ in points["prefill"]))
    return found


def foretold(points: Sequence[tuple[int, float]], powers: Sequence[int]) -> float:
    """How far the fit to all lengths but the longest is from what was measured there, as a share of it."""
    *others, (tokens, seconds) = sorted(points)
    return abs(fit(others, powers)(tokens) / seconds - 1)


def seen(lines: Sequence[dict[str, Any]]) -> str:
    """What was measured, as a section; ``lines`` hold a model with three lengths or more."""
    device = next(line for line in lines if line["kind"] == "device")
    shapes = {line["model"]: line for line in lines if line["kind"] == "model"}
    rows, shares, off, longest = [], [], dict.fromkeys(POWERS, 0.0), 0
    for name, shape in shapes.items():
        points = points_of(lines, name)
        memory = {line["tokens"]: line for line in lines if line["kind"] == "memory" and line["model"] == name}
        for kind, powers in POWERS.items():
            if len(points[kind]) > 2:
                off[kind] = max(off[kind], foretold(points[kind], powers))
        for (tokens, prefill), (_, stores), (_, step) in zip(*points.values(), strict=True):
            held = memory[tokens]
            together = held["weights_bytes"] + held["estimated_bytes"]
            rate = operations(shape["layers"], shape["query_heads"], shape["head_dim"], shape["parameters"], tokens) / prefill
            sizes = (held["prefix_bytes"] + held["store_bytes"], held["peak_bytes"] or 0, together)
            times = (seconds_text(prefill), f"{rate / 1e12:.0f}", seconds_text(stores), seconds_text(step))
            rows.append([name, f"{tokens:,}", *times, *map(gib, sizes)])
            shares.append((held["peak_bytes"] or 0) / together)
            longest = max(longest, tokens)
    head = ["model", "tokens", "prefill", "TFLOP/s", "stores", "one step", "prefix and stores, GiB", "at most at once", "estimated"]
    filled = SEEN.format(
        device=device["name"],
        torch=device["torch"],
        branches=len(device["methods"]),
        k=device["k"],
        rows=table(head, rows),
        prefill=off["prefill"],
        step=off["step"],
        low=min(shares),
        high=max(shares),
        longest=longest,
    )
    return "\n".join(line if line.startswith("|") else wrapped(line) for line in filled.splitlines())
