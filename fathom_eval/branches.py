"""Many methods over one prefix: the attention of every branch, layer by layer.

Each branch is a row of one batch. Rows that scan the same store are scored together, so the store is read once for all of them;
rows with the same k and policy are selected and attended together. Small models are bound by the number of operations a layer, so
rows stand in an order that makes most groups slices, and what can be counted once a step is not counted in every layer. Methods that
need more than a store and a plan (:attr:`~fathom_eval.methods.base.Method.extended`) are groups of their own.

A method that fails takes no other with it: its rows are named in ``failures`` and carried along with outputs that mean nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fathom_eval.attention import attend_everything, attend_selected
from fathom_eval.branch_context import Rows, StepContext, sealed_tokens
from fathom_eval.branch_groups import Counts, ExtendedGroup, MethodGroup, ScanGroup, Scanned, SelectGroup
from fathom_eval.extended import Field, Scored, attend_extended
from fathom_eval.gguf_models import one_line
from fathom_eval.memory_errors import is_out_of_memory
from fathom_eval.methods import MethodSpec
from fathom_eval.methods.step import Step
from fathom_eval.models import ModelFacts
from fathom_eval.prefill import Prefix
from fathom_eval.reads import Reads
from fathom_eval.selection import Policy, candidate_range, distinct_rows, select, share_scores, top_indices, union_of_group
from fathom_eval.stores import ExactSpec, Store, StoreSpec


@dataclass(frozen=True)
class Branch:
    """One method at one k, decoded as one row of the batch. ``k`` is None for a method without a selection (dense)."""

    spec: MethodSpec
    k: int | None


class BranchBatch:
    """The attention of all branches of one prefix; pass it to the model as ``branches=``.

    Args:
        prefix: Shared and never written.
        branches: The rows of the batch, in order; :func:`batch_order` gives the order that makes groups consecutive.
        facts: Of the model.

    Attributes:
        counts: What has been read so far, complete after each step.
        failures: Why rows have failed, one line each. What they output from then on means nothing.
    """

    def __init__(self, prefix: Prefix, branches: Sequence[Branch], facts: ModelFacts) -> None:
        self.prefix, self.branches, self.facts = prefix, tuple(branches), facts
        self.failures: dict[int, str] = {}
        self._device = prefix.layers[0].keys.device
        self.counts = Counts.zero(len(self.branches), self._device)
        self._previous: Tensor | None = None
        self._scans = self._scan_groups()
        self._extended: dict[int, ExtendedGroup] = {}
        for scan in self._scans:
            spec, k = scan.methods[0].spec, self.branches[scan.rows.start].k
            if k is not None and spec.method.extended:
                self._extended[scan.rows.start] = ExtendedGroup(spec, k, scan, [{} for _ in prefix.layers])
        self._selects = self._select_groups()
        self._dense = _as_rows([row for row, branch in enumerate(self.branches) if branch.k is None], self._device)
        self._any_dense = any(branch.k is None for branch in self.branches)

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """See :class:`fathom_eval.attention.BranchAttention`."""
        context = StepContext(self.prefix.layers[layer], query, keys, values, scaling)
        output = torch.empty(query.shape, dtype=torch.float32, device=query.device)
        if self._any_dense:
            self._attend_densely(context, self._dense, output)
        if self._scans:
            scores = torch.empty(*query.shape[:3], context.tokens, dtype=torch.float32, device=query.device)
            found = [self._scan(group, layer, context, scores) for group in self._scans if not group.policy.is_dense(layer)]
            scanned = {one.group.rows.start: one for one in found if one is not None}
            for group in self._selects:
                if group.policy.is_dense(layer):
                    self._attend_densely(context, group.rows, output)
                else:
                    coverage = self._coverage(context, scanned) if group.policy.reallocate else None
                    self._attend_selected(group, layer, context, scores, coverage, output)
            for start, extended in self._extended.items():
                if extended.spec.policy.is_dense(layer):
                    self._attend_densely(context, extended.scan.rows, output)
                else:
                    self._attend_extended(extended, layer, context, scanned.get(start), scores, output)
        self._previous = query
        if layer == len(self.prefix.layers) - 1:
            self._previous = None
            for scan in self._scans:
                self._settle(scan)
        return output

    def _scan_groups(self) -> list[ScanGroup]:
        groups: list[ScanGroup] = []
        for row, branch in enumerate(self.branches):
            if branch.k is None:
                continue
            spec, store = branch.spec, branch.spec.method.store(self.facts)
            assert store is not None, f"{spec.label} scans nothing and so takes no k"
            last = groups[-1] if groups else None
            before = self.branches[row - 1]
            if last is None or last.rows.stop != row or _scan_key(branch, self.facts) != _scan_key(before, self.facts):
                sealed = sealed_tokens(self.prefix.tokens + 1, spec.policy.local)
                policy = _scan_policy(spec.policy)
                last = ScanGroup(store, policy, slice(row, row), sealed, [], [None] * len(self.prefix.layers))
                groups.append(last)
            last.rows = slice(last.rows.start, row + 1)
            at = row - last.rows.start
            if last.methods and last.methods[-1].spec == spec:
                last.methods[-1].rows = slice(last.methods[-1].rows.start, at + 1)
            else:
                last.methods.append(MethodGroup(spec, slice(at, at + 1), []))
        for group in groups:
            for method in group.methods:
                try:
                    method.indexes = [method.spec.method.index(layer, self.facts) for layer in self.prefix.layers]
                except Exception as error:
                    self._fail_method(group, method, "the prefix", error)
        return groups

    def _select_groups(self) -> list[SelectGroup]:
        members: dict[tuple[int, Policy], list[int]] = {}
        for row, branch in enumerate(self.branches):
            if branch.k is not None and not branch.spec.method.extended:
                members.setdefault((branch.k, branch.spec.policy), []).append(row)
        return [SelectGroup(k, policy, _as_rows(rows, self._device)) for (k, policy), rows in members.items()]

    def _scan(self, group: ScanGroup, layer: int, context: StepContext, scores: Tensor) -> Scanned | None:
        """Score all tokens for the rows of one store; None where the group has failed."""
        if not group.failed:
            try:
                return self._scan_store(group, layer, context, scores)
            except Exception as error:
                self._fail(range(group.rows.start, group.rows.stop), f"layer {layer}", error)
                group.failed = True
        # Rows that have failed are selected along with the others: any scores do, but ties would cost time.
        scores[group.rows] = -torch.arange(context.tokens, dtype=torch.float32, device=self._device)
        return None

    def _scan_store(self, group: ScanGroup, layer: int, context: StepContext, scores: Tensor) -> Scanned:
        """Score sealed blocks by the store, and the unsealed tail exactly."""
        sealed = sealed_tokens(context.tokens, group.policy.local)
        shared = context.layer.store(group.store, group.sealed)
        own = self._seal(group, layer, context, shared, sealed)
        stores = tuple(store for store in (shared, own) if store is not None and store.tokens)
        extended = self._extended.get(group.rows.start)
        step = self._step(extended, layer, context, stores) if extended is not None else None
        query = context.query[group.rows] if step is None else group.methods[0].spec.method.scan_query(step)
        projected = shared.project(query)
        plan = self._plan(group, layer, projected, step)
        parts, reads = [], None
        for store in stores:
            found, touched = store.scan(query, projected, plan)
            if found.shape != (*query.shape[:3], store.tokens):
                raise ValueError(f"its store gave scores of shape {tuple(found.shape)} for {store.tokens} sealed tokens")
            counted = 0 if isinstance(group.store, ExactSpec) else store.tokens
            if touched.tokens != counted or touched.code_bits.shape != query.shape[:2]:
                shape = tuple(touched.code_bits.shape)
                raise ValueError(f"its store reports reads of {touched.tokens} of {store.tokens} tokens, shape {shape}")
            parts.append(found)
            reads = touched if reads is None else reads + touched
        parts.append(context.exact_scores(group.rows, query, sealed))
        torch.cat(parts, dim=-1, out=scores[group.rows])
        group.reads.append(reads if reads is not None else Reads.none(query.shape[0], query.shape[1], query.device))
        return Scanned(group, shared, stores, query, plan)

    def _plan(self, group: ScanGroup, layer: int, projected: Tensor, step: Step | None) -> Tensor | None:
        """The plans of all rows. A method that fails here reads nothing from now on."""
        parts: list[Tensor | None] = []
        for method in group.methods:
            part = None
            if not method.failed:
                try:
                    rows, index = projected[method.rows], method.indexes[layer]
                    part = method.spec.method.plan(rows, index) if step is None else method.spec.method.plan_step(rows, step)
                    if part is not None and part.shape[:2] != rows.shape[:2]:
                        raise ValueError(f"its plan is of shape {tuple(part.shape)} for {rows.shape[0]} rows and {rows.shape[1]} heads")
                except Exception as error:
                    self._fail_method(group, method, f"layer {layer}", error)
            parts.append(part)
        planned = [part for part in parts if part is not None]
        if group.failed or not planned:
            return None
        for at, method in enumerate(group.methods):
            part = parts[at]
            if part is not None and part.shape[2:] == planned[0].shape[2:]:
                method.plans.append(part)
                continue
            if not method.failed:
                self._fail_method(group, method, f"layer {layer}", ValueError("its plan is not of the form that its store needs"))
            parts[at] = planned[0].new_zeros(method.rows.stop - method.rows.start, *planned[0].shape[1:])
        return torch.cat([part for part in parts if part is not None])

    def _step(self, group: ExtendedGroup, layer: int, context: StepContext, stores: tuple[Store, ...]) -> Step:
        rows = group.scan.rows
        return Step(
            layer=layer,
            index=group.scan.methods[0].indexes[layer],
            k=group.k,
            scaling=context.scaling,
            length=context.tokens,
            tokens=torch.full((rows.stop - rows.start,), context.tokens, dtype=torch.int64, device=self._device),
            query=context.query[rows],
            previous_query=None if self._previous is None else self._previous[rows],
            stores=stores,
            state={},
        )

    def _seal(self, group: ScanGroup, layer: int, context: StepContext, shared: Store, sealed: int) -> Store | None:
        """Seal the blocks that have left the local window since the prefill. They belong to these branches alone."""
        own = group.own[layer]
        done = group.sealed + (own.tokens if own is not None else 0)
        if sealed > done:
            if own is None:
                own = group.own[layer] = shared.empty(group.rows.stop - group.rows.start)
            own.seal(context.key_range(group.rows, done, sealed), context.value_range(group.rows, done, sealed))
        return own

    def _settle(self, group: ScanGroup) -> None:
        """Add up what a group has read in this step."""
        if group.failed or not group.reads:  # every layer is dense
            return
        counts, heads = self.counts, self.facts.kv_heads
        tokens = torch.tensor([reads.tokens for reads in group.reads], dtype=torch.int64, device=self._device)
        counts.scan_bits[group.rows] += torch.stack([reads.bits for reads in group.reads]).sum((0, 2))
        counts.channels[group.rows] += torch.stack([reads.channels for reads in group.reads]).sum((0, 2))
        counts.scan_tokens[group.rows] += tokens.sum() * heads
        counts.scans[group.rows] += len(group.reads)
        for method in group.methods:
            if method.failed:
                continue
            rows = slice(group.rows.start + method.rows.start, group.rows.start + method.rows.stop)
            if not method.spec.method.declares:
                counts.declared_bits[rows] = torch.nan
            else:
                try:
                    counts.declared_bits[rows] += (self._declared(method) * tokens).sum(-1)
                except Exception as error:
                    self._fail_method(group, method, "declared bits", error)
            method.plans.clear()
        group.reads.clear()

    def _declared(self, method: MethodGroup) -> Tensor:
        """Bits per token that a method declares for this step's plans, summed over heads, ``[rows or 1, layers or 1]``."""
        declared = method.spec.method.declared_bits(torch.stack(method.plans) if method.plans else None, self.facts)
        if isinstance(declared, Tensor):
            return declared.double().sum(-1).T
        return torch.tensor(declared * self.facts.kv_heads, device=self._device)

    def _coverage(self, context: StepContext, scanned: dict[int, Scanned]) -> Tensor:
        coverage = torch.ones(context.query.shape[:3], dtype=torch.float32, device=self._device)
        for start, one in scanned.items():
            if start not in self._extended:
                coverage[one.group.rows] = one.coverage()
        return coverage

    def _attend_selected(
        self, group: SelectGroup, layer: int, context: StepContext, scores: Tensor, coverage: Tensor | None, output: Tensor
    ) -> None:
        if not group.failed:
            try:
                output[group.rows] = self._select_and_attend(group, context, scores[group.rows], coverage)
                return
            except Exception as error:
                rows = group.rows
                numbers = range(rows.start, rows.stop) if isinstance(rows, slice) else rows.tolist()
                self._fail(numbers, f"layer {layer}", error)
                group.failed = True
        output[group.rows] = 0

    def _select_and_attend(self, group: SelectGroup, context: StepContext, approximate: Tensor, coverage: Tensor | None) -> Tensor:
        policy, tokens, rows = group.policy, context.tokens, group.rows
        start, stop = candidate_range(tokens, policy, sealed_tokens(tokens, policy.local))
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

    def _rerank(self, group: SelectGroup, context: StepContext, candidates: Tensor, count: int, stop: int) -> Tensor:
        """Rescore the candidates with their own keys and keep the best."""
        # Ascending, so that of equal scores the lower token is kept.
        candidates = candidates.sort(-1).values
        keys = context.gather_keys(group.rows, candidates, stop)
        exact = (keys.float() @ context.query[group.rows].float().unsqueeze(-1)).squeeze(-1)
        best = candidates.gather(-1, top_indices(share_scores(exact, group.policy), count))
        extra = distinct_rows(candidates, context.tokens) - distinct_rows(best, context.tokens)
        self.counts.candidates[group.rows] += extra.sum(-1)
        return best

    def _attend_densely(self, context: StepContext, rows: Rows, output: Tensor) -> None:
        output[rows] = attend_everything(
            context.query[rows], context.layer.keys, context.layer.values, context.keys[rows], context.values[rows], context.scaling
        )
        self.counts.rows[rows] += context.tokens * self.facts.kv_heads
        self.counts.fired[rows] += 1

    def _attend_extended(
        self, group: ExtendedGroup, layer: int, context: StepContext, scanned: Scanned | None, scores: Tensor, output: Tensor
    ) -> None:
        rows = group.scan.rows
        if scanned is not None:
            try:
                output[rows] = self._extend(group, layer, context, scanned, scores[rows])
                return
            except Exception as error:
                self._fail(range(rows.start, rows.stop), f"layer {layer}", error)
                group.scan.failed = True
        output[rows] = 0

    def _extend(self, group: ExtendedGroup, layer: int, context: StepContext, scanned: Scanned, approximate: Tensor) -> Tensor:
        policy, tokens, rows = group.spec.policy, context.tokens, group.scan.rows
        start, stop = candidate_range(tokens, policy, sealed_tokens(tokens, policy.local))
        free, room = group.k - (tokens - (stop - start)), stop - start
        number = torch.arange(tokens, device=self._device).view(1, 1, 1, -1)
        competing = (number >= start) & (number < stop)
        found = attend_extended(
            group.spec.method,
            policy,
            Scored(approximate, context.all_scores(rows), scanned.coverage),
            Field(competing, ~competing, min(room, free), min(room, int(free * policy.rerank))),
            replace(self._step(group, layer, context, scanned.stores), state=group.states[layer]),
            lambda weights: context.mix(rows, weights),
            lambda: context.mean_value(rows),
        )
        self.counts.rows[rows] += found.selection.rows.sum(-1)
        self.counts.candidates[rows] += found.selection.candidate_rows.sum(-1)
        self.counts.fired[rows] += 1
        return found.output

    def _fail_method(self, group: ScanGroup, method: MethodGroup, where: str, error: Exception) -> None:
        self._fail(range(group.rows.start + method.rows.start, group.rows.start + method.rows.stop), where, error)
        method.failed = True
        group.failed = all(one.failed for one in group.methods)

    def _fail(self, rows: Iterable[int], where: str, error: Exception) -> None:
        """Note why rows have failed. A lack of memory is raised instead: a smaller batch may do."""
        if is_out_of_memory(error):
            raise error
        for row in rows:
            self.failures.setdefault(row, f"{where}: {type(error).__name__}: {one_line(error)}")


def batch_order(branches: Sequence[Branch], facts: ModelFacts) -> list[int]:
    """The order of rows in which those that scan one store, and in it those of one method, are consecutive."""
    stores: dict[Any, int] = {}
    specs: dict[MethodSpec, int] = {}
    for branch in branches:
        stores.setdefault(_scan_key(branch, facts), len(stores))
        specs.setdefault(branch.spec, len(specs))
    return sorted(range(len(branches)), key=lambda row: (stores[_scan_key(branches[row], facts)], specs[branches[row].spec]))


def _scan_key(branch: Branch, facts: ModelFacts) -> tuple[StoreSpec | None, Policy | None, Branch | None]:
    policy = None if branch.k is None else _scan_policy(branch.spec.policy)
    return branch.spec.method.store(facts), policy, branch if branch.spec.method.extended else None


def _scan_policy(policy: Policy) -> Policy:
    """What of a policy matters to a scan: the window decides what is sealed, and dense layers are not scanned."""
    return Policy(local=policy.local, dense_layers=policy.dense_layers, dense_every=policy.dense_every)


def _as_rows(rows: Sequence[int], device: torch.device) -> Rows:
    if rows and list(rows) == list(range(rows[0], rows[-1] + 1)):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows, dtype=torch.int64, device=device)
