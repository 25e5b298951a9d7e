"""Clocks: kernels and copies as the profiler sees them, CUDA events, and the wall."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

PARTS = {
    "scan": ("_scan_planes", "_scan_nibbles", "_scan_landmarks", "_gather_channels"),
    "top_k": ("_top_blocks", "_top_tokens"),
    "union": ("_union_rows",),
    "rows": ("_fetch_rows", "_list_rows", "_take_rows"),
    "rows_wait": ("_await_rows",),
    "rerank": ("_rescore_rows", "_keep_best"),
    "attention": ("_attend_pieces", "_join_pieces"),
    "gemm": ("_linear", "gemm", "gemv", "cutlass", "nvjet", "splitK"),
    "copy": ("Memcpy", "memcpy"),
}
"""Parts of a step by what kernel names contain; the rest is ``other``. A scan from host memory is transfer and scan in one kernel;
``rows_wait`` is the wait for rows that the CPU gathers."""


@dataclass(frozen=True)
class GpuTime:
    """Kernels and copies of one step, milliseconds, means over the profiled steps.

    Attributes:
        busy: Time in which at least one of them ran.
        total: Sum over all of them; more than ``busy`` where they ran side by side.
        parts: The sum by part.
        launches: How many there were.
    """

    busy: float
    total: float
    parts: dict[str, float]
    launches: float


def part_of(name: str) -> str:
    """The part of a step that a kernel belongs to."""
    return next((part for part, words in PARTS.items() if any(word in name for word in words)), "other")


def busy_time(spans: Sequence[tuple[float, float]]) -> float:
    """Length of the union of intervals ``(start, end)``."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def profile_gpu(run: Callable[[], None], steps: int) -> GpuTime:
    """Profile ``steps`` calls of ``run`` on the current GPU."""
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:  # there is one cycle; without it torch warns
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    results: Any = profiler.profiler
    spans, parts = [], dict.fromkeys([*PARTS, "other"], 0.0)
    for event in results.kineto_results.events():
        if "CUDA" not in str(event.device_type()) or event.duration_ns() <= 0:
            continue
        start, length = event.start_ns() / 1e6, event.duration_ns() / 1e6
        spans.append((start, start + length))
        parts[part_of(event.name())] += length
    total = sum(parts.values())
    return GpuTime(busy_time(spans) / steps, total / steps, {part: value / steps for part, value in parts.items()}, len(spans) / steps)


@dataclass
class Samples:
    """Milliseconds of one thing that was timed again and again."""

    wall: list[float] = field(default_factory=list)
    event: list[float] = field(default_factory=list)

    def wall_quantiles(self) -> tuple[float, float, float]:
        """Median, tenth and ninetieth percentile."""
        if len(self.wall) == 1:
            return (self.wall[0],) * 3
        cuts = statistics.quantiles(self.wall, n=10, method="inclusive")
        return statistics.median(self.wall), cuts[0], cuts[-1]


def time_in_turn(runs: Sequence[Callable[[], None]], repeats: int, warm_up: int, *, gpu: bool) -> list[Samples]:
    """Time what is compared in turn, one call each a round, after ``warm_up`` rounds; every call is waited for."""
    samples = [Samples() for _ in runs]
    for turn in range(warm_up + repeats):
        for run, sample in zip(runs, samples, strict=True):
            if gpu:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                torch.cuda.synchronize()
            started = time.perf_counter()
            if gpu:
                begin.record()
            run()
            if gpu:
                end.record()
                torch.cuda.synchronize()
            if turn >= warm_up:
                sample.wall.append((time.perf_counter() - started) * 1e3)
                if gpu:
                    sample.event.append(begin.elapsed_time(end))
    return samples


@dataclass
class Path:
    """One thing to time: launches to capture, and the bytes that each moves."""

    name: str
    launches: Sequence[Callable[[], object]]
    moved: float
    facts: dict[str, Any] = field(default_factory=dict)


def time_paths(paths: Sequence[Path], repeats: int) -> dict[str, float]:
    """Median milliseconds a launch of every path, each captured in a CUDA graph, the paths taking turns."""
    graphs = {}
    for path in paths:
        for launch in path.launches[:2]:
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in path.launches:
                launch()
        graphs[path.name] = graph
    samples: dict[str, list[float]] = {path.name: [] for path in paths}
    for repeat in range(repeats + 2):
        for path in paths:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[path.name].replay()
            end.record()
            end.synchronize()
            if repeat >= 2:
                samples[path.name].append(begin.elapsed_time(end) / len(path.launches))
    return {name: statistics.median(values) for name, values in samples.items()}


def path_records(kind: str, context: int, paths: Sequence[Path], ceiling: float | None, repeats: int) -> list[dict[str, Any]]:
    """Time paths; a record each. ``ceiling`` is the rate in GB/s that their bytes could move at."""
    times = time_paths(paths, repeats)
    records = []
    for path in paths:
        record: dict[str, Any] = {"measure": kind, "context": context, "name": path.name, "gpu_ms": times[path.name], **path.facts}
        if path.moved:
            rate = path.moved / times[path.name] / 1e6
            record |= {"moved_bytes": int(path.moved), "gb_s": rate}
            if ceiling:
                record["of_ceiling"] = rate / ceiling
        records.append(record)
    return records
