"""Per-layer budgets: more bits where a layer's error falls most for them (paper §3.4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import torch

from fathom_eval.branches import Branch
from fathom_eval.errors import UserError
from fathom_eval.fidelity_capture import capture
from fathom_eval.fidelity_layer import LayerComparison
from fathom_eval.methods import MethodSpec
from fathom_eval.methods.fathom import Fathom
from fathom_eval.models import LoadedModel
from fathom_eval.selection import Policy

LEAST, STEP, MOST = 24, 8, 128
"""Budgets that a layer can have, in code bits for a head_dim of 128."""
BUDGETS = tuple(range(LEAST, MOST + 1, STEP))


def greedy_plan(errors: Sequence[Sequence[float]], mean: int) -> tuple[int, ...]:
    """The budget of every layer.

    All layers start at :data:`LEAST`; :data:`STEP` bits go to the layer whose error falls most for them, the lower of equal ones, until
    another step would lift the mean over ``mean`` or every layer has :data:`MOST`.

    Args:
        errors: Of each layer at each of :data:`BUDGETS`, while the other layers are exact.
        mean: From :data:`LEAST` to :data:`MOST`.
    """
    at = [0] * len(errors)
    for _ in range((mean - LEAST) * len(errors) // STEP):
        drops = {layer: row[at[layer]] - row[at[layer] + 1] for layer, row in enumerate(errors) if at[layer] + 1 < len(BUDGETS)}
        at[max(drops, key=lambda layer: (drops[layer], -layer))] += 1
    return tuple(BUDGETS[level] for level in at)


def check_means(means: Sequence[int]) -> None:
    """Raise :class:`UserError` for a mean budget that no plan can have."""
    for mean in means:
        if not LEAST <= mean <= MOST:
            raise UserError(f"--plan {mean} must lie in {LEAST}..{MOST}: a layer has {LEAST} to {MOST} code bits for a head_dim of 128")


@torch.inference_mode()
def layer_errors(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    *,
    basis: Literal["raw", "klt"],
    k: int,
    positions: int,
    progress: Callable[[str], None] | None = None,
) -> list[list[float]]:
    """Error of each layer's attention outputs at each of :data:`BUDGETS`, against exact top-k at the same k.

    Each layer is measured on the dense model's own keys and queries, which is what it sees while all other layers are exact. Statistics
    are those of the window before the positions.

    Args:
        token_ids: A window of text.
        positions: How many of its last positions are measured.

    Raises:
        UserError: A layer's keys cannot be stored.
    """

    def say(what: str) -> None:
        if progress is not None:
            progress(what)

    branches = [Branch(MethodSpec(Fathom(budget=budget, basis=basis), Policy()), k) for budget in BUDGETS]
    layers = capture(loaded, token_ids, positions, progress=lambda done: say(f"plan: prefill {done}"))
    errors, count = [], len(layers)
    for number in range(count):
        say(f"plan: layer {number + 1} of {count}")
        failures: dict[MethodSpec, str] = {}
        sums = {branch: torch.zeros((), dtype=torch.float64, device=loaded.model.device) for branch in branches}
        for _, branch, outcome in LayerComparison(
            layers.pop(0), number, branches, loaded.facts, full_window=False, failures=failures
        ).outcomes():
            sums[branch] += outcome.exact_error.sum(dtype=torch.float64)
        if failures:
            raise UserError(f"no plan can be made: {next(iter(failures.values()))}")
        measured = positions * loaded.facts.query_heads
        errors.append((torch.stack([sums[branch] for branch in branches]) / measured).tolist())
    return errors
