"""The selection protocol: which keys a query attends to, given a scan's scores (paper §2, "one protocol")."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fathom_eval.errors import UserError


@dataclass(frozen=True)
class Policy:
    """How scores become a selected set. The defaults are the paper's protocol; the rest is what published systems need.

    Attributes:
        sink: First tokens, always kept.
        local: Last tokens, the current one included, always kept.
        share: Select per query head, or share one set in a group by the sum or the maximum of the heads' scores.
        dense_layers: Layers that attend to everything.
        dense_every: Every so many-th layer from the first on attends to everything too (16: layers 0, 16, 32, …); 0 is off.
        reallocate: Give the softmax mass of the unselected keys to the running mean value (SparQ).
        rerank: Fetch the keys of ``rerank`` times as many candidates, rescore them exactly and keep the best; 1 is off.
        attend: Each head attends to its own set, or to the union of its group's sets (the same rows are fetched).
        keep_tail: Always keep the tokens whose block is not sealed yet. They are scored exactly and so have an advantage over
            keys seen through a truncated scan; this takes them out of the contest.
    """

    sink: int = 4
    local: int = 32
    share: Literal["head", "group_sum", "group_max"] = "head"
    dense_layers: tuple[int, ...] = ()
    reallocate: bool = False
    rerank: float = 1.0
    attend: Literal["own", "union"] = "own"
    keep_tail: bool = False
    dense_every: int = 0

    def is_dense(self, layer: int) -> bool:
        """Whether a layer attends to everything."""
        return layer in self.dense_layers or (self.dense_every > 0 and layer % self.dense_every == 0)

    def check(self, k: int, label: str) -> None:
        """Raise :class:`UserError` for a k or switches that cannot work."""
        if self.sink < 0 or self.local < 1:
            raise UserError(f"{label}: sink must be at least 0 and local at least 1 (the current token)")
        if self.dense_every < 0:
            raise UserError(f"{label}: dense_every={self.dense_every} must be at least 1, or 0 for off")
        if not 1 <= self.rerank <= 1000:
            raise UserError(f"{label}: rerank={self.rerank} must be at least 1 (which turns it off) and at most 1000")
        # With keep_tail up to 63 unsealed tokens are kept beside the local window.
        least = self.sink + self.local + (63 if self.keep_tail else 0)
        if k <= least:
            what = "sink + local" + (" + the unsealed tail" if self.keep_tail else "")
            raise UserError(f"{label}: k={k} leaves nothing to select; it must be above {what} = {least}")


def top_indices(scores: Tensor, count: int) -> Tensor:
    """Indices of the ``count`` largest scores of the last dimension; of equal scores the lower index is taken first.

    ``torch.topk`` leaves the choice among equal scores open, so a tie at the boundary is settled here, and only in the rows that have one:
    what a row gets, and in which order, depends on no other row. What is not a number counts as largest: such a row gets tokens too.

    Args:
        scores: ``[…, N]`` with N ≥ count.

    Returns:
        int64 ``[…, count]``, in no particular order.
    """
    if count == scores.shape[-1]:
        return torch.arange(count, device=scores.device).expand(*scores.shape[:-1], count)
    if count == 0:
        return torch.empty(*scores.shape[:-1], 0, dtype=torch.int64, device=scores.device)
    values, indices = scores.topk(count + 1, dim=-1)
    found, tied = indices[..., :count], values[..., -1] == values[..., -2]
    if tied.any():
        kept = settle_ties(scores[tied], values[tied][:, -2:-1], count)
        found[tied] = kept.nonzero()[:, -1].view(-1, count)
    return found


def settle_ties(scores: Tensor, threshold: Tensor, wanted: Tensor | int) -> Tensor:
    """True on the ``wanted`` largest of scores ``[M, N]``, where the last of them is ``threshold [M, 1]``: of equal ones on the first."""
    above, level = ~(scores <= threshold), scores == threshold
    return above | (level & (level.cumsum(-1) <= wanted - above.sum(-1, keepdim=True)))


def candidate_range(tokens: int, policy: Policy, sealed: int) -> tuple[int, int]:
    """The tokens ``[start, stop)`` that compete for selection. The sink before them and the window after them are always kept.

    Args:
        tokens: All tokens up to the current one.
        sealed: Those in sealed blocks (only ``keep_tail`` needs it).
    """
    stop = tokens - policy.local
    if policy.keep_tail:
        stop = min(stop, sealed)
    stop = max(stop, 0)
    return min(policy.sink, stop), stop


def select(scores: Tensor, count: int, policy: Policy, candidates: tuple[int, int]) -> Tensor:
    """The best candidates of every query head.

    Args:
        scores: fp32 ``[R, H, G, N]`` for all N tokens up to the current one.
        count: How many of them to take; at most as many as compete.
        candidates: From :func:`candidate_range`.

    Returns:
        Token indices, int64 ``[R, H, G, count]``, in no particular order.
    """
    start, stop = candidates
    return top_indices(share_scores(scores[..., start:stop], policy), count) + start


def share_scores(scores: Tensor, policy: Policy) -> Tensor:
    """The scores that each head selects by: its own, or one set of the group's for all of its heads."""
    return head_scores(scores, policy.share)


def head_scores(scores: Tensor, share: str) -> Tensor:
    """:func:`share_scores` by the name of the policy's switch."""
    if share == "head":
        return scores
    shared = scores.sum(-2, keepdim=True) if share == "group_sum" else scores.amax(-2, keepdim=True)
    return shared.expand_as(scores)


def union_of_group(indices: Tensor) -> tuple[Tensor, Tensor]:
    """The distinct indices of each group's sets, for every head of the group.

    Args:
        indices: int64 ``[R, H, G, k]``.

    Returns:
        Indices ``[R, H, G, G·k]`` and a mask of the same shape that is False on repetitions.
    """
    rows, heads, group, k = indices.shape
    pooled = indices.reshape(rows, heads, 1, group * k).sort(-1).values
    fresh = torch.ones_like(pooled, dtype=torch.bool)
    fresh[..., 1:] = pooled[..., 1:] != pooled[..., :-1]
    return pooled.expand(-1, -1, group, -1), fresh.expand(-1, -1, group, -1)


def distinct_rows(indices: Tensor, tokens: int) -> Tensor:
    """How many distinct tokens the sets of a group hold, int64 ``[R, H]`` (k∪ of paper Eq. 1)."""
    seen = torch.zeros(*indices.shape[:2], tokens, dtype=torch.bool, device=indices.device)
    return seen.scatter_(-1, indices.flatten(-2), True).sum(-1)


@dataclass(frozen=True)
class Selection:
    """A selected set as masks over N tokens.

    Attributes:
        chosen: Tokens that compete and were selected, ``[R, H, G, N]``.
        kept: Tokens that are always kept, ``[R, 1, 1, N]``.
        candidates: Tokens that were fetched for reranking, the chosen ones included.
    """

    chosen: Tensor
    kept: Tensor
    candidates: Tensor

    @property
    def rows(self) -> Tensor:
        """Distinct K/V rows that a KV head attends to, int64 ``[R, H]``."""
        return self.chosen.any(2).sum(-1) + self.kept[:, :, 0].sum(-1)

    @property
    def candidate_rows(self) -> Tensor:
        """Further K rows fetched for reranking, int64 ``[R, H]``."""
        return self.candidates.any(2).sum(-1) - self.chosen.any(2).sum(-1)


@dataclass(frozen=True)
class Boundary:
    """Where the best scores of each row end: of the last one that is taken and of the first one that is not.

    Attributes:
        scores: −∞ where a token does not compete, ``[R, H, G, N]``.
        threshold, following: ``[R, H, G, 1]``.
        wanted: How many are taken, a number or ``[R, 1, 1, 1]``.
    """

    scores: Tensor
    competing: Tensor
    threshold: Tensor
    following: Tensor
    wanted: Tensor | int

    @classmethod
    def find(cls, scores: Tensor, competing: Tensor, counts: Sequence[int] | int) -> Boundary:
        """See :func:`top_mask`."""
        scores = scores.masked_fill(~competing, -torch.inf)
        if isinstance(counts, int):
            best = scores.topk(counts + 1, dim=-1).values
            return cls(scores, competing, best[..., max(counts - 1, 0)].unsqueeze(-1), best[..., counts:], counts)
        wanted = torch.tensor(counts, device=scores.device).view(-1, 1, 1, 1)
        best = scores.topk(max(counts) + 1, dim=-1).values
        at = wanted.expand(*scores.shape[:-1], 1)
        return cls(scores, competing, best.gather(-1, (at - 1).clamp_min(0)), best.gather(-1, at), wanted)

    def mask(self, *, wait: bool) -> Tensor:
        """See :func:`top_mask`."""
        chosen = self.scores >= self.threshold
        if not wait or (self.threshold == self.following).any():
            above, level = self.scores > self.threshold, (self.scores == self.threshold) & self.competing
            chosen = above | (level & (level.cumsum(-1, dtype=torch.int32) <= self.wanted - above.sum(-1, keepdim=True)))
        if isinstance(self.wanted, int):
            return chosen & self.competing if self.wanted else torch.zeros_like(chosen)
        return chosen & self.competing & (self.wanted > 0)

    def near_ties(self, noise: Tensor) -> Tensor:
        """Whether the first score that is not taken is nearer to the last one taken than ``noise``, both ``[R, H, G]``."""
        near = (self.threshold - self.following).squeeze(-1) <= noise
        taken = self.wanted > 0 if isinstance(self.wanted, int) else (self.wanted > 0).squeeze(-1)
        return near & (self.following > -torch.inf).squeeze(-1) & taken


def top_mask(scores: Tensor, competing: Tensor, counts: Sequence[int] | int, *, wait: bool = True) -> Tensor:
    """True on each row's best competing tokens; of equal scores the lower token is taken, as :func:`select` does.

    Args:
        scores: ``[R, H, G, N]``.
        competing: Boolean, of the same shape or broadcast to it.
        counts: How many to take in each row, fewer than N. Where fewer compete, all of these are taken.
        wait: Ask the device whether there are ties at all, and settle none where there are none.
    """
    return Boundary.find(scores, competing, counts).mask(wait=wait)
