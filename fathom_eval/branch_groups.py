"""The groups that a batch of branches falls into."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from fathom_eval.branches import Branch


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
        plans = torch.stack([plan.to(device) for plan in self.plans]) if self.plans else None
        declared = self.spec.method.declared_bits(plans, facts)
        if isinstance(declared, Tensor):
            return declared.double().sum(-1).T
        return torch.tensor(declared * facts.kv_heads, device=device)


@dataclass
class ScanGroup:
    """Consecutive rows that scan the same store in the same layers, and the blocks that these branches sealed themselves.

    ``steady``: See :func:`fathom_eval.branch_graphs.steady`.
    """

    store: StoreSpec
    policy: Policy
    rows: slice
    sealed: int
    methods: list[MethodGroup]
    own: list[Store | None]
    reads: list[Reads | DeferredReads] = field(default_factory=list)
    failed: bool = False
    steady: bool = False

    def note(self, plan: Tensor | None, reads: Reads | DeferredReads) -> None:
        """Keep what was read in a layer, and by which plan, until it is added up."""
        self.reads.append(reads)
        if plan is not None:
            for method in self.methods:
                if not method.failed:
                    method.plans.append(plan[method.rows])


@dataclass
class ExtendedGroup:
    """A branch that is scanned and selected on its own, and what it keeps from step to step in every layer."""

    spec: MethodSpec
    k: int
    scan: ScanGroup
    states: list[dict[str, Any]]


@dataclass
class SelectGroup:
    """Rows that select with the same k and policy: as numbers, and as what addresses them on each device of the model."""

    k: int
    policy: Policy
    numbers: tuple[int, ...]
    rows: dict[torch.device, Rows]
    failed: bool = False


def select_groups(branches: Sequence[Branch], devices: Sequence[torch.device]) -> list[SelectGroup]:
    """The groups of all branches that select by their scan's scores alone."""
    members: dict[tuple[int, Policy], list[int]] = {}
    for row, branch in enumerate(branches):
        if branch.k is not None and not branch.spec.method.extended:
            members.setdefault((branch.k, branch.spec.policy), []).append(row)
    return [SelectGroup(k, policy, tuple(rows), rows_on(rows, devices)) for (k, policy), rows in members.items()]


def scan_groups(branches: Sequence[Branch], facts: ModelFacts, layers: int, prefix_tokens: int) -> list[ScanGroup]:
    """The groups that scan, of branches in the order of :func:`fathom_eval.branches.batch_order`; methods have no indexes yet."""
    groups: list[ScanGroup] = []
    for row, branch in enumerate(branches):
        if branch.k is None:
            continue
        spec, store = branch.spec, branch.spec.method.store(facts)
        assert store is not None, f"{spec.label} scans nothing and so takes no k"
        last = groups[-1] if groups else None
        if last is None or last.rows.stop != row or scan_key(branch, facts) != scan_key(branches[row - 1], facts):
            sealed = sealed_tokens(prefix_tokens + 1, spec.policy.local)
            last = ScanGroup(store, _scan_policy(spec.policy), slice(row, row), sealed, [], [None] * layers)
            groups.append(last)
        last.rows = slice(last.rows.start, row + 1)
        at = row - last.rows.start
        if last.methods and last.methods[-1].spec == spec:
            last.methods[-1].rows = slice(last.methods[-1].rows.start, at + 1)
        else:
            last.methods.append(MethodGroup(spec, slice(at, at + 1), []))
    return groups


def scan_key(branch: Branch, facts: ModelFacts) -> tuple[StoreSpec | None, Policy | None, Branch | None]:
    """Neighbouring branches of equal keys are one scan group."""
    policy = None if branch.k is None else _scan_policy(branch.spec.policy)
    return branch.spec.method.store(facts), policy, branch if branch.spec.method.extended else None


def _scan_policy(policy: Policy) -> Policy:
    """What of a policy matters to a scan: the window decides what is sealed, and dense layers are not scanned."""
    return Policy(local=policy.local, dense_layers=policy.dense_layers, dense_every=policy.dense_every)


@dataclass
class Bucket:
    """Groups that are selected and attended together on one device, and what competes in their rows at one number of tokens."""

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
    """The groups that are selected together in each layer of one device."""

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


def rows_on(rows: Sequence[int], devices: Sequence[torch.device]) -> dict[torch.device, Rows]:
    """:func:`as_rows` for each device."""
    return {device: as_rows(rows, device) for device in devices}


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
