"""Time whole decode steps: every method on the same data, in turn, checked first."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import torch

from fathom_eval.errors import UserError
from fathom_eval.methods import MethodSpec
from fathom_eval.offload.bench.checks import StepCheck
from fathom_eval.offload.bench.sources import Source, SyntheticSource
from fathom_eval.offload.bench.synthetic import BITS, CHANNELS, ROW_BYTES
from fathom_eval.offload.bench.timing import profile_gpu, time_in_turn
from fathom_eval.offload.gatherer import RowGatherer
from fathom_eval.offload.step import DecodeStep, launch_together

STEPS_OF_A_WINDOW = 56
"""Steps after which a synthetic cache starts again, before a block would be sealed into its shared segments."""

WARM_UP, PROFILED = 2, 3
"""Turns that are not counted, and steps of the profile."""


@dataclass(frozen=True)
class Variant:
    """One thing to time.

    Attributes:
        batch: Sessions that one step decodes together.
        sessions: Steps that run side by side, a stream each.
        lanes: Parts of a step that are pipelined.
        rows_by: Who brings the K/V rows, one of :data:`~fathom_eval.offload.gatherer.GATHERERS`.
        last_heads: KV heads of the last lane, None for as many as the others have.
    """

    spec: MethodSpec
    k: int
    batch: int = 1
    sessions: int = 1
    lanes: int = 1
    rows_by: str = "gpu"
    last_heads: int | None = None

    def key(self, model: str, context: int, index: str) -> dict[str, Any]:
        """The identity of its record."""
        method = self.spec.method
        options = {**self.spec.options, "batch": self.batch, "sessions": self.sessions, "lanes": self.lanes, "index": index}
        if self.rows_by != "gpu":
            options["rows"] = self.rows_by
        if self.last_heads is not None:
            options["last_lane"] = self.last_heads
        return {
            "kind": "step",
            "task": model,
            "context": context,
            "sample": 0,
            "k": self.k,
            "method": method.name,
            "options": options,
            "method_version": method.version,
        }


@dataclass
class _Prepared:
    variant: Variant
    steps: list[DecodeStep]
    facts: dict[str, Any]

    def __post_init__(self) -> None:
        device = self.steps[0].weights.device
        self._streams = [torch.cuda.Stream(device) for _ in self.steps] if device.type == "cuda" and len(self.steps) > 1 else []

    def run(self) -> None:
        """One token of every session."""
        if self._streams:
            for step in self.steps:
                step.check()
                step.cache.advance()
            launch_together(self.steps, self._streams)
            return
        for step in self.steps:
            step.run()


def with_rerank(specs: Sequence[MethodSpec], values: Sequence[float]) -> list[MethodSpec]:
    """Every method at every rerank factor; one that names its own keeps it."""
    found: list[MethodSpec] = []
    for spec in specs:
        for value in values if spec.policy.rerank == 1 else [spec.policy.rerank]:
            made = dataclasses.replace(spec, policy=dataclasses.replace(spec.policy, rerank=value))
            if made not in found:
                found.append(made)
    return found


def measure(
    source: Source,
    context: int,
    variants: Sequence[Variant],
    rates: dict[str, float],
    *,
    index: str,
    repeats: int,
    common: dict[str, Any],
    say: Callable[[str], None],
    gather_threads: int | None = None,
) -> Iterator[dict[str, Any]]:
    """Check and time variants at one context; those that have the same batch and sessions run in turn.

    Args:
        source: Turned to the context already.
        rates: Of :func:`fathom_eval.offload.bench.link.quick_rates`; empty where nothing was measured.
        common: Fields of every record.
        gather_threads: Threads of the CPU that gather rows where a variant asks for it.
    """
    groups: dict[tuple[int, int], list[Variant]] = {}
    for variant in variants:
        groups.setdefault((variant.batch, variant.sessions), []).append(variant)
    for group in groups.values():
        with contextlib.ExitStack() as stack:
            gatherer = None
            if any(variant.rows_by != "gpu" for variant in group):
                gatherer = stack.enter_context(RowGatherer(source.weights().device, gather_threads))
            prepared = []
            for variant in group:
                prepared.append(_prepare(source, variant, gatherer, stack))
                checked = _checked(prepared[-1].facts["relative_errors"], source.weights().device)
                say(f"{context}: {variant.spec.label}, batch {variant.batch}, lanes {variant.lanes}, rows by {variant.rows_by}: {checked}")
            yield from _time(source, context, prepared, rates, index, repeats, common)


def _checked(errors: dict[str, float], device: torch.device) -> str:
    """What the check found, in words; on the CPU nothing of scores and attention, since they are the references' own."""
    if device.type != "cuda":
        return "rows and selection checked; its scores and attention are those of the references"
    return "checked, relative errors of " + " and ".join(f"{what} {error:.1e}" for what, error in errors.items())


def _prepare(source: Source, variant: Variant, gatherer: RowGatherer | None, stack: contextlib.ExitStack) -> _Prepared:
    steps: list[DecodeStep] = []
    facts: dict[str, Any] = {}
    own = None if variant.rows_by == "gpu" else gatherer
    threads = {} if own is None else {"gather_threads": own.threads}
    for session in range(variant.sessions):
        cache, scan = source.prepare(variant.spec, variant.batch, variant.lanes, session, variant.sessions, variant.last_heads)
        step = DecodeStep(
            source.weights(),
            cache,
            scan,
            variant.k,
            variant.spec.policy,
            rows_by=variant.rows_by,
            gatherer=own,
        )
        stack.callback(step.release)
        step.token_ids.random_(0, step.weights.head.shape[0], generator=torch.Generator(step.weights.device).manual_seed(5))
        check = StepCheck(step, variant.spec.label)
        step.observer = check.observe
        try:
            step.run()
        except UserError:
            step.check()  # rows that were not gathered are the reason why they differ
            raise
        step.observer = None
        step.check()
        facts = {
            **_traffic(step, check),
            **source.notes(cache),
            **threads,
            "relative_errors": {k: float(f"{v:.2e}") for k, v in check.errors.items()},
        }
        source.reset(cache)
        step.capture()
        steps.append(step)
    return _Prepared(variant, steps, facts)


def _traffic(step: DecodeStep, check: StepCheck) -> dict[str, Any]:
    """What the last step moved, of one of the steps that run side by side.

    The GPU fetches the keys of what a step reranks and the values of what it attends to, the CPU both of every candidate. Without rerank
    the two are the same rows. Weights are all matrices in GPU memory that a step reads, those that turn queries into a basis too.
    """
    cache, weights = step.cache, step.weights
    row = cache.arena.shape.head_dim * cache.tail.element_size()
    sealed = cache.blocks.double().view(1, -1, 1) * 64
    bits, candidates, kept = step.scan.bits(), step.union_counts.double().sum().item(), check.kept_rows.sum().item()
    parts = 0.0
    for lane, attended in zip(cache.lanes, check.kept_rows.sum(0).tolist(), strict=True):
        keys = step.union_counts[:, lane.rows, lane.heads].double().sum().item()
        parts += keys + (keys if step.gathered(lane) else attended)
    scan_bytes = (bits.to(sealed.device) * sealed / 8).sum().item()
    fetched = parts * row
    bases = [layer.basis for layer in cache.layers if layer.basis is not None]
    turning = sum(part.numel() * part.element_size() for basis in bases for part in (basis.mean, basis.vectors))
    return {
        "scan_bits": bits.mean().item(),
        "active_channels": step.scan.channels().mean().item(),
        "scan_bytes": int(scan_bytes),
        "union_rows": kept / step.union_counts.numel(),
        "candidate_rows": candidates / step.union_counts.numel(),
        "rows_bytes": int(2 * kept * row),
        "fetched_bytes": int(fetched),
        "link_bytes": int(fetched + (scan_bytes if cache.arena.index == "host" else 0)),
        "weight_bytes": weights.bytes_read + turning,
    }


def _time(
    source: Source,
    context: int,
    prepared: Sequence[_Prepared],
    rates: dict[str, float],
    index: str,
    repeats: int,
    common: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    gpu = prepared[0].steps[0].weights.device.type == "cuda"

    def restarting(item: _Prepared) -> Callable[[], None]:
        taken = 0

        def run() -> None:
            nonlocal taken
            if taken % STEPS_OF_A_WINDOW == 0 and source.synthetic:
                for step in item.steps:
                    source.reset(step.cache)
            taken += 1
            item.run()

        return run

    # Ratios are of steps that took turns; a resumed run has several rounds.
    together = datetime.now(UTC).isoformat(timespec="milliseconds")
    runs = [restarting(item) for item in prepared]
    samples = time_in_turn(runs, repeats, WARM_UP, gpu=gpu)
    _check(prepared)
    for item, run, sample in zip(prepared, runs, samples, strict=True):
        wall, low, high = sample.wall_quantiles()
        times: dict[str, Any] = {"gpu_ms": None, "gpu_sum_ms": None, "event_ms": None, "parts_ms": {}, "launches": None}
        if gpu:
            profiled = profile_gpu(run, PROFILED)
            _check(prepared)
            times = {
                "gpu_ms": profiled.busy,
                "gpu_sum_ms": profiled.total,
                "event_ms": sorted(sample.event)[len(sample.event) // 2],
                "parts_ms": profiled.parts,
                "launches": profiled.launches,
            }
        record = {
            **item.variant.key(source.facts.name, context, index),
            **common,
            "label": item.variant.spec.label,
            "family": item.variant.spec.line,
            "model": source.facts.name,
            "layers": source.facts.layers,
            "head_dim": source.facts.head_dim,
            "synthetic": source.synthetic,
            "batch": item.variant.batch,
            "sessions": item.variant.sessions,
            "lanes": item.variant.lanes,
            "last_lane": item.variant.last_heads,
            "rows_by": item.variant.rows_by,
            "index": index,
            "rerank": item.variant.spec.policy.rerank,
            "adaptive": item.steps[0].scan.adaptive,
            "repeats": repeats,
            "round": together,
            **times,
            "wall_ms": wall,
            "wall_ms_p10": low,
            "wall_ms_p90": high,
            "wall_ms_a_token": wall / (item.variant.batch * item.variant.sessions),
            **item.facts,
            **rates,
        }
        yield {**record, **_floor(record), **_validity(record)}


def _check(prepared: Sequence[_Prepared]) -> None:
    """Raise where rows of a step that is over were not gathered."""
    for item in prepared:
        for step in item.steps:
            step.check()


def _floor(record: dict[str, Any]) -> dict[str, Any]:
    """The time that a step cannot go below, and how close the scan alone and a fixed plan are to the link.

    The floor is all bytes of the link at its copy rate, then the weights (and an index in HBM) at the GPU memory's own rate. A plan that
    does not depend on the query could be copied ahead of it; ``ahead_ms`` is what such a step could not go below, all else hidden.
    """
    names = ("floor_ms", "floor_ratio", "scan_gb_s", "scan_of_link", "ahead_ms")
    if not record.get("link_gb_s"):
        return dict.fromkeys(names)
    sessions, on_host = record["sessions"], record["index"] == "host"
    link_ms = sessions * record["link_bytes"] / record["link_gb_s"] / 1e6
    memory_bytes = record["weight_bytes"] + (0 if on_host else record["scan_bytes"])
    floor = link_ms + sessions * memory_bytes / record["hbm_gb_s"] / 1e6
    scan, rate = record["parts_ms"].get("scan", 0.0), None
    # Kernels that ran side by side shared the link, and their own times tell nothing.
    if scan and record["gpu_sum_ms"] < 1.01 * record["gpu_ms"]:
        rate = sessions * record["scan_bytes"] / scan / 1e6
    return {
        "floor_ms": floor,
        "floor_ratio": record["gpu_ms"] / floor,
        "scan_gb_s": rate,
        "scan_of_link": rate / record["link_gb_s"] if rate and on_host else None,
        "ahead_ms": link_ms if on_host and not record["adaptive"] else None,
    }


def _validity(record: dict[str, Any]) -> dict[str, Any]:
    """Whether synthetic data stand in for the paper's: only judged where its figures apply."""
    if record["model"] != "qwen3-8b-shape":
        return {"void": False, "void_reason": None}
    reasons = []
    bits, channels, a_session = record["fathom48_bits"], record["fathom48_channels"], record["rows_bytes"] / record["batch"]
    if not BITS[0] <= bits <= BITS[1] or not CHANNELS[0] <= channels <= CHANNELS[1]:
        reasons.append(f"Fathom 48 reads {bits:.1f} bits over {channels:.1f} channels, not 56 ± 1 over 30 to 34")
    if record["k"] == 512 and not ROW_BYTES[0] <= a_session <= ROW_BYTES[1]:
        reasons.append(f"rows of {a_session / 1e6:.0f} MB a step, not 167 to 216")
    return {"void": bool(reasons), "void_reason": "; ".join(reasons) or None}


def fit_source(source: SyntheticSource, k: int, spec: MethodSpec, say: Callable[[str], None]) -> dict[str, float]:
    """Fit synthetic queries at the open context and say how they read."""
    found = source.fit(k, spec.policy)
    say(
        f"synthetic queries: share {found['share']:.3f}, tilt {found['tilt']:.3f}; Fathom 48 reads {found['fathom48_bits']:.1f} bits "
        f"over {found['fathom48_channels']:.1f} channels"
    )
    return found
