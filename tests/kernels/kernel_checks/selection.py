"""Checks of what follows a scan: top-k, union and fetch of rows, attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fathom_eval.kernels import attend, topk
from fathom_eval.kernels.rows import GroupRows
from fathom_eval.kernels.rows import reference as rows_reference
from fathom_eval.kernels.segments import SegmentTable
from fathom_eval.kernels.topk import NONE
from fathom_eval.kernels.topk import reference as topk_reference
from kernel_checks.registry import POISON, check, close, equal, poisoned, random, split, whole

TOPS: list[dict[str, Any]] = [
    {"tokens": [1000], "k": 40, "tail": 40, "dtype": "float16", "kind": "normal"},
    {"tokens": [1000, 130], "k": 24, "tail": 0, "dtype": "float32", "kind": "normal"},
    {"tokens": [64, 7], "k": 100, "tail": 64, "dtype": "float32", "kind": "normal"},
    {"tokens": [900], "k": 50, "tail": 4, "dtype": "float16", "kind": "tied"},
    {"tokens": [700], "k": 30, "tail": 60, "dtype": "float32", "kind": "infinite"},
    {"tokens": [640], "k": 37, "tail": 0, "dtype": "float16", "kind": "landmark"},
    {"tokens": [640, 512], "k": 37, "tail": 30, "dtype": "float32", "kind": "chunks"},
    {"tokens": [1900, 300, 5], "k": 9, "tail": 30, "dtype": "float16", "kind": "chunks"},
    {"tokens": [1300, 900], "k": 5, "tail": 70, "dtype": "float32", "kind": "level"},
]
FULL_TOPS: list[dict[str, Any]] = [
    {"tokens": [2**20 + 77], "k": 476, "tail": 95, "dtype": dtype, "kind": kind}
    for dtype in ("float16", "float32")
    for kind in ("normal", "tied", "infinite")
] + [
    {"tokens": [2**20], "k": 476, "tail": 0, "dtype": "float16", "kind": "landmark"},
    {"tokens": [2**20], "k": 476, "tail": 95, "dtype": "float16", "kind": "normal"},
    {"tokens": [2**22 - 400, 2**21 + 70], "k": 2012, "tail": 95, "dtype": "float16", "kind": "normal"},
    {"tokens": [2**21 + 13, 1300], "k": 200, "tail": 95, "dtype": "float16", "kind": "level"},
    {"tokens": [131072 + 13, 4097], "k": 2012, "tail": 95, "dtype": "float16", "kind": "normal"},
    {"tokens": [300, 5], "k": 476, "tail": 95, "dtype": "float32", "kind": "normal"},
]


@check(TOPS, FULL_TOPS)
def check_topk(device: str, tokens: list[int], k: int, tail: int, dtype: str, kind: str) -> None:
    from fathom_eval.kernels.topk import triton as kernel

    sink, local, span, heads, group = 4, 32, 8 if kind == "landmark" else 1, 2, 3
    sealed = [max(total - tail, 0) // 64 for total in tokens]
    capacity = max(max(sealed), 1) + 3
    scores = random(len(tokens), heads, group, capacity * 64 // span, device=device) * 10
    if kind == "tied":
        scores = (scores / 8).round()
    if kind == "level":  # many blocks with the same maximum, in every part that is ranked at once
        scores.unflatten(-1, (capacity, -1))[..., ::2, 3] = 60
    if kind == "infinite":
        scores[..., ::3] = float("-inf")
        scores[:, 0, :, 100:120] = float("inf")
    scores = scores.to(getattr(torch, dtype))
    scores[..., :2] = 1000  # sinks do not compete, however large
    late = random(len(tokens), heads, group, max(tail, 1) + 64, device=device, seed=9).to(scores.dtype) * 20 if tail else None
    maxima = scores.unflatten(-1, (capacity, -1)).amax(-1)
    for row, count in enumerate(sealed):
        scores[row, ..., count * 64 // span :] = float("nan")
        maxima[row, ..., count:] = float("nan")
    size = topk.scratch_size(k, 0 if late is None else late.shape[-1])
    scratch = poisoned(len(tokens), heads, group, size, dtype=torch.int32, device=device)
    indices = poisoned(len(tokens), heads, group, k, dtype=torch.int32, device=device)
    sizes = kernel.CHUNK, kernel.TILE, kernel.RANKED
    if kind in ("chunks", "level") and device == "cpu":
        kernel.CHUNK, kernel.TILE, kernel.RANKED = 1024, 32, 4
    try:
        kernel.top_tokens(scores, maxima, late, whole(sealed, device), whole(tokens, device), sink, local, scratch, indices)
    finally:
        kernel.CHUNK, kernel.TILE, kernel.RANKED = sizes
    for row, (count, total) in enumerate(zip(sealed, tokens, strict=True)):
        known = scores[row, ..., : count * 64 // span].repeat_interleave(span, -1)
        if late is not None:
            known = torch.cat([known, late[row, ..., : total - count * 64]], -1)
        stop = min(max(total - local, 0), known.shape[-1])
        expected = topk_reference.top_tokens(known, k, min(sink, stop), stop).long()
        found = indices[row].long()
        valid = found != NONE
        equal(valid, expected != NONE, "entries in use")
        assert (found[..., 1:] > found[..., :-1])[valid[..., 1:]].all(), "ascending and distinct"
        assert ((found >= min(sink, stop)) & (found < stop))[valid].all(), "candidates alone"

        def values(index: Tensor, known: Tensor = known) -> Tensor:
            picked = known.gather(-1, index.clamp(max=known.shape[-1] - 1)).float()
            return picked.masked_fill(index == NONE, float("-inf")).sort(-1).values

        equal(values(found), values(expected), "selected scores")


@check(
    [
        {"tokens": [700], "k": 30, "group": 4, "shared": False},
        {"tokens": [500, 90], "k": 20, "group": 3, "shared": True},
        {"tokens": [50, 3], "k": 40, "group": 7, "shared": False},
        {"tokens": [300], "k": 33, "group": 1, "shared": False},
    ],
    [{"tokens": [2**20 + 50], "k": 476, "group": 4, "shared": False}, {"tokens": [9000, 20], "k": 2012, "group": 7, "shared": True}],
)
def check_rows_and_attend(device: str, tokens: list[int], k: int, group: int, shared: bool) -> None:
    from fathom_eval.kernels.attend import triton as attend_kernel
    from fathom_eval.kernels.rows import triton as rows_kernel

    sink, local, tail, heads, capacity = 4, 32, 95, 2, 512 if device == "cuda" else 2
    for head_dim, dtype in ((64, torch.float16), (96, torch.float32), (128, torch.bfloat16 if device == "cuda" else torch.float32)):
        sealed = [max(total - local, 0) // 64 for total in tokens]
        stored = random(heads, max(max(sealed), 1) * 64, 2, head_dim, device=device).to(dtype)
        table = SegmentTable.of(split(stored, capacity * 64, 1, device, host=device == "cuda"), device, rows=len(tokens))
        late = random(2, len(tokens), heads, tail, head_dim, device=device, seed=3).to(dtype)
        query = random(len(tokens), heads, group, head_dim, device=device, seed=4).to(dtype)
        indices = torch.full((len(tokens), heads, group, k), NONE, dtype=torch.int32)
        generator = torch.Generator().manual_seed(5)
        for row, total in enumerate(tokens):
            for head in range(heads):
                # Heads share many of their picks, as real ones do.
                pool = torch.randperm(max(total - local - sink, 0), generator=generator)[: 2 * k] + sink
                for member in range(group):
                    pick = pool[torch.randperm(len(pool), generator=generator)[:k]].sort().values
                    indices[row, head, member, : len(pick)] = pick.int()
        union = GroupRows.allocate(len(tokens), heads, group, k, sink, local, tail, device)
        for part in (union.rows, union.members, union.counts, union.tail_members):
            part.fill_(POISON)
        blocks, totals = whole(sealed, device), whole(tokens, device)
        rows_kernel.union_rows(indices.to(device), blocks, totals, sink, local, shared, union)
        fetched = poisoned(2, *union.rows.shape, head_dim, dtype=dtype, device=device)
        rows_kernel.fetch_rows(table, union, fetched, 0, False)
        for programs in (1, 5 * heads * len(tokens)):
            paced = poisoned(*fetched.shape, dtype=dtype, device=device)
            rows_kernel.fetch_rows(table, union, paced, 0, False, programs)
            equal(paced.nan_to_num(), fetched.nan_to_num(), f"rows by {programs} programs")
            equal(paced.isnan(), fetched.isnan(), f"places written by {programs} programs")
        check_second_part(table, union, fetched)
        size = attend.workspace_size(len(tokens), heads, group, head_dim, union.rows.shape[-1], tail)
        workspace = poisoned(size, dtype=torch.float32, device=device)
        out = poisoned(*query.shape, dtype=torch.float32, device=device)
        for row, total in enumerate(tokens):
            late[:, row, :, total - sealed[row] * 64 :] = float("nan")
        scaling = head_dim**-0.5
        attend_kernel.attend_rows(
            query, fetched[0], fetched[1], union.members, union.counts, late[0], late[1], union.tail_members, workspace, out, scaling
        )
        for row, total in enumerate(tokens):
            for head in range(heads):
                expected = rows_reference.union_rows(indices[row, head], sealed[row] * 64, total, sink, local, shared)
                count = int(union.counts[row, head])
                assert count == len(expected[0])
                equal(union.rows[row, head, :count].cpu(), expected[0], "rows")
                equal(union.members[row, head, :count].cpu(), expected[1], "members")
                equal(union.tail_members[row, head, : len(expected[2])].cpu(), expected[2], "tail members")
                assert (union.tail_members[row, head, len(expected[2]) :] == 0).all()
                assert (union.rows[row, head, count:] == POISON).all()
                wanted = union.rows[row, head, :count].long()
                equal(fetched[:, row, head, :count], stored[head][wanted].transpose(0, 1), "fetched rows")
                assert fetched[:, row, head, count:].isnan().all()
                whole_rows = torch.cat([fetched[:, row, head, :count], late[:, row, head, : len(expected[2])]], dim=1)
                members = torch.cat([union.members[row, head, :count], union.tail_members[row, head, : len(expected[2])]])
                exact = attend.reference.attend_rows(query[row, head], whole_rows[0], whole_rows[1], members, scaling)
                close(out[row, head], exact, "attention", 1e-5)


def check_second_part(table: SegmentTable, union: GroupRows, fetched: Tensor) -> None:
    """Values alone, of the rows that some head attends to."""
    from fathom_eval.kernels.rows import triton as kernel

    some = union.with_own_masks()
    some.members[..., ::3] = union.members[..., ::3]
    values = poisoned(1, *fetched.shape[1:], dtype=fetched.dtype, device=str(fetched.device))
    kernel.fetch_rows(table, some, values, 1, True)
    slots = torch.arange(union.rows.shape[-1], device=fetched.device)
    taken = ((some.members != 0) & (slots < union.counts[..., None]))[..., None]
    equal(values[0].isnan(), ~taken.expand_as(values[0]), "written values")
    equal(values[0].nan_to_num(), fetched[1].masked_fill(~taken, 0), "fetched values")


@check([], [{"rows": 9, "tokens": 2**21}])
def check_beyond_31_bits(device: str, rows: int, tokens: int) -> None:
    """Rows and scores at places above 2^31 elements."""
    from fathom_eval.kernels.rows import triton as rows_kernel
    from fathom_eval.kernels.topk import triton as topk_kernel

    stored = torch.zeros(rows, tokens, 1, 128, dtype=torch.bfloat16, device=device)
    assert stored.numel() > 2**31
    stored.view(torch.int16).copy_(torch.arange(tokens, device=device, dtype=torch.int32)[:, None, None].to(torch.int16))
    stored[-1] += 1
    union = GroupRows.allocate(1, rows, 1, 8, 0, 0, 1, device)
    union.rows[..., :8] = torch.tensor([0, 1, 77, 4095, 65537, 2**20, tokens - 2, tokens - 1], device=device)
    union.counts.fill_(8)
    out = poisoned(1, 1, rows, 8, 128, dtype=torch.bfloat16, device=device)
    rows_kernel.fetch_rows(SegmentTable.of([stored], device), union, out, 0, False)
    equal(out[0, 0].view(torch.int16), stored[:, :, 0][:, union.rows[0, 0, :8].long()].view(torch.int16), "rows")
    del stored
    lines = 2**31 // tokens + 8
    scores = torch.zeros(1, 1, lines, tokens, dtype=torch.float16, device=device)
    assert scores.numel() > 2**31
    best = torch.randint(0, tokens, (lines,), generator=torch.Generator().manual_seed(0)).to(device)
    scores[0, 0].scatter_(-1, best[:, None], 5.0)
    scratch = torch.zeros(1, 1, lines, topk.scratch_size(1, 0), dtype=torch.int32, device=device)
    indices = poisoned(1, 1, lines, 1, dtype=torch.int32, device=device)
    maxima = scores.unflatten(-1, (-1, 64)).amax(-1)
    topk_kernel.top_tokens(scores, maxima, None, whole([tokens // 64], device), whole([tokens], device), 0, 0, scratch, indices)
    equal(indices[0, 0, :, 0], best.int(), "best tokens")
