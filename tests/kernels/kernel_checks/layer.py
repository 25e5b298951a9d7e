"""Checks of what stands around the attention of a decode step: linear layer, norm, rotary embedding, gate, and the rerank of candidates."""

from __future__ import annotations

import torch

from fathom_eval.kernels import gate, linear, norm, rerank, rotary
from fathom_eval.kernels.linear import reference as linear_reference
from fathom_eval.kernels.rows import GroupRows
from kernel_checks.registry import POISON, check, close, equal, poisoned, random, whole


@check(
    [{"rows": 1, "width": 64, "outputs": 10, "bias": False}, {"rows": 3, "width": 1100, "outputs": 7, "bias": True}],
    [
        {"rows": 1, "width": 4096, "outputs": 24576, "bias": False},
        {"rows": 4, "width": 12288, "outputs": 4096, "bias": False},
        {"rows": 3, "width": 576, "outputs": 49152, "bias": True},
    ],
)
def check_linear(device: str, rows: int, width: int, outputs: int, bias: bool) -> None:
    from fathom_eval.kernels.linear import triton as kernel

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    inputs, weight = random(rows, width, device=device).to(dtype), random(outputs, width, device=device, seed=1).to(dtype)
    added = random(outputs, device=device, seed=2).to(dtype) if bias else None
    out = poisoned(rows, outputs, dtype=torch.float32, device=device)
    kernel.linear(inputs, weight, added, out)
    close(out, linear_reference.linear(inputs, weight, added), "outputs", 1e-5)
    if device == "cpu":
        again = poisoned(rows, outputs, dtype=torch.float32, device=device)
        linear.linear(inputs, weight, added, again)
        close(again, out, "dispatched outputs", 1e-5)


@check([{"rows": 2, "width": 96, "delta": True}, {"rows": 1, "width": 64, "delta": False}], [{"rows": 4, "width": 4096, "delta": True}])
def check_norm(device: str, rows: int, width: int, delta: bool) -> None:
    from fathom_eval.kernels.norm import triton as kernel

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    residual, weight = random(rows, width, device=device).to(dtype), random(width, device=device, seed=1).to(dtype)
    added = random(rows, width, device=device, seed=2).to(dtype) if delta else None
    expected_residual = residual.cpu().clone()
    expected = torch.empty_like(expected_residual)
    norm.add_norm(expected_residual, None if added is None else added.cpu(), weight.cpu(), 1e-5, expected)
    out = poisoned(rows, width, dtype=dtype, device=device)
    kernel.add_norm(residual, added, weight, 1e-5, out)
    equal(residual.cpu(), expected_residual, "residual")
    close(out.cpu(), expected, "normalised", 2**-7 if device == "cuda" else 1e-5)


@check([{"rows": 2, "width": 700}], [{"rows": 4, "width": 12288}])
def check_gate(device: str, rows: int, width: int) -> None:
    from fathom_eval.kernels.gate import triton as kernel

    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    both, out = random(rows, 2 * width, device=device).to(dtype), poisoned(rows, width, dtype=dtype, device=device)
    kernel.silu_gate(both, out)
    close(out.cpu(), gate.reference.silu_gate(both.cpu()), "gated", 2**-7 if device == "cuda" else 1e-5)


@check(
    [{"group": 3, "head_dim": 96, "qk_norm": True}, {"group": 1, "head_dim": 64, "qk_norm": False}],
    [{"group": 4, "head_dim": 128, "qk_norm": True}, {"group": 3, "head_dim": 64, "qk_norm": False}],
)
def check_rotary(device: str, group: int, head_dim: int, qk_norm: bool) -> None:
    from fathom_eval.kernels.rotary import triton as kernel

    rows, heads, tail, first = 2, 2, 95, 100
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    projected = random(rows, (group + 2) * heads * head_dim, device=device).to(dtype)
    norms = [random(head_dim, device=device, seed=seed).to(dtype) if qk_norm else None for seed in (1, 2)]
    angles = random(300, head_dim // 2, device=device, seed=3)
    sealed, tokens = whole([1, 2], device), whole([101, 64 * 2 + 95], device)
    shapes = [(rows, heads, group, head_dim), *[(rows, heads, tail, head_dim)] * 2]
    found = [poisoned(*shape, dtype=dtype, device=device) for shape in shapes]
    expected = [tensor.cpu().clone() for tensor in found]
    kernel.rotate_heads(projected, *norms, 1e-6, angles.cos(), angles.sin(), first, sealed, tokens, *found)
    plain = [None if part is None else part.cpu() for part in norms]
    cosines, sines = angles.cpu().cos(), angles.cpu().sin()
    rotary.rotate_heads(projected.cpu(), *plain, 1e-6, cosines, sines, first, sealed.cpu(), tokens.cpu(), *expected)
    for what, mine, right in zip(("query", "keys", "values"), found, expected, strict=True):
        equal(mine.cpu().isnan(), right.isnan(), f"written {what}")
        close(mine.cpu().nan_to_num(), right.nan_to_num(), what, 2**-7 if device == "cuda" else 1e-5)


@check(
    [
        {"group": 4, "count": 9, "tokens": 300, "shared": False},
        {"group": 3, "count": 20, "tokens": 90, "shared": True},
        {"group": 1, "count": 50, "tokens": 3, "shared": False},
    ],
    [{"group": 4, "count": 476, "tokens": 2**17 + 50, "shared": False}, {"group": 7, "count": 300, "tokens": 5000, "shared": True}],
)
def check_rerank(device: str, group: int, count: int, tokens: int, shared: bool) -> None:
    from fathom_eval.kernels.rerank import triton as kernel

    sink, local, tail, heads, head_dim = 4, 32, 95, 2, 128 if device == "cuda" else 48
    sealed = max(tokens - local, 0) // 64
    union = GroupRows.allocate(1, heads, group, 2 * count, sink, local, tail, device)
    capacity = union.rows.shape[-1]
    used = min(capacity, sealed * 64)
    generator = torch.Generator().manual_seed(7)
    union.counts.fill_(used)
    union.rows.fill_(POISON)
    union.members.fill_(POISON)
    for head in range(heads):
        picked = torch.randperm(max(sealed * 64, 1), generator=generator)[:used]
        union.rows[0, head, :used] = picked.int().to(device)
        union.members[0, head, :used] = torch.randint(1, 2**group, (used,), generator=generator).int().to(device)
    late = tokens - sealed * 64
    union.tail_members[..., :late] = torch.randint(0, 2**group, (1, heads, late), generator=generator).int().to(device)
    keys = poisoned(1, heads, capacity, head_dim, dtype=torch.float32, device=device)
    keys[:, :, :used] = random(1, heads, used, head_dim, device=device)
    tail_keys = poisoned(1, heads, tail, head_dim, dtype=torch.float32, device=device)
    tail_keys[:, :, :late] = random(1, heads, late, head_dim, device=device, seed=2)
    query = random(1, heads, group, head_dim, device=device, seed=3)
    kept = union.with_own_masks()
    for part in (kept.members, kept.tail_members):
        part.fill_(POISON)
    candidates = GroupRows(*(part.cpu().clone() for part in (union.rows, union.members, union.counts, union.tail_members)))
    lengths = (whole([sealed], device), whole([tokens], device))
    ordered = poisoned(rerank.ordered_size(1, heads, group, capacity, tail), dtype=torch.int32, device=device)
    kernel.keep_best(query, keys, tail_keys, *lengths, sink, local, count, union, kept, ordered, shared)
    plain = (part.cpu() for part in (query, keys, tail_keys, *lengths))
    expected = candidates.with_own_masks()
    rerank.keep_best(*plain, sink, local, count, candidates, expected, ordered.cpu(), shared=shared)
    equal(kept.members.cpu(), expected.members, "members")
    equal(kept.tail_members.cpu(), expected.tail_members, "tail members")
    equal(union.members.cpu(), candidates.members, "the candidates' own masks")
