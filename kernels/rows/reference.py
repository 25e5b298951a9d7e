"""The union of a group's selections and the fetch of its rows, in torch (k∪ of paper Eq. 1)."""

from __future__ import annotations

import torch
from torch import Tensor


def union_rows(indices: Tensor, sealed: int, tokens: int, sink: int, local: int, shared: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Which tokens a group attends to, and which of its query heads.

    Args:
        indices: Selected tokens of each head, ``[G, k]``; entries of at least ``tokens`` are ignored.
        sealed: Tokens whose rows lie in the store; the later ones are the tail.
        tokens: All tokens.
        sink, local: Tokens at either end that every head attends to.
        shared: Every head attends to the whole union.

    Returns:
        int32: the union's sealed tokens ``[u]``, ascending; a bit mask of the heads that attend to each, ``[u]``; the same mask for every
        tail token, ``[tokens - sealed]``.
    """
    group = indices.shape[0]
    attends = torch.zeros(group, tokens, dtype=torch.bool)
    for head, picked in enumerate(indices.tolist()):
        attends[head, [token for token in picked if token < tokens]] = True
    if shared:
        attends[:] = attends.any(0)
    attends[:, :sink] = True
    attends[:, max(tokens - local, 0) :] = True
    members = (attends.int() << torch.arange(group).unsqueeze(-1)).sum(0).int()
    rows = members[:sealed].nonzero().flatten().int()
    return rows, members[rows.long()], members[sealed:]


def fetch_rows(stored: Tensor, rows: Tensor) -> Tensor:
    """Rows of a store: ``[n, W]`` and ``[u]`` to ``[u, W]``."""
    return stored[rows.long()]
