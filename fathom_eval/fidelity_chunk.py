"""A run of positions of one layer: dense attention, exact top-k and the methods' attention at all of them.

Shapes: R positions of the chunk, H KV heads, G query heads a KV head, N tokens up to the chunk's last position, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fathom_eval.branch_context import folded
from fathom_eval.extended import Attended, Field, Scored, attend_extended
from fathom_eval.kernels.choose import Contest, choose_tokens, compiled
from fathom_eval.methods.base import Method
from fathom_eval.methods.step import Step
from fathom_eval.reads import Reads
from fathom_eval.reallocation import tempered
from fathom_eval.selection import Boundary, Policy, Selection, candidate_range, share_scores, top_mask

SCORE_NOISE = 4e-5
"""Of the largest exact score of a row: differences below it are rounding, of two fp32 products of which each may be off by half of it."""


@dataclass(frozen=True)
class Outcome:
    """What one method at one k gives at R positions of one layer.

    Attributes:
        output: fp32 ``[R, H, G, D]``.
        dense_error: ‖o − o_dense‖ / ‖o_dense‖, fp32 ``[R, H, G]``.
        exact_error: The same against exact top-k with the same k and policy.
        oracle_error: Exact top-k's own error against dense.
        recall: Share of the oracle's set that the method selected too; the always-kept tokens are in neither set.
        rows: Distinct K/V rows that a KV head attends to, ``[R, H]`` (k∪ of paper Eq. 1).
        candidate_rows: Further K rows fetched for reranking, ``[R, H]``.
        near_ties: Whether rounding alone could change exact top-k's set: its last score is as good as equal to the next, ``[R, H, G]``.
        scan: What was scored; None where nothing was scanned.
    """

    output: Tensor
    dense_error: Tensor
    exact_error: Tensor
    oracle_error: Tensor
    recall: Tensor
    rows: Tensor
    candidate_rows: Tensor
    near_ties: Tensor
    scan: Scan | None


@dataclass(frozen=True)
class Scan:
    """Approximate scores of all tokens and what reading them took.

    Attributes:
        scores: fp32 ``[R, H, G, N]``, exact where a token is not sealed.
        coverage: See :meth:`fathom_eval.stores.Store.coverage`.
        reads: What was read of the sealed tokens; None if there were none, or the keys themselves were scored.
        declared_bits: Bits per token that the method declares for its plan, fp64 ``[R, H]``; None for one that declares none.
        broken: Whether a score, or what a method ranks by, is not a number; or a score is −∞ from a method that ranks all tokens, or +∞
            from one that forces none. A boolean scalar not waited for.
    """

    scores: Tensor
    coverage: Tensor
    reads: Reads | None
    declared_bits: Tensor | None
    broken: Tensor


@dataclass(frozen=True)
class _Oracle:
    """Exact top-k: its set, its output, its error against dense, and where rounding could change it."""

    selection: Selection
    output: Tensor
    error: Tensor
    near_ties: Tensor


class Chunk:
    """A run of positions that see the same sealed blocks."""

    mean_value: Tensor  # of all values that a position sees, [R, H, D]

    def __init__(self, query: Tensor, first: int, keys: Tensor, values: Tensor, scaling: float) -> None:
        rows, self._device = len(query), query.device
        self.tokens = range(first + 1, first + rows + 1)
        self.query, self._scaling = query, scaling
        count = first + rows
        self._keys, self._values = keys[:, :count], values[:, :count]
        self.lengths = torch.arange(first + 1, count + 1, device=query.device)
        self._number = torch.arange(count, device=query.device)
        self._seen = (self._number < self.lengths.unsqueeze(-1)).view(rows, 1, 1, count)
        self.exact = self.scores(query)
        self.dense = self._attend(self._seen)
        self._fields: dict[tuple[int, Policy, int], tuple[Field, Contest]] = {}
        self._oracles: dict[tuple[int, Policy, int], _Oracle] = {}
        self._exact_choices: dict[tuple[int, Policy, int], tuple[Selection, Tensor]] = {}

    def exact_scan(self) -> Scan:
        """The scores of the keys themselves."""
        one, none = torch.ones(self.query.shape[:3], device=self._device), torch.zeros(self.query.shape[:2], device=self._device)
        return Scan(self.exact, one, None, none.double(), torch.zeros((), dtype=torch.bool, device=self._device))

    def scores(self, query: Tensor) -> Tensor:
        """fp32 scores of all tokens for other queries than the positions' own, ``[R, H, G, N]``."""
        return folded(query.float(), self._keys.transpose(-1, -2))

    def dense_outcome(self) -> Outcome:
        """Attention to everything."""
        rows, heads, group, _ = self.query.shape
        zero = torch.zeros(rows, heads, group, device=self._device)
        seen = self.lengths.unsqueeze(-1).expand(rows, heads)
        return Outcome(self.dense, zero, zero, zero, zero + 1, seen, torch.zeros_like(seen), zero > 0, None)

    def outcome(self, policy: Policy, k: int, scan: Scan, sealed: int) -> Outcome:
        """Select by a scan's scores and attend. ``sealed``: tokens in sealed blocks."""
        selection = self._select(scan.scores, policy, k, sealed)
        return self._compared(Attended(self._output(selection, policy, scan, sealed), selection), policy, k, scan, sealed)

    def extended_outcome(self, method: Method, policy: Policy, scan: Scan, sealed: int, step: Step) -> Outcome:
        """The same for a method that needs more than a store and a plan."""
        field, _ = self._field(policy, step.k, sealed)
        if method.overrides("learn"):
            parts = [self._extended(method, policy, scan, field, step, row) for row in range(len(self.query))]
            attended = Attended(
                torch.cat([part.output for part in parts]),
                Selection(
                    *(
                        torch.cat([_padded(getattr(part.selection, name), step.length) for part in parts])
                        for name in ("chosen", "kept", "candidates")
                    )
                ),
                None if parts[0].broken is None else torch.cat([part.broken for part in parts if part.broken is not None]),
            )
        else:
            attended = self._extended(method, policy, scan, field, step, None)
        return self._compared(attended, policy, step.k, scan, sealed)

    def _extended(self, method: Method, policy: Policy, scan: Scan, field: Field, step: Step, row: int | None) -> Attended:
        """All positions at once, or one of them, which sees no more columns than it has tokens."""
        rows, length = (slice(None), step.length) if row is None else (slice(row, row + 1), self.tokens[row])
        if row is not None:
            previous, rehearsed = (None if one is None else one[rows] for one in (step.previous_query, step.rehearsed_query))
            step = replace(step, length=length, tokens=step.tokens[rows], query=step.query[rows], previous_query=previous)
            step = replace(step, rehearsed_query=rehearsed)
            assert not isinstance(field.counts, int)
            assert not isinstance(field.fetched, int)
            competing, kept = field.competing[rows, ..., :length], field.kept[rows, ..., :length]
            field = Field(competing, kept, field.counts[row], field.fetched[row])
        return attend_extended(
            method,
            policy,
            Scored(scan.scores[rows, ..., :length], self.exact[rows, ..., :length], lambda: scan.coverage[rows]),
            field,
            step,
            lambda weights: folded(weights, self._values[:, :length]),
            lambda: self.mean_value[rows],
        )

    def _compared(self, attended: Attended, policy: Policy, k: int, scan: Scan, sealed: int) -> Outcome:
        oracle, output, selection = self._oracle(policy, k, sealed), attended.output, attended.selection
        if attended.broken is not None:
            scan = replace(scan, broken=scan.broken | attended.broken.any())
        shared = (selection.chosen & oracle.selection.chosen).sum(-1)
        wanted = oracle.selection.chosen.sum(-1)
        return Outcome(
            output=output,
            dense_error=relative_error(output, self.dense),
            exact_error=relative_error(output, oracle.output),
            oracle_error=oracle.error,
            # Where nothing competes there is nothing to miss.
            recall=torch.where(wanted > 0, shared / wanted.clamp_min(1), 1.0),
            rows=selection.rows,
            candidate_rows=selection.candidate_rows,
            near_ties=oracle.near_ties,
            scan=scan,
        )

    def _oracle(self, policy: Policy, k: int, sealed: int) -> _Oracle:
        """Exact top-k at this k and policy. Reranking by exact scores would change nothing."""
        policy = replace(policy, rerank=1.0)
        key = (k, policy, sealed)
        if key not in self._oracles:
            # Reallocation and the union change what is done with a set, not the set.
            choice = (k, replace(policy, reallocate=False, attend="own", dense_layers=(), dense_every=0), sealed)
            if choice not in self._exact_choices:
                self._exact_choices[choice] = self._choose_exactly(policy, k, sealed)
            selection, near_ties = self._exact_choices[choice]
            output = self._output(selection, policy, self.exact_scan(), sealed)
            self._oracles[key] = _Oracle(selection, output, relative_error(output, self.dense), near_ties)
        return self._oracles[key]

    def _choose_exactly(self, policy: Policy, k: int, sealed: int) -> tuple[Selection, Tensor]:
        field, _ = self._field(policy, k, sealed)
        boundary = Boundary.find(share_scores(self.exact, policy), field.competing, field.counts)
        noise = SCORE_NOISE * self.exact.masked_fill(~self._seen, 0.0).abs().amax(-1, keepdim=True)
        chosen = boundary.mask(wait=True)
        return Selection(chosen, field.kept, chosen), boundary.near_ties(share_scores(noise, policy).squeeze(-1))

    def _field(self, policy: Policy, k: int, sealed: int) -> tuple[Field, Contest]:
        """What competes, as a mask and as ranges."""
        key = (k, Policy(policy.sink, policy.local, rerank=policy.rerank, keep_tail=policy.keep_tail), sealed)
        if key not in self._fields:
            self._fields[key] = self._make_field(policy, k, sealed)
        return self._fields[key]

    def _make_field(self, policy: Policy, k: int, sealed: int) -> tuple[Field, Contest]:
        ranges = [candidate_range(tokens, policy, sealed) for tokens in self.tokens]
        free = [k - (tokens - (stop - start)) for tokens, (start, stop) in zip(self.tokens, ranges, strict=True)]
        room = [stop - start for start, stop in ranges]
        counts = [min(available, wanted) for available, wanted in zip(room, free, strict=True)]
        fetched = [min(available, int(wanted * policy.rerank)) for available, wanted in zip(room, free, strict=True)]
        bounds = torch.tensor(ranges, device=self._device).view(len(ranges), 1, 1, 2)
        competing = (self._number >= bounds[..., :1]) & (self._number < bounds[..., 1:])
        return Field(competing, self._seen & ~competing, counts, fetched), Contest.of(ranges, counts, fetched, self._device)

    def _select(self, scores: Tensor, policy: Policy, k: int, sealed: int) -> Selection:
        field, contest = self._field(policy, k, sealed)
        shared = share_scores(scores, policy)
        if compiled(shared):
            tokens = shared.shape[-1]
            found = torch.zeros(*shared.shape[:3], tokens + 1, dtype=torch.bool, device=self._device)
            candidates = found.scatter_(-1, choose_tokens(shared, contest).clamp_max(tokens).long(), True)[..., :tokens]
        else:
            candidates = top_mask(shared, field.competing, field.fetched)
        chosen = candidates
        if field.fetched != field.counts:
            chosen = top_mask(share_scores(self.exact, policy), candidates, field.counts)
        return Selection(chosen, field.kept, candidates)

    def _output(self, selection: Selection, policy: Policy, scan: Scan, sealed: int) -> Tensor:
        chosen = selection.chosen.any(2, keepdim=True) if policy.attend == "union" else selection.chosen
        output = self._attend(chosen | selection.kept)
        if policy.reallocate:
            weights = tempered(scan.scores, scan.coverage, self._scaling, sealed).masked_fill(~self._seen, -torch.inf).softmax(-1)
            missed = weights.masked_fill(selection.chosen | selection.kept, 0.0).sum(-1, keepdim=True)
            output = (1 - missed) * output + missed * self.mean_value.unsqueeze(-2)
        return output

    def _attend(self, attended: Tensor) -> Tensor:
        weights = (self.exact * self._scaling).masked_fill_(~attended, -torch.inf).softmax(-1)
        return folded(weights, self._values)


def relative_error(output: Tensor, reference: Tensor) -> Tensor:
    """‖o − o_ref‖ / ‖o_ref‖ of every query head, ``[…, D]`` to ``[…]``."""
    size: Tensor = reference.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    distance: Tensor = (output - reference).norm(dim=-1)
    return distance / size


def _padded(mask: Tensor, length: int) -> Tensor:
    """Nothing is selected of the tokens that a position has not seen."""
    return torch.nn.functional.pad(mask, (0, length - mask.shape[-1]))
