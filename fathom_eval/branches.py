"""Many methods over one prefix: the attention of every branch, layer by layer.

Each branch is a row of one batch. Rows that scan the same store are scored together, so the store is read once for all of them;
rows with the same k and policy are selected and attended together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fathom_eval.attention import attend_everything, attend_selected
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.methods import MethodSpec
from fathom_eval.models import ModelFacts
from fathom_eval.prefill import Prefix, PrefixLayer
from fathom_eval.reads import Reads
from fathom_eval.selection import Policy, candidate_range, distinct_rows, select, top_indices, union_of_group
from fathom_eval.stores import Store, StoreSpec


@dataclass(frozen=True)
class Branch:
    """One method at one k, decoded as one row of the batch. ``k`` is None for a method without a selection (dense)."""

    spec: MethodSpec
    k: int | None


@dataclass
class _MethodGroup:
    """Consecutive rows of a scan group that run the same method (at different k)."""

    spec: MethodSpec
    rows: slice
    indexes: list[Any]


@dataclass
class _ScanGroup:
    """Rows that scan the same store in the same layers, and each layer's blocks that these branches sealed themselves."""

    store: StoreSpec
    local: int
    dense_layers: tuple[int, ...]
    rows: Tensor
    sealed: int
    methods: list[_MethodGroup]
    own: list[Store | None]


@dataclass(frozen=True)
class _SelectGroup:
    """Rows that select with the same k and policy."""

    k: int
    policy: Policy
    rows: Tensor


class BranchBatch:
    """The attention of all branches of one prefix; pass it to the model as ``branches=``.

    Args:
        prefix: Shared and never written.
        branches: The rows of the batch, in order.
        facts: Of the model.

    Attributes:
        scan_bits, declared_bits, scan_tokens, channels, rows, candidates, fired: Sums over layers, KV heads and steps so far, one a
            branch: scan bits counted, what the method's plans declare, sealed tokens scanned, channels read, distinct K/V rows
            selected, K rows fetched for reranking beyond those, and how many layers' attention the method has decided.
    """

    def __init__(self, prefix: Prefix, branches: Sequence[Branch], facts: ModelFacts) -> None:
        self.prefix, self.branches, self.facts = prefix, tuple(branches), facts
        self._device = prefix.layers[0].keys.device
        count = len(self.branches)
        self.scan_bits = torch.zeros(count, dtype=torch.int64, device=self._device)
        self.declared_bits = torch.zeros(count, dtype=torch.float64, device=self._device)
        self.scan_tokens = torch.zeros(count, dtype=torch.int64, device=self._device)
        self.channels = torch.zeros(count, dtype=torch.int64, device=self._device)
        self.rows = torch.zeros(count, dtype=torch.int64, device=self._device)
        self.candidates = torch.zeros(count, dtype=torch.int64, device=self._device)
        self.fired = torch.zeros(count, dtype=torch.int64, device=self._device)
        self._scans = self._scan_groups()
        self._selects = self._select_groups()
        scanning = {row for group in self._scans for row in group.rows.tolist()}
        self._dense = torch.tensor([row for row in range(count) if row not in scanning], dtype=torch.int64, device=self._device)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """See :class:`fathom_eval.attention.BranchAttention`."""
        part = self.prefix.layers[layer]
        output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        context = _Context(part, query, keys, values, scaling)
        self.fired += 1
        if len(self._dense):
            self._attend_densely(context, self._dense, output)
        if self._scans:
            scores = torch.empty(*query.shape[:3], context.tokens, dtype=torch.float32, device=query.device)
            coverage = torch.ones(query.shape[:3], dtype=torch.float32, device=query.device)
            for scan in self._scans:
                if layer not in scan.dense_layers:
                    self._scan(scan, layer, context, scores, coverage)
            for group in self._selects:
                if layer in group.policy.dense_layers:
                    self._attend_densely(context, group.rows, output)
                else:
                    output[group.rows] = self._select_and_attend(group, context, scores, coverage)
        return output

    def _scan_groups(self) -> list[_ScanGroup]:
        members: dict[tuple[StoreSpec, int, tuple[int, ...]], dict[MethodSpec, list[int]]] = {}
        for row, branch in enumerate(self.branches):
            store, policy = branch.spec.method.store(self.facts), branch.spec.policy
            if store is not None:
                members.setdefault((store, policy.local, policy.dense_layers), {}).setdefault(branch.spec, []).append(row)
        groups = []
        for (store, local, dense_layers), methods in members.items():
            sealed = _sealed_tokens(self.prefix.tokens + 1, local)
            parts, start = [], 0
            for spec, rows in methods.items():
                indexes = [spec.method.index(layer, self.facts) for layer in self.prefix.layers]
                parts.append(_MethodGroup(spec, slice(start, start + len(rows)), indexes))
                start += len(rows)
            order = torch.tensor([row for rows in methods.values() for row in rows], device=self._device)
            groups.append(_ScanGroup(store, local, dense_layers, order, sealed, parts, [None] * len(self.prefix.layers)))
        return groups

    def _select_groups(self) -> list[_SelectGroup]:
        members: dict[tuple[int, Policy], list[int]] = {}
        for row, branch in enumerate(self.branches):
            if branch.spec.method.store(self.facts) is not None:
                assert branch.k is not None, f"{branch.spec.label} needs a k"
                members.setdefault((branch.k, branch.spec.policy), []).append(row)
        return [_SelectGroup(k, policy, torch.tensor(rows, device=self._device)) for (k, policy), rows in members.items()]

    def _scan(self, group: _ScanGroup, layer: int, context: _Context, scores: Tensor, coverage: Tensor) -> None:
        """Score all tokens for the rows of one store: sealed blocks by the store, the unsealed tail exactly."""
        query = context.query[group.rows]
        shared = context.layer.store(group.store, group.sealed)
        sealed = _sealed_tokens(context.tokens, group.local)
        own = self._seal(group, layer, context, shared, sealed)
        projected = shared.project(query)
        plans = [method.spec.method.plan(projected[method.rows], method.indexes[layer]) for method in group.methods]
        plan = None if plans[0] is None else torch.cat([part for part in plans if part is not None])
        parts, reads = [], Reads.none(*query.shape[:2], query.device)
        for store in (shared, own):
            if store is not None and store.tokens:
                part, touched = store.scan(query, projected, plan)
                parts.append(part)
                reads = reads + touched
        parts.append(context.exact_scores(group.rows, sealed))
        scores[group.rows] = torch.cat(parts, dim=-1)
        coverage[group.rows] = shared.coverage(projected, plan)
        self._count(group, reads, plans)

    def _seal(self, group: _ScanGroup, layer: int, context: _Context, shared: Store, sealed: int) -> Store | None:
        """Seal the blocks that have left the local window since the prefill. They belong to these branches alone."""
        own = group.own[layer]
        done = group.sealed + (own.tokens if own is not None else 0)
        if sealed > done:
            if own is None:
                own = group.own[layer] = shared.empty(len(group.rows))
            own.append(context.key_range(group.rows, done, sealed))
        return own

    def _count(self, group: _ScanGroup, reads: Reads, plans: Sequence[Tensor | None]) -> None:
        heads = self.facts.kv_heads
        self.scan_bits[group.rows] += reads.bits.sum(-1)
        self.channels[group.rows] += reads.channels.sum(-1)
        self.scan_tokens[group.rows] += reads.tokens * heads
        for method, plan in zip(group.methods, plans, strict=True):
            declared = method.spec.method.declared_bits(plan, self.facts)
            total = declared.double().sum(-1) if isinstance(declared, Tensor) else declared * heads
            self.declared_bits[group.rows[method.rows]] += total * reads.tokens

    def _select_and_attend(self, group: _SelectGroup, context: _Context, scores: Tensor, coverage: Tensor) -> Tensor:
        policy = group.policy
        approximate, query = scores[group.rows], context.query[group.rows]
        sealed = _sealed_tokens(context.tokens, policy.local)
        indices = select(approximate, group.k, policy, sealed=sealed)
        if policy.rerank > 1 and group.k < context.tokens:
            indices = self._rerank(group, context, indices, query, sealed)
        self.rows[group.rows] += distinct_rows(indices, context.tokens).sum(-1)
        fetched, mask = (indices, None) if policy.attend == "own" else union_of_group(indices)
        keys, values = context.gather(group.rows, fetched)
        output = attend_selected(query, keys, values, context.scaling, mask)
        if policy.reallocate:
            # SparQ's temperature sharpens scores that saw only part of the query's mass.
            temperature = (query.shape[-1] * coverage[group.rows].clamp_min(1e-6)).sqrt().unsqueeze(-1)
            weights = (approximate / temperature).softmax(-1)
            chosen = weights.gather(-1, indices).sum(-1, keepdim=True)
            output = chosen * output + (1 - chosen) * context.mean_value(group.rows).unsqueeze(-2)
        return output

    def _rerank(self, group: _SelectGroup, context: _Context, indices: Tensor, query: Tensor, sealed: int) -> Tensor:
        """Rescore the candidates with their own keys and keep the best; the always-kept tokens stand last."""
        start, stop = candidate_range(context.tokens, group.policy, sealed)
        kept = context.tokens - (stop - start)
        found = indices.shape[-1] - kept
        # Ascending, so that of equal scores the lower token is kept.
        candidates, always = indices[..., :found].sort(-1).values, indices[..., found:]
        keys, _ = context.gather(group.rows, candidates, values=False)
        exact = (keys.float() @ query.float().unsqueeze(-1)).squeeze(-1)
        if group.policy.share != "head":
            exact = (exact.sum(-2, keepdim=True) if group.policy.share == "group_sum" else exact.amax(-2, keepdim=True)).expand_as(exact)
        best = candidates.gather(-1, top_indices(exact, min(group.k - kept, found)))
        indices = torch.cat([best, always], dim=-1)
        everything = torch.cat([candidates, always], dim=-1)
        extra = distinct_rows(everything, context.tokens) - distinct_rows(indices, context.tokens)
        self.candidates[group.rows] += extra.sum(-1)
        return indices

    def _attend_densely(self, context: _Context, rows: Tensor, output: Tensor) -> None:
        output[rows] = attend_everything(
            context.query[rows], context.layer.keys, context.layer.values, context.keys[rows], context.values[rows], context.scaling
        )
        self.rows[rows] += context.tokens * self.facts.kv_heads


class _Context:
    """One layer and step: the shared prefix and the branches' own tails, addressed as one sequence of tokens."""

    def __init__(self, layer: PrefixLayer, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self.layer, self.query, self.keys, self.values, self.scaling = layer, query, keys, values, scaling
        self.prefix_tokens = layer.keys.shape[1]
        self.tokens = self.prefix_tokens + keys.shape[2]

    def key_range(self, rows: Tensor, start: int, stop: int) -> Tensor:
        """Keys of tokens ``[start, stop)``, ``[R, H, stop - start, D]``."""
        n = self.prefix_tokens
        shared = self.layer.keys[:, min(start, n) : min(stop, n)]
        own = self.keys[rows, :, max(start - n, 0) : max(stop - n, 0)]
        return torch.cat([shared.expand(len(rows), -1, -1, -1), own], dim=2)

    def exact_scores(self, rows: Tensor, start: int) -> Tensor:
        """fp32 scores of all tokens from ``start`` on, ``[R, H, G, tokens - start]``."""
        return self.query[rows].float() @ self.key_range(rows, start, self.tokens).float().transpose(-1, -2)

    def gather(self, rows: Tensor, indices: Tensor, *, values: bool = True) -> tuple[Tensor, Tensor]:
        """K and V rows ``[R, H, G, k, D]`` of the given tokens; without ``values`` both are the keys."""
        keys = self._rows(self.layer.keys, self.keys, rows, indices)
        return keys, self._rows(self.layer.values, self.values, rows, indices) if values else keys

    def mean_value(self, rows: Tensor) -> Tensor:
        """The mean of all values so far, fp32 ``[R, H, D]``."""
        return (self.layer.value_sum + self.values[rows].float().sum(2)) / self.tokens

    def _rows(self, shared: Tensor, own: Tensor, rows: Tensor, indices: Tensor) -> Tensor:
        heads, n, channels = shared.shape
        head = torch.arange(heads, device=indices.device).view(1, -1, 1, 1)
        flat = (indices.clamp_max(n - 1) + head * n).flatten()
        out = shared.reshape(heads * n, channels).index_select(0, flat).view(*indices.shape, channels)
        late = (indices >= n).nonzero(as_tuple=True)
        out[late] = own[rows[late[0]], late[1], indices[late] - n]
        return out


def _sealed_tokens(tokens: int, local: int) -> int:
    """Tokens in sealed blocks: full, and outside the local window."""
    return max(0, tokens - local) // BLOCK * BLOCK
