"""Attention of branches over a shared prefix on the GPU: pieces of rows in parallel, then one pass that joins them."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fathom_eval.kernels.branches import SharedRows
from fathom_eval.kernels.choose import Contest
from fathom_eval.kernels.choose.triton import narrow_lists

PIECE = 64
"""Listed rows that one program attends to."""

TILE = 64
"""Rows of dense attention that are read together."""

PROGRAMS = 528
"""Programs of dense attention: four for each multiprocessor of an H100 or H200."""

MOST_PIECES = 256
"""Of one query head, joined by one program."""


@triton.jit
def _load_rows(shared, own, token, inside, head, pair, prefix, tail, head_stride, head_dim, CHANNELS: tl.constexpr):
    """Rows of the given tokens in fp32 ``[tokens, channels]``, 0 where there is none."""
    channel = tl.arange(0, CHANNELS)[None, :]
    late = token >= prefix
    of_prefix = (inside & (token < prefix))[:, None] & (channel < head_dim)
    of_tail = (inside & late)[:, None] & (channel < head_dim)
    first = tl.load(shared + head * head_stride + token.to(tl.int64)[:, None] * head_dim + channel, mask=of_prefix, other=0.0)
    second = tl.load(own + (pair * tail + token - prefix)[:, None] * head_dim + channel, mask=of_tail, other=0.0)
    return first.to(tl.float32) + second.to(tl.float32)


@triton.jit(do_not_specialize=["tail", "tokens", "pieces", "list_pieces"])
def _attend_lists(
    query,
    keys,
    values,
    tail_keys,
    tail_values,
    lists,
    mask,
    table,
    workspace,
    scaling,
    rows,
    heads,
    prefix,
    tail,
    tokens,
    width,
    head_dim,
    key_stride,
    value_stride,
    list_pieces,
    pieces,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIECE: tl.constexpr,
    MASKED: tl.constexpr,
):
    piece = tl.program_id(0)
    line = tl.program_id(1).to(tl.int64)
    pair = line // GROUP
    row = pair // heads
    head = pair % heads
    start = tl.load(table + row)
    stop = tl.load(table + rows + row)
    if piece < list_pieces:
        slot = piece * PIECE + tl.arange(0, PIECE)
        listed = slot < (width if MASKED else tl.load(table + 2 * rows + row))
        inside = (tl.load(mask + line * width + slot, mask=listed, other=0) != 0) if MASKED else listed
        token = tl.load(lists + line * width + slot, mask=inside, other=0x7FFFFFFF)
        inside = inside & (token < tokens)
    else:
        slot = (piece - list_pieces) * PIECE + tl.arange(0, PIECE)
        inside = slot < start + tokens - stop
        token = tl.where(slot < start, slot, stop + slot - start)
    channel = tl.arange(0, CHANNELS)
    out = workspace + (line * pieces + piece) * (head_dim + 2)
    if tl.sum(inside.to(tl.int32), axis=0) == 0:
        tl.store(out + head_dim, float("-inf"))
        tl.store(out + head_dim + 1, 0.0)
    else:
        q = tl.load(query + line * head_dim + channel, mask=channel < head_dim, other=0.0).to(tl.float32) * scaling
        key = _load_rows(keys, tail_keys, token, inside, head, pair, prefix, tail, key_stride, head_dim, CHANNELS)
        value = _load_rows(values, tail_values, token, inside, head, pair, prefix, tail, value_stride, head_dim, CHANNELS)
        logits = tl.where(inside, tl.sum(key * q[None, :], axis=1), float("-inf"))
        largest = tl.max(logits, axis=0)
        weights = tl.exp(logits - largest)
        tl.store(out + channel, tl.sum(weights[:, None] * value, axis=0), mask=channel < head_dim)
        tl.store(out + head_dim, largest)
        tl.store(out + head_dim + 1, tl.sum(weights, axis=0))


@triton.jit
def _product(left, right, EXACT: tl.constexpr):
    """fp32 product. Operands of 16 bits are exact in it as they are; weights in fp32 are the sum of three of them."""
    if EXACT:
        return tl.dot(left, right, input_precision="ieee")
    first = left.to(right.dtype)
    rest = left - first.to(tl.float32)
    second = rest.to(right.dtype)
    third = (rest - second.to(tl.float32)).to(right.dtype)
    return tl.dot(first, right) + (tl.dot(second, right) + tl.dot(third, right))


@triton.jit(do_not_specialize=["tail", "length", "prefix_pieces", "pieces"])
def _attend_everything(
    query,
    keys,
    values,
    tail_keys,
    tail_values,
    workspace,
    scaling,
    heads,
    prefix,
    tail,
    head_dim,
    key_stride,
    value_stride,
    length,
    prefix_pieces,
    pieces,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
    EXACT: tl.constexpr,
):
    piece = tl.program_id(0)
    pair = tl.program_id(1).to(tl.int64)
    head = pair % heads
    if piece < prefix_pieces:
        first = piece * length
        last = tl.minimum(first + length, prefix)
        key_base = keys + head * key_stride
        value_base = values + head * value_stride
    else:
        first = (piece - prefix_pieces) * length
        last = tl.minimum(first + length, tail)
        key_base = tail_keys + pair * tail * head_dim
        value_base = tail_values + pair * tail * head_dim
    member = tl.arange(0, MEMBERS)
    channel = tl.arange(0, CHANNELS)
    known = (member < GROUP)[:, None] & (channel < head_dim)[None, :]
    q = tl.load(query + (pair * GROUP + member)[:, None] * head_dim + channel[None, :], mask=known, other=0.0)
    largest = tl.full([MEMBERS], float("-inf"), dtype=tl.float32)
    total = tl.zeros([MEMBERS], dtype=tl.float32)
    mixed = tl.zeros([MEMBERS, CHANNELS], dtype=tl.float32)
    for begin in range(first, last, TILE):
        token = begin + tl.arange(0, TILE)
        inside = (token < last)[:, None] & (channel < head_dim)[None, :]
        place = token.to(tl.int64)[:, None] * head_dim + channel[None, :]
        key = tl.load(key_base + place, mask=inside, other=0.0)
        value = tl.load(value_base + place, mask=inside, other=0.0)
        logits = tl.dot(q, tl.trans(key), input_precision="ieee") * scaling
        logits = tl.where((token < last)[None, :], logits, float("-inf"))
        above = tl.maximum(largest, tl.max(logits, axis=1))
        weights = tl.exp(logits - above[:, None])
        fading = tl.exp(largest - above)
        total = total * fading + tl.sum(weights, axis=1)
        mixed = mixed * fading[:, None] + _product(weights, value, EXACT)
        largest = above
    out = workspace + ((pair * GROUP + member) * pieces + piece) * (head_dim + 2)
    tl.store(out[:, None] + channel[None, :], mixed, mask=known)
    tl.store(out + head_dim, largest, mask=member < GROUP)
    tl.store(out + head_dim + 1, total, mask=member < GROUP)


@triton.jit(do_not_specialize=["pieces"])
def _join_pieces(workspace, out, head_dim, pieces, PIECES: tl.constexpr, CHANNELS: tl.constexpr):
    line = tl.program_id(0).to(tl.int64)
    piece = tl.arange(0, PIECES)
    channel = tl.arange(0, CHANNELS)
    base = workspace + (line * pieces + piece) * (head_dim + 2)
    largest = tl.load(base + head_dim, mask=piece < pieces, other=float("-inf"))
    weight = tl.exp(largest - tl.max(largest, axis=0))
    total = tl.sum(weight * tl.load(base + head_dim + 1, mask=piece < pieces, other=0.0), axis=0)
    # Nothing was written where a piece attends to nothing.
    inside = (largest > float("-inf"))[:, None] & (channel < head_dim)[None, :]
    mixed = tl.load(base[:, None] + channel[None, :], mask=inside, other=0.0)
    tl.store(out + line * head_dim + channel, tl.sum(mixed * weight[:, None], axis=0) / total, mask=channel < head_dim)


@triton.jit(do_not_specialize=["tail"])
def _score_lists(
    query,
    keys,
    tail_keys,
    lists,
    fetched,
    scores,
    heads,
    prefix,
    tail,
    width,
    head_dim,
    key_stride,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    PIECE: tl.constexpr,
):
    line = tl.program_id(1).to(tl.int64)
    pair = line // GROUP
    slot = tl.program_id(0) * PIECE + tl.arange(0, PIECE)
    inside = slot < tl.load(fetched + pair // heads)
    token = tl.load(lists + line * width + slot, mask=inside, other=0)
    channel = tl.arange(0, CHANNELS)
    q = tl.load(query + line * head_dim + channel, mask=channel < head_dim, other=0.0).to(tl.float32)
    key = _load_rows(keys, tail_keys, token, inside, pair % heads, pair, prefix, tail, key_stride, head_dim, CHANNELS)
    tl.store(scores + line * width + slot, tl.sum(key * q[None, :], axis=1), mask=inside)


def attend_lists(query: Tensor, shared: SharedRows, lists: Tensor, contest: Contest, scaling: float, mask: Tensor | None) -> Tensor:
    """See :func:`fathom_eval.kernels.branches.attend_lists`."""
    rows, heads, group, head_dim = query.shape
    lines, width, tokens = rows * heads * group, lists.shape[-1], shared.tokens
    keys, values, tail_keys, tail_values = _packed(shared)
    listed = max(contest.counts) if mask is None else width
    kept = max(start + tokens - stop for start, stop in zip(contest.starts, contest.stops, strict=True))
    list_pieces = triton.cdiv(listed, PIECE)
    pieces = list_pieces + triton.cdiv(kept, PIECE)
    workspace = torch.empty(lines * pieces * (head_dim + 2), dtype=torch.float32, device=query.device)
    channels = triton.next_power_of_2(head_dim)
    _attend_lists[(pieces, lines)](
        query.contiguous(),
        keys,
        values,
        tail_keys,
        tail_values,
        lists.contiguous(),
        lists if mask is None else mask.contiguous().view(torch.int8),
        contest.table,
        workspace,
        scaling,
        rows,
        heads,
        shared.prefix_tokens,
        tail_keys.shape[2],
        tokens,
        width,
        head_dim,
        keys.stride(0),
        values.stride(0),
        list_pieces,
        pieces,
        GROUP=group,
        CHANNELS=channels,
        PIECE=PIECE,
        MASKED=mask is not None,
        num_warps=4,
    )
    return _joined(workspace, query.shape, pieces)


def rerank_lists(query: Tensor, shared: SharedRows, lists: Tensor, contest: Contest) -> Tensor:
    """See :func:`fathom_eval.kernels.branches.rerank_lists`."""
    rows, heads, group, head_dim = query.shape
    keys, _, tail_keys, _ = _packed(shared)
    lists = lists.contiguous()
    width, fetched = lists.shape[-1], contest.table[3]
    scores = torch.empty(lists.shape, dtype=torch.float32, device=query.device)
    _score_lists[(triton.cdiv(max(contest.fetched), PIECE), rows * heads * group)](
        query.contiguous(),
        keys,
        tail_keys,
        lists,
        fetched,
        scores,
        heads,
        shared.prefix_tokens,
        tail_keys.shape[2],
        width,
        head_dim,
        keys.stride(0),
        GROUP=group,
        CHANNELS=triton.next_power_of_2(head_dim),
        PIECE=PIECE,
        num_warps=4,
    )
    narrow_lists(scores, lists, fetched, contest.table[2])
    return lists


def attend_everything(query: Tensor, shared: SharedRows, scaling: float) -> Tensor:
    """See :func:`fathom_eval.kernels.branches.attend_everything`."""
    rows, heads, group, head_dim = query.shape
    keys, values, tail_keys, tail_values = _packed(shared)
    prefix, tail = shared.prefix_tokens, tail_keys.shape[2]
    wanted = min(MOST_PIECES // 2, max(1, PROGRAMS // (rows * heads)))
    length = max(TILE, triton.cdiv(triton.cdiv(prefix, wanted), TILE) * TILE)
    prefix_pieces = triton.cdiv(prefix, length)
    pieces = prefix_pieces + triton.cdiv(tail, length)
    workspace = torch.empty(rows * heads * group * pieces * (head_dim + 2), dtype=torch.float32, device=query.device)
    _attend_everything[(pieces, rows * heads)](
        query.to(keys.dtype).contiguous(),
        keys,
        values,
        tail_keys,
        tail_values,
        workspace,
        scaling,
        heads,
        prefix,
        tail,
        head_dim,
        keys.stride(0),
        values.stride(0),
        length,
        prefix_pieces,
        pieces,
        GROUP=group,
        MEMBERS=max(16, triton.next_power_of_2(group)),
        CHANNELS=max(16, triton.next_power_of_2(head_dim)),
        TILE=TILE,
        EXACT=keys.dtype == torch.float32,
        num_warps=4,
        num_stages=3,
    )
    return _joined(workspace, query.shape, pieces)


def _joined(workspace: Tensor, shape: torch.Size, pieces: int) -> Tensor:
    out = torch.empty(shape, dtype=torch.float32, device=workspace.device)
    lines, head_dim = shape[:-1].numel(), shape[-1]
    padded = triton.next_power_of_2(pieces)
    _join_pieces[(lines,)](
        workspace, out, head_dim, pieces, PIECES=padded, CHANNELS=triton.next_power_of_2(head_dim), num_warps=8 if padded > 64 else 4
    )
    return out


def _packed(shared: SharedRows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The tensors as the kernels read them: rows one after the other, the heads of the prefix anywhere."""
    return _rows_packed(shared.keys), _rows_packed(shared.values), shared.tail_keys.contiguous(), shared.tail_values.contiguous()


def _rows_packed(rows: Tensor) -> Tensor:
    return rows if rows.stride()[1:] == (rows.shape[-1], 1) else rows.contiguous()
