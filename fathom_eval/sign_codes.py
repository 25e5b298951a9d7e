"""Keys as Self-Indexing KVCache retrieves by them: the signs of a few channels name a centroid (arXiv:2603.14224).

Shapes: H KV heads, D channels, n tokens, 2^g centroids for every g channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.coded import CodedStore, Part
from fathom_eval.stores import Store, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer


@dataclass(frozen=True)
class SignCodeSpec(StoreSpec):
    """One bit a channel: the sign of the key less its channel's median over the prefix.

    The signs of ``group`` consecutive channels name one of 2^group centroids, each the mean of the prefix's keys with these signs. Medians
    and centroids stay as the prefix made them.

    Attributes:
        group: Channels of a centroid; divides D.
    """

    group: int = 4

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        heads, _, channels = layer.keys.shape
        keys = layer.keys.float()
        median = keys.median(-2).values
        store = SignCodeStore((heads,), channels, median, _centroids(keys - median.unsqueeze(-2), self.group))
        store.append(layer.keys[:, :tokens])
        return store


class SignCodeStore(CodedStore):
    """Signs of ``group`` channels as one number, ``[…, n, D / group]``."""

    def __init__(self, lead: tuple[int, ...], channels: int, median: Tensor, centroids: Tensor) -> None:
        super().__init__(lead, channels)
        self._median, self._centroids = median, centroids
        self._group = centroids.shape[-1]
        self.parts = (Part(self._group, "code"),)

    def empty(self, rows: int) -> Store:
        return SignCodeStore((rows, self.lead[-1]), self.channels, self._median, self._centroids)

    def encode(self, keys: Tensor) -> tuple[Tensor, ...]:
        return (_labels(keys.float() - self._median.unsqueeze(-2), self._group),)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        heads, groups, labels, group = self._centroids.shape
        first = torch.arange(0, heads * groups * labels, labels, dtype=torch.int32, device=parts[0].device)
        rows = parts[0].int() + first.view(heads, 1, groups)
        values: Tensor = self._centroids.view(-1, group)[rows]
        return values.flatten(-2)

    def offset(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> Tensor | None:
        return query.float() @ self._median.unsqueeze(-1)


def _labels(centred: Tensor, group: int) -> Tensor:
    """Which centroid the signs name, uint8 ``[…, n, D / group]``: bit i is set where channel i of the group is not negative."""
    bits: Tensor = (centred >= 0).unflatten(-1, (-1, group))
    shifts = torch.arange(group, device=centred.device, dtype=torch.uint8)
    return torch.bitwise_left_shift(bits.byte(), shifts).sum(-1, dtype=torch.uint8)


def _centroids(centred: Tensor, group: int) -> Tensor:
    """Mean of the keys of each label, fp32 ``[H, D / group, 2^group, group]``.

    Signs that no key of the prefix has get what they say of each channel alone: its mean magnitude with that sign.
    """
    count = 2**group
    rows = centred.unflatten(-1, (-1, group)).transpose(1, 2)  # [H, D / group, n, group]
    labels = _labels(centred, group).transpose(-1, -2).unsqueeze(-1)  # [H, D / group, n, 1]
    # One label at a time: sums in a fixed order, where scatter_add on a GPU has none.
    chosen = [labels == number for number in range(count)]
    total = torch.stack([(rows * mask).sum(2) for mask in chosen], dim=2)
    found = torch.stack([mask.sum(2) for mask in chosen], dim=2)
    signs = ((torch.arange(count, device=centred.device).unsqueeze(-1) >> torch.arange(group, device=centred.device)) & 1) * 2 - 1
    alone = centred.abs().mean(-2).unflatten(-1, (-1, 1, group)) * signs
    return torch.where(found > 0, total / found.clamp_min(1), alone)
