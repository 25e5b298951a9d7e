"""A graph of keys linked through the queries that they are near to, for searches by queries (RetrievalAttention, arXiv:2409.10516 §3).

Queries lie elsewhere than keys, so a graph of keys near to each other leads a query astray. Here two keys are linked when one query of the
prompt has both among its largest inner products.

Shapes: R branches, H KV heads, G query heads a KV head, n keys, m queries, D channels, L links, c candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.observations import RecentQueries
from fathom_eval.reads import Reads
from fathom_eval.stores import Store, StoreSpec, batched_scores
from fathom_eval.vector_index import KEY_BITS

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer

ENTRIES = 32
"""Keys that every search starts from: those that most queries are near to."""

_ROUNDS = 36
"""Of a search, in each of which a share of the candidates is followed."""

_ELEMENTS = 2**25
"""Products, or channels of fetched keys, at a time (128 MB in fp32)."""


@dataclass(frozen=True)
class PairGraphSpec(StoreSpec):
    """The graph of the prefix's keys.

    Attributes:
        links: Of a key, the neighbouring tokens among them.
        candidates: Keys that a search keeps in view and returns.
        queries: The last ones of the prompt, whose nearest keys are linked, of each head.
    """

    links: int = 32
    candidates: int = 256
    queries: int = 2048

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        keys = layer.keys[:, :tokens]
        recent = layer.observations[RecentQueries(self.queries)].flatten(1, 2)
        if not tokens:
            none = torch.empty(len(keys), 0, dtype=torch.int32, device=keys.device)
            return PairGraphStore(self, none.unsqueeze(-1), none, keys, keys)
        near = nearest_keys(recent, keys, min(self.links, tokens))
        graph = torch.stack([linked(part, tokens, self.links) for part in near])
        hits = torch.zeros(len(near), tokens, dtype=torch.int64, device=keys.device)
        hits.scatter_add_(-1, near.flatten(1), torch.ones_like(near.flatten(1)))
        entries = hits.topk(min(ENTRIES, tokens), dim=-1).indices
        return PairGraphStore(self, graph, entries.int(), keys, layer.keys[:, :0])


def nearest_keys(queries: Tensor, keys: Tensor, count: int) -> Tensor:
    """The keys ``[H, n, D]`` with the largest inner product for each query ``[H, m, D]``, largest first: int64 ``[H, m, count]``."""
    held = keys.float().transpose(-1, -2)
    step = max(1, _ELEMENTS // (len(keys) * keys.shape[1]))
    parts = [(queries[:, start : start + step].float() @ held).topk(count, dim=-1).indices for start in range(0, queries.shape[1], step)]
    return torch.cat(parts, dim=1)


def linked(near: Tensor, tokens: int, links: int) -> Tensor:
    """The graph of one head, int32 ``[n, L]``, −1 where there is no link.

    A query links its nearest key with all others that are near to it, and each of those with the next, in both directions. Of a key's links
    those that most queries make are kept. The two last are the tokens beside it: they lead to keys that no query is near to.

    Args:
        near: int64 ``[m, count]``, the nearest key first.
    """
    first, rest = near[:, :1].expand(-1, near.shape[1] - 1), near[:, 1:]
    one, other = torch.cat([first, near[:, :-1]]).flatten(), torch.cat([rest, rest]).flatten()
    codes, made = torch.cat([one * tokens + other, other * tokens + one]).unique(return_counts=True)
    source = codes // tokens
    order = made.argsort(descending=True, stable=True)
    order = order[source[order].argsort(stable=True)]
    source, target = source[order], codes[order] % tokens
    rank = torch.arange(len(source), device=near.device) - torch.searchsorted(source, source)
    kept = (rank < links - 2) & (source != target)
    graph = torch.full((tokens, links), -1, dtype=torch.int32, device=near.device)
    graph[source[kept], rank[kept]] = target[kept].int()
    number = torch.arange(tokens, dtype=torch.int32, device=near.device)
    graph[1:, -2], graph[:-1, -1] = number[:-1], number[1:]
    return graph


class PairGraphStore(Store):
    """A graph for each KV head over the prefix's keys, searched by every query head; later keys are all scored.

    The keys that a search returns have their inner product as score, all others −∞. What is read are the keys that a search of any head of
    the group has met, and all later keys.

    Args:
        graph: int32 ``[H, n, L]``; of no tokens for blocks that branches sealed themselves.
        entries: int32 ``[H, e]``.
        keys: Of the graph, ``[H, n, D]``: the model's own.
        later: Later keys, none yet, ``[…, H, 0, D]``.
    """

    def __init__(self, spec: PairGraphSpec, graph: Tensor, entries: Tensor, keys: Tensor, later: Tensor) -> None:
        self._spec, self._graph, self._entries, self._keys, self._later = spec, graph, entries, keys, later
        self.tokens = self._indexed = graph.shape[-2]

    @property
    def bytes(self) -> int:
        return self._graph.nbytes + self._entries.nbytes

    def append(self, keys: Tensor) -> None:
        self._later = torch.cat([self._later, keys], dim=-2)
        self.tokens += keys.shape[-2]

    def empty(self, rows: int) -> Store:
        later = self._later.new_empty(rows, self._later.shape[-3], 0, self._later.shape[-1])
        return PairGraphStore(self._spec, self._graph[:, :0], self._entries[:, :0], self._keys[:, :0], later)

    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Reads]:
        query, channels = query.float(), query.shape[-1]
        rows, heads, group, _ = query.shape
        touched = torch.full((rows, heads), self._later.shape[-2], dtype=torch.int64, device=query.device)
        parts = []
        if self._indexed:
            links, width = self._graph.shape[-1], self._width
            step = max(1, _ELEMENTS // (heads * group * max(width * links * channels, self._indexed)))
            found = [self._search(query[start : start + step]) for start in range(0, rows, step)]
            parts.append(torch.cat([scores for scores, _ in found]))
            touched += torch.cat([met for _, met in found])
        if self._later.shape[-2]:
            parts.append(batched_scores(query, self._later.float().transpose(-1, -2)))
        zero = torch.zeros_like(touched)
        return torch.cat(parts, dim=-1), Reads(zero, zero, touched * (KEY_BITS * channels), zero, self.tokens)

    @property
    def _width(self) -> int:
        """Candidates that are followed in one round."""
        return -(-min(self._spec.candidates, self._indexed) // (_ROUNDS - 4))

    def _search(self, query: Tensor) -> tuple[Tensor, Tensor]:
        """Scores ``[R, H, G, n]``, and how many keys the heads of a group met, ``[R, H]``. It does not wait for the device."""
        rows, _, group, _ = query.shape
        n, count, width = self._indexed, min(self._spec.candidates, self._indexed), self._width
        asked = query.transpose(0, 1).flatten(1, 2)  # [H, Q, D]
        lead = asked.shape[:2]
        met = torch.zeros(*lead, n + 1, dtype=torch.bool, device=query.device)  # the last column is no key
        scores = torch.full((*lead, count), -torch.inf, device=query.device)
        tokens = torch.full((*lead, count), n, dtype=torch.int64, device=query.device)
        followed = torch.ones(*lead, count, dtype=torch.bool, device=query.device)
        fresh = self._entries.long().unsqueeze(1).expand(-1, lead[1], -1)
        for _ in range(_ROUNDS):
            fresh = fresh.sort(-1).values
            again = torch.nn.functional.pad(fresh[..., 1:] == fresh[..., :-1], (1, 0)) | met.gather(-1, fresh)
            fresh = fresh.masked_fill(again, n)
            met.scatter_(-1, fresh, True)
            products = self._products(asked, fresh)
            scores, at = torch.cat([scores, products], dim=-1).topk(count, dim=-1)
            tokens = torch.cat([tokens, fresh], dim=-1).gather(-1, at)
            followed = torch.nn.functional.pad(followed, (0, fresh.shape[-1])).gather(-1, at) | (tokens == n)
            best, at = scores.masked_fill(followed, -torch.inf).topk(width, dim=-1)
            followed = followed.scatter(-1, at, True)
            chosen = tokens.gather(-1, at)
            fresh = self._neighbours(chosen.clamp_max(n - 1)).masked_fill((best == -torch.inf).unsqueeze(-1), n).flatten(-2)
        whole = torch.full((*lead, n + 1), -torch.inf, device=query.device).scatter_(-1, tokens, scores)[..., :n]
        seen = met[..., :n].unflatten(1, (rows, group)).any(2).sum(-1)
        return whole.unflatten(1, (rows, group)).transpose(0, 1), seen.transpose(0, 1)

    def _neighbours(self, tokens: Tensor) -> Tensor:
        """``[H, Q, w]`` to int64 ``[H, Q, w, L]``, n where there is no link."""
        head = torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1)
        found: Tensor = self._graph[head, tokens].long()
        return found.masked_fill(found < 0, self._indexed)

    def _products(self, asked: Tensor, tokens: Tensor) -> Tensor:
        """Inner products of queries ``[H, Q, D]`` and their own keys ``[H, Q, w]``, −∞ for n."""
        head = torch.arange(len(tokens), device=tokens.device).view(-1, 1, 1)
        keys = self._keys[head, tokens.clamp_max(self._indexed - 1)].float()
        found: Tensor = (keys @ asked.unsqueeze(-1)).squeeze(-1)
        return found.masked_fill(tokens == self._indexed, -torch.inf)
