"""Many methods over one prefix: the attention of every branch, layer by layer.

Each branch is a row of one batch. Rows that scan the same store are scored together, so the store is read once for all of them; rows
are selected and attended together whatever their k, on a GPU by kernels that read K/V rows where they lie. Small models are bound by
the number of operations a layer, so rows stand in an order that makes most groups slices, and what can be counted later is not counted
in every layer. Methods that need more than a store and a plan (:attr:`~fathom_eval.methods.base.Method.extended`) are groups of their own.

A method that fails takes no other with it: its rows are named in ``failures`` and carried along with outputs that mean nothing.

The layers of a model may lie on several devices. What is needed in every layer is kept on each of them; counts meet on the first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    MethodGroup,
    ScanGroup,
    Scanned,
    joint_plans,
    rows_on,
    scan_groups,
    scan_key,
    select_groups,
)
from fathom_eval.branch_health import Health
from fathom_eval.devices import current
from fathom_eval.extended import Field, Scored, attend_extended
from fathom_eval.gguf_models import one_line
from fathom_eval.kernels.branches import attend_everything, attend_lists, rerank_lists
from fathom_eval.kernels.choose import NONE, choose_tokens
from fathom_eval.memory_errors import is_out_of_memory
from fathom_eval.methods import MethodSpec
from fathom_eval.methods.step import Step
from fathom_eval.models import ModelFacts
from fathom_eval.prefill import Prefix
from fathom_eval.reads import Reads
from fathom_eval.reallocation import tempered
from fathom_eval.selection import candidate_range, head_scores, union_of_group
from fathom_eval.stores import ExactSpec, Store

SETTLED_STEPS = 32
"""Steps after which what they have read is added up, unless somebody asks before."""


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
        failures: Why rows have failed, one line each. What they output from then on means nothing.
    """

    def __init__(self, prefix: Prefix, branches: Sequence[Branch], facts: ModelFacts) -> None:
        self.prefix, self.branches, self.facts = prefix, tuple(branches), facts
        self.failures: dict[int, str] = {}
        on = [layer.keys.device for layer in prefix.layers]
        self._home, devices = on[0], list(dict.fromkeys(on))
        self._tally = Tally(len(self.branches), facts.kv_heads, on)
        self._health = Health(len(self.branches), on)
        self._unsettled = 0
        self._settled = False
        self._scores = ScoreBuffer()
        self._previous: Tensor | None = None
        self._scans = scan_groups(self.branches, facts, len(on), prefix.tokens)
        for scan in self._scans:
            self._index(scan)
        self._extended: dict[int, ExtendedGroup] = {}
        for scan in self._scans:
            spec, k = scan.methods[0].spec, self.branches[scan.rows.start].k
            if k is not None and spec.method.extended:
                self._extended[scan.rows.start] = ExtendedGroup(spec, k, scan, [{} for _ in prefix.layers])
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
            tail = self._score_tail(scans, context, scores)
            found = [self._scan(group, layer, context, scores, tail) for group in scans]
            scanned = {one.group.rows.start: one for one in found if one is not None}
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

    def _index(self, group: ScanGroup) -> None:
        """Let each method prepare what it needs of every layer."""
        for method in group.methods:
            try:
                for layer in self.prefix.layers:
                    with current(layer.keys.device):
                        method.indexes.append(method.spec.method.index(layer, self.facts))
            except Exception as error:
                self._fail_method(group, method, "the prefix", error)

    def _score_tail(self, groups: Sequence[ScanGroup], context: StepContext, scores: Tensor) -> bool:
        """Score the unsealed tokens of all rows exactly, in one go where all seal the same tokens."""
        plain = [group for group in groups if group.rows.start not in self._extended]
        sealed = {sealed_tokens(context.tokens, group.policy.local) for group in plain}
        if len(sealed) != 1:
            return False
        [start] = sealed
        rows = slice(plain[0].rows.start, plain[-1].rows.stop)
        scores[rows, ..., start:] = context.exact_scores(rows, context.query[rows], start)
        return True

    def _scan(self, group: ScanGroup, layer: int, context: StepContext, scores: Tensor, tail: bool) -> Scanned | None:
        """Score all tokens for the rows of one store; None where the group has failed."""
        if not group.failed:
            try:
                return self._scan_store(group, layer, context, scores, tail)
            except Exception as error:
                self._fail(range(group.rows.start, group.rows.stop), f"layer {layer}", error)
                group.failed = True
        # Rows that have failed are selected along with the others: any scores do, but ties would cost time.
        scores[group.rows] = -torch.arange(context.tokens, dtype=torch.float32, device=scores.device)
        return None

    def _scan_store(self, group: ScanGroup, layer: int, context: StepContext, scores: Tensor, tail: bool) -> Scanned:
        """Score sealed blocks by the store, and the unsealed tail exactly unless that is done."""
        sealed = sealed_tokens(context.tokens, group.policy.local)
        shared = context.layer.store(group.store, group.sealed)
        own = self._seal(group, layer, context, shared, sealed)
        stores = tuple(store for store in (shared, own) if store is not None and store.tokens)
        extended = self._extended.get(group.rows.start)
        step = self._step(extended, layer, context, stores) if extended is not None else None
        query = context.query[group.rows] if step is None else group.methods[0].spec.method.scan_query(step)
        projected = shared.project(query)
        plan = self._plan(group, layer, projected, step)
        reads = shared.scan_into(query, projected, plan, scores[group.rows][..., :sealed], own)
        counted = 0 if isinstance(group.store, ExactSpec) else sealed
        if reads.tokens != counted or (isinstance(reads, Reads) and reads.code_bits.shape != query.shape[:2]):
            shape = tuple(reads.code_bits.shape) if isinstance(reads, Reads) else ()
            raise ValueError(f"its store reports reads of {reads.tokens} of {sealed} tokens, shape {shape}")
        if step is not None or not tail:
            scores[group.rows, ..., sealed:] = context.exact_scores(group.rows, query, sealed)
        group.reads.append(reads)
        return Scanned(group, shared, stores, query, plan)

    def _plan(self, group: ScanGroup, layer: int, projected: Tensor, step: Step | None) -> Tensor | None:
        """The plans of all rows. A method that fails here reads nothing from now on."""
        parts: list[Tensor | None] = [None] * len(group.methods) if step is not None else joint_plans(group.methods, layer, projected)
        for at, method in enumerate(group.methods):
            if method.failed or parts[at] is not None:
                continue
            try:
                rows, index = projected[method.rows], method.indexes[layer]
                part = method.spec.method.plan(rows, index) if step is None else method.spec.method.plan_step(rows, step)
                if part is not None and part.shape[:2] != rows.shape[:2]:
                    raise ValueError(f"its plan is of shape {tuple(part.shape)} for {rows.shape[0]} rows and {rows.shape[1]} heads")
                parts[at] = part
            except Exception as error:
                self._fail_method(group, method, f"layer {layer}", error)
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
        return torch.cat([part for part in parts if part is not None]) if len(parts) > 1 else parts[0]

    def _step(self, group: ExtendedGroup, layer: int, context: StepContext, stores: tuple[Store, ...]) -> Step:
        rows, query = group.scan.rows, context.query
        return Step(
            layer=layer,
            index=group.scan.methods[0].indexes[layer],
            k=group.k,
            scaling=context.scaling,
            length=context.tokens,
            tokens=torch.full((rows.stop - rows.start,), context.tokens, dtype=torch.int64, device=query.device),
            query=query[rows],
            previous_query=None if self._previous is None else self._previous[rows].to(query.device),
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
                    except Exception as error:
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
            except Exception as error:
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
            except Exception as error:
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
        self._tally.add_rows(layer, rows, found.selection.rows, found.selection.candidate_rows)
        self._tally.attend(range(rows.start, rows.stop), 0)
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
        stores.setdefault(scan_key(branch, facts), len(stores))
        specs.setdefault(branch.spec, len(specs))
    return sorted(range(len(branches)), key=lambda row: (stores[scan_key(branches[row], facts)], specs[branches[row].spec]))
