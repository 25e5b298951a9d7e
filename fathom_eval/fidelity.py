"""Attention-output fidelity: how far each method's attention is from dense attention and from exact top-k, per bit it reads.

One dense prefill a window of text; then, layer by layer, every method at the window's last positions. The model runs densely
throughout, so a record holds each layer's own error and nothing that other layers passed on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from fathom_eval.branches import Branch
from fathom_eval.calibration import QueryStatistics
from fathom_eval.compat import cache_argument
from fathom_eval.errors import UserError
from fathom_eval.fidelity_layer import LayerComparison, Outcome, WindowLayer
from fathom_eval.methods import MethodSpec
from fathom_eval.models import LoadedModel, ModelFacts
from fathom_eval.prefill import CHUNK, use_attention
from fathom_eval.run import Run, record_key
from fathom_eval.tasks.encoding import PromptEncoder
from fathom_eval.tasks.haystack import Haystack
from fathom_eval.tasks.samples import sample_seed

PROTOCOL = 1
"""Raise it when what is measured changes: it is part of every run's identity."""

TASK = "fidelity"


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


def run_identity(facts: ModelFacts, windows: Windows, *, positions: int, full_window: bool) -> dict[str, Any]:
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
    windows: Windows,
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
        shared = {
            "head_dim": loaded.facts.head_dim,
            "positions": positions,
            "full_window": full_window,
            "window_start": windows.start(unit.context, unit.index),
            "seconds": seconds,
        }
        yield [_record(unit, branch, totals[branch], shared) for branch in unit.branches]


@torch.inference_mode()
def _measure(
    loaded: LoadedModel, token_ids: Sequence[int], unit: Unit, positions: int, full_window: bool, progress: Callable[[str], None] | None
) -> dict[Branch, _Totals]:
    def say(what: str) -> None:
        if progress is not None:
            progress(f"window {unit.index} of {unit.context} tokens, {what}")

    layers = capture(loaded, token_ids, positions, full_window=full_window, progress=lambda done: say(f"prefill {done}"))
    count = len(layers)
    totals = {branch: _Totals() for branch in unit.branches}
    failures: dict[MethodSpec, str] = {}
    for number in range(count):
        say(f"layer {number + 1} of {count}")
        # A layer's keys, values and stores go before the next layer's turn comes.
        sums = _layer_sums(layers.pop(0), number, unit.branches, loaded.facts, full_window, failures)
        _settle(number, sums, totals, failures)
    for branch, total in totals.items():
        total.failure = failures.get(branch.spec)
    return totals


def _layer_sums(
    layer: WindowLayer, number: int, branches: Sequence[Branch], facts: ModelFacts, full_window: bool, failures: dict[MethodSpec, str]
) -> dict[Branch, Tensor]:
    sums: dict[Branch, Tensor] = {}
    for _, branch, outcome in LayerComparison(layer, number, branches, facts, full_window=full_window, failures=failures).outcomes():
        found = _sums(outcome)
        sums[branch] = sums[branch] + found if branch in sums else found
    return sums


def capture(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    positions: int,
    *,
    full_window: bool = False,
    chunk: int = CHUNK,
    progress: Callable[[int], None] | None = None,
) -> list[WindowLayer]:
    """Run the model densely over a window and keep its keys and values, and the queries of its last positions.

    Args:
        token_ids: The window.
        positions: How many of its last positions are evaluated.
        full_window: Query moments of the whole window, instead of those before the first evaluated position.
        chunk: Tokens of one forward pass.
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
        observer = _QueryCapture(facts.layers, len(token_ids) - positions, full_window)
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
        layers.append(WindowLayer(keys, values, observer.queries(number), observer.statistics[number], probe.scaling[number]))
    return layers


class _QueryCapture:
    """Keeps the queries of the evaluated positions, and the moments of those before them (or of all)."""

    def __init__(self, layers: int, first: int, full_window: bool) -> None:
        self.statistics = [QueryStatistics() for _ in range(layers)]
        self._first, self._full_window = first, full_window
        self._seen = [0] * layers
        self._kept: list[list[Tensor]] = [[] for _ in range(layers)]

    def observe(self, layer: int, query: Tensor) -> None:
        length = query.shape[2]
        before = min(max(self._first - self._seen[layer], 0), length)
        self._seen[layer] += length
        known = length if self._full_window else before
        if known:
            self.statistics[layer].add(query[:, :, :known])
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


@dataclass
class _Totals:
    """Sums of one branch over layers, fp64, and its layers' means."""

    layers: list[dict[str, float]] = field(default_factory=list)
    failure: str | None = None


# What is summed over positions and heads: errors and recall a query head, rows a KV head, reads a KV head and position.
_PER_QUERY = ("error_dense", "error_exact", "oracle_error", "squared_error_dense", "squared_error_exact", "squared_oracle_error", "recall")
_PER_KV = ("rows", "candidate_rows")
_READS = ("scan_bits", "declared_bits", "scan_tokens", "scans", "channels", "differing", "negative", "broken")


def _sums(outcome: Outcome) -> Tensor:
    """All sums of an outcome as one fp64 vector on the device, so that a layer's results cross over in one transfer."""
    errors = torch.stack([outcome.dense_error, outcome.exact_error, outcome.oracle_error]).double()
    parts = [*errors.sum((1, 2, 3)), *errors.square().sum((1, 2, 3)), outcome.recall.sum(dtype=torch.float64)]
    parts += [outcome.rows.sum(), outcome.candidate_rows.sum()]
    numbers: list[float] = [outcome.recall.numel(), outcome.rows.numel()]
    scan = outcome.scan
    if scan is None or scan.reads is None:
        reads: list[Tensor | float] = [*[0.0] * (len(_READS) - 1), 0.0 if scan is None else scan.broken]
    else:
        bits, tokens, scans = scan.reads.bits.double(), scan.reads.tokens, scan.reads.bits.numel()
        declared = scan.declared_bits * tokens
        reads = [bits.sum(), declared.sum(), tokens * scans, scans, scan.reads.channels.sum()]
        reads += [(bits != declared).sum(), (bits < 0).sum(), scan.broken]
    # A number becomes a tensor by filling one, which does not wait for the device as a copy does.
    return torch.stack(
        [
            part.double() if isinstance(part, Tensor) else torch.full((), float(part), dtype=torch.float64, device=errors.device)
            for part in (*numbers, *parts, *reads)
        ]
    )


def _settle(number: int, sums: dict[Branch, Tensor], totals: dict[Branch, _Totals], failures: dict[MethodSpec, str]) -> None:
    """Take a layer's sums to the host, refuse what cannot be, and keep the rest."""
    if not sums:
        return
    names = ("query_heads", "kv_heads", *_PER_QUERY, *_PER_KV, *_READS)
    for branch, values in zip(sums, torch.stack(list(sums.values())).tolist(), strict=True):
        found = dict(zip(names, values, strict=True))
        for name in _PER_QUERY:
            found[name] /= found["query_heads"]
        for name in _PER_KV:
            found[name] /= found["kv_heads"]
        problem = _impossible(found)
        if problem is not None and branch.spec not in failures:
            failures[branch.spec] = f"layer {number}: {problem}"
        totals[branch].layers.append(found)


def _impossible(found: dict[str, float]) -> str | None:
    if found["broken"]:
        return "scores that are not a number"
    bad = [name for name in (*_PER_QUERY, *_READS) if not math.isfinite(found[name])]
    if bad:
        return f"{bad[0]} is not finite"
    if not 0 <= found["recall"] <= 1 + 1e-9:
        return f"a recall of {found['recall']:g}"
    if found["negative"]:
        return "it reports reads of less than nothing"
    if found["differing"]:
        counted, declared = (found[name] / found["scan_tokens"] for name in ("scan_bits", "declared_bits"))
        return f"it declares {declared:g} bits per token and reads {counted:g}"
    return None


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


def _record(unit: Unit, branch: Branch, totals: _Totals, shared: dict[str, Any]) -> dict[str, Any]:
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
        "declared_bits": per("declared_bits", scanned),
        "active_channels": per("channels", scans),
        "rows": per("rows", len(layers)),
        "candidate_rows": per("candidate_rows", len(layers)),
        "layers": {name: [layer[name] for layer in layers] for name in metrics},
    }
