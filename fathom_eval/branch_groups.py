"""The groups that a batch of branches falls into."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fathom_eval.branch_context import Rows, sealed_tokens
from fathom_eval.kernels.choose import Contest
from fathom_eval.kernels.choose.reference import rows_at
from fathom_eval.methods import MethodSpec
from fathom_eval.models import ModelFacts
from fathom_eval.reads import Reads
from fathom_eval.selection import Policy, candidate_range
from fathom_eval.stores import DeferredReads, Store, StoreSpec


@dataclass
class MethodGroup:
    """Consecutive rows of a scan group that run the same method (at different k). ``rows`` count from the group's first."""

    spec: MethodSpec
    rows: slice
    indexes: list[Any]
    plans: list[Tensor] = field(default_factory=list)
    failed: bool = False

    def declared_bits(self, facts: ModelFacts, device: torch.device) -> Tensor:
        """Bits per token that the method declares for its plans, summed over heads, ``[rows or 1, plans or 1]``."""
        declared = self.spec.method.declared_bits(torch.stack(self.plans) if self.plans else None, facts)
        if isinstance(declared, Tensor):
            return declared.double().sum(-1).T
        return torch.tensor(declared * facts.kv_heads, device=device)


@dataclass
class ScanGroup:
    """Consecutive rows that scan the same store in the same layers, and the blocks that these branches sealed themselves."""

    store: StoreSpec
    policy: Policy
    rows: slice
    sealed: int
    methods: list[MethodGroup]
    own: list[Store | None]
    reads: list[Reads | DeferredReads] = field(default_factory=list)
    failed: bool = False


@dataclass
class ExtendedGroup:
    """A branch that is scanned and selected on its own, and what it keeps from step to step in every layer."""

    spec: MethodSpec
    k: int
    scan: ScanGroup
    states: list[dict[str, Any]]


@dataclass
class SelectGroup:
    """Rows that select with the same k and policy. ``numbers``: the same rows as numbers."""

    k: int
    policy: Policy
    rows: Rows
    numbers: tuple[int, ...]
    failed: bool = False


@dataclass
class Bucket:
    """Groups that are selected and attended together, and what competes in their rows at one number of tokens."""

    groups: tuple[SelectGroup, ...]
    rows: Rows
    numbers: tuple[int, ...]
    tokens: int = -1
    current: Contest | None = None

    @classmethod
    def of(cls, groups: Sequence[SelectGroup], device: torch.device) -> Bucket:
        """The bucket of these groups."""
        numbers = tuple(sorted(row for group in groups for row in group.numbers))
        return cls(tuple(groups), as_rows(numbers, device), numbers)

    @property
    def policy(self) -> Policy:
        """Of the first group: what all of them have in common is how heads share and what is attended to."""
        return self.groups[0].policy

    def contest(self, tokens: int, device: torch.device) -> Contest:
        """What competes when there are so many tokens; made once a step."""
        if self.current is None or self.tokens != tokens:
            of_row: dict[int, tuple[tuple[int, int], int, int]] = {}
            for group in self.groups:
                policy = group.policy
                start, stop = candidate_range(tokens, policy, sealed_tokens(tokens, policy.local))
                free, room = group.k - (tokens - (stop - start)), stop - start
                of_row.update(dict.fromkeys(group.numbers, ((start, stop), min(room, free), min(room, int(free * policy.rerank)))))
            ranges, counts, fetched = zip(*(of_row[row] for row in self.numbers), strict=True)
            self.tokens, self.current = tokens, Contest.of(ranges, counts, fetched, device)
        return self.current


class Buckets:
    """The groups that are selected together in each layer."""

    def __init__(self, groups: Sequence[SelectGroup], device: torch.device) -> None:
        self._groups, self._device = tuple(groups), device
        self._known: dict[tuple[int, ...], list[Bucket]] = {}

    def of(self, layer: int) -> list[Bucket]:
        """Those that select in this layer, joined as far as they can be."""
        active = tuple(at for at, group in enumerate(self._groups) if not group.policy.is_dense(layer))
        if active not in self._known:
            joined: dict[tuple[object, ...], list[SelectGroup]] = {}
            for at in active:
                joined.setdefault(_bucket_key(self._groups[at]), []).append(self._groups[at])
            self._known[active] = [Bucket.of(groups, self._device) for groups in joined.values()]
        return self._known[active]


def _bucket_key(group: SelectGroup) -> tuple[object, ...]:
    """Groups of equal keys are one bucket. Those that reallocate mass are buckets of their own: they need one range of tokens."""
    policy = group.policy
    return (policy.share, policy.attend, (group.k, policy) if policy.reallocate else None)


def as_rows(rows: Sequence[int], device: torch.device) -> Rows:
    """Rows of the batch as a slice where they are evenly spaced."""
    found = rows_at(rows) if rows else slice(0, 0)
    return found if isinstance(found, slice) else torch.tensor(found, dtype=torch.int64, device=device)


@dataclass(frozen=True)
class Scanned:
    """What a group scanned in this layer: its stores, the shared one first, and its plan."""

    group: ScanGroup
    shared: Store
    stores: tuple[Store, ...]
    query: Tensor
    plan: Tensor | None

    def coverage(self) -> Tensor:
        """See :meth:`fathom_eval.stores.Store.coverage`."""
        return self.shared.coverage(self.shared.project(self.query), self.plan)


def joint_plans(methods: Sequence[MethodGroup], layer: int, projected: Tensor) -> list[Tensor | None]:
    """The plans of neighbouring methods that can be planned together; None for the others."""
    parts: list[Tensor | None] = []
    for key, members in itertools.groupby(methods, lambda method: _plan_key(method, layer)):
        run = list(members)
        if key is None or len(run) == 1:
            parts += [None] * len(run)
            continue
        start, stop = run[0].rows.start, run[-1].rows.stop
        entries = [(one.spec.method, one.indexes[layer], one.rows.stop - one.rows.start) for one in run]
        plan = type(run[0].spec.method).plan_together(projected[start:stop], entries)
        parts += [plan[one.rows.start - start : one.rows.stop - start] for one in run]
    return parts


def _plan_key(method: MethodGroup, layer: int) -> Hashable:
    kind = type(method.spec.method)
    key = None if method.failed or not _plans_together(kind) else method.spec.method.plan_key(method.indexes[layer])
    return None if key is None else (kind, key)


@functools.cache
def _plans_together(kind: type) -> bool:
    """Whether ``plan_together`` is that of ``plan``: a subclass may have given another ``plan`` alone."""
    return len({next(one for one in kind.__mro__ if name in vars(one)) for name in ("plan", "plan_together")}) == 1
