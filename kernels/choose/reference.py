"""Exact top-k with a range and a count of its own for every row, and the distinct tokens of a group, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fathom_eval.kernels.topk.reference import NONE
from fathom_eval.selection import top_indices


def choose_tokens(scores: Tensor, starts: Sequence[int], stops: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Each row's ``counts`` best tokens of ``[start, stop)``, of equal scores the lower ones.

    Args:
        scores: ``[R, H, G, N]``.

    Returns:
        int64 ``[R, H, G, max(counts)]`` in no particular order, filled up with :data:`NONE`.
    """
    ranges = list(zip(starts, stops, strict=True))
    if len(set(ranges)) == 1 and len(set(counts)) == 1:
        start, stop = ranges[0]
        return top_indices(scores[..., start:stop], counts[0]) + start
    lists = torch.full((*scores.shape[:-1], max(counts)), NONE, dtype=torch.int64, device=scores.device)
    for start, stop in dict.fromkeys(ranges):
        rows = [row for row, place in enumerate(ranges) if place == (start, stop)]
        wanted = [counts[row] for row in rows]
        at = rows_at(rows)
        best = _largest(scores[at][..., start:stop], wanted) + start
        for count in dict.fromkeys(wanted):
            some = [place for place, number in enumerate(wanted) if number == count]
            lists[rows_at([rows[place] for place in some]), ..., :count] = best[rows_at(some)][..., :count]
    return lists


def count_rows(lists: Tensor, tokens: int) -> Tensor:
    """How many distinct tokens below ``tokens`` the lists of a group hold, ``[R, H, G, C]`` to int64 ``[R, H]``."""
    seen = torch.zeros(*lists.shape[:2], tokens + 1, dtype=torch.bool, device=lists.device)
    return seen.scatter_(-1, lists.flatten(-2).clamp_max(tokens), True)[..., :tokens].sum(-1)


def rows_at(rows: Sequence[int]) -> slice | list[int]:
    """Rows as a slice where they are evenly spaced, which costs no copy."""
    first, last = rows[0], rows[-1]
    step = rows[1] - first if len(rows) > 1 else 1
    return slice(first, last + 1, step) if step > 0 and list(rows) == list(range(first, last + 1, step)) else list(rows)


def _largest(scores: Tensor, counts: Sequence[int]) -> Tensor:
    """Indices of each row's ``counts`` largest scores in the first places, ``[R, H, G, max(counts)]``; behind them are any."""
    most, width = max(counts), scores.shape[-1]
    if len(set(counts)) == 1:
        return top_indices(scores, most)
    if most == width:
        ends = [torch.nn.functional.pad(top_indices(row, count), (0, most - count)) for row, count in zip(scores, counts, strict=True)]
        return torch.stack(ends)
    values, indices = scores.topk(most + 1, dim=-1)
    wanted = torch.tensor(counts, device=scores.device).view(-1, 1, 1, 1)
    at = wanted.expand(*scores.shape[:-1], 1)
    threshold = values.gather(-1, (at - 1).clamp_min(0))
    if not (threshold == values.gather(-1, at)).any():
        return indices[..., :most]
    above, level = scores > threshold, scores == threshold
    kept = above | (level & (level.cumsum(-1) <= wanted - above.sum(-1, keepdim=True)))
    inside = (torch.arange(most, device=scores.device) < wanted).expand(*scores.shape[:-1], most)
    found = torch.zeros_like(indices[..., :most])
    found[inside] = kept.nonzero()[:, -1]
    return found
