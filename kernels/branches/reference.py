"""Attention of branches over a shared prefix, in torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.kernels.choose.reference import rows_at
from fathom_eval.kernels.topk.reference import NONE
from fathom_eval.selection import head_scores, top_indices

if TYPE_CHECKING:
    from fathom_eval.kernels.branches import SharedRows
    from fathom_eval.kernels.choose import Contest


def attend_lists(query: Tensor, shared: SharedRows, lists: Tensor, contest: Contest, scaling: float, mask: Tensor | None) -> Tensor:
    """See :func:`fathom_eval.kernels.branches.attend_lists`."""
    alike: dict[tuple[int, int, int], list[int]] = {}
    for row, key in enumerate(zip(contest.starts, contest.stops, contest.counts, strict=True)):
        alike.setdefault(key, []).append(row)
    if len(alike) == 1:
        [(start, stop, count)] = alike
        return _attend(query.float() * scaling, shared, _first(lists, count, mask), (start, stop), mask)
    scaled = query.float() * scaling
    output = torch.empty_like(scaled)
    for (start, stop, count), rows in alike.items():
        at = rows_at(rows)
        some = None if mask is None else mask[at]
        output[at] = _attend(scaled[at], shared.of(at), _first(lists[at], count, some), (start, stop), some)
    return output


def rerank_lists(query: Tensor, shared: SharedRows, lists: Tensor, contest: Contest, share: str) -> Tensor:
    """See :func:`fathom_eval.kernels.branches.rerank_lists`."""
    for (_, stop, count, fetched), rows in contest.alike().items():
        if fetched == count:
            continue
        at = rows_at(rows)
        # Ascending, so that of equal scores the lower token is kept.
        candidates = lists[at][..., :fetched].long().sort(-1).values
        some = shared.of(at)
        [keys] = _gather([(some.keys, some.tail_keys)], candidates, stop)
        exact = (keys.float() @ query[at].float().unsqueeze(-1)).squeeze(-1)
        lists[at, ..., :count] = candidates.gather(-1, top_indices(head_scores(exact, share), count))
        lists[at, ..., count:] = NONE
    return lists


def attend_everything(query: Tensor, shared: SharedRows, scaling: float) -> Tensor:
    """See :func:`fathom_eval.kernels.branches.attend_everything`."""
    rows, heads, group, head_dim = query.shape
    scaled = query.float() * scaling
    together = scaled.transpose(0, 1).reshape(heads, rows * group, head_dim)
    of_prefix = (together @ shared.keys.float().transpose(-1, -2)).view(heads, rows, group, -1).transpose(0, 1)
    of_tail = scaled @ shared.tail_keys.float().transpose(-1, -2)
    weights = torch.cat([of_prefix, of_tail], dim=-1).softmax(-1)
    of_prefix, of_tail = torch.split(weights, [shared.prefix_tokens, shared.tail_keys.shape[2]], dim=-1)
    mixed = of_prefix.transpose(0, 1).reshape(heads, rows * group, -1) @ shared.values.float()
    return mixed.view(heads, rows, group, -1).transpose(0, 1) + of_tail @ shared.tail_values.float()


def _first(lists: Tensor, count: int, mask: Tensor | None) -> Tensor:
    return lists[..., :count] if mask is None else lists


def _attend(scaled: Tensor, shared: SharedRows, chosen: Tensor, candidates: tuple[int, int], mask: Tensor | None) -> Tensor:
    """Attention over the chosen tokens, all below the end of the candidates, and those outside of the candidates."""
    start, stop = candidates
    keys, values = _gather(((shared.keys, shared.tail_keys), (shared.values, shared.tail_values)), chosen, stop)
    logits = (keys.float() @ scaled.unsqueeze(-1)).squeeze(-1)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    kept = _kept(shared.keys, shared.tail_keys, start, stop)
    weights = torch.cat([logits, scaled @ kept.float().transpose(-1, -2)], dim=-1).softmax(-1)
    of_chosen, of_kept = torch.split(weights, [chosen.shape[-1], kept.shape[-2]], dim=-1)
    kept = _kept(shared.values, shared.tail_values, start, stop)
    return (of_chosen.unsqueeze(-2) @ values.float()).squeeze(-2) + of_kept @ kept.float()


def _kept(shared: Tensor, own: Tensor, start: int, stop: int) -> Tensor:
    """Rows of the tokens before ``start`` and from ``stop`` on, ``[R, H, c, D]``."""
    n = shared.shape[1]
    of_prefix = [part.expand(len(own), -1, -1, -1) for part in (shared[:, :start], shared[:, min(stop, n) :]) if part.shape[1]]
    if start > n:  # a prompt shorter than the sink
        of_prefix.append(own[:, :, : start - n])
    return torch.cat([*of_prefix, own[:, :, max(stop - n, 0) :]], dim=2)


def _gather(parts: Sequence[tuple[Tensor, Tensor]], tokens: Tensor, stop: int) -> list[Tensor]:
    """Rows ``[R, H, G, m, D]`` of the given tokens, all of them below ``stop``, from each pair of a prefix and tails."""
    (shared, own), *_ = parts
    heads, n = shared.shape[:2]
    head = torch.arange(heads, device=tokens.device).view(-1, 1, 1)
    if stop <= n:
        at = tokens + head * n
        return [_flat_rows(prefix, at) for prefix, _ in parts]
    row = torch.arange(len(own), device=tokens.device).view(-1, 1, 1, 1)
    early = (tokens < n).unsqueeze(-1)
    at, late = tokens.clamp_max(n - 1) + head * n, (tokens - n).clamp_min(0) + (row * heads + head) * own.shape[2]
    return [torch.where(early, _flat_rows(prefix, at), _flat_rows(tail, late)) for prefix, tail in parts]


def _flat_rows(rows: Tensor, number: Tensor) -> Tensor:
    """Rows of ``[…, D]`` by their number over all leading dimensions, ``[…]`` to ``[…, D]``."""
    return rows.reshape(-1, rows.shape[-1]).index_select(0, number.flatten()).view(*number.shape, rows.shape[-1])
