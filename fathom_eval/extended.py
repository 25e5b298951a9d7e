"""Selection and attention of methods that need more than a store and a plan, the same for decoding and for fidelity.

A set is a mask over the tokens here, since such a set may have any size. The hooks of :class:`~fathom_eval.methods.base.Method` are
called in this order: ``rank``, ``log_weights``, ``remainder``, ``learn``.

Shapes: R rows (branches, or positions), H KV heads, G query heads a KV head, N tokens, D channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fathom_eval.branch_context import folded
from fathom_eval.methods.base import Method
from fathom_eval.methods.step import Step
from fathom_eval.reallocation import tempered
from fathom_eval.selection import Policy, Selection, share_scores, top_mask


@dataclass(frozen=True)
class Field:
    """What competes in each row, and how many of it can be taken.

    Attributes:
        competing: Boolean ``[R or 1, 1, 1, N]``.
        kept: Tokens that are always kept, of the same shape.
        counts: How many to select, in each row or in all.
        fetched: How many candidates to fetch for it.
    """

    competing: Tensor
    kept: Tensor
    counts: Sequence[int] | int
    fetched: Sequence[int] | int


@dataclass(frozen=True)
class Scored:
    """Scores of all tokens, fp32 ``[R, H, G, N]``.

    Attributes:
        approximate: What the scan gave.
        exact: q·k of the step's own queries.
        coverage: Of the scan, ``[R, H, G]``; only asked for where the policy reallocates.
    """

    approximate: Tensor
    exact: Tensor
    coverage: Callable[[], Tensor]


@dataclass(frozen=True)
class Attended:
    """Output and the set that it comes from.

    Attributes:
        output: fp32 ``[R, H, G, D]``.
        broken: Rows in which the method's ``rank`` gave a competing token what is not a number, boolean ``[R]`` not waited for; None
            where the scan's own scores rank.
    """

    output: Tensor
    selection: Selection
    broken: Tensor | None = None


def attend_extended(
    method: Method,
    policy: Policy,
    scored: Scored,
    field: Field,
    step: Step,
    mix: Callable[[Tensor], Tensor],
    mean_value: Callable[[], Tensor],
) -> Attended:
    """Select by a scan's scores and attend, with all hooks of the method.

    Args:
        mix: From weights ``[R, H, G, N]`` to the weighted sum of the values, ``[R, H, G, D]``.
        mean_value: Of all tokens of each row, ``[R, H, D]``.

    Raises:
        ValueError: A hook gave a tensor of the wrong shape.
    """
    selection, broken = _choose(method, policy, scored, field, step)
    chosen = selection.chosen.any(2, keepdim=True) if policy.attend == "union" else selection.chosen
    attended = (chosen | field.kept).expand(scored.exact.shape)
    logits = scored.exact * step.scaling
    if method.overrides("log_weights"):
        logits = logits + _log_weights(method, field, step, scored.exact.shape)
    logits = logits.masked_fill(~attended, -torch.inf)
    output, weights = _attend(method, attended, logits, step, mix)
    if policy.reallocate:
        output = _reallocated(output, scored, selection.chosen | field.kept, mean_value(), step)
    if method.overrides("learn"):
        method.learn(attended, weights, step)
    return Attended(output, selection, broken)


def _choose(method: Method, policy: Policy, scored: Scored, field: Field, step: Step) -> tuple[Selection, Tensor | None]:
    """The set, and :attr:`Attended.broken`."""
    scores, broken = scored.approximate, None
    if method.overrides("rank"):
        ranked = method.rank(scores.masked_fill(~field.competing, -torch.inf), step)
        if ranked.shape != scores.shape:
            raise ValueError(f"its rank gave scores of shape {tuple(ranked.shape)} for {tuple(scores.shape)}")
        # No comparison takes what is not a number, so such a token would go unnoticed.
        scores, broken = ranked, (ranked.isnan() & field.competing).any(-1).any(-1).any(-1)
    shared = share_scores(scores, policy)
    finite = shared > -torch.inf
    if not method.capped:
        chosen = finite & field.competing
        return Selection(chosen, field.kept, chosen), broken
    candidates = top_mask(shared, field.competing, field.fetched, wait=False) & finite
    if field.fetched == field.counts:
        return Selection(candidates, field.kept, candidates), broken
    exact = share_scores(scored.exact, policy)
    # What is taken first stays first: only finite scores are estimates that an exact one replaces.
    rescored = torch.where(shared == torch.inf, shared, exact)
    return Selection(top_mask(rescored, candidates, field.counts, wait=False), field.kept, candidates), broken


def _log_weights(method: Method, field: Field, step: Step, shape: torch.Size) -> Tensor:
    found = method.log_weights(step)
    if found.shape[:3] != shape[:3]:
        raise ValueError(f"its log_weights are of shape {tuple(found.shape)} for {tuple(shape)}")
    found = found[..., : shape[-1]]
    padded = torch.nn.functional.pad(found, (0, shape[-1] - found.shape[-1]))
    return padded.masked_fill(field.kept, 0.0)


def _attend(method: Method, attended: Tensor, logits: Tensor, step: Step, mix: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Output and the weights of the tokens."""
    if not method.overrides("remainder"):
        weights = logits.softmax(-1)
        return mix(weights), weights
    tokens = logits.shape[-1]
    missing = max(0, sum(store.tokens for store in step.stores) - tokens)
    estimated, values = method.remainder(torch.nn.functional.pad(attended, (0, missing)), step)
    if estimated.shape[:3] != logits.shape[:3] or values.shape[-2] != estimated.shape[-1]:
        raise ValueError(f"its remainder has logits of shape {tuple(estimated.shape)} and values of {tuple(values.shape)}")
    weights = torch.cat([logits, estimated], dim=-1).softmax(-1)
    return mix(weights[..., :tokens]) + _mixed(weights[..., tokens:], values.float()), weights[..., :tokens]


def _mixed(weights: Tensor, values: Tensor) -> Tensor:
    """Values of pseudo-keys, ``[R or 1, H, G or 1, c, D]``, weighted by ``[R, H, G, c]``, without a copy for every head of a group."""
    if values.shape[2] > 1:
        return (weights.unsqueeze(-2) @ values).squeeze(-2)
    shared = values.squeeze(2)
    return folded(weights, shared[0]) if len(shared) == 1 else weights @ shared


def _reallocated(output: Tensor, scored: Scored, selected: Tensor, mean_value: Tensor, step: Step) -> Tensor:
    """Give the mass of the tokens that were not selected to the mean value (SparQ)."""
    scores = scored.approximate
    finite = torch.where(torch.isinf(scores), -torch.inf, scores)
    scores = torch.where(scores == torch.inf, finite.amax(-1, keepdim=True), scores)
    future = torch.arange(step.length, device=output.device) >= step.tokens.view(-1, 1, 1, 1)
    logits = tempered(scores, scored.coverage(), step.scaling, sum(store.tokens for store in step.stores))
    weights = logits.masked_fill(future, -torch.inf).softmax(-1)
    missed = weights.masked_fill(selected, 0.0).sum(-1, keepdim=True)
    return (1 - missed) * output + missed * mean_value.unsqueeze(-2)
