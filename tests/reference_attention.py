"""Attention-output errors computed in the plainest way from the definitions, one position and head at a time, in float64.

Nothing of the package's stores, scans, plans or selection is used: this is what they are checked against. A row whose result rests on
a difference below float noise (a score next to the k-th, a key on the edge of a code's cell, a channel next to the last that is read)
is marked unsure, since two right computations may differ there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray

Array = NDArray[np.float64]

BLOCK, SINK, LOCAL = 64, 4, 32
SCORE_NOISE = 2e-5  # of the largest score
CELL_NOISE = 1e-4  # of a code's cell
PLAN_NOISE = 1e-5  # relative
HALF_NOISE = 5e-3  # of what two neighbouring fp16 numbers differ by


@dataclass
class HeadData:
    """One KV head of one layer. Keys and values ``[n, D]``, queries of its group at every position ``[G, n, D]``.

    ``ahead`` holds other queries of the same shape: those of the layer ``previous``, and those ``rehearsed`` of its input.
    """

    keys: Array
    values: Array
    queries: Array
    scaling: float
    first: int
    ahead: dict[str, Array] = field(default_factory=dict)
    tables: dict[str, tuple[list[Array], list[Array]]] = field(default_factory=dict)
    bases: dict[str, tuple[Array, Array, Array]] = field(default_factory=dict)


@dataclass
class Row:
    """What one query head gets at one position."""

    output: Array
    dense_error: float
    exact_error: float
    oracle_error: float
    recall: float
    bits: float | None
    union: int
    sure: bool


def sealed_tokens(tokens: int, local: int) -> int:
    """Tokens in blocks that are full and outside the local window."""
    return max(0, tokens - local) // BLOCK * BLOCK


def dequantised(keys: Array) -> tuple[list[Array], list[Array]]:
    """Every key at 0 to 4 planes (§1), and where the value at that depth hangs on float noise, as how far it would jump."""
    n, channels = keys.shape
    values = [np.zeros((n, channels)) for _ in range(5)]
    jumps = [np.zeros((n, channels)) for _ in range(5)]
    for block in range(n // BLOCK):
        rows = slice(block * BLOCK, (block + 1) * BLOCK)
        for j in range(channels):
            part = keys[rows, j].astype(np.float32)
            a = np.float32(np.float16(np.abs(part).max()))
            if a == 0:
                code = np.full(BLOCK, 8)
                exact = np.full(BLOCK, 8.5)
            else:
                exact = part / (a / np.float32(8)) + 8
                code = np.clip(np.floor(exact), 0, 15).astype(int)
            for t in range(1, 5):
                step = a / 2 ** (t - 1)
                values[t][rows, j] = ((code >> (4 - t)) + 0.5 - 2 ** (t - 1)) * step
                edge = np.abs(exact / 2 ** (4 - t) - np.round(exact / 2 ** (4 - t))) * 2 ** (4 - t) < CELL_NOISE
                inside = (np.round(exact) > 0) & (np.round(exact) < 16)
                jumps[t][rows, j] = np.where(edge & inside, step, 0.0)
    return values, jumps


def water_filled(importance: Array, budget: int) -> tuple[Array, bool]:
    """Depths of Eq. 4: bisection over the water line, then the bits that are left to the largest g·4^(−t) (§2)."""
    low, high = importance.max() * 4.0**-12, 4 * importance.max()

    def depths(theta: float) -> Array:
        return np.array([min(4, max(0, round(math.log(g / theta, 4)))) if g > 0 else 0 for g in importance], dtype=np.float64)

    for _ in range(60):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if depths(middle).sum() > budget else (low, middle)
    found = depths(high)
    while found.sum() < min(budget, 4 * len(importance)):
        gain = np.where(found < 4, importance * 4.0**-found, -1.0)
        found[int(gain.argmax())] += 1
    taken = min(importance[j] * 4.0 ** (0.5 - found[j]) for j in range(len(found)) if found[j] > 0)
    left = max([importance[j] * 4.0 ** (-0.5 - found[j]) for j in range(len(found)) if found[j] < 4], default=0.0)
    return found, taken > left * (1 + PLAN_NOISE)


def largest(importance: Array, count: int) -> tuple[Array, bool]:
    """Depth 4 on the most important channels, lower channel first."""
    order = sorted(range(len(importance)), key=lambda j: (-importance[j], j))
    depths = np.zeros(len(importance))
    depths[order[:count]] = 4
    return depths, count == len(order) or importance[order[count - 1]] > importance[order[count]] * (1 + PLAN_NOISE)


def karhunen_loeve(head: HeadData) -> tuple[Array, Array, Array]:
    """Mean, eigenvectors and eigenvalues (largest first) of the keys before the first evaluated position."""
    if "keys" not in head.bases:
        known = head.keys[: head.first]
        values, vectors = np.linalg.eigh(np.cov(known.T, ddof=1))
        head.bases["keys"] = known.mean(0), vectors[:, ::-1], values[::-1].clip(0)
    return head.bases["keys"]


def halves(values: Array) -> tuple[Array, Array]:
    """In fp16, and where that hangs on float noise, as how far a value would jump."""
    found = values.astype(np.float16)
    apart = np.spacing(np.abs(found)).astype(np.float64)
    edge = np.abs(np.abs(values - found.astype(np.float64)) / apart - 0.5) < HALF_NOISE
    return found.astype(np.float64), np.where(edge, apart, 0.0)


def column_scan(head: HeadData, method: str, query: Array, scores: Array, noise: Array, sealed: int) -> tuple[float, bool]:
    """Scores of sealed tokens by coordinates in fp16, put in place; the bits, and whether the columns are sure."""
    channels, count = query.shape[1], query.shape[1] // 4
    mean, vectors, variance = karhunen_loeve(head)
    known_queries = head.queries[:, : head.first].reshape(-1, channels)
    if method == "infinigen-published":
        if "queries" not in head.bases:
            moments, axes = np.linalg.eigh(known_queries.T @ known_queries / len(known_queries))
            head.bases["queries"] = mean, axes[:, ::-1], moments[::-1]
        _, vectors, variance = head.bases["queries"]
    importance = variance * ((known_queries @ vectors) ** 2).mean(0) if method == "loki-fp16" else variance
    depths, sure = largest(importance, count)
    read, centre = depths > 0, mean if method == "loki-fp16" else np.zeros(channels)
    coordinates, jumps = halves((head.keys[:sealed] - centre) @ vectors)
    projected = query @ vectors
    # What all keys share where nothing is read: tokens that are not sealed are scored with it.
    shared = query @ mean if method == "loki-fp16" else (projected * ~read) @ (vectors.T @ mean)
    scores[:, :sealed] = (projected * read) @ coordinates.T + shared[:, None]
    noise[:, :sealed] += np.abs(projected * read) @ jumps.T
    return 16.0 * count, sure


def scan(head: HeadData, position: int, method: str, local: int = LOCAL) -> tuple[Array, Array, float | None, bool]:
    """Approximate scores ``[G, position + 1]``, their noise, the bits, and whether the plan is sure."""
    tokens = position + 1
    ahead = {"infinigen-previous": "previous", "infinigen-rehearsed": "rehearsed", "infinigen-published": "rehearsed"}.get(method)
    queries = head.queries if ahead is None else head.ahead[ahead]
    sealed, query, keys = sealed_tokens(tokens, local), queries[:, position], head.keys[:tokens]
    channels = keys.shape[1]
    exact = query @ keys.T
    noise = np.full_like(exact, SCORE_NOISE * np.abs(exact).max())
    if method == "exact":
        return exact, noise, None, True
    if method == "landmark":
        scores = exact.copy()
        for start in range(0, sealed, 8):
            landmark = keys[start : start + 8].astype(np.float32).mean(0).astype(np.float16).astype(np.float64)
            scores[:, start : start + 8] = (query @ landmark)[:, None]
        return scores, noise, 16 * channels / 8, True
    if method == "quest":
        scores = exact.copy()
        for start in range(0, sealed, 16):
            low, high = (bound(keys[start : start + 16], 0).astype(np.float16).astype(np.float64) for bound in (np.min, np.max))
            scores[:, start : start + 16] = np.maximum(query * low, query * high).sum(-1)[:, None]
        return scores, noise, 2 * 16 * channels / 16, True
    if method == "streaming":
        return np.broadcast_to(np.arange(tokens, dtype=np.float64), exact.shape), np.zeros_like(exact), 0.0, True
    if method in ("loki-fp16", "loki-published", "infinigen-published"):
        scores = exact.copy()
        bits, sure = column_scan(head, method, query, scores, noise, sealed)
        return scores, noise, bits, sure

    known_keys, known_queries = head.keys[: head.first], head.queries[:, : head.first]
    basis = "klt" if method in ("fathom-klt", "loki") else "raw"
    mean, vectors = np.zeros(channels), np.eye(channels)
    variance = known_keys.var(0, ddof=1)
    if basis == "klt":
        mean, vectors, variance = karhunen_loeve(head)
    if basis not in head.tables:
        head.tables[basis] = dequantised((head.keys - mean) @ vectors)
    values, jumps = head.tables[basis]
    projected = query @ vectors

    sure = True
    if method in ("fathom-raw", "fathom-klt"):
        depths, sure = water_filled((projected**2).sum(0) * variance, round(48 * channels / 128))
    elif method == "uniform-depth":
        depths, sure = largest((query**2).sum(0) * variance, round(48 * channels / 128) // 2)
        depths /= 2
    elif method == "sparq":
        depths, sure = largest(np.abs(query).sum(0), channels // 8)
    elif method == "sparq-per-head":
        picks = [largest(np.abs(one), channels // 8) for one in query]
        depths, sure = np.maximum.reduce([pick for pick, _ in picks]), all(certain for _, certain in picks)
    elif method in ("infinigen-previous", "infinigen-rehearsed"):
        depths, sure = largest(np.abs(query).sum(0), channels // 4)
    elif method == "double_sparsity":
        depths, sure = largest(np.abs(known_queries).mean((0, 1)) * np.abs(known_keys).mean(0), channels // 4)
    elif method == "loki":
        depths, sure = largest(variance * ((known_queries @ vectors) ** 2).mean((0, 1)), channels // 4)
    else:
        depths = np.full(channels, {"thumbnail": 2.0, "full": 4.0}[method])
    approximate = np.stack([values[int(depths[j])][:sealed, j] for j in range(channels)], axis=1)
    jump = np.stack([jumps[int(depths[j])][:sealed, j] for j in range(channels)], axis=1)
    scores = exact.copy()
    scores[:, :sealed] = projected @ approximate.T + (query @ mean)[:, None]
    noise[:, :sealed] += np.abs(projected) @ jump.T
    return scores, noise, float(depths.sum() + 0.25 * (depths > 0).sum()), sure


def best(scores: Array, noise: Array, allowed: list[int], count: int, equal_is_sure: bool) -> tuple[set[int], bool]:
    """The tokens with the largest scores, lower token first, and whether noise could have changed them."""
    order = sorted(allowed, key=lambda i: (-scores[i], i))
    chosen, rest = order[:count], order[count:]
    if not chosen or not rest:
        return set(chosen), True
    threshold = scores[chosen[-1]]
    level = {i for i in order if scores[i] == threshold} if equal_is_sure else set()
    low = min((scores[i] - noise[i] for i in chosen if i not in level), default=math.inf)
    high = max((scores[i] + noise[i] for i in rest if i not in level), default=-math.inf)
    if level:
        margin = max(noise[i] for i in level)
        return set(chosen), low > threshold + margin and high < threshold - margin
    return set(chosen), low > high


def attend(head: HeadData, query: Array, tokens: list[int]) -> Array:
    """Softmax attention over the given tokens."""
    logits = head.keys[tokens] @ query * head.scaling
    weights = np.exp(logits - logits.max())
    return weights / weights.sum() @ head.values[tokens]


def evaluate(
    head: HeadData, position: int, method: str, k: int, rerank: float = 1.0, union: bool = False, sink: int = SINK, local: int = LOCAL
) -> list[Row]:
    """All query heads of the group at one position, by the protocol of §3."""
    tokens = position + 1
    stop = max(tokens - local, 0)
    start = min(sink, stop)
    allowed, kept = list(range(start, stop)), [*range(start), *range(stop, tokens)]
    count = min(len(allowed), k - len(kept))
    fetched = min(len(allowed), int((k - len(kept)) * rerank))
    group = range(len(head.queries))
    exact, exact_noise, *_ = scan(head, position, "exact")
    scores, noise, bits, sure = scan(head, position, method, local)
    oracle = [best(exact[g], exact_noise[g], allowed, count, False) for g in group]
    found = [best(scores[g], noise[g], allowed, fetched, method in ("landmark", "quest")) for g in group]
    if fetched > count:
        again = [best(exact[g], exact_noise[g], sorted(found[g][0]), count, False) for g in group]
        found = [(chosen, certain and found[g][1]) for g, (chosen, certain) in enumerate(again)]
    every = set().union(*(chosen for chosen, _ in found))
    every_oracle = set().union(*(chosen for chosen, _ in oracle))
    all_sure = sure and all(certain for _, certain in (*found, *oracle))
    rows = []
    for g in group:
        query = head.queries[g, position]
        dense = attend(head, query, list(range(tokens)))
        output = attend(head, query, sorted(every if union else found[g][0]) + kept)
        reference = attend(head, query, sorted(every_oracle if union else oracle[g][0]) + kept)
        certain = all_sure if union else sure and found[g][1] and oracle[g][1]
        rows.append(
            Row(
                output,
                *(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in ((output, dense), (output, reference), (reference, dense))),
                recall=len(found[g][0] & oracle[g][0]) / len(oracle[g][0]) if oracle[g][0] else 1.0,
                bits=bits,
                union=len(every) + len(kept),
                sure=certain,
            )
        )
    return rows


def head_data(
    keys: torch.Tensor,
    values: torch.Tensor,
    queries: torch.Tensor,
    scaling: float,
    first: int,
    ahead: dict[str, torch.Tensor] | None = None,
) -> HeadData:
    """One KV head from tensors ``[n, D]``, ``[n, D]`` and ``[G, n, D]``."""
    others = {name: part.double().numpy() for name, part in (ahead or {}).items()}
    return HeadData(*(part.double().numpy() for part in (keys, values, queries)), scaling=scaling, first=first, ahead=others)
