"""Many methods over one prefix: the attention of every branch, layer by layer.

Each branch is a row of one batch. Rows that scan the same store are scored together, so the store is read once for all of them; rows
are selected and attended together whatever their k, on a GPU by kernels that read K/V rows where they lie. Small models are bound by
the number of operations a layer, so rows stand in an order that makes most groups slices, and what can be counted later is not counted
in every layer. Methods that need more than a store and a plan (:attr:`~fathom_eval.methods.base.Method.extended`) are groups of their own.

A method that fails takes no other with it: its rows are named in ``failures`` and carried along with outputs that mean nothing.

The layers of a model may lie on several devices. What is needed in every layer is kept on each of them; counts meet on the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fathom_eval.branch_context import Rows, ScoreBuffer, StepContext, sealed_tokens
from fathom_eval.branch_counts import Counts, Tally
from fathom_eval.branch_groups import (
    Bucket,
    Buckets,
    ExtendedGroup,
    ScanGroup,
    Scanned,
    rows_on,
    scan_key,
    select_groups,
)
from fathom_eval.branch_health import Health
from fathom_eval.branch_scans import BranchScans
from fathom_eval.devices import current
from fathom_eval.errors import METHOD_ERRORS
from fathom_eval.extended import Field, Scored, attend_extended
from fathom_eval.kernels.branches import attend_everything, attend_lists, rerank_lists
from fathom_eval.kernels.choose import NONE, choose_tokens
from fathom_eval.methods import MethodSpec
from fathom_eval.models import ModelFacts
from fathom_eval.prefill import Prefix
from fathom_eval.reallocation import tempered
from fathom_eval.rehearsal import Rehearsal
from fathom_eval.selection import candidate_range, head_scores, union_of_group

SETTLED_STEPS = 32
"""Steps after which what they have read is added up, unless somebody asks before."""


@dataclass(frozen=True)
class Branch:
    """One method at one k, decoded as one row of the batch. ``k`` is None for a method without a selection (dense)."""

    spec: MethodSpec
    k: int | None


class BranchBatch(BranchScans):
    """The attention of all branches of one prefix; pass it to the model as ``branches=``.

    Args:
        prefix: Shared and never written.
        branches: The rows of the batch, in order; :func:`batch_order` gives the order that makes groups consecutive.
        facts: Of the model.
        rehearsal: Of the same rows, for methods that ask for it.

    Attributes:
        failures: Why rows have failed, one line each. What they output from then on means nothing.
    """

    def __init__(self, prefix: Prefix, branches: Sequence[Branch], facts: ModelFacts, rehearsal: Rehearsal | None = None) -> None:
        super().__init__(prefix, branches, facts, rehearsal)
        on = [layer.keys.device for layer in prefix.layers]
        self._home, devices = on[0], list(dict.fromkeys(on))
        self._tally = Tally(len(self.branches), facts.kv_heads, on)
        self._health = Health(len(self.branches), on)
        self._unsettled = 0
        self._settled = False
        self._scores = ScoreBuffer()
        self._selects = select_groups(self.branches, devices)
        self._buckets = {device: Buckets(self._selects, device) for device in devices}
        self._dense = tuple(row for row, branch in enumerate(self.branches) if branch.k is None)
        self._dense_rows = rows_on(self._dense, devices)

    @property
    def counts(self) -> Counts:
        """What has been read so far. Asking for it waits for the device."""
        self.settle()
        return self._tally.counts()

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        """See :class:`fathom_eval.attention.BranchAttention`."""
        with current(query.device):
            return self._attend(layer, query, keys, values, scaling)

    def _attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        if layer == 0 or not self._unsettled:
            self._tally.begin()
            self._unsettled += 1
        context, device = StepContext(self.prefix.layers[layer], query, keys, values, scaling), query.device
        self._health.watch_query(layer, query)
        output = torch.empty(query.shape, dtype=torch.float32, device=device)
        if self._dense:
            self._attend_densely(context, self._dense_rows[device], self._dense, output)
        if self._scans:
            scores = self._scores.of(context)
            scans = [group for group in self._scans if not group.policy.is_dense(layer)]
            scanned = self._scan_all(scans, layer, context, scores)
            self._health.watch_scores(layer, scores)
            for group in self._selects:
                if group.policy.is_dense(layer):
                    self._attend_densely(context, group.rows[device], group.numbers, output)
            for bucket in self._buckets[device].of(layer):
                coverage = self._coverage(context, scanned) if bucket.policy.reallocate else None
                self._attend_selected(bucket, layer, context, scores, coverage, output)
            for start, extended in self._extended.items():
                if extended.spec.policy.is_dense(layer):
                    self._attend_densely(context, extended.scan.rows, range(start, extended.scan.rows.stop), output)
                else:
                    self._attend_extended(extended, layer, context, scanned.get(start), scores, output)
        self._health.watch_output(layer, output)
        self._previous = query
        if layer == len(self.prefix.layers) - 1:
            self._previous = None
            # A method that declares what it cannot is to end with the first step.
            if not self._settled or self._unsettled == SETTLED_STEPS:
                self.settle()
        return output

    def broken(self, device: torch.device) -> Tensor:
        """Rows that gave in the last step what is not a number, boolean ``[R]`` on this device, which is not waited for."""
        return self._health.broken(device)

    def note_broken(self) -> None:
        """Say in ``failures`` why rows are :meth:`broken`. Waits for the devices."""
        for row, (layer, problem) in self._health.problems().items():
            self.failures.setdefault(row, f"layer {layer}: {self.branches[row].spec.label} gives {problem}")

    def settle(self) -> None:
        """Add up what has been read since the last time. A method whose declared bits fail, fails here."""
        for scan in self._scans:
            self._settle(scan)
        self._tally.settle()
        self._unsettled, self._settled = 0, True

    def _settle(self, group: ScanGroup) -> None:
        """Add up what a group has read since the last time."""
        if not group.reads:  # every layer is dense
            return
        tokens = self._tally.scan(group.rows, group.reads)
        for method in group.methods:
            if not method.failed:
                rows = slice(group.rows.start + method.rows.start, group.rows.start + method.rows.stop)
                if not method.spec.method.declares:
                    self._tally.declared_bits[rows] = torch.nan
                else:
                    try:
                        self._tally.declared_bits[rows] += (method.declared_bits(self.facts, self._home) * tokens).sum(-1)
                    except METHOD_ERRORS as error:
                        self._fail_method(group, method, "declared bits", error)
            method.plans.clear()
        group.reads.clear()

    def _coverage(self, context: StepContext, scanned: dict[int, Scanned]) -> Tensor:
        coverage = torch.ones(context.query.shape[:3], dtype=torch.float32, device=context.query.device)
        for start, one in scanned.items():
            if start not in self._extended:
                coverage[one.group.rows] = one.coverage()
        return coverage

    def _attend_selected(
        self, bucket: Bucket, layer: int, context: StepContext, scores: Tensor, coverage: Tensor | None, output: Tensor
    ) -> None:
        if not any(group.failed for group in bucket.groups):
            try:
                output[bucket.rows] = self._select_and_attend(bucket, context, layer, scores[bucket.rows], coverage)
                return
            except METHOD_ERRORS as error:
                self._tally.clear(layer, bucket.rows)
                self._fail(bucket.numbers if len(bucket.groups) == 1 else (), f"layer {layer}", error)
        if len(bucket.groups) == 1:
            bucket.groups[0].failed = True
            output[bucket.rows] = 0
            return
        for group in bucket.groups:  # one by one, so that only what fails by itself ends
            self._attend_selected(Bucket.of([group], output.device), layer, context, scores, coverage, output)

    def _select_and_attend(self, bucket: Bucket, context: StepContext, layer: int, approximate: Tensor, coverage: Tensor | None) -> Tensor:
        policy, tokens, rows = bucket.policy, context.tokens, bucket.rows
        query, shared = context.query[rows], context.shared.of(rows)
        contest = bucket.contest(tokens, query.device)
        if policy.share == "head":
            lists = choose_tokens(approximate, contest)
        else:
            lists = choose_tokens(head_scores(approximate, policy.share)[:, :, :1], contest).expand(-1, -1, query.shape[2], -1).contiguous()
        if contest.reranks:
            self._tally.count(layer, rows, lists, contest, tokens, fetched=True)
            lists = rerank_lists(query, shared, lists, contest, policy.share)[..., : max(contest.counts)]
        self._tally.count(layer, rows, lists, contest, tokens)
        self._tally.attend(bucket.numbers, [start + tokens - stop for start, stop in zip(contest.starts, contest.stops, strict=True)])
        attended, mask = lists, None
        if policy.attend == "union":
            attended, mask = union_of_group(lists)
            mask = mask & (attended < NONE)
            attended = attended.masked_fill(~mask, 0)
        output = attend_lists(query, shared, attended, contest, context.scaling, mask)
        if coverage is not None:
            weights = tempered(approximate, coverage[rows], context.scaling, sealed_tokens(tokens, policy.local)).softmax(-1)
            # All rows of a bucket that reallocates have one range of candidates.
            competing = weights[..., contest.starts[0] : contest.stops[0]].sum(-1, keepdim=True)
            missed = competing - weights.gather(-1, lists.long()).sum(-1, keepdim=True)
            output = (1 - missed) * output + missed * context.mean_value(rows).unsqueeze(-2)
        return output

    def _attend_densely(self, context: StepContext, rows: Rows, numbers: Sequence[int], output: Tensor) -> None:
        output[rows] = attend_everything(context.query[rows], context.shared.of(rows), context.scaling)
        self._tally.attend(numbers, context.tokens)

    def _attend_extended(
        self, group: ExtendedGroup, layer: int, context: StepContext, scanned: Scanned | None, scores: Tensor, output: Tensor
    ) -> None:
        rows = group.scan.rows
        if scanned is not None:
            try:
                output[rows] = self._extend(group, layer, context, scanned, scores[rows])
                return
            except METHOD_ERRORS as error:
                self._fail(range(rows.start, rows.stop), f"layer {layer}", error)
                group.scan.failed = True
        output[rows] = 0

    def _extend(self, group: ExtendedGroup, layer: int, context: StepContext, scanned: Scanned, approximate: Tensor) -> Tensor:
        policy, tokens, rows = group.spec.policy, context.tokens, group.scan.rows
        start, stop = candidate_range(tokens, policy, sealed_tokens(tokens, policy.local))
        free, room = group.k - (tokens - (stop - start)), stop - start
        number = torch.arange(tokens, device=context.query.device).view(1, 1, 1, -1)
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
        if found.broken is not None:
            self._health.watch_rank(layer, rows, found.broken)
        self._tally.add_rows(layer, rows, found.selection.rows, found.selection.candidate_rows)
        self._tally.attend(range(rows.start, rows.stop), 0)
        return found.output


def batch_order(branches: Sequence[Branch], facts: ModelFacts) -> list[int]:
    """The order of rows in which those that scan one store, and in it those of one method, are consecutive."""
    stores: dict[Any, int] = {}
    specs: dict[MethodSpec, int] = {}
    for branch in branches:
        stores.setdefault(scan_key(branch, facts), len(stores))
        specs.setdefault(branch.spec, len(specs))
    return sorted(range(len(branches)), key=lambda row: (stores[scan_key(branches[row], facts)], specs[branches[row].spec]))
