"""Attention-output fidelity: how far each method's attention is from dense attention and from exact top-k, per bit it reads.

One dense prefill a window of text; then, layer by layer, every method at the window's last positions. The model runs densely
throughout, so a record holds each layer's own error and nothing that other layers passed on.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from fathom_eval.branches import Branch
from fathom_eval.calibration import QueryStatistics
from fathom_eval.compat import cache_argument
from fathom_eval.errors import UserError
from fathom_eval.fidelity_layer import LayerComparison, WindowLayer
from fathom_eval.fidelity_sums import Totals, outcome_sums, settle
from fathom_eval.methods import MethodSpec
from fathom_eval.models import LoadedModel, ModelFacts
from fathom_eval.observations import LayerObservers, Observation, needed_observations
from fathom_eval.prefill import CHUNK, use_attention
from fathom_eval.run import Run, record_key
from fathom_eval.session_data import SourceSettings
from fathom_eval.session_windows import SessionWindows
from fathom_eval.tasks.encoding import PromptEncoder
from fathom_eval.tasks.haystack import Haystack
from fathom_eval.tasks.samples import sample_seed
from fathom_eval.workers import Measured, ModelRequest

PROTOCOL = 1
"""Raise it when what is measured changes: it is part of every run's identity."""

TASK = "fidelity"


class WindowSource(Protocol):
    """Where windows come from: a text, or agent sessions (:class:`fathom_eval.session_windows.SessionWindows`)."""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides which tokens a window holds; asked for after :meth:`check`."""

    def check(self, context: int, windows: int) -> None:
        """Raise :class:`UserError` unless there are so many windows."""

    def origin(self, context: int, index: int) -> dict[str, Any]:
        """Where a window comes from, for its records."""

    def token_ids(self, context: int, index: int) -> list[int]:
        """The ``context`` ids of a window."""


class Windows:
    """Disjoint windows of a text, the same ones whatever else is asked for.

    The text is encoded once. A context of c tokens cuts it into as many windows as fit, at a seeded offset, and window i is the
    i-th of them in a seeded order; each begins with BOS where the tokenizer wants one.
    """

    def __init__(self, tokenizer: Any, haystack: Haystack, seed: int) -> None:
        self._encoder = PromptEncoder(tokenizer, chat_template=False)
        self._haystack, self._seed = haystack, seed

    @cached_property
    def _ids(self) -> list[int]:
        return self._encoder.encode_many([self._haystack.text])[0]

    @cached_property
    def _beginning(self) -> list[int]:
        return self._encoder.encode("")

    @property
    def identity(self) -> dict[str, Any]:
        """What decides which tokens a window holds."""
        return {"haystack": self._haystack.sha256, "seed": self._seed}

    def check(self, context: int, windows: int) -> None:
        """Raise :class:`UserError` unless so many windows fit into the text."""
        fit = len(self._ids) // (context - len(self._beginning))
        if fit < windows:
            raise UserError(
                f"{windows} windows of {context} tokens do not fit: the haystack {self._haystack.origin} has {len(self._ids)} tokens, "
                f"enough for {fit}; take fewer windows, a shorter context or a longer text"
            )

    def start(self, context: int, index: int) -> int:
        """Where in the encoded text a window starts."""
        length = context - len(self._beginning)
        fit = len(self._ids) // length
        random = Random(sample_seed(self._seed, TASK, context, 0))
        offset = random.randrange(len(self._ids) - fit * length + 1)
        order = list(range(fit))
        random.shuffle(order)
        return offset + order[index] * length

    def origin(self, context: int, index: int) -> dict[str, Any]:
        """Where in the text a window starts, for its records."""
        return {"window_start": self.start(context, index)}

    def token_ids(self, context: int, index: int) -> list[int]:
        """The ``context`` ids of a window."""
        start = self.start(context, index)
        return [*self._beginning, *self._ids[start : start + context - len(self._beginning)]]


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


def missing_units(run: Run, contexts: Sequence[int], windows: int, branches: Sequence[Branch]) -> list[Unit]:
    """What a run still lacks, shorter contexts first."""
    done = run.keys()
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
        progress: Told what is at work.

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
            raise UserError(f"a window of {unit.context} tokens does not fit into the memory of {loaded.facts.device}") from None
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
            progress(f"window {unit.index} of {unit.context} tokens, {what}")

    observations = needed_observations((branch.spec.method for branch in unit.branches), loaded.facts)
    layers = capture(
        loaded,
        token_ids,
        positions,
        full_window=full_window,
        observations=observations,
        progress=lambda done: say(f"prefill {done}"),
    )
    count = len(layers)
    totals = {branch: Totals() for branch in unit.branches}
    failures: dict[MethodSpec, str] = {}
    previous: Tensor | None = None
    for number in range(count):
        say(f"layer {number + 1} of {count}")
        # A layer's keys, values and stores go before the next layer's turn comes; only its queries stay until then.
        layer = layers.pop(0)
        queries = layer.queries
        sums = _layer_sums(layer, number, unit.branches, loaded.facts, full_window, failures, previous)
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
) -> dict[Branch, Tensor]:
    sums: dict[Branch, Tensor] = {}
    comparison = LayerComparison(
        layer, number, branches, facts, full_window=full_window, failures=failures, previous_queries=previous_queries
    )
    for _, branch, outcome in comparison.outcomes():
        found = outcome_sums(outcome)
        sums[branch] = sums[branch] + found if branch in sums else found
    return sums


def capture(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    positions: int,
    *,
    full_window: bool = False,
    chunk: int = CHUNK,
    observations: Sequence[Observation] = (),
    progress: Callable[[int], None] | None = None,
) -> list[WindowLayer]:
    """Run the model densely over a window and keep its keys and values, and the queries of its last positions.

    Args:
        token_ids: The window.
        positions: How many of its last positions are evaluated.
        full_window: Query moments of the whole window, instead of those before the first evaluated position.
        chunk: Tokens of one forward pass.
        observations: What else to gather, of the same positions as the moments.
        progress: Called with the tokens done so far after every chunk.

    Raises:
        UserError: A key is not finite; layer and KV head are named.
    """
    facts, model = loaded.facts, loaded.model
    use_attention(loaded)
    ids = torch.tensor([list(token_ids)], device=model.device)
    probe = _ScalingProbe()
    with torch.inference_mode():
        scratch: Cache = DynamicCache()
        model(input_ids=ids[:, :1], use_cache=True, logits_to_keep=1, branches=probe, **{cache_argument(model): scratch})
        observer = _QueryCapture(facts.layers, len(token_ids) - positions, full_window, observations)
        cache: Any = DynamicCache()
        for start in range(0, len(token_ids), chunk):
            stop = min(start + chunk, len(token_ids))
            model(
                input_ids=ids[:, start:stop],
                position_ids=torch.arange(start, stop, device=ids.device).unsqueeze(0),
                use_cache=True,
                logits_to_keep=1,
                observer=observer,
                **{cache_argument(model): cache},
            )
            if progress is not None:
                progress(stop)
    layers = []
    for number in range(facts.layers):
        keys, values = cache.layers[number].keys[0], cache.layers[number].values[0]
        finite = torch.isfinite(keys).all(-1).all(-1)
        if not finite.all():
            heads = ", ".join(map(str, (~finite).nonzero().flatten().tolist()))
            raise UserError(f"the prefill gave keys that are not finite in layer {number}, KV head {heads}")
        queries, further = observer.queries(number), observer.further.results(number)
        layers.append(WindowLayer(keys, values, queries, observer.statistics[number], probe.scaling[number], further))
    return layers


class _QueryCapture:
    """Keeps the queries of the evaluated positions, and what is to be known of those before them (or of all)."""

    def __init__(self, layers: int, first: int, full_window: bool, observations: Sequence[Observation]) -> None:
        self.statistics = [QueryStatistics() for _ in range(layers)]
        self.further = LayerObservers(observations, layers)
        self._first, self._full_window = first, full_window
        self._seen = [0] * layers
        self._kept: list[list[Tensor]] = [[] for _ in range(layers)]

    def observe(self, layer: int, query: Tensor, keys: Tensor, scaling: float) -> None:
        length = query.shape[2]
        before = min(max(self._first - self._seen[layer], 0), length)
        self._seen[layer] += length
        known = length if self._full_window else before
        if known:
            self.statistics[layer].add(query[:, :, :known])
            self.further.add(layer, query[:, :, :known], keys[:, : keys.shape[1] - length + known], scaling)
        if before < length:
            self._kept[layer].append(query[:, :, before:].clone())  # a view would hold the whole chunk

    def queries(self, layer: int) -> Tensor:
        """``[P, H, G, D]``."""
        return torch.cat(self._kept[layer], dim=2).permute(2, 0, 1, 3).contiguous()


class _ScalingProbe:
    """Learns what each layer scales its scores by."""

    def __init__(self) -> None:
        self.scaling: dict[int, float] = {}

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        self.scaling[layer] = scaling
        return torch.zeros_like(query)


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
