"""Many methods over one prefix: the attention of every branch, layer by layer.

Each branch is a row of one batch. Rows that scan the same store are scored together, so the store is read once for all of them;
rows with the same k and policy are selected and attended together. Small models are bound by the number of operations a layer, so
rows stand in an order that makes most groups slices, and what can be counted once a step is not counted in every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fathom_eval.attention import attend_everything, attend_selected
from fathom_eval.errors import UserError
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.methods import MethodSpec
from fathom_eval.models import ModelFacts
from fathom_eval.prefill import Prefix, PrefixLayer
from fathom_eval.reads import Reads
from fathom_eval.selection import Policy, candidate_range, distinct_rows, select, share_scores, top_indices, union_of_group
from fathom_eval.stores import Store, StoreSpec

Rows = slice | Tensor
"""Rows of the batch: a slice where they are consecutive, which costs no copy."""


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
    plans: list[Tensor | None] = field(default_factory=list)


@dataclass
class _ScanGroup:
    """Consecutive rows that scan the same store in the same layers, and the blocks that these branches sealed themselves."""

    store: StoreSpec
    policy: Policy
    rows: slice
    sealed: int
    methods: list[_MethodGroup]
    own: list[Store | None]
    reads: list[Reads] = field(default_factory=list)


@dataclass(frozen=True)
class _SelectGroup:
    """Rows that select with the same k and policy."""

    k: int
    policy: Policy
    rows: Rows


@dataclass
class Counts:
    """Sums over layers, KV heads and steps, one number a branch.

    Attributes:
        scan_bits: Bits that the scans touched.
        declared_bits: What the methods declare for their plans.
        scan_tokens: Sealed tokens that were scanned.
        channels: Channels read.
        scans: Layers scanned (not summed over heads).
        rows: Distinct K/V rows attended to.
        candidates: K rows fetched for reranking beyond those.
        fired: Layers whose attention the method decided (not summed over heads).
    """

    scan_bits: Tensor
    declared_bits: Tensor
    scan_tokens: Tensor
    channels: Tensor
    scans: Tensor
    rows: Tensor
    candidates: Tensor
    fired: Tensor

    @classmethod
    def zero(cls, rows: int, device: torch.device) -> Counts:
        """Nothing counted yet."""
        whole = [torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(7)]
        return cls(whole[0], torch.zeros(rows, dtype=torch.float64, device=device), *whole[1:])


class BranchBatch:
    """The attention of all branches of one prefix; pass it to the model as ``branches=``.

    Args:
        prefix: Shared and never written.
        branches: The rows of the batch, in order; :func:`batch_order` gives the order that makes groups consecutive.
        facts: Of the model.

    Attributes:
        counts: What has been read so far, complete after each step.
    """

    def __init__(self, prefix: Prefix, branches: Sequence[Branch], facts: ModelFacts) -> None:
        self.prefix, self.branches, self.facts = prefix, tuple(branches), facts
        self._device = prefix.layers[0].keys.device
        self.counts = Counts.zero(len(self.branches), self._device)
        self._scans = self._scan_groups()
        self._selects = self._select_groups()
        self._dense = _as_rows([row for row, branch in enumerate(self.branches) if branch.k is None], self._device)
        self._any_dense = any(branch.k is None for branch in self.branches)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """See :class:`fathom_eval.attention.BranchAttention`."""
        context = _Context(self.prefix.layers[layer], query, keys, values, scaling)
        output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        if self._any_dense:
            self._attend_densely(context, self._dense, output)
        if self._scans:
            scores = torch.empty(*query.shape[:3], context.tokens, dtype=torch.float32, device=query.device)
            plans = [self._scan(group, layer, context, scores) for group in self._scans if layer not in group.policy.dense_layers]
            for group in self._selects:
                if layer in group.policy.dense_layers:
                    self._attend_densely(context, group.rows, output)
                else:
                    coverage = self._coverage(context, plans) if group.policy.reallocate else None
                    output[group.rows] = self._select_and_attend(group, context, scores[group.rows], coverage)
        if layer == len(self.prefix.layers) - 1:
            for scan in self._scans:
                self._settle(scan)
        return output

    def _scan_groups(self) -> list[_ScanGroup]:
        groups: list[_ScanGroup] = []
        for row, branch in enumerate(self.branches):
            if branch.k is None:
                continue
            spec, store = branch.spec, branch.spec.method.store(self.facts)
            assert store is not None, f"{spec.label} scans nothing and so takes no k"
            last = groups[-1] if groups else None
            if last is None or last.rows.stop != row or _scan_key(branch, self.facts) != (last.store, last.policy):
                sealed = _sealed_tokens(self.prefix.tokens + 1, spec.policy.local)
                policy = _scan_policy(spec.policy)
                last = _ScanGroup(store, policy, slice(row, row), sealed, [], [None] * len(self.prefix.layers))
                groups.append(last)
            last.rows = slice(last.rows.start, row + 1)
            at = row - last.rows.start
            if last.methods and last.methods[-1].spec == spec:
                last.methods[-1].rows = slice(last.methods[-1].rows.start, at + 1)
            else:
                indexes = [spec.method.index(layer, self.facts) for layer in self.prefix.layers]
                last.methods.append(_MethodGroup(spec, slice(at, at + 1), indexes))
        return groups

    def _select_groups(self) -> list[_SelectGroup]:
        members: dict[tuple[int, Policy], list[int]] = {}
        for row, branch in enumerate(self.branches):
            if branch.k is not None:
                members.setdefault((branch.k, branch.spec.policy), []).append(row)
        return [_SelectGroup(k, policy, _as_rows(rows, self._device)) for (k, policy), rows in members.items()]

    def _scan(self, group: _ScanGroup, layer: int, context: _Context, scores: Tensor) -> tuple[_ScanGroup, Store, Tensor | None]:
        """Score all tokens for the rows of one store: sealed blocks by the store, the unsealed tail exactly."""
        query = context.query[group.rows]
        sealed = _sealed_tokens(context.tokens, group.policy.local)
        try:
            shared = context.layer.store(group.store, group.sealed)
            own = self._seal(group, layer, context, shared, sealed)
        except ValueError as error:
            labels = ", ".join(method.spec.label for method in group.methods)
            raise UserError(f"layer {layer} cannot be stored for {labels}: {error}") from error
        projected = shared.project(query)
        plans = [method.spec.method.plan(projected[method.rows], method.indexes[layer]) for method in group.methods]
        for method, part in zip(group.methods, plans, strict=True):
            method.plans.append(part)
        planned = [part for part in plans if part is not None]
        assert len(planned) in (0, len(plans)), "methods that scan one store all have a plan, or none has"
        plan = torch.cat(planned) if planned else None
        parts, reads = [], None
        for store in (shared, own):
            if store is not None and store.tokens:
                found, touched = store.scan(query, projected, plan)
                parts.append(found)
                reads = touched if reads is None else reads + touched
        parts.append(context.exact_scores(group.rows, sealed))
        torch.cat(parts, dim=-1, out=scores[group.rows])
        group.reads.append(reads if reads is not None else Reads.none(query.shape[0], query.shape[1], query.device))
        return group, shared, plan

    def _seal(self, group: _ScanGroup, layer: int, context: _Context, shared: Store, sealed: int) -> Store | None:
        """Seal the blocks that have left the local window since the prefill. They belong to these branches alone."""
        own = group.own[layer]
        done = group.sealed + (own.tokens if own is not None else 0)
        if sealed > done:
            if own is None:
                own = group.own[layer] = shared.empty(group.rows.stop - group.rows.start)
            own.append(context.key_range(group.rows, done, sealed))
        return own

    def _settle(self, group: _ScanGroup) -> None:
        """Add up what a group has read in this step."""
        if not group.reads:  # every layer is dense
            return
        counts, heads = self.counts, self.facts.kv_heads
        tokens = torch.tensor([reads.tokens for reads in group.reads], dtype=torch.int64, device=self._device)
        counts.scan_bits[group.rows] += torch.stack([reads.bits for reads in group.reads]).sum((0, 2))
        counts.channels[group.rows] += torch.stack([reads.channels for reads in group.reads]).sum((0, 2))
        counts.scan_tokens[group.rows] += tokens.sum() * heads
        counts.scans[group.rows] += len(group.reads)
        for method in group.methods:
            plans = [plan for plan in method.plans if plan is not None]
            declared = method.spec.method.declared_bits(torch.stack(plans) if plans else None, self.facts)
            per_step = declared.double().sum(-1).T if isinstance(declared, Tensor) else torch.tensor(declared * heads, device=self._device)
            rows = slice(group.rows.start + method.rows.start, group.rows.start + method.rows.stop)
            counts.declared_bits[rows] += (per_step * tokens).sum(-1)
            method.plans.clear()
        group.reads.clear()

    def _coverage(self, context: _Context, plans: Sequence[tuple[_ScanGroup, Store, Tensor | None]]) -> Tensor:
        coverage = torch.ones(context.query.shape[:3], dtype=torch.float32, device=self._device)
        for group, store, plan in plans:
            coverage[group.rows] = store.coverage(store.project(context.query[group.rows]), plan)
        return coverage

    def _select_and_attend(self, group: _SelectGroup, context: _Context, approximate: Tensor, coverage: Tensor | None) -> Tensor:
        policy, tokens, rows = group.policy, context.tokens, group.rows
        start, stop = candidate_range(tokens, policy, _sealed_tokens(tokens, policy.local))
        free = group.k - (tokens - (stop - start))
        count = min(stop - start, free)
        best = select(approximate, min(stop - start, int(free * policy.rerank)), policy, (start, stop))
        if best.shape[-1] > count:
            best = self._rerank(group, context, best, count, stop)
        self.counts.rows[rows] += (distinct_rows(best, tokens) + (tokens - (stop - start))).sum(-1)
        self.counts.fired[rows] += 1
        fetched, mask = (best, None) if policy.attend == "own" else union_of_group(best)
        kept_keys, kept_values = context.kept(rows, start, stop)
        keys, values = context.gather_keys(rows, fetched, stop), context.gather_values(rows, fetched, stop)
        output = attend_selected(context.query[rows], (keys, values), (kept_keys, kept_values), context.scaling, mask)
        if coverage is not None:
            # SparQ's temperature sharpens scores that saw only part of the query's mass.
            temperature = (output.shape[-1] * coverage[rows].clamp_min(1e-6)).sqrt().unsqueeze(-1)
            weights = (approximate / temperature).softmax(-1)
            missed = weights[..., start:stop].sum(-1, keepdim=True) - weights.gather(-1, best).sum(-1, keepdim=True)
            output = (1 - missed) * output + missed * context.mean_value(rows).unsqueeze(-2)
        return output

    def _rerank(self, group: _SelectGroup, context: _Context, candidates: Tensor, count: int, stop: int) -> Tensor:
        """Rescore the candidates with their own keys and keep the best."""
        # Ascending, so that of equal scores the lower token is kept.
        candidates = candidates.sort(-1).values
        keys = context.gather_keys(group.rows, candidates, stop)
        exact = (keys.float() @ context.query[group.rows].float().unsqueeze(-1)).squeeze(-1)
        best = candidates.gather(-1, top_indices(share_scores(exact, group.policy), count))
        extra = distinct_rows(candidates, context.tokens) - distinct_rows(best, context.tokens)
        self.counts.candidates[group.rows] += extra.sum(-1)
        return best

    def _attend_densely(self, context: _Context, rows: Rows, output: Tensor) -> None:
        output[rows] = attend_everything(
            context.query[rows], context.layer.keys, context.layer.values, context.keys[rows], context.values[rows], context.scaling
        )
        self.counts.rows[rows] += context.tokens * self.facts.kv_heads
        self.counts.fired[rows] += 1


class _Context:
    """One layer and step: the shared prefix and the branches' own tails, addressed as one sequence of tokens."""

    def __init__(self, layer: PrefixLayer, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self.layer, self.query, self.keys, self.values, self.scaling = layer, query, keys, values, scaling
        self.prefix_tokens = layer.keys.shape[1]
        self.tokens = self.prefix_tokens + keys.shape[2]

    def key_range(self, rows: Rows, start: int, stop: int) -> Tensor:
        """Keys of tokens ``[start, stop)``, ``[R, H, stop - start, D]``."""
        return self._range(self.layer.keys, self.keys[rows], start, stop)

    def exact_scores(self, rows: Rows, start: int) -> Tensor:
        """fp32 scores of all tokens from ``start`` on, ``[R, H, G, tokens - start]``."""
        return self.query[rows].float() @ self.key_range(rows, start, self.tokens).float().transpose(-1, -2)

    def kept(self, rows: Rows, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of the sink ``[0, start)`` and the window ``[stop, tokens)``, ``[R, H, c, D]``."""
        pairs = ((self.layer.keys, self.keys[rows]), (self.layer.values, self.values[rows]))
        keys, values = (
            torch.cat([self._range(shared, own, 0, start), self._range(shared, own, stop, self.tokens)], dim=2) for shared, own in pairs
        )
        return keys, values

    def gather_keys(self, rows: Rows, indices: Tensor, stop: int) -> Tensor:
        """Keys ``[R, H, G, m, D]`` of the given tokens, all of them below ``stop``."""
        return self._gather(self.layer.keys, self.keys[rows], indices, stop)

    def gather_values(self, rows: Rows, indices: Tensor, stop: int) -> Tensor:
        """Values ``[R, H, G, m, D]`` of the given tokens, all of them below ``stop``."""
        return self._gather(self.layer.values, self.values[rows], indices, stop)

    def mean_value(self, rows: Rows) -> Tensor:
        """The mean of all values so far, fp32 ``[R, H, D]``."""
        return (self.layer.value_sum + self.values[rows].float().sum(2)) / self.tokens

    def _range(self, shared: Tensor, own: Tensor, start: int, stop: int) -> Tensor:
        n = self.prefix_tokens
        of_prefix = shared[:, min(start, n) : min(stop, n)].expand(len(own), -1, -1, -1)
        return of_prefix if stop <= n else torch.cat([of_prefix, own[:, :, max(start - n, 0) : stop - n]], dim=2)

    def _gather(self, shared: Tensor, own: Tensor, indices: Tensor, stop: int) -> Tensor:
        n, heads = self.prefix_tokens, shared.shape[0]
        head = torch.arange(heads, device=indices.device).view(-1, 1, 1)
        if stop <= n:
            return _rows_at(shared, indices + head * n)
        of_prefix = _rows_at(shared, indices.clamp_max(n - 1) + head * n)
        row = torch.arange(len(own), device=indices.device).view(-1, 1, 1, 1)
        of_tail = _rows_at(own, (indices - n).clamp_min(0) + (row * heads + head) * own.shape[2])
        return torch.where((indices < n).unsqueeze(-1), of_prefix, of_tail)


def batch_order(branches: Sequence[Branch], facts: ModelFacts) -> list[int]:
    """The order of rows in which those that scan one store, and in it those of one method, are consecutive."""
    stores: dict[Any, int] = {}
    specs: dict[MethodSpec, int] = {}
    for branch in branches:
        stores.setdefault(_scan_key(branch, facts), len(stores))
        specs.setdefault(branch.spec, len(specs))
    return sorted(range(len(branches)), key=lambda row: (stores[_scan_key(branches[row], facts)], specs[branches[row].spec]))


def _scan_key(branch: Branch, facts: ModelFacts) -> tuple[StoreSpec | None, Policy | None]:
    return branch.spec.method.store(facts), None if branch.k is None else _scan_policy(branch.spec.policy)


def _scan_policy(policy: Policy) -> Policy:
    """What of a policy matters to a scan: the window decides what is sealed, and dense layers are not scanned."""
    return Policy(local=policy.local, dense_layers=policy.dense_layers)


def _as_rows(rows: Sequence[int], device: torch.device) -> Rows:
    if rows and list(rows) == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.int64, device=device)


def _rows_at(rows: Tensor, flat: Tensor) -> Tensor:
    """Rows of ``[…, D]`` by their number over all leading dimensions: ``flat […]`` to ``[…, D]``."""
    return rows.reshape(-1, rows.shape[-1]).index_select(0, flat.flatten()).view(*flat.shape, rows.shape[-1])


def _sealed_tokens(tokens: int, local: int) -> int:
    """Tokens in sealed blocks: full, and outside the local window."""
    return max(0, tokens - local) // BLOCK * BLOCK
