"""Exact top-k through block maxima, in torch (the candidates and the always-kept tokens are those of fathom_eval.selection)."""

from __future__ import annotations

import torch
from torch import Tensor

from fathom_eval.selection import top_indices

NONE = 2**31 - 1
"""Fills the end of an index list that has fewer than its k entries; larger than any token, so lists stay sorted."""


def top_tokens(scores: Tensor, count: int, start: int, stop: int) -> Tensor:
    """The ``count`` best tokens of ``[start, stop)``.

    Args:
        scores: ``[..., N]``, one a token.

    Returns:
        int32 ``[..., count]``, ascending, filled up with :data:`NONE`.
    """
    found = min(count, max(stop - start, 0))
    out = torch.full((*scores.shape[:-1], count), NONE, dtype=torch.int32, device=scores.device)
    if found:
        best = top_indices(scores[..., start:stop], found) + start
        out[..., :found] = best.sort(-1).values.int()
    return out
