"""Time what follows a scan, and the layer around it: plan, top-k, union, rows, attention, matrices, packing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.kernels import attend, linear, pack, plan, rows, topk
from fathom_eval.kernels.plan import ReadPlan
from fathom_eval.kernels.rows import GroupRows
from fathom_eval.kernels.segments import SEGMENT_BLOCKS, SegmentTable
from fathom_eval.offload.arena import release_pinned
from fathom_eval.offload.bench.timing import Path, path_records

HEADS, CHANNELS, GROUP = 8, 128, 4
SINK, LOCAL, K, TAIL = 4, 32, 512, 95
SEGMENT_TOKENS = SEGMENT_BLOCKS * 64

SHARE = 0.85
"""Share of the scores' variance that the heads of a group have in common: rows amount to 167 to 216 MB a step of 36 layers."""

MATRICES = {
    "projections": (6144, 4096),
    "output": (4096, 4096),
    "gate and up": (24576, 4096),
    "down": (4096, 12288),
    "head": (151936, 4096),
}


def measure_selection(context: int, repeats: int, rates: dict[str, float]) -> Iterator[dict[str, Any]]:
    """Records of one context; each path is compared with a plain computation first."""
    count = K - SINK - LOCAL
    yield from path_records("plan", context, _plans(), None, repeats)
    blocks = torch.tensor([context // 64 - 1], dtype=torch.int32, device="cuda")
    tokens = torch.tensor([context - 1], dtype=torch.int32, device="cuda")
    indices = torch.empty(1, HEADS, GROUP, count, dtype=torch.int32, device="cuda")
    for dtype in (torch.float32, torch.float16):
        yield from path_records("top-k", context, _tops(context, dtype, blocks, tokens, indices), None, repeats)
    yield from path_records("rows", context, _rows(context, blocks, tokens, indices), rates["link_gb_s"], repeats)
    release_pinned()
    yield from path_records("matrix", context, _matrices(), rates["hbm_gb_s"], repeats)
    yield from path_records("pack", context, [_packing()], None, repeats)


def _demand(holds: bool, what: str) -> None:
    if not holds:
        raise UserError(f"{what} differ from a plain computation on the same data; nothing was timed")


def _plans() -> list[Path]:
    query = torch.randn(1, HEADS, GROUP, CHANNELS, device="cuda").bfloat16()
    variance = torch.exp(2 * torch.randn(HEADS, CHANNELS, device="cuda"))
    read = ReadPlan.allocate(1, HEADS, CHANNELS, "cuda")
    picked = torch.empty(1, HEADS, 16, dtype=torch.int32, device="cuda")
    return [
        Path("plan, 48 bits", [lambda: plan.plan_depths(query, variance, 48, read)], 0),
        Path("plan, top 16 channels", [lambda: plan.top_channels(query, None, picked)], 0),
    ]


def _tops(context: int, dtype: torch.dtype, blocks: Tensor, tokens: Tensor, indices: Tensor) -> list[Path]:
    count = indices.shape[-1]
    common = torch.randn(1, HEADS, 1, context, device="cuda") * SHARE**0.5
    own = torch.randn(1, HEADS, GROUP, context, device="cuda") * (1 - SHARE) ** 0.5
    scores = (common + own).to(dtype)
    maxima = scores.unflatten(-1, (-1, 64)).amax(-1)
    late = torch.randn(1, HEADS, GROUP, TAIL, device="cuda").to(dtype)
    scratch = torch.empty(1, HEADS, GROUP, topk.scratch_size(count, TAIL), dtype=torch.int32, device="cuda")

    def top() -> None:
        topk.top_tokens(scores, maxima, late, blocks, tokens, SINK, LOCAL, scratch, indices)

    top()
    sealed = context - 64
    known = torch.cat([scores[..., :sealed], late[..., : context - 1 - sealed]], -1)[..., SINK : context - 1 - LOCAL]
    exact = known.topk(count).values.sort().values
    _demand(torch.equal(known.gather(-1, indices.long() - SINK).sort().values, exact), "selected scores")
    flat, kept = scores.view(HEADS * GROUP, -1), maxima.view(HEADS * GROUP, -1)
    name = str(dtype).removeprefix("torch.")
    return [
        Path(f"top-k from block maxima, {name}", [top], 0),
        Path(f"torch.topk, {name}", [lambda: flat.topk(count)], 0),
        Path(f"torch.topk of the maxima alone, {name}", [lambda: kept.topk(count)], 0),
    ]


def _rows(context: int, blocks: Tensor, tokens: Tensor, indices: Tensor) -> list[Path]:
    segments = [
        torch.empty(HEADS, SEGMENT_TOKENS, 2, CHANNELS, dtype=torch.bfloat16, pin_memory=True) for _ in range(context // SEGMENT_TOKENS)
    ]
    for segment in segments:
        segment.copy_(torch.randn(segment.shape, device="cuda", dtype=torch.bfloat16))
    table = SegmentTable.of(segments, "cuda")
    union = GroupRows.allocate(1, HEADS, GROUP, indices.shape[-1], SINK, LOCAL, TAIL, "cuda")
    out = torch.full((2, *union.rows.shape, CHANNELS), float("nan"), dtype=torch.bfloat16, device="cuda")
    query = torch.randn(1, HEADS, GROUP, CHANNELS, device="cuda").bfloat16()
    late = torch.randn(2, 1, HEADS, TAIL, CHANNELS, device="cuda").bfloat16()
    size = attend.workspace_size(1, HEADS, GROUP, CHANNELS, union.rows.shape[-1], TAIL)
    workspace, mixed = torch.empty(size, device="cuda"), torch.empty(1, HEADS, GROUP, CHANNELS, device="cuda")

    def join() -> None:
        rows.union_rows(indices, blocks, tokens, SINK, LOCAL, union)

    def fetch() -> None:
        rows.fetch_rows(table, union, out)

    def mix() -> None:
        attend.attend_rows(query, out[0], out[1], union, late[0], late[1], workspace, mixed, CHANNELS**-0.5)

    for launch in (join, fetch, mix):
        launch()
    for head in (0, HEADS - 1):
        used = int(union.counts[0, head])
        wanted = union.rows[0, head, :used].tolist()
        stored = torch.stack([segments[token // SEGMENT_TOKENS][head, token % SEGMENT_TOKENS] for token in wanted], 1)
        _demand(torch.equal(out[:, 0, head, :used].cpu(), stored), "fetched rows")
        keys, values = (torch.cat([out[part, 0, head, :used], late[part, 0, head]]) for part in (0, 1))
        members = torch.cat([union.members[0, head, :used], union.tail_members[0, head]])
        exact = attend.reference.attend_rows(query[0, head], keys, values, members, CHANNELS**-0.5)
        _demand(((mixed[0, head] - exact).norm() / exact.norm()).item() < 1e-4, "attention outputs")
    moved = int(union.counts.sum()) * 2 * CHANNELS * 2
    facts = {"union_rows": union.counts.float().mean().item(), "rows_bytes_36_layers": 36 * moved}
    return [
        Path("union of rows", [join], 0),
        Path("fetch of K and V rows", [fetch], moved, facts),
        Path("attention over rows and tail", [mix], 0),
    ]


def _matrices() -> list[Path]:
    """The layer's matrices times one vector, by this package's kernel and by the library's, over weights larger than the cache."""
    paths = []
    for name, (outputs, inputs) in MATRICES.items():
        copies = max(1, 2 * 10**8 // (outputs * inputs * 2))
        weights = [torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) * inputs**-0.5 for _ in range(copies)]
        vector = torch.randn(1, inputs, device="cuda", dtype=torch.bfloat16)
        out = torch.empty(1, outputs, device="cuda", dtype=torch.bfloat16)
        linear.linear(vector, weights[0], None, out)
        exact = vector.float() @ weights[0].float().T
        _demand(((out.float() - exact).norm() / exact.norm()).item() < 1e-2, f"outputs of the matrix {name}")
        own = [partial(linear.linear, vector, weight, None, out) for weight in weights]
        library = [partial(torch.mm, vector, weight.T, out=out) for weight in weights]
        paths += [Path(f"{name}, kernel", own, weights[0].nbytes), Path(f"{name}, library", library, weights[0].nbytes)]
    return paths


def _packing() -> Path:
    keys = torch.randn(HEADS, SEGMENT_TOKENS, CHANNELS, device="cuda").bfloat16()
    planes = torch.empty(HEADS, CHANNELS, 4, SEGMENT_BLOCKS, dtype=torch.int64, device="cuda")
    scales = torch.empty(HEADS, CHANNELS, SEGMENT_BLOCKS, dtype=torch.float16, device="cuda")
    flags = torch.zeros(HEADS, dtype=torch.int32, device="cuda")
    return Path("pack a segment", [lambda: pack.pack_blocks(keys, planes, scales, flags)], keys.numel() * (2 + 0.5 + 2 / 64))
