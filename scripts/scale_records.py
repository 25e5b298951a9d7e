"""What published runs on one H200 say about the cost of a session, for ``scripts/scale_plan.py``."""

from __future__ import annotations

import gzip
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathom_eval.branches import Branch
from fathom_eval.memory import MemoryEstimate, estimate_memory
from fathom_eval.methods import parse_methods
from fathom_eval.models import ModelFacts

PUBLISHED = Path(__file__).resolve().parents[1] / "reports" / "published"
SESSIONS = PUBLISHED / "scale-h200" / "sessions.jsonl.gz"
LOCK_STEP = PUBLISHED / "scale-h200" / "lock-step.json"
SMALL = ModelFacts("Qwen2.5-Coder-0.5B", "qwen2", 24, 14, 2, 64, False, 131072, (), "bfloat16", "cuda:0", "", "")
SMALL_PARAMETERS = 494_032_768
"""Of the model of these runs, the embedding, which is also its output, counted once."""


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


def operations(layers: int, query_heads: int, head_dim: int, parameters: int, tokens: int) -> float:
    """Floating-point operations of a prefill: Q·K and P·V of half of the square each, and two a weight and token."""
    return float(2 * parameters * tokens + 2 * layers * query_heads * head_dim * tokens**2)


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
    return statistics.median(
        operations(SMALL.layers, SMALL.query_heads, SMALL.head_dim, SMALL_PARAMETERS, one.tokens) / one.prefill for one in sessions
    )


def step_factor(step: LockStep, bytes_a_second: float) -> float:
    """GPU time of the lock-step run by the time in which what it must read at least once could be read."""
    held: MemoryEstimate = estimate_memory(SMALL, step.branches, step.tokens, 1, len(step.branches))
    return step.gpu * bytes_a_second / (2 * SMALL_PARAMETERS + held.prefix + held.stores)
