"""Key stores: what a scan reads. A store is built once per prefix and shared by every method that reads it.

Shapes: R branches, H KV heads, G query heads a KV head, D channels. A store's keys are ``[H, n, D]`` when it is shared by all
branches and ``[R, H, n, D]`` when it holds the blocks that each branch sealed itself.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.reads import Reads

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer


class DeferredReads(ABC):
    """What a scan read, noted in a form from which :class:`~fathom_eval.reads.Reads` are counted later, for many scans at once.

    Attributes:
        tokens: Tokens scanned.
    """

    tokens: int

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Of the layer that was scanned."""

    @classmethod
    @abstractmethod
    def totals(cls, noted: Sequence[DeferredReads]) -> tuple[Tensor, Tensor]:
        """Bits and channels read in these scans of R branches, summed over scans and KV heads, both int64 ``[R]``.

        Args:
            noted: Scans of this class on one device.
        """


class Store(ABC):
    """Sealed keys in the form that a scan reads. Grows by whole blocks of 64 tokens."""

    tokens: int = 0

    @property
    @abstractmethod
    def bytes(self) -> int:
        """Memory that the store takes beside the model's own keys."""

    @abstractmethod
    def append(self, keys: Tensor) -> None:
        """Seal keys ``[…, 64·b, D]``. Nothing that was sealed before changes."""

    def seal(self, keys: Tensor, values: Tensor) -> None:
        """:meth:`append` for a store that holds something of the values too, ``[…, 64·b, D]``."""
        self.append(keys)

    @abstractmethod
    def empty(self, rows: int) -> Store:
        """A store of the same kind and basis with no tokens, whose keys are ``[rows, H, n, D]``."""

    def project(self, query: Tensor) -> Tensor:
        """The query in the store's basis, ``[R, H, G, D]``; a method plans its read on this."""
        return query

    @abstractmethod
    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Reads]:
        """Approximate q·k of every sealed key.

        Every store approximates q·k itself: a centred store adds q·μ back. A key therefore scores alike, up to quantisation,
        before its block is sealed (exactly) and after.

        Args:
            query: ``[R, H, G, D]``, unscaled.
            projected: The same queries from :meth:`project`.
            plan: The read plan of each branch, ``[R, H, D]`` depths for stores that have depths, otherwise None.

        Returns:
            Scores fp32 ``[R, H, G, tokens]`` and what was read. A score of −∞ or +∞ means what
            :class:`~fathom_eval.methods.base.Method` says under ``ranks_all`` and ``forces``, which the method must declare.
        """

    def scan_into(
        self, query: Tensor, projected: Tensor, plan: Tensor | None, out: Tensor, own: Store | None = None
    ) -> Reads | DeferredReads:
        """:meth:`scan` this store and then ``own``, the blocks that the branches sealed themselves, into ``out [R, H, G, tokens]``.

        Raises:
            ValueError: The scores are not of the shape that they must be.
        """
        reads, done = None, 0
        for store in (self, own):
            if store is None or not store.tokens:
                continue
            scores, touched = store.scan(query, projected, plan)
            if scores.shape != (*query.shape[:3], store.tokens):
                raise ValueError(f"its store gave scores of shape {tuple(scores.shape)} for {store.tokens} sealed tokens")
            out[..., done : done + store.tokens] = scores
            done += store.tokens
            reads = touched if reads is None else reads + touched
        return Reads.none(query.shape[0], query.shape[1], query.device) if reads is None else reads

    def coverage(self, projected: Tensor, plan: Tensor | None) -> Tensor:
        """The share ‖q̂‖₁/‖q‖₁ of the query's mass on the channels that are read, ``[R, H, G]`` (SparQ's temperature)."""
        return torch.ones(projected.shape[:-1], device=projected.device)


@dataclass(frozen=True)
class StoreSpec(ABC):
    """Names a store. Equal specs share one store."""

    @abstractmethod
    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        """The store of the layer's first ``tokens`` keys."""


@dataclass(frozen=True)
class ExactSpec(StoreSpec):
    """The model's own keys, scored in fp32: the oracle's store."""

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        return ExactStore(layer.keys[:, :tokens])


class ExactStore(Store):
    """Keys as they are. A control, so its reads are not counted as a scan."""

    def __init__(self, keys: Tensor) -> None:
        self._keys = keys
        self.tokens = keys.shape[-2]

    @property
    def bytes(self) -> int:
        return 0

    def append(self, keys: Tensor) -> None:
        self._keys = torch.cat([self._keys, keys], dim=-2)
        self.tokens = self._keys.shape[-2]

    def empty(self, rows: int) -> Store:
        return ExactStore(self._keys.new_empty(rows, self._keys.shape[-3], 0, self._keys.shape[-1]))

    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Reads]:
        scores = batched_scores(query.float(), self._keys.float().transpose(-1, -2))
        return scores, Reads.none(query.shape[0], query.shape[1], query.device)


@dataclass(frozen=True)
class UnreadSpec(StoreSpec):
    """Nothing of the keys: for methods that rank by something else, such as recency or the attention received."""

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        return UnreadStore(layer.keys.shape[-3], tokens)


class UnreadStore(Store):
    """Every sealed key scores 0, and none is read."""

    def __init__(self, heads: int, tokens: int = 0) -> None:
        self._heads = heads
        self.tokens = tokens

    @property
    def bytes(self) -> int:
        return 0

    def append(self, keys: Tensor) -> None:
        self.tokens += keys.shape[-2]

    def empty(self, rows: int) -> Store:
        return UnreadStore(self._heads)

    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Reads]:
        rows, heads, group, _ = query.shape
        scores = torch.zeros((), device=query.device).expand(rows, heads, group, self.tokens)
        return scores, dataclasses.replace(Reads.none(rows, heads, query.device), tokens=self.tokens)


@dataclass(frozen=True)
class LandmarkSpec(StoreSpec):
    """Mean keys of short runs of tokens in fp16 (the paper's ShadowKV-style block landmark).

    Attributes:
        size: Tokens a landmark; divides 64.
    """

    size: int = 8

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        store = LandmarkStore(layer.keys[:, :0], self.size)
        store.append(layer.keys[:, :tokens])
        return store


class LandmarkStore(Store):
    """One fp16 mean key for every ``size`` tokens; each token scores as its landmark does."""

    def __init__(self, keys: Tensor, size: int) -> None:
        self._size = size
        self._landmarks = keys.to(torch.float16)

    @property
    def bytes(self) -> int:
        return self._landmarks.nbytes

    def append(self, keys: Tensor) -> None:
        """Seal keys ``[…, 64·b, D]``.

        Raises:
            ValueError: A mean key is not finite or overflows fp16; the message names the KV heads.
        """
        from fathom_eval.coded import half  # it builds on this module

        means = half(keys.float().unflatten(-2, (-1, self._size)).mean(-2))
        self._landmarks = torch.cat([self._landmarks, means], dim=-2)
        self.tokens = self._landmarks.shape[-2] * self._size

    def empty(self, rows: int) -> Store:
        heads, channels = self._landmarks.shape[-3], self._landmarks.shape[-1]
        return LandmarkStore(self._landmarks.new_empty(rows, heads, 0, channels), self._size)

    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Reads]:
        scores = batched_scores(query.float(), self._landmarks.float().transpose(-1, -2))
        rows, heads, _, channels = query.shape
        zero = torch.zeros(rows, heads, dtype=torch.int64, device=query.device)
        entries = self._landmarks.shape[-2] * channels
        reads = Reads(zero, zero, zero + 16 * entries, zero + channels, self.tokens)
        return scores.unsqueeze(-1).expand(*scores.shape, self._size).flatten(-2), reads


def batched_scores(queries: Tensor, values: Tensor) -> Tensor:
    """``[R, H, G, C] × […, H, C, n] → [R, H, G, n]``; a store that all branches share is read once for all of them."""
    if values.dim() == 4:
        return queries @ values
    rows, heads, group, channels = queries.shape
    folded = queries.transpose(0, 1).reshape(heads, rows * group, channels) @ values
    return folded.view(heads, rows, group, -1).transpose(0, 1)


def score_into(folded: Tensor, values: Tensor, out: Tensor) -> None:
    """``[H, R·G, C] × [H, C, n]`` into ``out [R, H, G, n]``, without a copy where a head's rows of ``out`` are evenly spaced."""
    rows, heads, group, tokens = out.shape
    by_head = out.transpose(0, 1)
    if by_head.stride(1) == group * by_head.stride(2) and by_head.stride(3) == 1:
        torch.bmm(folded, values, out=by_head.view(heads, rows * group, tokens))
    else:
        by_head.copy_((folded @ values).view(heads, rows, group, tokens))
