"""What the steps of one branch read, counted as the evaluator counts it (:mod:`fathom_eval.branch_counts`).

Counting is the step's observer: it adds launches of a fixed size to each layer, in a captured graph too, and changes nothing of what the
step computes. What only the host knows (sealed tokens) weighs the sums there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.offload.step import DecodeStep, LaneWork

if TYPE_CHECKING:
    from fathom_eval.methods import MethodSpec
    from fathom_eval.models import ModelFacts


@dataclass(frozen=True)
class StepOutcome:
    """What came of one step: its token, or in one line why there is none."""

    token: int
    problem: str | None


class StepReads:
    """Counts what a step of one session reads. Make it before the step is captured, and call :meth:`run` in place of the step's.

    Args:
        step: Gets this as its observer, until it is released.
        spec: The method, which declares the bits of the plans that the step makes.

    Attributes:
        steps: Taken so far.
    """

    def __init__(self, step: DecodeStep, spec: MethodSpec, facts: ModelFacts) -> None:
        assert step.cache.rows == 1, "one session is counted"
        self._step, self._method, self._facts = step, spec.method, facts
        shape, device = (step.layers, 1, facts.kv_heads), step.weights.device
        self._attended, self._fetched = (torch.zeros(shape, dtype=torch.int64, device=device) for _ in range(2))
        self._declared = torch.zeros(shape, dtype=torch.float64, device=device)
        self.steps = self._scan_tokens = self._fired = 0
        self._bits = self._declared_bits = self._channels = self._rows = self._candidates = 0.0
        step.observer = self._observe

    def run(self) -> StepOutcome:
        """Take one step and wait for the device once.

        Raises:
            UserError: Rows were not gathered, or memory for a sealed block is lacking.
        """
        step = self._step
        for counted in (self._attended, self._fetched, self._declared):
            counted.zero_()
        step.run()
        found = torch.cat([self._sums(), self._states()]).tolist()
        step.check()
        bits, declared, channels, attended, fetched, fired, token, finite, flagged = found
        sealed = step.cache.sealed[0]
        self.steps += 1
        self._scan_tokens += sealed * step.layers * self._facts.kv_heads
        self._bits += sealed * bits
        self._declared_bits += sealed * declared
        # A plan is made, and counted, before anything is sealed; landmarks have none.
        self._channels += channels if sealed or step.scan.store != "landmarks" else 0
        self._rows += attended
        self._candidates += fetched - attended
        self._fired += int(fired)
        return StepOutcome(int(token), self._problem(bool(finite), bool(flagged)))

    def counts(self) -> dict[str, Any]:
        """The counters as means, by their names in :class:`fathom_eval.decode.BranchResult`."""
        scanned, attentions = self._scan_tokens, self._step.layers * self._facts.kv_heads * self.steps
        return {
            "steps": self.steps,
            "fired": self._fired,
            "bits": self._bits / scanned if scanned else None,
            "declared_bits": self._declared_bits / scanned if scanned and self._method.declares else None,
            "channels": self._channels / attentions if scanned else None,
            "rows": self._rows / attentions,
            "candidate_rows": self._candidates / attentions,
        }

    def _observe(self, layer: int, work: LaneWork) -> None:
        """Count the rows of a lane once its layer is done: its lists are the next layer's too."""
        union, kept, lane = work.unions[layer], work.kept[layer], work.lane
        used = torch.arange(union.rows.shape[-1], device=union.rows.device) < union.counts.unsqueeze(-1)
        attended = ((kept.members != 0) & used).sum(-1) + (kept.tail_members != 0).sum(-1)
        lane.part(self._attended[layer]).copy_(attended)
        lane.part(self._fetched[layer]).copy_(union.counts + (union.tail_members != 0).sum(-1))
        if self._method.declares:
            declared = self._method.declared_bits(self._plan(layer, work), self._facts)
            part = lane.part(self._declared[layer])
            if isinstance(declared, Tensor):
                part.copy_(declared)
            else:
                part.fill_(declared)

    def _plan(self, layer: int, work: LaneWork) -> Tensor | None:
        """The read depths that the step has planned, ``[1, h, D]``."""
        planned = self._step.scan.planned(layer, work.lane)
        if planned is None or self._step.scan.store == "planes":
            return planned
        depths = torch.zeros(*planned.shape[:-1], self._facts.head_dim, dtype=torch.int64, device=planned.device)
        return depths.scatter_(-1, planned.long(), 4)

    def _sums(self) -> Tensor:
        """fp64 on the device: sums of the last step over layers and KV heads, and the layers that were computed."""
        device, scan = self._attended.device, self._step.scan
        scanned = (scan.bits().to(device), self._declared, scan.channels().to(device))
        # Every layer attends at least to the current token.
        fired = (self._attended > 0).all(-1)
        return torch.stack([part.double().sum() for part in (*scanned, self._attended, self._fetched, fired)])

    def _states(self) -> Tensor:
        step = self._step
        return torch.stack([step.token_ids[0], torch.isfinite(step.logits).all(), step.cache.flags.any()]).double()

    def _problem(self, finite: bool, flagged: bool) -> str | None:
        if flagged:
            try:
                self._step.cache.check_flags()
            except UserError as error:
                return str(error)
        return None if finite else f"the logits of step {self.steps - 1} are not finite"
