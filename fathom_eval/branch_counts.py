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
        rows, layers, heads: Branches, the model's layers and its KV heads.
    """

    def __init__(self, rows: int, layers: int, heads: int, device: torch.device) -> None:
        self._shape, self._heads, self._device = (2, layers, rows, heads), heads, device
        self.scan_bits, self.channels, self._rows, self._candidates = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(4)
        )
        self.declared_bits = torch.zeros(rows, dtype=torch.float64, device=device)
        self._scan_tokens, self._scans, self._attended, self._fired = ([0] * rows for _ in range(4))
        self._pending: list[Tensor] = []

    def begin(self) -> None:
        """A step begins."""
        self._pending.append(torch.zeros(self._shape, dtype=torch.int32, device=self._device))

    def count(self, layer: int, rows: Rows, lists: Tensor, contest: Contest, tokens: int, *, fetched: bool = False) -> None:
        """Note how many distinct tokens a layer's lists hold, see :func:`fathom_eval.kernels.choose.count_rows`."""
        place = self._pending[-1][0 if fetched else 1, layer]
        out = place[rows]
        count_rows(lists, contest, tokens, out, fetched=fetched)
        if not isinstance(rows, slice):
            place[rows] = out

    def add_rows(self, layer: int, rows: Rows, attended: Tensor, candidates: Tensor) -> None:
        """Note rows that were counted already, integers ``[R, H]``, and the candidates beyond them."""
        self._pending[-1][1, layer, rows] = attended.int()
        self._pending[-1][0, layer, rows] = (attended + candidates).int()

    def clear(self, layer: int, rows: Rows) -> None:
        """Forget what was written of these rows."""
        self._pending[-1][:, layer, rows] = 0

    def attend(self, rows: Sequence[int], always: int | Sequence[int]) -> None:
        """A layer's attention was decided; a KV head attends to ``always`` rows beyond those that were written."""
        for place, row in enumerate(rows):
            self._fired[row] += 1
            self._attended[row] += self._heads * (always if isinstance(always, int) else always[place])

    def scan(self, rows: slice, noted: Sequence[Reads | DeferredReads]) -> Tensor:
        """Add up the scans of some rows. Returns the tokens of each, int64."""
        first = noted[0]
        if isinstance(first, DeferredReads):
            bits, channels = type(first).totals([one for one in noted if isinstance(one, DeferredReads)])
        else:
            reads = [one for one in noted if isinstance(one, Reads)]
            bits = torch.stack([one.bits for one in reads]).sum((0, 2))
            channels = torch.stack([one.channels for one in reads]).sum((0, 2))
        self.scan_bits[rows] += bits
        self.channels[rows] += channels
        tokens = [one.tokens for one in noted]
        for row in range(rows.start, rows.stop):
            self._scan_tokens[row] += sum(tokens) * self._heads
            self._scans[row] += len(noted)
        return torch.tensor(tokens, dtype=torch.int64).to(self._device, non_blocking=True)

    def settle(self) -> None:
        """Add up the rows that were written so far."""
        if self._pending:
            fetched, attended = torch.stack(self._pending, dim=1)
            self._rows += attended.sum((0, 1, 3))
            # Where there was no rerank nothing is written of what was fetched.
            self._candidates += (fetched - attended).clamp_min(0).sum((0, 1, 3))
            self._pending.clear()

    def counts(self) -> Counts:
        """All that is settled."""
        scan_tokens, scans, attended, fired = (
            torch.tensor(numbers, dtype=torch.int64, device=self._device)
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
