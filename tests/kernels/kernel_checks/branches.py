"""Checks of what decodes many branches of one prefix: the choice of tokens, distinct rows, rerank, and attention."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from fathom_eval.branches import Branch, BranchBatch
from fathom_eval.calibration import QueryStatistics
from fathom_eval.kernels import branches, choose
from fathom_eval.kernels.branches import SharedRows
from fathom_eval.kernels.branches import reference as branches_reference
from fathom_eval.kernels.choose import NONE, Contest
from fathom_eval.kernels.choose import reference as choose_reference
from fathom_eval.methods import parse_methods
from fathom_eval.models import ModelFacts
from fathom_eval.prefill import Prefix, PrefixLayer
from fathom_eval.selection import union_of_group
from kernel_checks.registry import check, close, equal, poisoned, random


def contest_of(tokens: int, ks: list[int], rerank: list[float], device: str, windows: tuple[int, ...] = (32,)) -> Contest:
    """Rows with these k; a row's window is the next of ``windows``. A k beyond the tokens takes all of them."""
    ranges = [(min(4, max(tokens - local, 0)), max(tokens - local, 0)) for local in (windows[row % len(windows)] for row in range(len(ks)))]
    room = [stop - start for start, stop in ranges]
    free = [k - (tokens - left) for k, left in zip(ks, room, strict=True)]
    counts = [max(min(left, wanted), 0) for left, wanted in zip(room, free, strict=True)]
    fetched = [max(min(left, int(wanted * factor)), 0) for left, wanted, factor in zip(room, free, rerank, strict=True)]
    return Contest.of(ranges, counts, fetched, device)


def made_scores(device: str, rows: int, heads: int, group: int, tokens: int, kind: str) -> Tensor:
    """Scores in a buffer with room to spare, a KV head's rows side by side, and what lies behind them poisoned."""
    buffer = poisoned(heads, rows, group, tokens + 13, dtype=torch.float32, device=device)
    values = random(heads, rows, group, tokens, device=device) * 10
    if kind == "tied":
        values = (values / 10).round()
        values[..., ::7] = -0.0  # equal to the zeros beside it
    if kind == "landmark":
        values = values[..., ::8].repeat_interleave(8, -1)[..., :tokens]
    if kind == "level":
        values = torch.zeros_like(values)
    if kind == "infinite":
        values[..., ::3] = float("-inf")
        values[:, 0, :, 10:20] = float("inf")
    values[..., :2] = 1000  # sinks do not compete, however large
    buffer[..., :tokens] = values
    return buffer.transpose(0, 1)[..., :tokens]


CHOICES: list[dict[str, Any]] = [
    {"tokens": 301, "ks": [60, 90, 60], "windows": (32,), "kind": "normal"},
    {"tokens": 257, "ks": [80, 50, 1000], "windows": (32, 5), "kind": "tied"},
    {"tokens": 200, "ks": [70], "windows": (32,), "kind": "landmark"},
    {"tokens": 130, "ks": [60, 61], "windows": (32,), "kind": "level"},
    {"tokens": 190, "ks": [100, 40], "windows": (1, 32), "kind": "infinite"},
    {"tokens": 20, "ks": [40], "windows": (32,), "kind": "normal"},
]
FULL_CHOICES: list[dict[str, Any]] = [
    {"tokens": tokens, "ks": [512, 2048] * 6, "windows": (32,), "kind": kind}
    for kind in ("normal", "tied", "landmark", "level", "infinite")
    for tokens in (90013, 5003)
] + [
    {"tokens": 2**20 - 5, "ks": [2048], "windows": (32,), "kind": "normal"},
    {"tokens": 300, "ks": [512, 2048], "windows": (32, 1), "kind": "tied"},
]


@check(CHOICES, FULL_CHOICES)
def check_choose(device: str, tokens: int, ks: list[int], windows: tuple[int, ...], kind: str) -> None:
    from fathom_eval.kernels.choose import triton as kernel

    heads, group = 2, 3
    scores = made_scores(device, len(ks), heads, group, tokens, kind)
    contest = contest_of(tokens, ks, [1.0] * len(ks), device, windows)
    most = max(contest.fetched)
    lists = kernel.choose_tokens(scores, contest.table[0], contest.table[1], contest.table[3], most)
    expected = choose_reference.choose_tokens(scores, contest.starts, contest.stops, contest.fetched)
    for row, count in enumerate(contest.fetched):
        equal(lists[row, ..., :count].long(), expected[row, ..., :count].sort(-1).values, f"tokens of row {row}")
        assert (lists[row, ..., count:] == NONE).all()
    if most:
        found = torch.zeros(len(ks), heads, dtype=torch.int32, device=device)
        kernel.count_rows(lists, contest.table[3], most, found)
        equal(found.long(), choose_reference.count_rows(expected, tokens), "distinct rows")
    if device == "cpu":
        equal(choose.choose_tokens(scores, contest), expected, "dispatched tokens")


@check([{"tokens": 150}], [{"tokens": 90013}, {"tokens": 5003}])
def check_choose_without_numbers(device: str, tokens: int) -> None:
    from fathom_eval.kernels.choose import triton as kernel

    ks = [60, 50, 60, 55]
    contest = contest_of(tokens, ks, [1.0] * len(ks), device, (32,))
    most = max(contest.fetched)
    scores = made_scores(device, len(ks), 2, 3, tokens, "normal")
    expected = kernel.choose_tokens(scores.clone(), contest.table[0], contest.table[1], contest.table[3], most)
    bits = torch.tensor([0x7FC00000, -(2**22), -1], dtype=torch.int32, device=device).view(torch.float32)  # of either sign, and all ones
    assert bits.isnan().all()
    scores[1] = bits.view(1, 3, 1)
    scores[3, ..., 7::5] = torch.nan
    for find in (
        lambda: kernel.choose_tokens(scores, contest.table[0], contest.table[1], contest.table[3], most),
        lambda: choose_reference.choose_tokens(scores, contest.starts, contest.stops, contest.fetched),
    ):
        lists = find().long().sort(-1).values
        for row, count in enumerate(contest.fetched):
            mine = lists[row, ..., :count]
            if row in (0, 2):
                equal(mine, expected[row, ..., :count].long(), f"tokens of row {row}")
            # Tokens without a number are tokens like others: as many as are wanted, each once.
            assert ((mine >= contest.starts[row]) & (mine < contest.stops[row])).all()
            assert (mine.diff(dim=-1) > 0).all()


ATTENTIONS: list[dict[str, Any]] = [
    {"prefix": 170, "tail": 45, "ks": [60, 90, 60], "rerank": [1.0, 1.0, 2.0], "group": 3, "head_dim": 24, "dtype": "float32"},
    {"prefix": 150, "tail": 0, "ks": [50], "rerank": [1.5], "group": 1, "head_dim": 16, "dtype": "float16"},
    {"prefix": 90, "tail": 3, "ks": [1000, 40], "rerank": [2.0, 2.0], "group": 7, "head_dim": 32, "dtype": "float32"},
]
FULL_ATTENTIONS: list[dict[str, Any]] = [
    {"prefix": 90001, "tail": tail, "ks": [512, 2048] * 3, "rerank": [1.0, 2.0] * 3, "group": 7, "head_dim": 64, "dtype": dtype}
    for tail in (1, 260)
    for dtype in ("bfloat16", "float32", "float16")
] + [{"prefix": 4000, "tail": 33, "ks": [128] * 4, "rerank": [1.0] * 4, "group": 4, "head_dim": 128, "dtype": "bfloat16"}]


@check(ATTENTIONS, FULL_ATTENTIONS)
def check_branch_attention(
    device: str, prefix: int, tail: int, ks: list[int], rerank: list[float], group: int, head_dim: int, dtype: str
) -> None:
    from fathom_eval.kernels.branches import triton as kernel
    from fathom_eval.kernels.choose import triton as choose_kernel

    heads, tokens, rows, scaling = 2, prefix + tail, len(ks), 0.3 / head_dim**0.5
    shapes = [(heads, prefix, head_dim)] * 2 + [(rows, heads, tail, head_dim)] * 2
    shared = SharedRows(*(random(*shape, device=device, seed=seed).to(getattr(torch, dtype)) for seed, shape in enumerate(shapes)))
    query = random(rows, heads, group, head_dim, device=device, seed=9).to(getattr(torch, dtype))
    contest = contest_of(tokens, ks, rerank, device)
    scores = made_scores(device, rows, heads, group, tokens, "normal")
    lists = choose_kernel.choose_tokens(scores, contest.table[0], contest.table[1], contest.table[3], max(contest.fetched))
    kept = branches_reference.rerank_lists(query, shared, lists.long(), contest, "head")
    lists = kernel.rerank_lists(query, shared, lists, contest)
    for row, count in enumerate(contest.counts):
        mine, right = lists[row, ..., :count].long(), kept[row, ..., :count].sort(-1).values
        # Sums of another order may exchange the last of two scores that are as good as equal.
        allowed = 0 if device == "cpu" or contest.fetched[row] == count else 2
        for found, wanted in zip(mine.flatten(0, -2).tolist(), right.flatten(0, -2).tolist(), strict=True):
            assert len(set(wanted) - set(found)) <= allowed, f"row {row}"
        assert (lists[row, ..., count:] == NONE).all()
    exact = branches_reference.attend_lists(query, shared, lists.long(), contest, scaling, None)
    close(kernel.attend_lists(query, shared, lists, contest, scaling, None), exact, "attention", 1e-5)
    pooled, mask = union_of_group(lists[..., : max(contest.counts)].long())
    mask = mask & (pooled < NONE)
    pooled = pooled.masked_fill(~mask, 0)
    exact = branches_reference.attend_lists(query, shared, pooled, contest, scaling, mask)
    close(kernel.attend_lists(query, shared, pooled.int(), contest, scaling, mask), exact, "attention to the union", 1e-5)
    exact = branches_reference.attend_everything(query, shared, scaling)
    close(kernel.attend_everything(query, shared, scaling), exact, "dense attention", 2e-5 if device == "cpu" else 1e-4)
    if device == "cpu":
        again = branches.attend_everything(query, shared, scaling)
        equal(again, exact, "dispatched attention")


BATCH = (
    "dense,exact,fathom:basis=klt,fathom:basis=raw:rerank=2,sparq:share=group_sum,sparq:share=group_max:rerank=2,landmark,thumbnail,"
    "double_sparsity:attend=union,loki:attend=union:rerank=2,sparq:reallocate=true,fathom:keep_tail=true,sparq:local=5,streaming_llm"
)
BATCHES: list[dict[str, Any]] = [{"tokens": 200, "tail": 40, "ks": [110, 130], "head_dim": 16, "dtype": "float32"}]
FULL_BATCHES: list[dict[str, Any]] = [
    {"tokens": 20000, "tail": tail, "ks": [200, 1000], "head_dim": 64, "dtype": dtype}
    for tail in (1, 150)
    for dtype in ("bfloat16", "float32")
]


@check(BATCHES, FULL_BATCHES)
def check_branch_batch(device: str, tokens: int, tail: int, ks: list[int], head_dim: int, dtype: str) -> None:
    """A step of many methods with the kernels and without: the same scans, so the same tokens, and outputs but for rounding."""
    kind, heads, group = getattr(torch, dtype), 2, 3
    queries = QueryStatistics()
    queries.add(random(heads, group, 64, head_dim, device=device))
    keys, values = (random(heads, tokens, head_dim, device=device, seed=seed).to(kind) for seed in (1, 2))
    prefix = Prefix(tuple([1] * (tokens + 1)), (PrefixLayer(keys, values, queries),))
    facts = ModelFacts("random", "llama", 1, heads * group, heads, head_dim, False, 10**6, (), dtype, device, "m", "t")
    specs = parse_methods(BATCH)
    rows = [Branch(spec, k) for spec in specs for k in ([None] if spec.method.name == "dense" else ks)]
    query = random(len(rows), heads, group, head_dim, device=device, seed=3).to(kind)
    own = [random(len(rows), heads, tail, head_dim, device=device, seed=seed).to(kind) for seed in (4, 5)]
    outputs, counts = [], []
    for with_kernels in (False, True):
        known = {"new": lambda _, answer=with_kernels: answer}
        with patch.object(choose, "compiled", **known), patch.object(branches, "compiled", **known):
            batch = BranchBatch(prefix, rows, facts)
            outputs.append(batch.attend(0, query, *own, head_dim**-0.5))
            assert not batch.failures, batch.failures
            counts.append(batch.counts)
    close(outputs[1], outputs[0], "outputs", 2e-5 if device == "cpu" else 1e-3)
    for name in ("scan_bits", "scan_tokens", "channels", "scans", "fired"):
        equal(getattr(counts[1], name), getattr(counts[0], name), name)
    for name in ("rows", "candidates"):
        # A rerank's sums of another order may exchange scores that are as good as equal.
        off = (getattr(counts[1], name) - getattr(counts[0], name)).abs().max().item()
        assert off <= (0 if device == "cpu" else 8), (name, getattr(counts[1], name).tolist(), getattr(counts[0], name).tolist())
