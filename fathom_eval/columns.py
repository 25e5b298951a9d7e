"""Keys in fp16, a channel at a time: what SparQ and Loki read as their authors published them.

Shapes: R branches, H KV heads, G query heads a KV head, D channels, n tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fathom_eval.calibration import Basis
from fathom_eval.calibration_file import SESSION, statistics_of
from fathom_eval.coded import CodedStore, Part, half
from fathom_eval.reads import Reads
from fathom_eval.stores import Store, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer

BITS = 16
"""The read depth of a channel that is read: fp16 has no planes."""


@dataclass(frozen=True)
class ColumnSpec(StoreSpec):
    """The keys' coordinates in fp16.

    Attributes:
        basis: The model's own channels, or the keys' Karhunen–Loève basis.
        centred: Project k − μ rather than k. Scores get back what μ has in the directions that are not read, either way: it is the same
            for every sealed key and changes no rank among them, but tokens that are not sealed are scored with it.
        statistics: Whose basis it is: the prefix's own (``session``) or a calibration's, by name or path.
    """

    basis: Literal["raw", "klt"] = "raw"
    centred: bool = True
    statistics: str = SESSION

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        heads, _, channels = layer.keys.shape
        basis = statistics_of(self.statistics, layer).key_statistics.basis if self.basis == "klt" else None
        store = ColumnStore((heads,), channels, basis, centred=self.centred)
        store.append(layer.keys[:, :tokens])
        return store


class ColumnStore(CodedStore):
    """Coordinates ``[…, n, D]``; a plan says for every channel whether it is read (depth 16) or not (0).

    Args:
        basis: None for the model's own channels.
        centred: Whether its mean is subtracted before the projection.
    """

    parts = (Part(BITS, "code"),)

    def __init__(self, lead: tuple[int, ...], channels: int, basis: Basis | None = None, *, centred: bool = True) -> None:
        super().__init__(lead, channels)
        self._basis, self._centred = basis, centred

    def empty(self, rows: int) -> Store:
        return ColumnStore((rows, self.lead[-1]), self.channels, self._basis, centred=self._centred)

    def project(self, query: Tensor) -> Tensor:
        return query.float() if self._basis is None else query.float() @ self._basis.vectors

    def encode(self, keys: Tensor) -> tuple[Tensor, ...]:
        if self._basis is None:
            return (half(keys),)
        centred = keys.float() - self._basis.mean.unsqueeze(-2) if self._centred else keys.float()
        return (half(centred @ self._basis.vectors),)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        return parts[0].float()

    def operand(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> Tensor:
        assert plan is not None, "a column store needs to know which channels are read"
        return projected * (plan > 0).unsqueeze(-2)

    def offset(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> Tensor | None:
        if self._basis is None:
            return None
        mean = self._basis.mean.unsqueeze(-1)
        if self._centred:
            return query.float() @ mean
        assert plan is not None
        return (projected * (plan == 0).unsqueeze(-2)) @ (self._basis.vectors.transpose(-1, -2) @ mean)

    def reads(self, query: Tensor, plan: Tensor | None) -> Reads:
        assert plan is not None
        channels = (plan > 0).sum(-1)
        zero = torch.zeros_like(channels)
        return Reads(channels * (BITS * self.tokens), zero, zero, channels, self.tokens)

    def coverage(self, projected: Tensor, plan: Tensor | None) -> Tensor:
        assert plan is not None
        magnitude = projected.abs()
        return (magnitude * (plan > 0).unsqueeze(-2)).sum(-1) / magnitude.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)


def column_bits(plan: Tensor) -> Tensor:
    """Bits per token that a plan of a column store reads, ``[R, H, D]`` to ``[R, H]``: fp16 takes no scales."""
    return plan.sum(-1)
