"""Hash tables of sign random projections over centred keys (MagicPIG, arXiv:2410.16179 §4).

Shapes: R branches, H KV heads, G query heads a KV head, n sealed tokens, D channels, L tables.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.reads import Reads
from fathom_eval.stores import Store, StoreSpec, batched_scores

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer

ENTRY_BITS = 32
"""Of a token's number in a bucket."""

SINK = 4
"""First tokens, which the authors' code keeps out of the mean that keys are centred by, as it does the local window's."""

_COMPARED = 2**26
"""Hashes compared at a time (64 MB)."""


@dataclass(frozen=True)
class HashSpec(StoreSpec):
    """``tables`` hashes of ``bits`` sign projections each, drawn with ``seed``, of the keys less the mean of those that can be sampled.

    That is the mean of the prefix's sealed tokens beyond the sink; of all its tokens where there are none.
    """

    bits: int
    tables: int
    seed: int = 0

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        generator = torch.Generator().manual_seed(self.seed)
        projections = torch.randn(layer.keys.shape[-1], self.tables * self.bits, generator=generator).to(layer.keys.device)
        mean = layer.keys[:, SINK:tokens].float().mean(1) if tokens > SINK else layer.key_statistics.mean
        store = HashStore(projections, self.tables, mean, layer.keys[:, :0])
        store.append(layer.keys[:, :tokens])
        return store


class HashStore(Store):
    """The hashes of every key in every table.

    A key is sampled when at least two tables hash it as they do the query; it scores 0 then, and −∞ otherwise. What is read is what
    looking the query up touches: of each table the entries of one bucket, :data:`ENTRY_BITS` bits each; an entry that several
    heads of the group touch is counted once.

    Args:
        projections: fp32 ``[D, L·K]``.
        tables: L.
        mean: What keys are centred by, fp32 ``[H, D]``.
        keys: None yet, ``[…, H, 0, D]``; the keys themselves stay the model's, for the angles of those that are sampled.
    """

    def __init__(self, projections: Tensor, tables: int, mean: Tensor, keys: Tensor) -> None:
        self._projections, self._tables, self._mean = projections, tables, mean
        self._keys = keys
        self._hashes = torch.empty(*keys.shape[:-2], tables, 0, dtype=torch.int16, device=keys.device)

    @property
    def bytes(self) -> int:
        return self._hashes.nbytes

    def append(self, keys: Tensor) -> None:
        self._keys = torch.cat([self._keys, keys], dim=-2) if self.tokens else keys
        self._hashes = torch.cat([self._hashes, self._hash(keys.float() - self._mean.unsqueeze(-2)).transpose(-1, -2)], dim=-1)
        self.tokens = self._hashes.shape[-1]

    def empty(self, rows: int) -> Store:
        keys = self._keys.new_empty(rows, self._keys.shape[-3], 0, self._keys.shape[-1])
        return HashStore(self._projections, self._tables, self._mean, keys)

    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Reads]:
        rows, heads, group, _ = query.shape
        wanted = self._hash(query.float()).unsqueeze(-1)  # [R, H, G, L, 1]
        hashes = self._hashes.unsqueeze(-3)  # […, H, 1, L, n]
        width = max(1, _COMPARED // (rows * heads * group * self._tables))
        sampled, touched = [], torch.zeros(rows, heads, dtype=torch.int64, device=query.device)
        for start in range(0, self.tokens, width):
            same = wanted == hashes[..., start : start + width]
            sampled.append(same.sum(-2, dtype=torch.int16) >= 2)
            touched += same.any(2).sum((-1, -2))
        found = torch.cat(sampled, dim=-1)
        zero = torch.zeros_like(touched)
        scores = torch.zeros((), device=query.device).masked_fill(~found, -torch.inf)
        return scores, Reads(zero, zero, touched * ENTRY_BITS, zero, self.tokens)

    def cosine(self, query: Tensor) -> Tensor:
        """Cosines of queries ``[R, H, G, D]`` and centred keys, fp32 ``[R, H, G, tokens]``."""
        centred = torch.nn.functional.normalize(self._keys.float() - self._mean.unsqueeze(-2), dim=-1)
        return batched_scores(torch.nn.functional.normalize(query.float(), dim=-1), centred.transpose(-1, -2))

    def _hash(self, vectors: Tensor) -> Tensor:
        """``[…, D]`` to int16 ``[…, L]``."""
        signs = (vectors @ self._projections).unflatten(-1, (self._tables, -1)) > 0
        powers = 2 ** torch.arange(signs.shape[-1], device=signs.device, dtype=torch.int16)
        codes: Tensor = (signs * powers).sum(-1, dtype=torch.int16)
        return codes
