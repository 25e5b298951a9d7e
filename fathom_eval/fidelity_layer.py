"""Attention outputs of many methods at many positions of one layer, beside those of dense attention and of exact top-k.

Position p sees the tokens 0..p, as a decode step does, and is computed as one: what :class:`~fathom_eval.branches.BranchBatch`
gives for that step, here for a run of positions at once. Positions between two sealings scan the same store, so they are its rows.
Each method's set is a mask over the tokens, from which the output, the recall and the distinct rows all follow.

Shapes: R positions of one chunk, H KV heads, G query heads a KV head, N tokens up to the chunk's last position, D channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from fathom_eval.branches import Branch
from fathom_eval.calibration import QueryStatistics
from fathom_eval.errors import METHOD_ERRORS, raised_at
from fathom_eval.fidelity_chunk import Chunk, Outcome, Scan
from fathom_eval.gguf_models import one_line
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.memory_errors import is_out_of_memory
from fathom_eval.methods import MethodSpec
from fathom_eval.methods.base import Method
from fathom_eval.methods.step import Step
from fathom_eval.models import ModelFacts
from fathom_eval.observations import Observation
from fathom_eval.prefill import PrefixLayer
from fathom_eval.rehearsal import Rehearsal, rehearsed_query
from fathom_eval.stores import ExactSpec, Store, StoreSpec

SCORE_ELEMENTS, GPU_SCORE_ELEMENTS = 2**25, 2**26
"""Scores of one chunk (128 MB in fp32, twice that on a GPU): what bounds memory at long contexts. A few tensors of this size live at a
time."""


@dataclass(frozen=True)
class WindowLayer:
    """One layer of a dense prefill.

    Attributes:
        keys, values: Of the whole window, ``[H, n, D]``.
        queries: Post-RoPE queries of its last P positions, which are evaluated, ``[P, H, G, D]``.
        query_statistics: Moments of the queries that a method may know.
        scaling: Of the scores, before the softmax.
        observations: What was gathered of the positions that a method may know.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    query_statistics: QueryStatistics
    scaling: float
    observations: Mapping[Observation, Any] = field(default_factory=dict, repr=False)


class LayerComparison:
    """All branches at all evaluated positions of one layer.

    Args:
        layer: Whose dense attention is the reference.
        number: Of the layer, for ``dense_layers`` and for messages.
        branches: Methods at their k. Exact top-k at the same k and policy is computed beside each, whether or not it is among them.
        full_window: Statistics, bases and sealed blocks of the whole window, instead of what a position's own past holds.
        failures: Filled with why a method failed, one line each; those that are in it already are left out.
        previous_queries: Queries of the layer before at the same positions, ``[P, H, G, D]``.
        rehearsal: Of the same positions, for methods that ask for it.
    """

    def __init__(
        self,
        layer: WindowLayer,
        number: int,
        branches: Sequence[Branch],
        facts: ModelFacts,
        *,
        full_window: bool,
        failures: dict[MethodSpec, str],
        previous_queries: Tensor | None = None,
        rehearsal: Rehearsal | None = None,
    ) -> None:
        self._layer, self._number, self._facts, self._full_window, self.failures = layer, number, facts, full_window, failures
        self._previous_queries, self._rehearsal = previous_queries, rehearsal
        self._tokens = layer.keys.shape[1]
        self._first = self._tokens - len(layer.queries)
        self._keys, self._values = layer.keys.float(), layer.values.float()
        known = self._tokens if full_window else self._first
        self._known = PrefixLayer(layer.keys[:, :known], layer.values[:, :known], layer.query_statistics, number, layer.observations)
        self._stores: dict[tuple[StoreSpec, int], Store] = {}
        self._indexes: dict[Method, Any] = {}
        self._states: dict[tuple[MethodSpec, int], dict[str, Any]] = {}
        self._groups: dict[tuple[Method, int], dict[MethodSpec, list[int | None]]] = {}
        for branch in branches:
            group = self._groups.setdefault((branch.spec.method, branch.spec.policy.local), {})
            group.setdefault(branch.spec, []).append(branch.k)

    def outcomes(self) -> Iterator[tuple[int, Branch, Outcome]]:
        """For each chunk of positions, the first of them and the outcome of every branch that has not failed."""
        base = self._values[:, : self._first].sum(1)
        means = base + self._values[:, self._first :].transpose(0, 1).cumsum(0)  # [P, H, D], divided where it is used
        for start, stop in self._chunks():
            chunk = Chunk(self._layer.queries[start:stop], self._first + start, self._keys, self._values, self._layer.scaling)
            chunk.mean_value = means[start:stop] / chunk.lengths.view(-1, 1, 1)
            for (method, local), members in self._groups.items():
                found = self._group(chunk, slice(start, stop), method, local, members)
                yield from ((self._first + start, branch, outcome) for branch, outcome in found)

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """Runs of positions with one number of sealed blocks, short enough for their scores to fit the bound."""
        query_heads = self._layer.queries.shape[1] * self._layer.queries.shape[2]
        bound = GPU_SCORE_ELEMENTS if self._keys.is_cuda else SCORE_ELEMENTS
        most = max(1, bound // (query_heads * self._tokens))
        locals_ = sorted({local for _, local in self._groups})
        start, count = 0, len(self._layer.queries)
        while start < count:
            stop = start + 1
            state = [self._sealed(self._first + start + 1, local) for local in locals_]
            while stop < min(count, start + most) and [self._sealed(self._first + stop + 1, local) for local in locals_] == state:
                stop += 1
            yield start, stop
            start = stop

    def _sealed(self, tokens: int, local: int) -> int:
        """Tokens in sealed blocks when there are ``tokens``: full, and outside the local window."""
        return max(0, (self._tokens if self._full_window else tokens) - local) // BLOCK * BLOCK

    def _group(
        self, chunk: Chunk, positions: slice, method: Method, local: int, members: dict[MethodSpec, list[int | None]]
    ) -> Iterator[tuple[Branch, Outcome]]:
        """The branches that share one scan, unless the scan itself may depend on k."""
        scan: Scan | None = None
        for spec, k_values in members.items():
            for k in k_values:
                if spec in self.failures:
                    continue
                if k is None or spec.policy.is_dense(self._number):
                    yield Branch(spec, k), chunk.dense_outcome()
                    continue
                try:
                    sealed = self._sealed(chunk.tokens[0], local)
                    step = self._step(chunk, positions, method, local, k) if method.extended else None
                    if scan is None or (step is not None and method.overrides("scan_query", "plan_step")):
                        scan = self._scan(chunk, method, local, step)
                    if step is None:
                        outcome = chunk.outcome(spec.policy, k, scan, sealed)
                    else:
                        step = replace(step, state=self._states.setdefault((spec, k), {}))
                        outcome = chunk.extended_outcome(method, spec.policy, scan, sealed, step)
                except METHOD_ERRORS as error:  # whatever a plug-in raises, or needs of memory, the others go on
                    lack = is_out_of_memory(error)
                    problem, where = ("out of memory", "") if lack else (type(error).__name__, raised_at(error))
                    self.failures[spec] = f"layer {self._number}: {problem}: {one_line(error)}{where}"
                    continue
                yield Branch(spec, k), outcome

    def _step(self, chunk: Chunk, positions: slice, method: Method, local: int, k: int) -> Step:
        store_spec = method.store(self._facts)
        exact = store_spec is None or isinstance(store_spec, ExactSpec)
        store = None if exact or store_spec is None else self._store(store_spec, local, self._sealed(chunk.tokens[0], local))
        rehearsed = rehearsed_query(self._rehearsal, method, self._number)
        return Step(
            layer=self._number,
            index=self._index(method),
            k=k,
            scaling=self._layer.scaling,
            length=chunk.exact.shape[-1],
            tokens=chunk.lengths,
            query=chunk.query,
            previous_query=None if self._previous_queries is None else self._previous_queries[positions],
            stores=() if store is None or not store.tokens else (store,),
            state={},
            rehearsed_query=None if rehearsed is None else rehearsed[positions],
        )

    def _index(self, method: Method) -> Any:
        if method not in self._indexes:
            self._indexes[method] = method.index(self._known, self._facts)
        return self._indexes[method]

    def _scan(self, chunk: Chunk, method: Method, local: int, step: Step | None) -> Scan:
        store_spec = method.store(self._facts)
        assert store_spec is not None, f"{method.name} scans nothing and so takes no k"
        if isinstance(store_spec, ExactSpec):
            return chunk.exact_scan()
        store = self._store(store_spec, local, self._sealed(chunk.tokens[0], local))
        query, exact = chunk.query, chunk.exact
        if step is not None and method.overrides("scan_query"):
            query = method.scan_query(step)
            exact = chunk.scores(query)
        projected = store.project(query)
        plan = method.plan(projected, self._index(method)) if step is None else method.plan_step(projected, step)
        shape = query.shape[:2]
        declared = None
        if method.declares:
            declared = torch.as_tensor(method.declared_bits(plan, self._facts), dtype=torch.float64, device=query.device).expand(shape)
        coverage = store.coverage(projected, plan)
        if not store.tokens:
            return replace(chunk.exact_scan(), scores=exact, coverage=coverage)
        found, reads = store.scan(query, projected, plan)
        if found.shape != (*query.shape[:3], store.tokens):
            raise ValueError(f"its store gave scores of shape {tuple(found.shape)} for {store.tokens} sealed tokens")
        if reads.tokens != store.tokens or reads.bits.shape != shape:
            raise ValueError(f"its store reports reads of {reads.tokens} of {store.tokens} tokens, shape {tuple(reads.bits.shape)}")
        scanned = min(store.tokens, exact.shape[-1])
        scores = torch.cat([found[..., :scanned], exact[..., scanned:]], dim=-1)
        # Not a number is not above −∞ either.
        broken = ~(found > -torch.inf).all() if method.ranks_all else torch.isnan(found).any()
        if not method.forces:
            broken = broken | (found == torch.inf).any()
        return Scan(scores, coverage, reads, declared, broken)

    def _store(self, spec: StoreSpec, local: int, sealed: int) -> Store:
        """The store of the tokens that are sealed by now. It grows as a decoding branch's does, and keeps its basis."""
        if (spec, local) not in self._stores:
            self._stores[spec, local] = spec.build(self._known, self._sealed(self._first + 1, local))
        store = self._stores[spec, local]
        if sealed > store.tokens:
            fresh = slice(store.tokens, sealed)
            store.seal(self._layer.keys[:, fresh], self._layer.values[:, fresh])
        return store
