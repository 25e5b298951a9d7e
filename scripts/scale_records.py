"""What published runs on one H200 say about the cost of a session, for ``scripts/scale_plan.py``."""

from __future__ import annotations

import gzip
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathom_eval.branches import Branch
from fathom_eval.memory import MemoryEstimate, estimate_memory
from fathom_eval.methods import parse_methods
from fathom_eval.models import ModelFacts
from scripts.scale_tables import gib, seconds_text, table, wrapped

PUBLISHED = Path(__file__).resolve().parents[1] / "reports" / "published"
SESSIONS = PUBLISHED / "scale-h200" / "sessions.jsonl.gz"
LOCK_STEP = PUBLISHED / "scale-h200" / "lock-step.json"
SMALL = ModelFacts("Qwen2.5-Coder-0.5B", "qwen2", 24, 14, 2, 64, False, 131072, (), "bfloat16", "cuda:0", "", "")
SMALL_PARAMETERS = 494_032_768
"""Of the model of these runs, the embedding, which is also its output, counted once."""
SMALL_WIDTHS = 896, 4864
"""Of its hidden state and of its MLPs."""

RUNS = """\
## Measured with a small model

{model} in bfloat16 on one {device}: five sessions of up to 256 new tokens a branch, \
`reports/published/scale-h200/sessions.jsonl.gz`,

{sessions}

and a lock-step decode at {tokens} tokens of a model of that shape with random weights, `reports/published/scale-h200/lock-step.json`: \
{alone} a step for dense attention alone, {together} for {branches} branches, of which the GPU computes {gpu}. The rest is the host, \
which launches {launches} times a layer for {kernels} kernels, since scans are replayed as CUDA graphs. \
[Sessions](sessions.md#how-long-a-session-takes) has one from end to end.

- **Memory** is predicted: prefix and stores were within {off} of the estimate."""
AGAINST = """\
- **No forecast for larger models:** a session extrapolated from these runs, by what it computes and reads, {against}. A step there does \
many times what it must read once, and no profile of it is published that would say why."""
EXTRAPOLATION = """\
- **The prefill** ran at {prefill} (median of the sessions; operations are those of attention and of the layers' matrices, the time is \
that of all that a prefill does; the first one likely compiles kernels too). The tables take this rate for larger models too, whose \
matrices use a GPU better: likely too slow.
- **A step** took {factor} times as long on the GPU as what it must read at least once takes at {copying}, the copy rate of \
`reports/published/kernels-h200`; and {host} of the host a layer. The tables take the larger of the two, with the factor of a model with \
{heads} KV heads of {channels} channels and {branches} branches for models with 8 of 128 and 20 branches: this is an extrapolation.
- **Stores** are counted, not measured: what is read and written of them once, at the copy rate.
- No session of more than {longest} tokens, no model above 0.5 B and no model spread over several GPUs was timed."""


@dataclass(frozen=True)
class Rates:
    """What turns operations and bytes into seconds.

    Attributes:
        operations_a_second: Of a prefill.
        bytes_a_second: Of the GPU's memory.
        step_factor: GPU time of a step by the time of what it must read at least once.
        host_a_layer: Seconds of the host for a layer of a step.
    """

    operations_a_second: float
    bytes_a_second: float
    step_factor: float = 1.0
    host_a_layer: float = 0.0


@dataclass(frozen=True)
class Session:
    """One session of the published run: tokens, branches, seconds and bytes."""

    tokens: int
    branches: int
    prefill: float
    decoding: float
    held: int
    estimated: int
    peak: int


@dataclass(frozen=True)
class LockStep:
    """Decoding of several branches together, seconds a step."""

    device: str
    tokens: int
    branches: tuple[Branch, ...]
    dense_wall: float
    wall: float
    dense_gpu: float
    gpu: float
    launches_a_layer: float
    kernels_a_layer: float

    @property
    def wall_a_layer(self) -> float:
        """Seconds that the host takes for a layer: it, and not the GPU, is what this run waits for."""
        return self.wall / SMALL.layers


def layer_weights(layers: int, query_heads: int, kv_heads: int, head_dim: int, hidden: int, inner: int) -> int:
    """Weights of the layers' matrices: the projections of attention, and the three of a gated MLP."""
    return layers * hidden * (head_dim * (2 * query_heads + 2 * kv_heads) + 3 * inner)


def operations(layers: int, query_heads: int, head_dim: int, weights: int, tokens: int) -> float:
    """Floating-point operations of a prefill: Q·K and P·V of half of the square each, and two a weight of the layers and token.

    An embedding is looked up, and the head sees one token a chunk: neither counts.
    """
    return float(2 * weights * tokens + 2 * layers * query_heads * head_dim * tokens**2)


def read_sessions() -> list[Session]:
    """The timed sessions, in the order in which they ran."""
    samples: dict[int, list[dict[str, Any]]] = {}
    with gzip.open(SESSIONS, "rt", encoding="utf-8") as lines:
        for record in map(json.loads, lines):
            samples.setdefault(record["sample"], []).append(record)
    found = []
    for records in samples.values():
        first, seconds = records[0], sum(record["seconds"] for record in records)
        memory = first["memory"]
        held, estimated, peak = memory["held_bytes"], memory["estimated_held_bytes"], memory["peak_bytes"]
        found.append(Session(first["prompt_tokens"], len(records), first["prefill_seconds"], seconds, held, estimated, peak))
    return found


def read_lock_step() -> LockStep:
    """The published lock-step run."""
    found = json.loads(LOCK_STEP.read_text(encoding="utf-8"))
    [k] = found["k"]
    specs = parse_methods(",".join(":".join(label.split()) for label in found["methods"]))
    branches = tuple(Branch(spec, None if spec.method.name == "dense" else k) for spec in specs)
    dense, together = found["profile"]["dense"], found["profile"]["branches"]
    return LockStep(
        found["device"],
        found["context"],
        branches,
        found["dense_ms_a_step"]["median"] / 1e3,
        found["branches_ms_a_step"]["median"] / 1e3,
        dense["gpu_ms_a_step"] / 1e3,
        together["gpu_ms_a_step"] / 1e3,
        together["launches_a_layer"],
        together["kernels_a_layer"],
    )


def prefill_rate(sessions: list[Session]) -> float:
    """Operations a second of the median session."""
    weights = layer_weights(SMALL.layers, SMALL.query_heads, SMALL.kv_heads, SMALL.head_dim, *SMALL_WIDTHS)
    return statistics.median(
        operations(SMALL.layers, SMALL.query_heads, SMALL.head_dim, weights, one.tokens) / one.prefill for one in sessions
    )


def step_factor(step: LockStep, bytes_a_second: float) -> float:
    """GPU time of the lock-step run by the time in which what it must read at least once could be read."""
    held: MemoryEstimate = estimate_memory(SMALL, step.branches, step.tokens, 1, len(step.branches))
    return step.gpu * bytes_a_second / (2 * SMALL_PARAMETERS + held.prefix + held.stores)


def _filled(text: str, **values: object) -> str:
    """With its values, and wrapped but for tables."""
    return "\n".join(line if line.startswith("|") else wrapped(line) for line in text.format(**values).splitlines())


def small_runs(sessions: Sequence[Session], step: LockStep, against: str | None = None) -> str:
    """What was measured with the small model, as a section; ``against`` says what that would have foretold of larger ones."""
    head = ["tokens", "branches", "prefill", "decoding and stores", "prefix and stores estimated, GiB", "measured", "at most at once"]
    rows = []
    for one in sessions:
        sizes = map(gib, (one.estimated, one.held, one.peak))
        rows.append([f"{one.tokens:,}", one.branches, seconds_text(one.prefill), seconds_text(one.decoding), *sizes])
    runs = _filled(
        RUNS,
        model=SMALL.name,
        device=step.device,
        sessions=table(head, rows),
        tokens=f"{step.tokens:,}",
        alone=f"{1e3 * step.dense_wall:.1f} ms",
        together=f"{1e3 * step.wall:.1f} ms",
        gpu=f"{1e3 * step.gpu:.1f} ms",
        branches=len(step.branches),
        launches=f"{step.launches_a_layer:.0f}",
        kernels=f"{step.kernels_a_layer:.0f}",
        off=f"{100 * max(abs(one.held / one.estimated - 1) for one in sessions):.4f} %",
    )
    return runs if against is None else f"{runs}\n{_filled(AGAINST, against=against)}"


def extrapolation(sessions: Sequence[Session], step: LockStep, rates: Rates) -> str:
    """How the measurements with the small model become costs of larger ones, as points of a list."""
    return _filled(
        EXTRAPOLATION,
        prefill=f"{rates.operations_a_second / 1e12:.0f} TFLOP/s",
        factor=f"{rates.step_factor:.1f}",
        copying=f"{rates.bytes_a_second / 1e12:.2f} TB/s",
        host=f"{1e3 * rates.host_a_layer:.1f} ms",
        heads=SMALL.kv_heads,
        channels=SMALL.head_dim,
        branches=len(step.branches),
        longest=f"{max(one.tokens for one in sessions):,}",
    )
