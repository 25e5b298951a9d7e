"""Exact attention of a group over its fetched rows and its tail, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def attend_rows(query: Tensor, keys: Tensor, values: Tensor, members: Tensor, scaling: float) -> Tensor:
    """Attention of each query head over the rows whose mask names it.

    Args:
        query: ``[G, D]``.
        keys, values: ``[u, D]``, the fetched rows in front of the tail's.
        members: int32 ``[u]``, bit g set where head g attends to the row; every head has a row.
        scaling: Multiplies q·k.

    Returns:
        fp32 ``[G, D]``.
    """
    heads = torch.arange(query.shape[0], device=query.device).unsqueeze(-1)
    attends = (members >> heads) & 1 == 1
    logits = (query.float() * scaling) @ keys.float().T
    return logits.masked_fill(~attends, -torch.inf).softmax(-1) @ values.float()
