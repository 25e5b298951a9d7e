"""Landmarks of short chunks, and the chunks that theirs describes worst (ShadowKV, arXiv:2410.21465 §4.2).

Shapes: H KV heads, n sealed tokens, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.stores import LandmarkStore, Store, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer


@dataclass(frozen=True)
class OutlierLandmarkSpec(StoreSpec):
    """fp16 mean keys, with outliers among the chunks of the prefix.

    Attributes:
        size: Tokens a chunk; divides 64.
        outlier: How many of the prefix's sealed chunks are outliers: those with the smallest cosine between a key and the mean key.
    """

    size: int = 8
    outlier: int = 48

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        store = OutlierLandmarkStore(layer.keys[:, :0], self.size)
        keys = layer.keys[:, :tokens]
        store.append(keys)
        store.outliers = outlier_tokens(keys, self.size, self.outlier)
        return store


class OutlierLandmarkStore(LandmarkStore):
    """See :class:`~fathom_eval.stores.LandmarkStore`.

    Attributes:
        outliers: Tokens of outlier chunks, boolean ``[…, H, n]``; there are none in blocks that are sealed later.
    """

    def __init__(self, keys: Tensor, size: int) -> None:
        super().__init__(keys, size)
        self._size = size
        self.outliers = torch.zeros(keys.shape[:-1], dtype=torch.bool, device=keys.device)

    @property
    def bytes(self) -> int:
        return super().bytes + self.outliers.nbytes

    def append(self, keys: Tensor) -> None:
        super().append(keys)
        self.outliers = torch.nn.functional.pad(self.outliers, (0, keys.shape[-2]))

    def empty(self, rows: int) -> Store:
        heads, channels = self._landmarks.shape[-3], self._landmarks.shape[-1]
        return OutlierLandmarkStore(self._landmarks.new_empty(rows, heads, 0, channels), self._size)


def outlier_tokens(keys: Tensor, size: int, count: int) -> Tensor:
    """The tokens of the ``count`` chunks whose mean key is farthest, by angle, from one of its keys.

    Args:
        keys: ``[H, n, D]``, n a multiple of ``size``.

    Returns:
        Boolean ``[H, n]``; of equal chunks the first are taken, and all of them if there are no more than ``count``.
    """
    chunks = keys.float().unflatten(-2, (-1, size))
    cosine = torch.nn.functional.cosine_similarity(chunks.mean(-2, keepdim=True), chunks, dim=-1).amin(-1)
    worst = cosine.sort(dim=-1, stable=True).indices[..., :count]
    return torch.zeros_like(cosine, dtype=torch.bool).scatter_(-1, worst, True).repeat_interleave(size, dim=-1)
