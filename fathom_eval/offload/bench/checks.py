"""A timed step against the torch references on the same data: scores to a tolerance, selections by threshold, rows, attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.kernels import attend, landmark, nibble, scan
from fathom_eval.kernels.topk import NONE
from fathom_eval.offload.cache import Lane
from fathom_eval.offload.scans import Scan
from fathom_eval.offload.step import DecodeStep, LaneWork

SCORE_TOLERANCE = 1e-3
ATTENTION_TOLERANCE = 2e-2
"""‖found − reference‖ / ‖reference‖: of fp16 scores, and of bf16 outputs."""


class StepCheck:
    """Checks the first and the last layer of a step that is not captured; pass :meth:`observe` as its observer.

    Attributes:
        errors: The largest relative error of scores and attention.
    """

    def __init__(self, step: DecodeStep, name: str) -> None:
        self._step, self._name = step, name
        self.errors = {"scores": 0.0, "attention": 0.0}
        self.kept_rows = torch.zeros(step.layers, len(step.cache.lanes), dtype=torch.float64)

    def observe(self, layer: int, work: LaneWork) -> None:
        """Called by the step after each lane."""
        lane = self._step.cache.lanes.index(work.lane)
        union = work.kept[layer]
        slots = torch.arange(union.rows.shape[-1], device=union.rows.device)
        kept = (union.members != 0) & (slots < union.counts.unsqueeze(-1))
        self.kept_rows[layer, lane] = kept.sum().double().cpu()
        if layer in (0, self._step.layers - 1):
            self._check_scores(layer, lane, work)
            self._check_selection(work)
            self._check_rows(layer, lane, work)
            self._check_attention(layer, work)

    def _check_scores(self, layer: int, lane: int, work: LaneWork) -> None:
        """The first head's scores, in the first and the last segment."""
        step = self._step
        sealed = int(step.cache.blocks[work.lane.rows][0])
        if not sealed:
            return
        tables = step.cache.layers[layer].lanes[lane].tables
        query, _ = step.project(layer)
        part = work.lane.part(query)[0, :1]
        size, span = 64 * step.cache.arena.shape.blocks, step.scan.span
        held = {name: table.segments[0] for name, table in tables.items()}
        for index in {0, (sealed * 64 - 1) // size}:
            stored = {name: parts[index][:1].to(query.device) for name, parts in held.items() if name != "rows"}
            expected = reference_scores(step.scan, layer, work.lane, part, stored)[0] * step.score_scaling
            used = min(size, sealed * 64 - index * size) // span
            found = work.scores[0, 0, :, index * size // span :][..., :used]
            self._take("scores", found, expected[..., :used], SCORE_TOLERANCE)
        blocks = work.scores[0, 0, :, : sealed * 64 // span].unflatten(-1, (sealed, -1))
        self._demand(torch.equal(blocks.amax(-1), work.maxima[0, 0, :, :sealed]), "block maxima")

    def _check_selection(self, work: LaneWork) -> None:
        """Every selected score is at least the best one left out, for the first head."""
        step, policy = self._step, self._step.policy
        sealed, total = int(step.cache.blocks[work.lane.rows][0]) * 64, int(step.cache.tokens[work.lane.rows][0])
        known = work.scores[0, 0, :, : sealed // step.scan.span].repeat_interleave(step.scan.span, dim=-1)
        known = torch.cat([known, work.lane.part(step.tail_scores)[0, 0, :, : total - sealed]], dim=-1)
        stop = max(total - policy.local, 0)
        known = known[:, min(policy.sink, stop) : stop].float()
        picked = work.indices[0, 0].long()
        valid = picked != NONE
        count = min(picked.shape[-1], known.shape[-1])
        self._demand(bool((valid.sum(-1) == count).all()), "number of selected tokens")
        if count:
            values = known.gather(-1, (picked - min(policy.sink, stop)).clamp(0, known.shape[-1] - 1)).masked_fill(~valid, -torch.inf)
            exact = known.topk(count).values.sort(-1).values
            self._demand(torch.equal(values.sort(-1).values[:, -count:], exact), "selected scores")

    def _check_rows(self, layer: int, lane: int, work: LaneWork) -> None:
        union, table = work.kept[layer], self._step.cache.layers[layer].lanes[lane]["rows"]
        count = int(union.counts[0, 0])
        some = torch.linspace(0, count - 1, min(count, 64)).long().tolist() if count else []
        size = table.example.shape[1]
        for slot in some:
            token = int(union.rows[0, 0, slot])
            stored = table.segments[0][token // size][0, token % size].to(work.fetched.device)
            for part in (0, 1):
                if part == 0 or int(union.members[0, 0, slot]):
                    self._demand(torch.equal(work.fetched[part, 0, 0, slot], stored[part]), "fetched rows")

    def _check_attention(self, layer: int, work: LaneWork) -> None:
        step, union = self._step, work.kept[layer]
        count = int(union.counts[0, 0])
        tail = [work.lane.part(step.cache.tail[layer, part])[0, 0] for part in (0, 1)]
        members = torch.cat([union.members[0, 0, :count], union.tail_members[0, 0]])
        used = members != 0
        keys, values = (torch.cat([work.fetched[part, 0, 0, :count], tail[part]])[used] for part in (0, 1))
        query = work.lane.part(step.query)[0, 0]
        expected = attend.reference.attend_rows(query, keys, values, members[used], step.weights.scaling)
        self._take("attention", work.lane.part(step.mixed)[0, 0], expected, ATTENTION_TOLERANCE)

    def _take(self, what: str, found: Tensor, expected: Tensor, tolerance: float) -> None:
        error = ((found.float() - expected.float()).norm() / expected.float().norm().clamp_min(1e-30)).item()
        self.errors[what] = max(self.errors[what], error)
        self._demand(error < tolerance, f"{what} (relative error {error:.2e})")

    def _demand(self, holds: bool, what: str) -> None:
        if not holds:
            raise UserError(f"{self._name}: {what} of the step differ from the torch reference on the same data; nothing was timed")


def reference_scores(method: Scan, layer: int, lane: Lane, query: Tensor, stored: dict[str, Tensor]) -> Tensor:
    """The first head's scores of one segment by the torch references, with the plan of the step: ``[1, G, n]``."""
    plan: Any = method.planned(layer, lane)
    if method.store == "planes":
        depths = plan[0, :1]
        used = depths[0].nonzero().flatten()
        return scan.scan_planes(query[..., used], depths[:, used], stored["planes"][:, used], stored["scales"][:, used])
    if method.store == "nibbles":
        return nibble.reference.scan_nibbles(query, plan[0, :1], stored["nibbles"], stored["scales"])
    return landmark.reference.scan_landmarks(query, stored["landmarks"])
