"""Exact top-k with a range and a count of its own for every row, and the distinct tokens of a group, in torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fathom_eval.kernels.topk.reference import NONE
from fathom_eval.selection import settle_ties, top_indices


def choose_tokens(scores: Tensor, starts: Sequence[int], stops: Sequence[int], counts: Sequence[int]) -> Tensor:
    """Each row's ``counts`` best tokens of ``[start, stop)``, of equal scores the lower ones.

    Args:
        scores: ``[R, H, G, N]``.

    Returns:
        int64 ``[R, H, G, max(counts)]`` in no particular order, filled up with :data:`NONE`.
    """
    ranges = list(zip(starts, stops, strict=True))
    if len(set(ranges)) == 1:
        return _largest(scores, ranges[0], counts)
    lists = torch.full((*scores.shape[:-1], max(counts)), NONE, dtype=torch.int64, device=scores.device)
    for place in dict.fromkeys(ranges):
        rows = [row for row, other in enumerate(ranges) if other == place]
        best = _largest(scores[rows_at(rows)], place, [counts[row] for row in rows])
        lists[rows_at(rows), ..., : best.shape[-1]] = best
    return lists


def count_rows(lists: Tensor, tokens: int, padded: bool = True) -> Tensor:
    """How many distinct tokens below ``tokens`` the lists of a group hold, ``[R, H, G, C]`` to int64 ``[R, H]``.

    Args:
        padded: Whether there may be :data:`NONE` in them.
    """
    flat = lists.flatten(-2)
    if not padded:
        return torch.zeros(*flat.shape[:2], tokens, dtype=torch.bool, device=lists.device).scatter_(-1, flat, True).sum(-1)
    seen = torch.zeros(*flat.shape[:2], tokens + 1, dtype=torch.bool, device=lists.device)
    return seen.scatter_(-1, flat.clamp_max(tokens), True)[..., :tokens].sum(-1)


def rows_at(rows: Sequence[int]) -> slice | list[int]:
    """Rows as a slice where they are evenly spaced, which costs no copy."""
    first, last = rows[0], rows[-1]
    step = rows[1] - first if len(rows) > 1 else 1
    return slice(first, last + 1, step) if step > 0 and list(rows) == list(range(first, last + 1, step)) else list(rows)


def _largest(scores: Tensor, candidates: tuple[int, int], counts: Sequence[int]) -> Tensor:
    """:func:`choose_tokens` of rows that have one range."""
    start, stop = candidates
    scores, most = scores[..., start:stop], max(counts)
    if len(set(counts)) == 1:
        return top_indices(scores, most) + start
    if most == stop - start:
        parts = [top_indices(row, count) + start for row, count in zip(scores, counts, strict=True)]
        return torch.stack([torch.nn.functional.pad(part, (0, most - part.shape[-1]), value=NONE) for part in parts])
    values, indices = scores.topk(most + 1, dim=-1)
    wanted = torch.tensor(counts, device=scores.device).view(-1, 1, 1, 1)
    at = wanted.expand(*scores.shape[:-1], 1)
    threshold = values.gather(-1, (at - 1).clamp_min(0))
    inside = (torch.arange(most, device=scores.device) < wanted).expand(*scores.shape[:-1], most)
    found = (indices[..., :most] + start).masked_fill(~inside, NONE)
    tied = (threshold == values.gather(-1, at)).squeeze(-1)
    if tied.any():
        kept = settle_ties(scores[tied], threshold[tied], at[tied])
        settled = torch.full((len(kept), most), NONE, dtype=torch.int64, device=scores.device)
        settled[inside[tied]] = kept.nonzero()[:, -1] + start
        found[tied] = settled
    return found
