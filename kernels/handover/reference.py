"""Where the rows of a step's lists lie, in torch."""

from __future__ import annotations

import torch
from torch import Tensor


def list_rows(addresses: Tensor, rows: Tensor, counts: Tensor, segment_tokens: int, units: int) -> Tensor:
    """Numbers of the rows that are wanted: address over bytes, less one.

    Args:
        addresses: int64 ``[R, S]``, of every row's segments ``[H, segment_tokens, …]``, in address units.
        rows: int32 ``[R, H, C]``, tokens.
        counts: int32 ``[R, H]``, entries of them in use.
        segment_tokens: Tokens of a segment.
        units: Address units of one token's row.

    Returns:
        int64, one list behind the other.
    """
    token = rows.long()
    used = torch.arange(rows.shape[-1], device=rows.device) < counts.unsqueeze(-1)
    token = token.masked_fill(~used, 0)
    start = addresses.unsqueeze(1).expand(-1, rows.shape[1], -1).gather(-1, token // segment_tokens) // units
    head = torch.arange(rows.shape[1], device=rows.device).view(1, -1, 1)
    return (start + head * segment_tokens + token % segment_tokens - 1)[used]
