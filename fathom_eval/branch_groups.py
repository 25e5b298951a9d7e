"""The groups that a batch of branches falls into, and what is counted for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fathom_eval.branch_context import Rows
from fathom_eval.methods import MethodSpec
from fathom_eval.reads import Reads
from fathom_eval.selection import Policy
from fathom_eval.stores import Store, StoreSpec


@dataclass
class MethodGroup:
    """Consecutive rows of a scan group that run the same method (at different k). ``rows`` count from the group's first."""

    spec: MethodSpec
    rows: slice
    indexes: list[Any]
    plans: list[Tensor] = field(default_factory=list)
    failed: bool = False


@dataclass
class ScanGroup:
    """Consecutive rows that scan the same store in the same layers, and the blocks that these branches sealed themselves."""

    store: StoreSpec
    policy: Policy
    rows: slice
    sealed: int
    methods: list[MethodGroup]
    own: list[Store | None]
    reads: list[Reads] = field(default_factory=list)
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
    """Rows that select with the same k and policy."""

    k: int
    policy: Policy
    rows: Rows
    failed: bool = False


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


@dataclass
class Counts:
    """Sums over layers, KV heads and steps, one number a branch.

    Attributes:
        scan_bits: Bits that the scans touched.
        declared_bits: What the methods declare for their plans, not a number for a method that declares nothing.
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
