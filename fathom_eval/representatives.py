"""Blocks of tokens seen through a few of their keys: InfLLM's memory units (arXiv:2402.04617 §3.2).

Shapes: R branches, H KV heads, G query heads a KV head, n sealed tokens, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.coded import half
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.observations import Observation, ReceivedLocalAttention, RecentQueries
from fathom_eval.reads import Reads
from fathom_eval.stores import Store, StoreSpec, batched_scores

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer

RECENT = RecentQueries(64)
"""The prompt's last queries, whose mean stands in for the attention that tokens of decoded blocks get."""


@dataclass(frozen=True)
class RepresentativeSpec(StoreSpec):
    """The keys of every block that get the most attention from the tokens after them, in fp16.

    Attributes:
        block: Tokens a block, a multiple of 64. What does not fill one is kept in blocks of 64 with as many representatives for a token.
        count: Representatives of a block.
        window: Tokens whose attention counts.
    """

    block: int = 128
    count: int = 4
    window: int = 4096

    @property
    def needs(self) -> tuple[Observation, ...]:
        """What it asks of the prefill."""
        return ReceivedLocalAttention(self.window), RECENT

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        keys, received = layer.keys[:, :tokens], layer.observations[self.needs[0]].sum(1)[:, :tokens]
        store = RepresentativeStore(self, layer.observations[RECENT].float().mean((1, 2)), layer.keys[:, :0])
        whole = tokens // self.block * self.block
        store.add_blocks(keys[:, :whole], received[:, :whole], self.block)
        store.add_blocks(keys[:, whole:], received[:, whole:], BLOCK)
        return store


class RepresentativeStore(Store):
    """fp16 keys ``[…, n·count / block, D]``; each token scores as the mean of its block's representatives.

    Nobody has looked at a block that is sealed while decoding, as far as the store can know: its representatives are the keys with the
    largest product with ``query``.

    Args:
        query: Mean of the prompt's last queries, fp32 ``[H, D]``.
        keys: None yet, ``[…, H, 0, D]``.
    """

    def __init__(self, spec: RepresentativeSpec, query: Tensor, keys: Tensor) -> None:
        self._spec, self._query = spec, query
        self._keys = keys.to(torch.float16)
        self._whole = 0  # representatives of whole blocks, which come first

    @property
    def bytes(self) -> int:
        return self._keys.nbytes

    def append(self, keys: Tensor) -> None:
        received = (keys.float() @ self._query.unsqueeze(-1)).squeeze(-1)
        self.add_blocks(keys, received, BLOCK)

    def add_blocks(self, keys: Tensor, received: Tensor, block: int) -> None:
        """Choose by ``received``, ``[…, n]``, of keys ``[…, n, D]``; whole blocks come before those of 64 tokens."""
        if not keys.shape[-2]:
            return
        count = self._share(block)
        # Ties go to the first tokens, whatever topk does.
        best = received.unflatten(-1, (-1, block)).sort(dim=-1, descending=True, stable=True).indices[..., :count]
        blocks = keys.unflatten(-2, (-1, block))
        chosen = blocks.gather(-2, best.unsqueeze(-1).expand(*best.shape, keys.shape[-1]))
        self._keys = torch.cat([self._keys, half(chosen.flatten(-3, -2))], dim=-2)
        if block == self._spec.block:
            self._whole = self._keys.shape[-2]
        self.tokens += keys.shape[-2]

    def empty(self, rows: int) -> Store:
        heads, channels = self._keys.shape[-3], self._keys.shape[-1]
        return RepresentativeStore(self._spec, self._query, self._keys.new_empty(rows, heads, 0, channels))

    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Reads]:
        found = batched_scores(query.float(), self._keys.float().transpose(-1, -2))
        parts = []
        for part, block in ((found[..., : self._whole], self._spec.block), (found[..., self._whole :], BLOCK)):
            if part.shape[-1]:
                parts.append(part.unflatten(-1, (-1, self._share(block))).mean(-1).repeat_interleave(block, dim=-1))
        channels = query.shape[-1]
        zero = torch.zeros(query.shape[:2], dtype=torch.int64, device=query.device)
        reads = Reads(zero, zero, zero + 16 * channels * self._keys.shape[-2], zero + channels, self.tokens)
        return torch.cat(parts, dim=-1), reads

    def _share(self, block: int) -> int:
        """Representatives of a block of this length."""
        return self._spec.count * block // self._spec.block
