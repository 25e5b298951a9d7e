"""The scans of many branches of one prefix: what each group seals, plans and scores in a layer.

A method that fails takes no other with it: its rows are named in ``failures``, and any scores do for them from then on.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.branch_context import StepContext, sealed_tokens
from fathom_eval.branch_graphs import Read, Recorder, ScanGraphs, steady
from fathom_eval.branch_groups import ExtendedGroup, MethodGroup, ScanGroup, Scanned, joint_plans, scan_groups
from fathom_eval.devices import current
from fathom_eval.errors import METHOD_ERRORS, raised_at
from fathom_eval.gguf_models import one_line
from fathom_eval.memory_errors import is_out_of_memory
from fathom_eval.methods.step import Step
from fathom_eval.models import ModelFacts
from fathom_eval.prefill import Prefix
from fathom_eval.reads import Reads
from fathom_eval.rehearsal import Rehearsal, rehearsed_query
from fathom_eval.stores import ExactSpec, Store

if TYPE_CHECKING:
    from fathom_eval.branches import Branch


class BranchScans:
    """The groups that scan, and their scans. :class:`~fathom_eval.branches.BranchBatch` adds selection and attention.

    Attributes:
        failures: Why rows have failed, one line each. What they output from then on means nothing.
    """

    def __init__(self, prefix: Prefix, branches: Sequence[Branch], facts: ModelFacts, rehearsal: Rehearsal | None) -> None:
        self.prefix, self.branches, self.facts = prefix, tuple(branches), facts
        self.failures: dict[int, str] = {}
        self._rehearsal = rehearsal
        self._previous: Tensor | None = None
        devices = [layer.keys.device for layer in prefix.layers]
        self._graphs = ScanGraphs(Recorder()) if all(device.type == "cuda" for device in devices) else None
        self._scans = scan_groups(self.branches, facts, len(devices), prefix.tokens)
        self._extended: dict[int, ExtendedGroup] = {}
        for scan in self._scans:
            self._index(scan)
            scan.steady = steady(scan)
            spec, k = scan.methods[0].spec, self.branches[scan.rows.start].k
            if k is not None and spec.method.extended:
                self._extended[scan.rows.start] = ExtendedGroup(spec, k, scan, [{} for _ in prefix.layers])

    def _index(self, group: ScanGroup) -> None:
        """Let each method prepare what it needs of every layer."""
        for method in group.methods:
            try:
                for layer in self.prefix.layers:
                    with current(layer.keys.device):
                        method.indexes.append(method.spec.method.index(layer, self.facts))
            except METHOD_ERRORS as error:
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

    def _scan_all(self, groups: Sequence[ScanGroup], layer: int, context: StepContext, scores: Tensor) -> dict[int, Scanned]:
        """Score all tokens for all rows. Groups are named by their first row; those that have failed are missing."""
        tail = self._score_tail(groups, context, scores)
        found = self._replay(groups, layer, context, scores) if tail and self._graphs is not None else {}
        for group in groups:
            one = None if group.rows.start in found else self._scan(group, layer, context, scores, tail)
            if one is not None:
                found[group.rows.start] = one
        return found

    def _replay(self, groups: Sequence[ScanGroup], layer: int, context: StepContext, scores: Tensor) -> dict[int, Scanned]:
        """Score sealed blocks for the groups whose scan can be recorded, once it is; the others are missing."""
        assert self._graphs is not None
        stores: list[tuple[ScanGroup, Store, Store | None, Tensor]] = []
        for group in groups:
            if group.steady and not group.failed:
                try:
                    shared, own = self._stores(group, layer, context)
                except Exception as error:  # which the scan that is not recorded meets again, and notes
                    if is_out_of_memory(error):  # there it would be met with less memory still
                        raise
                    continue
                sealed = sealed_tokens(context.tokens, group.policy.local)
                stores.append((group, shared, own, scores[group.rows][..., :sealed]))
        if not stores:
            return {}
        known = tuple((group.rows.start, out.shape[-1], *(one.failed for one in group.methods)) for group, _, _, out in stores)
        found = self._graphs.run(
            layer,
            (scores.data_ptr(), scores.stride(), context.query.dtype, known),
            context.query,
            lambda query: [self._read(group, layer, query[group.rows], shared, own, out, None) for group, shared, own, out in stores],
        )
        if found is None:
            return {}
        scanned = {}
        for (group, shared, own, _), (plan, reads) in zip(stores, found, strict=True):
            group.note(plan, reads)
            scanned[group.rows.start] = Scanned(group, shared, _filled(shared, own), context.query[group.rows], plan)
        return scanned

    def _scan(self, group: ScanGroup, layer: int, context: StepContext, scores: Tensor, tail: bool) -> Scanned | None:
        """Score all tokens for the rows of one store; None where the group has failed."""
        if not group.failed:
            try:
                return self._scan_store(group, layer, context, scores, tail)
            except METHOD_ERRORS as error:
                self._fail(range(group.rows.start, group.rows.stop), f"layer {layer}", error)
                group.failed = True
        # Rows that have failed are selected along with the others: any scores do, but ties would cost time.
        scores[group.rows] = -torch.arange(context.tokens, dtype=torch.float32, device=scores.device)
        return None

    def _scan_store(self, group: ScanGroup, layer: int, context: StepContext, scores: Tensor, tail: bool) -> Scanned:
        """Score sealed blocks by the store, and the unsealed tail exactly unless that is done."""
        sealed = sealed_tokens(context.tokens, group.policy.local)
        shared, own = self._stores(group, layer, context)
        stores = _filled(shared, own)
        extended = self._extended.get(group.rows.start)
        step = self._step(extended, layer, context, stores) if extended is not None else None
        query = context.query[group.rows] if step is None else group.methods[0].spec.method.scan_query(step)
        plan, reads = self._read(group, layer, query, shared, own, scores[group.rows][..., :sealed], step)
        if step is not None or not tail:
            scores[group.rows, ..., sealed:] = context.exact_scores(group.rows, query, sealed)
        group.note(plan, reads)
        return Scanned(group, shared, stores, query, plan)

    def _stores(self, group: ScanGroup, layer: int, context: StepContext) -> tuple[Store, Store | None]:
        """The store of the prefix, and that of what these branches sealed themselves."""
        shared = context.layer.store(group.store, group.sealed)
        return shared, self._seal(group, layer, context, shared, sealed_tokens(context.tokens, group.policy.local))

    def _read(self, group: ScanGroup, layer: int, query: Tensor, shared: Store, own: Store | None, out: Tensor, step: Step | None) -> Read:
        """Plan and scan the sealed tokens, ``out`` being room for their scores, ``[R, H, G, sealed]``."""
        sealed, projected = out.shape[-1], shared.project(query)
        plan = self._plan(group, layer, projected, step)
        reads = shared.scan_into(query, projected, plan, out, own)
        counted = 0 if isinstance(group.store, ExactSpec) else sealed
        if reads.tokens != counted or (isinstance(reads, Reads) and reads.code_bits.shape != query.shape[:2]):
            shape = tuple(reads.code_bits.shape) if isinstance(reads, Reads) else ()
            raise ValueError(f"its store reports reads of {reads.tokens} of {sealed} tokens, shape {shape}")
        return plan, reads

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
            except METHOD_ERRORS as error:
                self._fail_method(group, method, f"layer {layer}", error)
        planned = [part for part in parts if part is not None]
        if group.failed or not planned:
            return None
        for at, method in enumerate(group.methods):
            part = parts[at]
            if part is not None and part.shape[2:] == planned[0].shape[2:]:
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
            rehearsed_query=self._rehearsed(group, layer),
        )

    def _rehearsed(self, group: ExtendedGroup, layer: int) -> Tensor | None:
        query = rehearsed_query(self._rehearsal, group.spec.method, layer)
        return None if query is None else query[group.scan.rows]

    def _seal(self, group: ScanGroup, layer: int, context: StepContext, shared: Store, sealed: int) -> Store | None:
        """Seal the blocks that have left the local window since the prefill. They belong to these branches alone."""
        own = group.own[layer]
        done = group.sealed + (own.tokens if own is not None else 0)
        if sealed > done:
            if own is None:
                own = group.own[layer] = shared.empty(group.rows.stop - group.rows.start)
            own.seal(context.key_range(group.rows, done, sealed), context.value_range(group.rows, done, sealed))
        return own

    def _fail_method(self, group: ScanGroup, method: MethodGroup, where: str, error: BaseException) -> None:
        self._fail(range(group.rows.start + method.rows.start, group.rows.start + method.rows.stop), where, error)
        method.failed = True
        group.failed = all(one.failed for one in group.methods)

    def _fail(self, rows: Iterable[int], where: str, error: BaseException) -> None:
        """Note why rows have failed. A lack of memory is raised instead: a smaller batch may do. So is what cannot be recorded."""
        if is_out_of_memory(error) or (self._graphs is not None and self._graphs.recording):
            raise error
        for row in rows:
            self.failures.setdefault(row, f"{where}: {type(error).__name__}: {one_line(error)}{raised_at(error)}")


def _filled(*stores: Store | None) -> tuple[Store, ...]:
    return tuple(store for store in stores if store is not None and store.tokens)
