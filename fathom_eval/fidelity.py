"""Attention-output fidelity: how far each method's attention is from dense attention and from exact top-k, per bit it reads.

One dense prefill a window of text; then, layer by layer, every method at the window's last positions. The model runs densely
throughout, so a record holds each layer's own error and nothing that other layers passed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fathom_eval.branches import Branch
from fathom_eval.devices import current
from fathom_eval.errors import UserError
from fathom_eval.fidelity_capture import capture
from fathom_eval.fidelity_layer import LayerComparison, WindowLayer
from fathom_eval.fidelity_sums import Totals, outcome_sums, settle
from fathom_eval.fidelity_windows import TASK, Windows, WindowSource
from fathom_eval.methods import MethodSpec
from fathom_eval.models import LoadedModel, ModelFacts
from fathom_eval.observations import needed_observations
from fathom_eval.rehearsal import Rehearsal, needed_rehearsal
from fathom_eval.run import Run, record_key
from fathom_eval.session_data import SourceSettings
from fathom_eval.session_windows import SessionWindows
from fathom_eval.tasks.haystack import Haystack
from fathom_eval.workers import Measured, ModelRequest

PROTOCOL = 1
"""Raise it when what is measured changes: it is part of every run's identity."""


@dataclass(frozen=True)
class Unit:
    """One window and the branches of it that are still to be measured: prefilled once, its records written together."""

    context: int
    index: int
    branches: tuple[Branch, ...]


def run_identity(facts: ModelFacts, windows: WindowSource, *, positions: int, full_window: bool) -> dict[str, Any]:
    """Everything that can change a number of this run, apart from what each record carries itself."""
    return {
        "protocol": PROTOCOL,
        "model": facts.model_fingerprint,
        "tokenizer": facts.tokenizer_fingerprint,
        "dtype": facts.dtype,
        "device": facts.device.split(":")[0],
        "positions": positions,
        "full_window": full_window,
        **windows.identity,
    }


def check_positions(positions: int, contexts: Sequence[int], facts: ModelFacts | None = None) -> None:
    """Raise :class:`UserError` for contexts that do not hold the positions, or, given the model's facts, do not fit the model."""
    for context in contexts:
        if positions > context - 2:
            raise UserError(f"{positions} positions do not fit into a context of {context}: at least 2 tokens must stand before them")
        if facts is not None and context > facts.max_positions:
            raise UserError(f"context {context} exceeds the {facts.max_positions} positions of {facts.name}; --rope-scaling lengthens them")


def missing_units(run: Run, contexts: Sequence[int], windows: int, branches: Sequence[Branch], *, retry_failed: bool = False) -> list[Unit]:
    """What a run still lacks, and what failed if asked, shorter contexts first."""
    done = run.keys() - run.failed_keys() if retry_failed else run.keys()
    units = []
    for context in contexts:
        for index in range(windows):
            missing = tuple(branch for branch in branches if record_key(_identity(context, index, branch)) not in done)
            if missing:
                units.append(Unit(context, index, missing))
    return units


def evaluate(
    loaded: LoadedModel,
    windows: WindowSource,
    units: Sequence[Unit],
    *,
    positions: int,
    full_window: bool,
    progress: Callable[[str], None] | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Measure windows one by one.

    Args:
        progress: Told what is at work, after every chunk of a prefill and within each layer.

    Yields:
        The records of a window, to be written together.

    Raises:
        UserError: A key is not finite, or memory does not suffice.
    """
    for unit in units:
        began = time.perf_counter()
        try:
            totals = _measure(loaded, windows.token_ids(unit.context, unit.index), unit, positions, full_window, progress)
        except torch.OutOfMemoryError:
            raise UserError(f"a window of {unit.context} tokens does not fit into the memory of {loaded.facts.place}") from None
        seconds = (time.perf_counter() - began) / len(unit.branches)
        yield _records(loaded.facts, windows, unit, totals, positions=positions, full_window=full_window, seconds=seconds)


@dataclass(frozen=True)
class FidelityWork:
    """What a worker needs for any unit; see :mod:`fathom_eval.workers`."""

    model: ModelRequest
    text: Haystack | SourceSettings
    seed: int
    positions: int
    full_window: bool

    def windows(self, loaded: LoadedModel, say: Callable[[str], None] = lambda line: None) -> WindowSource:
        """The windows of a text, or of agent sessions."""
        if isinstance(self.text, Haystack):
            return Windows(loaded.tokenizer, self.text, self.seed)
        return SessionWindows(loaded, self.text, say)

    def prepare(self, loaded: LoadedModel) -> Callable[[Unit], Measured]:
        """See :class:`fathom_eval.workers.Work`."""
        windows = self.windows(loaded)

        def measure(unit: Unit) -> Measured:
            return Measured(next(evaluate(loaded, windows, [unit], positions=self.positions, full_window=self.full_window)))

        return measure

    def failed_records(self, facts: ModelFacts, windows: WindowSource, unit: Unit, reason: str) -> list[dict[str, Any]]:
        """The records of a unit that could not be measured."""
        totals = {branch: Totals(failure=reason) for branch in unit.branches}
        return _records(facts, windows, unit, totals, positions=self.positions, full_window=self.full_window, seconds=0.0)


def _records(
    facts: ModelFacts, windows: WindowSource, unit: Unit, totals: dict[Branch, Totals], **shared: float | bool
) -> list[dict[str, Any]]:
    shared = {"head_dim": facts.head_dim, **windows.origin(unit.context, unit.index), **shared}
    return [_record(unit, branch, totals[branch], shared) for branch in unit.branches]


@torch.inference_mode()
def _measure(
    loaded: LoadedModel, token_ids: Sequence[int], unit: Unit, positions: int, full_window: bool, progress: Callable[[str], None] | None
) -> dict[Branch, Totals]:
    def say(what: str) -> None:
        if progress is not None:
            progress(f"window {unit.index} of {unit.context} tokens: {what}")

    def prefilled(done: int) -> None:
        say(f"prefill, {done:,} of {len(token_ids):,} tokens")

    prefilled(0)
    methods = [branch.spec.method for branch in unit.branches]
    observations = needed_observations(methods, loaded.facts)
    rehearsal = needed_rehearsal(methods, loaded.model, loaded.facts.layers, first=len(token_ids) - positions)
    layers = capture(
        loaded,
        token_ids,
        positions,
        full_window=full_window,
        observations=observations,
        rehearsal=rehearsal,
        progress=prefilled,
    )
    count = len(layers)
    totals = {branch: Totals() for branch in unit.branches}
    failures: dict[MethodSpec, str] = {}
    previous: Tensor | None = None
    for number in range(count):
        # A layer's keys, values and stores go before the next layer's turn comes; only its queries stay until then.
        layer = layers.pop(0)
        queries = layer.queries
        with current(layer.keys.device):
            sums = _layer_sums(layer, number, unit.branches, loaded.facts, full_window, failures, previous, rehearsal, say)
        del layer
        previous = queries
        settle(number, sums, totals, failures)
    for branch, total in totals.items():
        total.failure = failures.get(branch.spec)
    return totals


def _layer_sums(
    layer: WindowLayer,
    number: int,
    branches: Sequence[Branch],
    facts: ModelFacts,
    full_window: bool,
    failures: dict[MethodSpec, str],
    previous_queries: Tensor | None,
    rehearsal: Rehearsal | None,
    say: Callable[[str], None],
) -> dict[Branch, Tensor]:
    sums: dict[Branch, Tensor] = {}
    positions, tokens = len(layer.queries), layer.keys.shape[1]

    def reached(position: int) -> None:
        say(f"layer {number + 1} of {facts.layers}, {position - (tokens - positions)} of {positions} positions")

    reached(tokens - positions)
    if previous_queries is not None:
        previous_queries = previous_queries.to(layer.queries.device)
    comparison = LayerComparison(
        layer,
        number,
        branches,
        facts,
        full_window=full_window,
        failures=failures,
        previous_queries=previous_queries,
        rehearsal=rehearsal,
    )
    for position, branch, outcome in comparison.outcomes():
        reached(position)
        found = outcome_sums(outcome)
        sums[branch] = sums[branch] + found if branch in sums else found
    return sums


def _identity(context: int, index: int, branch: Branch) -> dict[str, Any]:
    method = branch.spec.method
    return {
        "kind": "fidelity",
        "task": TASK,
        "context": context,
        "sample": index,
        "k": branch.k,
        "method": method.name,
        "options": branch.spec.options,
        "method_version": method.version,
    }


METRICS = ("error_dense", "error_exact", "excess", "squared_error_dense", "squared_error_exact", "squared_excess")
"""Of a record, for each of which ``layers`` holds the list of the layers' means."""


def _record(unit: Unit, branch: Branch, totals: Totals, shared: dict[str, Any]) -> dict[str, Any]:
    spec = branch.spec
    head = {
        **_identity(unit.context, unit.index, branch),
        "label": spec.label,
        "family": spec.method.family,
        "control": spec.method.control,
        "finish": "complete" if totals.failure is None else "error",
        "error": totals.failure,
        **shared,
    }
    if totals.failure is not None:
        return head
    layers = totals.layers
    for layer in layers:
        layer["excess"] = layer["error_dense"] - layer["oracle_error"]
        layer["squared_excess"] = layer["squared_error_dense"] - layer["squared_oracle_error"]
    # Exact top-k differs with k and policy, so dense attention has no one error against it.
    metrics: tuple[str, ...] = (*METRICS, "recall") if branch.k is not None else ("error_dense", "squared_error_dense")
    scanned, scans = (sum(layer[name] for layer in layers) for name in ("scan_tokens", "scans"))

    def per(name: str, count: float) -> float | None:
        return sum(layer[name] for layer in layers) / count if count else None

    return {
        **head,
        **{name: per(name, len(layers)) if name in metrics else None for name in (*METRICS, "recall")},
        "bits": per("scan_bits", scanned),
        "declared_bits": per("declared_bits", scanned) if spec.method.declares else None,
        "active_channels": per("channels", scans),
        "scan_bytes": per("scan_bits", 8 * sum(layer["kv_heads"] for layer in layers)),
        "rows": per("rows", len(layers)),
        "candidate_rows": per("candidate_rows", len(layers)),
        # Sets of exact top-k, over layers, positions and query heads, that rounding alone could change.
        "near_ties": None if branch.k is None else int(sum(layer["near_ties"] for layer in layers)),
        "layers": {name: [layer[name] for layer in layers] for name in metrics},
    }
