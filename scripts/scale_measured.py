"""What ``benchmarks/scale.py`` measured on a GPU, and what that makes of other lengths, for ``scripts/scale_plan.py``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.scale import SHAPES
from scripts.scale_records import layer_weights, operations
from scripts.scale_tables import gib, seconds_text, span, table, wrapped

Points = Sequence[tuple[int, float]]
"""Lengths, and the seconds that something took there."""
APART = 0.2
"""As a share of the fit: a time further away from it is marked."""
SEEN = """\
## What was measured

Random weights in the shapes of these models, bfloat16, on one {device} each, torch {torch}: \
`reports/published/scale-h200/measured.jsonl`. At each length one prefill, then {branches} methods decoding together at k = {k:,}: *one \
step* is the median of the steps after the first, and the first less that is the time of the stores. *TFLOP/s* counts the operations of \
attention and of the layers' matrices; an embedding is looked up, and the head sees one token a chunk. Nothing was repeated, so a spread \
is not known.

{rows}

- **Extrapolation.** {further}Fitted to all lengths but a model's longest, the prefill of that would have been foretold within \
{prefill} and a step within {step}; {sums}.
- **Fits.** a·n + b·n² by least squares for prefills. For stores and steps a line by repeated medians (Siegel), which one point of four \
that is off hardly moves. All points are in them.
{marked}- **Memory** at most at once was {low:.2f} to {high:.2f} times what weights and estimate say together{over}.
- No session of more than {longest:,} tokens and no model on several GPUs was timed; a copy on several is counted as no slower than one \
GPU with their memory would be."""
MARKED = """\
- **†** is more than {apart} from its fit: {listed}.{likely}{step}
"""
LIKELY = """ \
What a first step spent is not recorded. Where it took longer than at a greater length, compilation of kernels is likely, since stores \
grow with the length and a first step may need kernels that none before it did{but}. The fits, and so the tables above this one, hardly \
have it."""


@dataclass(frozen=True)
class Cost:
    """Seconds of one session of ``tokens`` tokens."""

    prefill: Callable[[int], float]
    stores: Callable[[int], float]
    step: Callable[[int], float]
    longest: int
    """Most tokens measured; 0 where nothing was."""


def square(points: Points) -> Callable[[int], float]:
    """The curve a·n + b·n² with a, b ≥ 0 that is nearest to the points, errors relative to each point."""
    import numpy

    kept = [1, 2]
    while True:
        matrix = numpy.array([[(n**power) / seconds for power in kept] for n, seconds in points])
        found = numpy.linalg.lstsq(matrix, numpy.ones(len(points)), rcond=None)[0]
        if (found >= 0).all() or len(kept) == 1:
            factors = dict(zip(kept, (max(float(factor), 0.0) for factor in found), strict=True))
            return lambda n: sum(factor * n**power for power, factor in factors.items())
        kept.pop(int(found.argmin()))


def straight(points: Points) -> Callable[[int], float]:
    """The line c + d·n with c, d ≥ 0 by repeated medians (Siegel 1982): one point of four that is off moves it little, whichever it is."""
    slopes = (statistics.median((seconds - own) / (n - m) for n, seconds in points if n != m) for m, own in points)
    slope = max(statistics.median(slopes), 0.0)
    height = statistics.median(seconds - slope * n for n, seconds in points)
    if height < 0:
        height, slope = 0.0, statistics.median(seconds / n for n, seconds in points)
    return lambda n: height + slope * n


FITS: dict[str, Callable[[Points], Callable[[int], float]]] = {"prefill": square, "stores": straight, "step": straight}


def points_of(lines: Sequence[dict[str, Any]], name: str) -> dict[str, list[tuple[int, float]]]:
    """Seconds by length of each part of a model's sessions."""
    own = [line for line in lines if line.get("model") == name]
    return {kind: [(line["tokens"], max(line["seconds"], 1e-6)) for line in own if line["kind"] == kind] for kind in FITS}


def measured_costs(lines: Sequence[dict[str, Any]], without_longest: int = 0) -> dict[str, Cost]:
    """A cost of every model that was measured at two lengths or more.

    Args:
        without_longest: How many of a model's longest to leave out for its prefill and steps. Stores keep theirs: with one point less, one
            that is off would rule them.
    """
    found = {}
    for name in SHAPES:
        points = {kind: sorted(own) for kind, own in points_of(lines, name).items()}
        for kind in ("prefill", "step"):
            points[kind] = points[kind][: len(points[kind]) - without_longest]
        if len(points["prefill"]) > 1:
            fitted = {kind: fit(points[kind]) for kind, fit in FITS.items()}
            found[name] = Cost(**fitted, longest=max(tokens for tokens, _ in points["prefill"]))
    return found


def foretold(points: Points, fit: Callable[[Points], Callable[[int], float]]) -> float:
    """How far the fit to all lengths but the longest is from what was measured there, as a share of it."""
    *others, (tokens, seconds) = sorted(points)
    return abs(fit(others)(tokens) / seconds - 1)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def seen(lines: Sequence[dict[str, Any]], tokens_of_run: int, sums: str) -> str:
    """What was measured, as a section; ``lines`` hold a model with three lengths or more.

    Args:
        tokens_of_run: Of the sessions that the measurements are extrapolated to.
        sums: What the whole run takes by fits without the longest lengths, in words.
    """
    device = next(line for line in lines if line["kind"] == "device")
    shapes = {line["model"]: line for line in lines if line["kind"] == "model"}
    rows, shares, off, longest = [], [], dict.fromkeys(FITS, 0.0), 0
    marked: dict[str, list[str]] = {kind: [] for kind in FITS}
    slow: list[tuple[str, int]] = []
    for name, shape in shapes.items():
        points = points_of(lines, name)
        heads = shape["layers"], shape["query_heads"], shape["kv_heads"], shape["head_dim"]
        matrices = layer_weights(*heads, SHAPES[name]["hidden_size"], SHAPES[name]["intermediate_size"])
        memory = {line["tokens"]: line for line in lines if line["kind"] == "memory" and line["model"] == name}
        fitted = {kind: fit(points[kind]) for kind, fit in FITS.items()}
        for kind, fit in FITS.items():
            if len(points[kind]) > 2:
                off[kind] = max(off[kind], foretold(points[kind], fit))
        for tokens, held in memory.items():
            cells = {}
            for kind, own in points.items():
                seconds, expected = dict(own)[tokens], fitted[kind](tokens)
                cells[kind] = seconds_text(seconds)
                if abs(seconds - expected) > APART * expected:
                    cells[kind] += " †"
                    times = f"{seconds_text(seconds)} by the clock and {seconds_text(expected)} by the fit"
                    marked[kind].append(f"{kind.replace('step', 'a step')} of {name} at {tokens:,} tokens, {times}")
                    if kind == "stores" and seconds > max(own)[1]:
                        slow.append((name, tokens))
            together = held["weights_bytes"] + held["estimated_bytes"]
            rate = operations(shape["layers"], shape["query_heads"], shape["head_dim"], matrices, tokens) / dict(points["prefill"])[tokens]
            sizes = (held["prefix_bytes"] + held["store_bytes"], held["peak_bytes"] or 0, together)
            rows.append([name, f"{tokens:,}", cells["prefill"], f"{rate / 1e12:.0f}", cells["stores"], cells["step"], *map(gib, sizes)])
            shares.append((held["peak_bytes"] or 0) / together)
            longest = max(longest, tokens)
    head = ["model", "tokens", "prefill", "TFLOP/s", "stores", "one step", "prefix and stores, GiB", "at most at once", "estimated"]
    listed = [one for own in marked.values() for one in own]
    likely = LIKELY.format(but=_not_shown(lines, slow)) if slow else ""
    other = " What made a step differ is not recorded either." if slow else " What made a step differ is not recorded."
    filled = SEEN.format(
        device=device["name"],
        torch=device["torch"],
        branches=len(device["methods"]),
        k=device["k"],
        rows=table(head, rows),
        further=f"The run's sessions are {tokens_of_run / longest:.3g} times as long as the longest measured. " if longest else "",
        sums=sums,
        marked=MARKED.format(apart=_percent(APART), listed="; ".join(listed), likely=likely, step=other * bool(marked["step"]))
        if listed
        else "",
        **{kind: _percent(share) for kind, share in off.items()},
        low=min(shares),
        high=max(shares),
        over="" if max(shares) > 1 else ": never more",
        longest=longest,
    )
    return "\n".join(line if line.startswith("|") else wrapped(line) for line in filled.splitlines())


def _not_shown(lines: Sequence[dict[str, Any]], slow: Sequence[tuple[str, int]]) -> str:
    """Models whose stores have the shapes of a slow one and took less at that length: what speaks against compilation."""
    heads = {line["model"]: (line["kv_heads"], line["head_dim"]) for line in lines if line["kind"] == "model"}
    found: dict[str, None] = {}
    for name, tokens in slow:
        for other, own in heads.items():
            seconds = dict(points_of(lines, other)["stores"]).get(tokens)
            if own == heads[name] and seconds is not None and (other, tokens) not in slow:
                found[f"{other}, whose KV heads are as many and as large, took {seconds_text(seconds)} at {tokens:,} tokens"] = None
    return f"; it is not shown: {'; '.join(found)}" if found else ""


def against(lines: Sequence[dict[str, Any]], counted: dict[str, Cost]) -> str:
    """What ``counted``, extrapolated from another model, would have said of the longest length measured of each model."""
    shares: dict[str, list[float]] = {"prefill": [], "step": []}
    longest = set()
    for name, cost in counted.items():
        points = points_of(lines, name)
        if not points["prefill"]:
            continue
        longest.add(max(tokens for tokens, _ in points["prefill"]))
        for kind, found in shares.items():
            tokens, seconds = max(points[kind])
            found.append(getattr(cost, kind)(tokens) / seconds)
    return (
        f"as long as measured above takes {span(shares['prefill'])} times the prefill and {span(shares['step'])} times the step"
        f" ({span(longest, '{:,}')} tokens)"
    )
