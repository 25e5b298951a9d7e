"""The transformers attention plug-in, and exact attention over a selection.

``fathom_eval`` is registered as an attention implementation through transformers' public interface, together with its mask
function, so that a chunk over a cached prefix stays causal. Without a ``branches`` keyword it is the library's own SDPA (the dense
prefill, reported to an observer if there is one); with one, each row of the batch is a branch that attends by its own method.
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
    """Sees the post-RoPE queries of every layer and chunk of a dense prefill."""

    def observe(self, layer: int, query: Tensor) -> None:
        """``query``: ``[H, G, m, D]``."""


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
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function that transformers calls: ``query [R, Hq, m, D]`` to ``[R, m, Hq, D]``."""
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    rows, query_heads, length, head_dim = query.shape
    heads = key.shape[1]
    grouped = query.view(rows, heads, query_heads // heads, length, head_dim)
    if branches is not None:
        scale = head_dim**-0.5 if scaling is None else scaling
        output = branches.attend(layer, grouped.squeeze(-2), key, value, scale)
        return output.reshape(rows, 1, query_heads, -1).to(query.dtype), None
    if observer is not None:
        observer.observe(layer, grouped[0])
    return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **kwargs)


AttentionInterface.register(IMPLEMENTATION, attention)
AttentionMaskInterface.register(IMPLEMENTATION, sdpa_mask)


def attend_selected(query: Tensor, keys: Tensor, values: Tensor, scaling: float, mask: Tensor | None = None) -> Tensor:
    """Exact attention over a selected set, in fp32.

    Args:
        query: ``[R, H, G, D]``.
        keys, values: The selected rows of each query head, ``[R, H, G, k, D]``.
        mask: ``[R, H, G, k]``, False on rows that do not take part.

    Returns:
        fp32 ``[R, H, G, D]``.
    """
    logits = (keys.float() @ (query.float() * scaling).unsqueeze(-1)).squeeze(-1)
    if mask is not None:
        logits = logits.masked_fill(~mask, -torch.inf)
    return (logits.softmax(-1).unsqueeze(-2) @ values.float()).squeeze(-2)


def attend_everything(
    query: Tensor, prefix_keys: Tensor, prefix_values: Tensor, keys: Tensor, values: Tensor, scaling: float
) -> Tensor:
    """Dense attention of many branches over a shared prefix and their own tails, in fp32, without copying the prefix.

    Args:
        query: ``[R, H, G, D]``.
        prefix_keys, prefix_values: ``[H, n, D]``.
        keys, values: ``[R, H, T, D]``.

    Returns:
        fp32 ``[R, H, G, D]``.
    """
    rows, heads, group, head_dim = query.shape
    scaled = query.float() * scaling
    folded = scaled.transpose(0, 1).reshape(heads, rows * group, head_dim)
    shared = (folded @ prefix_keys.float().transpose(-1, -2)).unflatten(1, (rows, group)).transpose(0, 1)
    own = scaled @ keys.float().transpose(-1, -2)
    weights = torch.cat([shared, own], dim=-1).softmax(-1)
    of_prefix, of_tail = weights.split([prefix_keys.shape[1], keys.shape[2]], dim=-1)
    mixed = of_prefix.transpose(0, 1).reshape(heads, rows * group, -1) @ prefix_values.float()
    return mixed.unflatten(1, (rows, group)).transpose(0, 1) + of_tail @ values.float()
