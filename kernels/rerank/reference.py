"""Exact rescoring of candidates, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_best(query: Tensor, keys: Tensor, members: Tensor, always: Tensor, count: int, shared: bool) -> Tensor:
    """Each head's best candidates by exact score, as masks.

    Args:
        query: ``[G, D]``.
        keys: ``[u, D]``.
        members: int32 ``[u]``, bit g set where the row is a candidate of head g.
        always: ``[u]``, rows that every head attends to and that do not compete.
        count: Rows a head keeps.
        shared: Every head attends to what any head keeps.

    Returns:
        int32 ``[u]``, the new masks.
    """
    group = query.shape[0]
    everyone = (1 << group) - 1
    scores = query.float() @ keys.float().T
    kept = torch.zeros_like(members)
    for head in range(group):
        candidates = (((members >> head) & 1 == 1) & ~always).nonzero().flatten()
        order = scores[head, candidates].sort(descending=True, stable=True).indices[:count]
        kept[candidates[order]] |= 1 << head
    if shared:
        kept[kept != 0] = everyone
    return torch.where(always, everyone, kept)
