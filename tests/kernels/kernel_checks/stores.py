"""Checks of what reads and writes key stores: pack, plan, the scans, the staged gather."""

from __future__ import annotations

from unittest.mock import patch

import torch
from torch import Tensor

from fathom_eval.kernels import gather, landmark, nibble, pack, plan, scan
from fathom_eval.kernels.plan import ReadPlan
from fathom_eval.kernels.plan import reference as plan_reference
from fathom_eval.kernels.segments import SegmentTable
from kernel_checks.registry import POISON, check, close, equal, poisoned, random, split, whole


def spread_keys(heads: int, tokens: int, channels: int, device: str) -> Tensor:
    """Keys whose channels differ in scale, so that a plan reads some deep and some not at all."""
    spread = torch.exp(random(heads, 1, channels, device=device, seed=1) * 1.3)
    return random(heads, tokens, channels, device=device, seed=2) * spread


@check(
    [
        {"dtype": "float32", "head_dim": 96, "tokens": 320, "offset": 0},
        {"dtype": "float16", "head_dim": 64, "tokens": 64, "offset": 3},
        {"dtype": "float32", "head_dim": 128, "tokens": 128, "offset": 1},
    ],
    [{"dtype": dtype, "head_dim": d, "tokens": 8192, "offset": 2} for dtype in ("bfloat16", "float16", "float32") for d in (64, 96, 128)],
)
def check_pack(device: str, dtype: str, head_dim: int, tokens: int, offset: int) -> None:
    from fathom_eval.kernels.pack import triton as kernel

    keys = spread_keys(2, tokens, head_dim, device).to(getattr(torch, dtype))
    keys[0, :64, 1] = 0
    keys[0, :, 2] = 1e-9
    keys[1, 5, 3] = keys[1, :64, 3].abs().max() * 2  # a key of exactly +a
    blocks = tokens // 64
    planes = poisoned(2, head_dim, 4, blocks + offset + 1, dtype=torch.int64, device=device)
    scales = poisoned(2, head_dim, blocks + offset + 1, dtype=torch.float16, device=device)
    flags = torch.zeros(2, dtype=torch.int32, device=device)
    kernel.pack_blocks(keys, planes, scales, flags, offset)
    expected = pack.block_scales(keys.cpu())
    codes = pack.quantise(keys.cpu(), expected)
    written = slice(offset, offset + blocks)
    equal(scales[..., written].cpu(), expected, "scales")
    equal(planes[..., written].cpu(), pack.pack_planes(codes), "planes")
    assert (planes[..., :offset] == POISON).all()
    assert (planes[..., -1] == POISON).all()
    assert flags.tolist() == [0, 0]
    for value in (float("nan"), float("inf"), 7e4):
        bad = keys.float()
        bad[1, 5, 2] = value
        kernel.pack_blocks(bad, planes, scales, flags.zero_(), offset)
        assert flags.tolist() == [0, 1], value


@check(
    [{"group": g, "head_dim": d, "budget": b} for g, d, b in [(1, 64, 24), (3, 96, 48), (4, 128, 48), (7, 128, 1), (4, 64, 1000)]],
    [{"group": g, "head_dim": d, "budget": b} for g, d in ((1, 64), (3, 96), (4, 128), (7, 128)) for b in (0, 1, 24, 48, 128, 1000)],
)
def check_plan(device: str, group: int, head_dim: int, budget: int) -> None:
    from fathom_eval.kernels.plan import triton as kernel

    queries = {
        "random": random(3, 2, group, head_dim, device=device),
        "tied": random(3, 2, group, head_dim, device=device).round(),
        "zero": torch.zeros(3, 2, group, head_dim, device=device),
        "fp16": random(3, 2, group, head_dim, device=device, dtype=torch.float16),
    }
    for kind, query in queries.items():
        variance = torch.exp(2 * random(2, head_dim, device=device, seed=3)) if kind != "tied" else torch.ones(2, head_dim, device=device)
        found = ReadPlan(*(poisoned(3, 2, n, dtype=torch.int32, device=device) for n in (head_dim, head_dim, head_dim, 4)))
        kernel.plan_depths(query, variance, budget, found)
        expected = plan_reference.plan_depths(query.cpu(), variance.cpu(), budget)
        for name, tensor in zip(("depths", "channels", "slots", "counts"), expected, strict=True):
            equal(getattr(found, name).cpu(), tensor, f"{kind} {name}")
        picked = poisoned(3, 2, head_dim // 4, dtype=torch.int32, device=device)
        for weight in (None, variance):
            kernel.top_channels(query, weight, picked)
            expected_channels = plan_reference.top_channels(query.cpu(), None if weight is None else weight.cpu(), head_dim // 4)
            equal(picked.cpu(), expected_channels, f"{kind} channels")


SCANS = [
    {"group": 1, "head_dim": 64, "blocks": [1], "capacity": 4, "dtype": "float32"},
    {"group": 3, "head_dim": 96, "blocks": [4], "capacity": 4, "dtype": "float16"},
    {"group": 4, "head_dim": 128, "blocks": [10, 7], "capacity": 4, "dtype": "float32"},
    {"group": 7, "head_dim": 64, "blocks": [5, 0], "capacity": 2, "dtype": "float16"},
    {"group": 2, "head_dim": 64, "blocks": [7, 3], "capacity": 2, "dtype": "float32", "programs": 3},
]
FULL_SCANS = [
    {"group": g, "head_dim": d, "blocks": blocks, "capacity": 512, "dtype": dtype, "host": host}
    for g, d, blocks, dtype, host in [
        (4, 128, [16384], "float16", False),
        (4, 128, [16384], "float16", True),
        (4, 128, [2048, 1, 1333], "float32", False),
        (1, 64, [777], "float16", False),
        (3, 96, [513], "float32", True),
        (7, 128, [1025], "float16", False),
        (8, 64, [511, 512], "float32", False),
    ]
]


@check(SCANS, FULL_SCANS)
def check_scan(
    device: str, group: int, head_dim: int, blocks: list[int], capacity: int, dtype: str, host: bool = False, programs: int | None = None
) -> None:
    from fathom_eval.kernels.scan import triton as kernel

    heads, most = 2, max(blocks)
    keys = spread_keys(heads, most * 64, head_dim, device)
    scales = pack.block_scales(keys)
    planes = poisoned(heads, head_dim, 4, most, dtype=torch.int64, device=device)
    for head in range(heads):
        planes[head] = pack.pack_planes(pack.quantise(keys[head], scales[head]))
    query = random(len(blocks), heads, group, head_dim, device=device, seed=4, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    chosen = ReadPlan.allocate(len(blocks), heads, head_dim, device)
    plan.plan_depths(query, keys.var(1), head_dim * 3 // 8, chosen)
    plane_table = SegmentTable.of(split(planes, capacity, -1, device, host=host), device, rows=len(blocks))
    scale_table = SegmentTable.of(split(scales, capacity, -1, device, host=host), device, rows=len(blocks))
    size = (len(blocks), heads, group, plane_table.capacity * capacity)
    scores = poisoned(*size[:-1], size[-1] * 64, dtype=getattr(torch, dtype), device=device)
    maxima = poisoned(*size, dtype=getattr(torch, dtype), device=device)
    with patch.dict(kernel.PROGRAMS, {} if programs is None else {"host": programs}):
        kernel.scan_segments(query, chosen, plane_table, scale_table, whole(blocks, device), scores, maxima, 0.5)
    for row, count in enumerate(blocks):
        assert scores[row, ..., count * 64 :].isnan().all()
        assert maxima[row, ..., count:].isnan().all()
        for head in range(heads):
            if count:
                read = chosen.depths[row, head].nonzero().flatten()
                part = (planes[head, read][..., :count], scales[head, read][..., :count])
                expected = scan.scan_planes(query[row, head][:, read], chosen.depths[row, head, read], *part) * 0.5
                found = scores[row, head, :, : count * 64]
                close(found, expected, f"scores of row {row}")
                equal(maxima[row, head, :, :count], found.unflatten(-1, (count, 64)).amax(-1), "maxima")
    if not host:
        again = poisoned(*scores.shape, dtype=scores.dtype, device=device)
        scan.scan_segments(query, chosen, plane_table, scale_table, whole(blocks, device), again, maxima, 0.5)
        close(again[0, ..., : blocks[0] * 64], scores[0, ..., : blocks[0] * 64].float(), "dispatched scores")


@check(SCANS, FULL_SCANS)
def check_nibble(
    device: str, group: int, head_dim: int, blocks: list[int], capacity: int, dtype: str, host: bool = False, programs: int | None = None
) -> None:
    from fathom_eval.kernels.nibble import triton as kernel

    heads, most = 2, max(blocks)
    keys = spread_keys(heads, most * 64, head_dim, device)
    scales = pack.block_scales(keys)
    words = torch.stack([nibble.pack_nibbles(pack.quantise(keys[head], scales[head])) for head in range(heads)])
    query = random(len(blocks), heads, group, head_dim, device=device, seed=4, dtype=torch.bfloat16 if device == "cuda" else torch.float32)
    channels = torch.empty(len(blocks), heads, head_dim // 4, dtype=torch.int32, device=device)
    plan.top_channels(query, keys.abs().mean(1), channels)
    nibble_table = SegmentTable.of(split(words, capacity, -1, device, host=host), device, rows=len(blocks))
    scale_table = SegmentTable.of(split(scales, capacity, -1, device, host=host), device, rows=len(blocks))
    size = (len(blocks), heads, group, nibble_table.capacity * capacity)
    scores = poisoned(*size[:-1], size[-1] * 64, dtype=getattr(torch, dtype), device=device)
    maxima = poisoned(*size, dtype=getattr(torch, dtype), device=device)
    with patch.dict(kernel.PROGRAMS, {} if programs is None else {"host": programs}):
        kernel.scan_nibbles(query, channels, nibble_table, scale_table, whole(blocks, device), scores, maxima, 0.5)
    for row, count in enumerate(blocks):
        assert scores[row, ..., count * 64 :].isnan().all()
        assert maxima[row, ..., count:].isnan().all()
        if count:
            for head in range(heads):
                part = (words[head : head + 1, :, :, :count], scales[head : head + 1, :, :count])
                expected = nibble.reference.scan_nibbles(query[row, head : head + 1], channels[row, head : head + 1], *part)[0] * 0.5
                found = scores[row, head, :, : count * 64]
                close(found, expected, f"scores of row {row}")
                equal(maxima[row, head, :, :count], found.unflatten(-1, (count, 64)).amax(-1), "maxima")
    depths = torch.zeros(len(blocks), heads, head_dim, dtype=torch.int64, device=device).scatter_(-1, channels.long(), 4)
    codes = pack.quantise(keys[0, : blocks[0] * 64], scales[0, :, : blocks[0]])
    same = scan.scan_planes(query[0, 0], depths[0, 0], pack.pack_planes(codes), scales[0, :, : blocks[0]]) * 0.5
    close(scores[0, 0, :, : blocks[0] * 64], same, "the plane scan of the same channels at depth 4")


@check(
    [
        {"group": 4, "head_dim": 96, "blocks": [3], "size": 8},
        {"group": 3, "head_dim": 64, "blocks": [6, 1], "size": 16},
        {"group": 2, "head_dim": 64, "blocks": [9, 5], "size": 8, "programs": 2},
    ],
    [{"group": 4, "head_dim": 128, "blocks": [16384], "size": 8}, {"group": 7, "head_dim": 96, "blocks": [600, 3], "size": 32}],
)
def check_landmark(device: str, group: int, head_dim: int, blocks: list[int], size: int, programs: int | None = None) -> None:
    from fathom_eval.kernels.landmark import triton as kernel

    capacity = 512 if device == "cuda" else 4
    means = random(2, max(blocks) * 64 // size, head_dim, device=device, dtype=torch.float16)
    query = random(len(blocks), 2, group, head_dim, device=device, seed=4)
    table = SegmentTable.of(split(means, capacity * 64 // size, 1, device), device, rows=len(blocks))
    shape = (len(blocks), 2, group, table.capacity * capacity)
    scores = poisoned(*shape[:-1], shape[-1] * 64 // size, dtype=torch.float32, device=device)
    maxima = poisoned(*shape, dtype=torch.float32, device=device)
    with patch.dict(kernel.PROGRAMS, {} if programs is None else {"host": programs}):
        kernel.scan_landmarks(query, table, size, whole(blocks, device), scores, maxima, 2.0)
    for row, count in enumerate(blocks):
        used = count * 64 // size
        close(scores[row, ..., :used], landmark.reference.scan_landmarks(query[row], means[:, :used]) * 2, "scores")
        equal(maxima[row, ..., :count], scores[row, ..., :used].unflatten(-1, (count, -1)).amax(-1), "maxima")
        assert scores[row, ..., used:].isnan().all()
        assert maxima[row, ..., count:].isnan().all()


@check([{"tail": 20, "centred": True}], [{"tail": 95, "centred": False}, {"tail": 128, "centred": True}])
def check_tail(device: str, tail: int, centred: bool) -> None:
    from fathom_eval.kernels.scan import triton as kernel

    query, keys = random(2, 2, 3, 96, device=device), random(2, 2, tail, 96, device=device, seed=1)
    offset = random(2, 2, 3, device=device, seed=2) if centred else None
    scores = poisoned(2, 2, 3, tail, dtype=torch.float32, device=device)
    kernel.score_tail(query, keys, offset, whole([3, 0], device), whole([3 * 64 + tail, 7], device), scores, 0.5)
    expected = query @ keys.transpose(-1, -2)
    if offset is not None:
        expected = expected - offset.unsqueeze(-1)
    close(scores[0], expected[0] * 0.5, "tail")
    close(scores[1, ..., :7], expected[1, ..., :7] * 0.5, "tail")
    assert scores[1, ..., 7:].isnan().all()


@check([{"capacity": 4, "segments": 2, "host": False}], [{"capacity": 512, "segments": 5, "host": True}])
def check_gather(device: str, capacity: int, segments: int, host: bool) -> None:
    from fathom_eval.kernels.gather import triton as kernel

    shape = (2, 16, 4, capacity)
    stored = [torch.randint(-(2**62), 2**62, shape, generator=torch.Generator().manual_seed(i)) for i in range(segments)]
    source = SegmentTable.of([part.pin_memory() if host else part.to(device) for part in stored], device)
    target = SegmentTable.of([poisoned(*shape, dtype=torch.int64, device=device) for _ in stored], device)
    channels = torch.stack([torch.randperm(16, generator=torch.Generator().manual_seed(i)) for i in range(2)])[None].int()
    depths = torch.tensor([4, 3, 3, 2, 1, 1, 1] + [0] * 9).expand(1, 2, 16).contiguous().int()
    blocks = whole([capacity * (segments - 1)], device)
    kernel.gather_channels(source, target, channels.to(device), depths.to(device), blocks, capacity * 8, 4, capacity)
    for index, part in enumerate(stored):
        expected = poisoned(*shape, dtype=torch.int64, device="cpu")
        if index < segments - 1:
            gather.reference.gather_channels(part, channels[0], depths[0] * capacity * 8, expected)
        equal(target.segments[0][index].cpu(), expected, f"segment {index}")
