"""What the branches of a batch have read: noted layer by layer, added up a few steps at a time.

Small models are bound by the number of operations a layer, so what is the same number for all heads is counted in Python, and what only
the device knows is kept until somebody asks or many steps have passed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from fathom_eval.branch_context import Rows
from fathom_eval.kernels.choose import Contest, count_rows
from fathom_eval.reads import Reads
from fathom_eval.stores import DeferredReads


@dataclass
class Counts:
    """Sums over layers, KV heads and steps, one number a branch; ``declared_bits`` fp64, the others int64.

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

    def lists(self) -> dict[str, list[float]]:
        """All of them on the host."""
        return {field.name: getattr(self, field.name).tolist() for field in fields(self)}


class Tally:
    """What has been read so far.

    Args:
        rows, heads: Branches, and KV heads of a layer.
        devices: Of the model's layers, one each. What they have in common is added up on the first.
    """

    def __init__(self, rows: int, heads: int, devices: Sequence[torch.device]) -> None:
        self._shape, self._heads, self._devices, self._home = (2, len(devices), rows, heads), heads, tuple(devices), devices[0]
        self.scan_bits, self.channels, self._rows, self._candidates = (
            torch.zeros(rows, dtype=torch.int64, device=self._home) for _ in range(4)
        )
        self.declared_bits = torch.zeros(rows, dtype=torch.float64, device=self._home)
        self._scan_tokens, self._scans, self._attended, self._fired = ([0] * rows for _ in range(4))
        self._pending: dict[torch.device, list[Tensor]] = {device: [] for device in devices}

    def begin(self) -> None:
        """A step begins."""
        for device, steps in self._pending.items():
            steps.append(torch.zeros(self._shape, dtype=torch.int32, device=device))

    def _current(self, layer: int) -> Tensor:
        return self._pending[self._devices[layer]][-1]

    def count(self, layer: int, rows: Rows, lists: Tensor, contest: Contest, tokens: int, *, fetched: bool = False) -> None:
        """Note how many distinct tokens a layer's lists hold, see :func:`fathom_eval.kernels.choose.count_rows`."""
        place = self._current(layer)[0 if fetched else 1, layer]
        out = place[rows]
        count_rows(lists, contest, tokens, out, fetched=fetched)
        if not isinstance(rows, slice):
            place[rows] = out

    def add_rows(self, layer: int, rows: Rows, attended: Tensor, candidates: Tensor) -> None:
        """Note rows that were counted already, integers ``[R, H]``, and the candidates beyond them."""
        self._current(layer)[1, layer, rows] = attended.int()
        self._current(layer)[0, layer, rows] = (attended + candidates).int()

    def clear(self, layer: int, rows: Rows) -> None:
        """Forget what was written of these rows."""
        self._current(layer)[:, layer, rows] = 0

    def attend(self, rows: Sequence[int], always: int | Sequence[int]) -> None:
        """A layer's attention was decided; a KV head attends to ``always`` rows beyond those that were written."""
        for place, row in enumerate(rows):
            self._fired[row] += 1
            self._attended[row] += self._heads * (always if isinstance(always, int) else always[place])

    def scan(self, rows: slice, noted: Sequence[Reads | DeferredReads]) -> Tensor:
        """Add up the scans of some rows. Returns the tokens of each, int64."""
        deferred: dict[torch.device, list[DeferredReads]] = {}
        counted: dict[torch.device, list[Reads]] = {}
        for one in noted:
            if isinstance(one, DeferredReads):
                deferred.setdefault(one.device, []).append(one)
            else:
                counted.setdefault(one.channels.device, []).append(one)
        for several in deferred.values():
            bits, channels = type(several[0]).totals(several)
            self._add(rows, bits, channels)
        for reads in counted.values():
            bits, channels = (torch.stack(parts).sum((0, 2)) for parts in ([one.bits for one in reads], [one.channels for one in reads]))
            self._add(rows, bits, channels)
        tokens = [one.tokens for one in noted]
        for row in range(rows.start, rows.stop):
            self._scan_tokens[row] += sum(tokens) * self._heads
            self._scans[row] += len(noted)
        return torch.tensor(tokens, dtype=torch.int64).to(self._home, non_blocking=True)

    def _add(self, rows: slice, bits: Tensor, channels: Tensor) -> None:
        self.scan_bits[rows] += bits.to(self._home)
        self.channels[rows] += channels.to(self._home)

    def settle(self) -> None:
        """Add up the rows that were written so far."""
        for steps in self._pending.values():
            if steps:
                fetched, attended = torch.stack(steps, dim=1)
                self._rows += attended.sum((0, 1, 3)).to(self._home)
                # Where there was no rerank nothing is written of what was fetched.
                self._candidates += (fetched - attended).clamp_min(0).sum((0, 1, 3)).to(self._home)
                steps.clear()

    def counts(self) -> Counts:
        """All that is settled."""
        scan_tokens, scans, attended, fired = (
            torch.tensor(numbers, dtype=torch.int64, device=self._home)
            for numbers in (self._scan_tokens, self._scans, self._attended, self._fired)
        )
        return Counts(
            scan_bits=self.scan_bits.clone(),
            declared_bits=self.declared_bits.clone(),
            scan_tokens=scan_tokens,
            channels=self.channels.clone(),
            scans=scans,
            rows=self._rows + attended,
            candidates=self._candidates.clone(),
            fired=fired,
        )
