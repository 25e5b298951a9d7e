"""The transformers attention plug-in.

``fathom_eval`` is registered as an attention implementation through transformers' public interface, together with its mask
function, so that a chunk over a cached prefix stays causal. Without a ``branches`` keyword it is the library's own SDPA (the dense
prefill, reported to an observer if there is one); with one, each row of the batch is a branch that attends by its own method. With a
``rehearsal`` keyword it attends to nothing: only the queries are wanted.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

IMPLEMENTATION = "fathom_eval"


class PrefillObserver(Protocol):
    """Sees the post-RoPE queries and keys of every layer and chunk of a dense prefill."""

    def observe(self, layer: int, query: Tensor, keys: Tensor, scaling: float) -> None:
        """Queries ``[H, G, m, D]`` of the chunk, and the keys ``[H, n, D]`` of all tokens up to its end."""


class QueryRehearsal(Protocol):
    """Wants to know the queries that an input leads to, and nothing else."""

    def take(self, layer: int, query: Tensor) -> None:
        """Post-RoPE queries ``[R, H, G, m, D]``."""


class BranchAttention(Protocol):
    """Attention of many branches over one shared prefix."""

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """Query ``[R, H, G, D]`` and each branch's own tail ``[R, H, T, D]`` to outputs ``[R, H, G, D]``."""


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    branches: BranchAttention | None = None,
    observer: PrefillObserver | None = None,
    rehearsal: QueryRehearsal | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: ``query [R, Hq, m, D]`` to ``[R, m, Hq, D]``."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    rows, query_heads, length, head_dim = query.shape
    heads = key.shape[1]
    grouped = query.view(rows, heads, query_heads // heads, length, head_dim)
    scale = head_dim**-0.5 if scaling is None else scaling
    if rehearsal is not None:
        rehearsal.take(layer, grouped)
        return query.new_zeros(rows, length, query_heads, value.shape[-1]), None
    if branches is not None:
        output = branches.attend(layer, grouped.squeeze(-2), key, value, scale)
        return output.reshape(rows, 1, query_heads, -1).to(query.dtype), None
    if observer is not None:
        observer.observe(layer, grouped[0], key[0], scale)
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)
