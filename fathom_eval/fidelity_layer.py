"""Attention outputs of many methods at many positions of one layer, beside those of dense attention and of exact top-k.

Position p sees the tokens 0..p, as a decode step does, and is computed as one: what :class:`~fathom_eval.branches.BranchBatch`
gives for that step, here for a run of positions at once. Positions between two sealings scan the same store, so they are its rows.
Each method's set is a mask over the tokens, from which the output, the recall and the distinct rows all follow.

Shapes: R positions of one chunk, H KV heads, G query heads a KV head, N tokens up to the chunk's last position, D channels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fathom_eval.branches import Branch
from fathom_eval.calibration import QueryStatistics
from fathom_eval.gguf_models import one_line
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.methods import MethodSpec
from fathom_eval.methods.base import Method
from fathom_eval.models import ModelFacts
from fathom_eval.prefill import PrefixLayer
from fathom_eval.reads import Reads
from fathom_eval.selection import Policy, candidate_range, share_scores
from fathom_eval.stores import ExactSpec, Store, StoreSpec

SCORE_ELEMENTS = 2**25
"""Scores of one chunk (128 MB in fp32): what bounds memory at long contexts. A few tensors of this size live at a time."""


@dataclass(frozen=True)
class WindowLayer:
    """One layer of a dense prefill.

    Attributes:
        keys, values: Of the whole window, ``[H, n, D]``.
        queries: Post-RoPE queries of its last P positions, which are evaluated, ``[P, H, G, D]``.
        query_statistics: Moments of the queries that a method may know.
        scaling: Of the scores, before the softmax.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    query_statistics: QueryStatistics
    scaling: float


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
        scan: What was scored; None where nothing was scanned.
    """

    output: Tensor
    dense_error: Tensor
    exact_error: Tensor
    oracle_error: Tensor
    recall: Tensor
    rows: Tensor
    candidate_rows: Tensor
    scan: Scan | None


@dataclass(frozen=True)
class Scan:
    """Approximate scores of all tokens and what reading them took.

    Attributes:
        scores: fp32 ``[R, H, G, N]``, exact where a token is not sealed.
        coverage: See :meth:`fathom_eval.stores.Store.coverage`.
        reads: What was read of the sealed tokens; None if there were none, or the keys themselves were scored.
        declared_bits: Bits per token that the method declares for its plan, fp64 ``[R, H]``.
        broken: Whether a score is not a number, a boolean scalar that has not been waited for.
    """

    scores: Tensor
    coverage: Tensor
    reads: Reads | None
    declared_bits: Tensor
    broken: Tensor


@dataclass(frozen=True)
class _Selection:
    """``chosen``: tokens that compete and were selected, ``[R, H, G, N]``. ``kept``: those that are always kept, ``[R, 1, 1, N]``."""

    chosen: Tensor
    kept: Tensor
    candidates: Tensor

    @property
    def rows(self) -> Tensor:
        return self.chosen.any(2).sum(-1) + self.kept[:, :, 0].sum(-1)

    @property
    def candidate_rows(self) -> Tensor:
        return self.candidates.any(2).sum(-1) - self.chosen.any(2).sum(-1)


class LayerComparison:
    """All branches at all evaluated positions of one layer.

    Args:
        layer: Whose dense attention is the reference.
        number: Of the layer, for ``dense_layers`` and for messages.
        branches: Methods at their k. Exact top-k at the same k and policy is computed beside each, whether or not it is among them.
        full_window: Statistics, bases and sealed blocks of the whole window, instead of what a position's own past holds.
        failures: Filled with why a method failed, one line each; those that are in it already are left out.
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
    ) -> None:
        self._layer, self._number, self._facts, self._full_window, self.failures = layer, number, facts, full_window, failures
        self._tokens = layer.keys.shape[1]
        self._first = self._tokens - len(layer.queries)
        self._keys, self._values = layer.keys.float(), layer.values.float()
        known = self._tokens if full_window else self._first
        self._known = PrefixLayer(layer.keys[:, :known], layer.values[:, :known], layer.query_statistics)
        self._stores: dict[tuple[StoreSpec, int], Store] = {}
        self._indexes: dict[Method, Any] = {}
        self._groups: dict[tuple[Method, int], dict[MethodSpec, list[int | None]]] = {}
        for branch in branches:
            group = self._groups.setdefault((branch.spec.method, branch.spec.policy.local), {})
            group.setdefault(branch.spec, []).append(branch.k)

    def outcomes(self) -> Iterator[tuple[int, Branch, Outcome]]:
        """For each chunk of positions, the first of them and the outcome of every branch that has not failed."""
        base = self._values[:, : self._first].sum(1)
        means = base + self._values[:, self._first :].transpose(0, 1).cumsum(0)  # [P, H, D], divided where it is used
        for start, stop in self._chunks():
            chunk = _Chunk(self._layer.queries[start:stop], self._first + start, self._keys, self._values, self._layer.scaling)
            chunk.mean_value = means[start:stop] / chunk.lengths.view(-1, 1, 1)
            for (method, local), members in self._groups.items():
                yield from ((self._first + start, branch, outcome) for branch, outcome in self._group(chunk, method, local, members))

    def _chunks(self) -> Iterator[tuple[int, int]]:
        """Runs of positions with one number of sealed blocks, short enough for their scores to fit the bound."""
        query_heads = self._layer.queries.shape[1] * self._layer.queries.shape[2]
        most = max(1, SCORE_ELEMENTS // (query_heads * self._tokens))
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
        self, chunk: _Chunk, method: Method, local: int, members: dict[MethodSpec, list[int | None]]
    ) -> Iterator[tuple[Branch, Outcome]]:
        """The branches that share one scan."""
        scan: Scan | None = None
        for spec, k_values in members.items():
            for k in k_values:
                if spec in self.failures:
                    continue
                if k is None or self._number in spec.policy.dense_layers:
                    yield Branch(spec, k), chunk.dense_outcome()
                    continue
                try:
                    scan = self._scan(chunk, method, local) if scan is None else scan
                    outcome = chunk.outcome(spec.policy, k, scan, self._sealed(chunk.tokens[0], local))
                except (torch.OutOfMemoryError, MemoryError):
                    raise
                except Exception as error:  # whatever a plug-in raises, the others go on
                    self.failures[spec] = f"layer {self._number}: {type(error).__name__}: {one_line(error)}"
                    continue
                yield Branch(spec, k), outcome

    def _scan(self, chunk: _Chunk, method: Method, local: int) -> Scan:
        store_spec = method.store(self._facts)
        assert store_spec is not None, f"{method.name} scans nothing and so takes no k"
        if isinstance(store_spec, ExactSpec):
            return chunk.exact_scan()
        query = chunk.query
        shape = query.shape[:2]
        store = self._store(store_spec, local, self._sealed(chunk.tokens[0], local))
        if method not in self._indexes:
            self._indexes[method] = method.index(self._known, self._facts)
        projected = store.project(query)
        plan = method.plan(projected, self._indexes[method])
        declared = torch.as_tensor(method.declared_bits(plan, self._facts), dtype=torch.float64, device=query.device).expand(shape)
        coverage = store.coverage(projected, plan)
        if not store.tokens:
            return replace(chunk.exact_scan(), coverage=coverage)
        found, reads = store.scan(query, projected, plan)
        if found.shape != (*query.shape[:3], store.tokens):
            raise ValueError(f"its store gave scores of shape {tuple(found.shape)} for {store.tokens} sealed tokens")
        if reads.tokens != store.tokens or reads.bits.shape != shape:
            raise ValueError(f"its store reports reads of {reads.tokens} of {store.tokens} tokens, shape {tuple(reads.bits.shape)}")
        scanned = min(store.tokens, chunk.exact.shape[-1])
        scores = torch.cat([found[..., :scanned], chunk.exact[..., scanned:]], dim=-1)
        return Scan(scores, coverage, reads, declared, torch.isnan(found).any())

    def _store(self, spec: StoreSpec, local: int, sealed: int) -> Store:
        """The store of the tokens that are sealed by now. It grows as a decoding branch's does, and keeps its basis."""
        if (spec, local) not in self._stores:
            self._stores[spec, local] = spec.build(self._known, self._sealed(self._first + 1, local))
        store = self._stores[spec, local]
        if sealed > store.tokens:
            store.append(self._layer.keys[:, store.tokens : sealed])
        return store


class _Chunk:
    """A run of positions that see the same sealed blocks."""

    mean_value: Tensor  # of all values that a position sees, [R, H, D]

    def __init__(self, query: Tensor, first: int, keys: Tensor, values: Tensor, scaling: float) -> None:
        rows, self._device = len(query), query.device
        self.tokens = range(first + 1, first + rows + 1)
        self.query, self._scaling = query, scaling
        count = first + rows
        self._values = values[:, :count]
        self.lengths = torch.arange(first + 1, count + 1, device=query.device)
        self._number = torch.arange(count, device=query.device)
        self._seen = (self._number < self.lengths.unsqueeze(-1)).view(rows, 1, 1, count)
        self.exact = _folded(query.float(), keys[:, :count].transpose(-1, -2))
        self.dense = self._attend(self._seen)
        self._oracles: dict[tuple[int, Policy, int], tuple[_Selection, Tensor, Tensor]] = {}
        self._exact_choices: dict[tuple[int, Policy, int], _Selection] = {}

    def exact_scan(self) -> Scan:
        """The scores of the keys themselves."""
        one, none = torch.ones(self.query.shape[:3], device=self._device), torch.zeros(self.query.shape[:2], device=self._device)
        return Scan(self.exact, one, None, none.double(), torch.zeros((), dtype=torch.bool, device=self._device))

    def dense_outcome(self) -> Outcome:
        """Attention to everything."""
        rows, heads, group, _ = self.query.shape
        zero = torch.zeros(rows, heads, group, device=self._device)
        seen = self.lengths.unsqueeze(-1).expand(rows, heads)
        return Outcome(self.dense, zero, zero, zero, zero + 1, seen, torch.zeros_like(seen), None)

    def outcome(self, policy: Policy, k: int, scan: Scan, sealed: int) -> Outcome:
        """Select by a scan's scores and attend. ``sealed``: tokens in sealed blocks."""
        oracle, reference, oracle_error = self._oracle(policy, k, sealed)
        selection = self._select(scan.scores, policy, k, sealed)
        output = self._output(selection, policy, scan)
        shared = (selection.chosen & oracle.chosen).sum(-1)
        wanted = oracle.chosen.sum(-1)
        # Where nothing competes there is nothing to miss.
        recall = torch.where(wanted > 0, shared / wanted.clamp_min(1), 1.0)
        return Outcome(
            output=output,
            dense_error=relative_error(output, self.dense),
            exact_error=relative_error(output, reference),
            oracle_error=oracle_error,
            recall=recall,
            rows=selection.rows,
            candidate_rows=selection.candidate_rows,
            scan=scan,
        )

    def _oracle(self, policy: Policy, k: int, sealed: int) -> tuple[_Selection, Tensor, Tensor]:
        """Exact top-k: its set, its output and its error against dense. Reranking by exact scores would change nothing."""
        policy = replace(policy, rerank=1.0)
        key = (k, policy, sealed)
        if key not in self._oracles:
            # Reallocation and the union change what is done with a set, not the set.
            choice = (k, replace(policy, reallocate=False, attend="own", dense_layers=()), sealed)
            if choice not in self._exact_choices:
                self._exact_choices[choice] = self._select(self.exact, policy, k, sealed)
            selection = self._exact_choices[choice]
            output = self._output(selection, policy, self.exact_scan())
            self._oracles[key] = selection, output, relative_error(output, self.dense)
        return self._oracles[key]

    def _select(self, scores: Tensor, policy: Policy, k: int, sealed: int) -> _Selection:
        ranges = [candidate_range(tokens, policy, sealed) for tokens in self.tokens]
        free = [k - (tokens - (stop - start)) for tokens, (start, stop) in zip(self.tokens, ranges, strict=True)]
        room = [stop - start for start, stop in ranges]
        counts = [min(available, wanted) for available, wanted in zip(room, free, strict=True)]
        fetched = [min(available, int(wanted * policy.rerank)) for available, wanted in zip(room, free, strict=True)]
        bounds = torch.tensor(ranges, device=self._device).view(len(ranges), 1, 1, 2)
        competing = (self._number >= bounds[..., :1]) & (self._number < bounds[..., 1:])
        candidates = top_mask(share_scores(scores, policy), competing, fetched)
        chosen = candidates
        if fetched != counts:
            chosen = top_mask(share_scores(self.exact, policy), candidates, counts)
        return _Selection(chosen, self._seen & ~competing, candidates)

    def _output(self, selection: _Selection, policy: Policy, scan: Scan) -> Tensor:
        chosen = selection.chosen.any(2, keepdim=True) if policy.attend == "union" else selection.chosen
        output = self._attend(chosen | selection.kept)
        if policy.reallocate:
            # SparQ's temperature sharpens scores that saw only part of the query's mass.
            temperature = (output.shape[-1] * scan.coverage.clamp_min(1e-6)).sqrt().unsqueeze(-1)
            weights = (scan.scores / temperature).masked_fill(~self._seen, -torch.inf).softmax(-1)
            missed = weights.masked_fill(selection.chosen | selection.kept, 0.0).sum(-1, keepdim=True)
            output = (1 - missed) * output + missed * self.mean_value.unsqueeze(-2)
        return output

    def _attend(self, attended: Tensor) -> Tensor:
        weights = (self.exact * self._scaling).masked_fill_(~attended, -torch.inf).softmax(-1)
        return _folded(weights, self._values)


def top_mask(scores: Tensor, competing: Tensor, counts: Sequence[int]) -> Tensor:
    """True on each row's best competing tokens; of equal scores the lower token is taken, as :func:`~fathom_eval.selection.select` does.

    Args:
        scores: ``[R, H, G, N]``.
        competing: Boolean, of the same shape or broadcast to it.
        counts: How many to take in each row, fewer than N and at most as many as compete.
    """
    most = max(counts)
    wanted = torch.tensor(counts, device=scores.device).view(-1, 1, 1, 1)
    scores = scores.masked_fill(~competing, -torch.inf)
    best = scores.topk(most + 1, dim=-1).values
    at = wanted.expand(*scores.shape[:-1], 1)
    threshold, following = best.gather(-1, (at - 1).clamp_min(0)), best.gather(-1, at)
    chosen = scores >= threshold
    if (threshold == following).any():
        above, level = scores > threshold, (scores == threshold) & competing
        chosen = above | (level & (level.cumsum(-1, dtype=torch.int32) <= wanted - above.sum(-1, keepdim=True)))
    return chosen & competing & (wanted > 0)


def relative_error(output: Tensor, reference: Tensor) -> Tensor:
    """‖o − o_ref‖ / ‖o_ref‖ of every query head, ``[…, D]`` to ``[…]``."""
    size: Tensor = reference.norm(dim=-1).clamp_min(torch.finfo(torch.float32).tiny)
    distance: Tensor = (output - reference).norm(dim=-1)
    return distance / size


def _folded(left: Tensor, right: Tensor) -> Tensor:
    """``[R, H, G, A] × [H, A, B]`` to ``[R, H, G, B]``: one product a head, so that ``right`` is read once for all rows."""
    rows, heads, group, inner = left.shape
    product = left.transpose(0, 1).reshape(heads, rows * group, inner) @ right
    unfolded: Tensor = product.view(heads, rows, group, -1).transpose(0, 1)
    return unfolded
