"""Synthetic records of fidelity, session and timing runs: what the commands write, with values that a test can foretell."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fathom_eval.run import Run

Records = list[dict[str, Any]]

# label, method, options, family, bits, error to dense beyond exact top-k's own
SCANS: list[tuple[str, str, dict[str, Any], str, float, float]] = [
    ("fathom budget=32 basis=raw", "fathom", {"budget": 32, "basis": "raw"}, "Fathom raw", 19.0, 0.012),
    ("fathom budget=48 basis=raw", "fathom", {"basis": "raw"}, "Fathom raw", 28.2, 0.005),
    ("fathom budget=64 basis=raw", "fathom", {"budget": 64, "basis": "raw"}, "Fathom raw", 37.5, 0.0024),
    ("fathom budget=48 basis=klt", "fathom", {"basis": "klt"}, "Fathom klt", 28.4, 0.004),
    ("fathom budget=64 basis=klt", "fathom", {"budget": 64, "basis": "klt"}, "Fathom klt", 37.6, 0.002),
    ("sparq r=D/8", "sparq", {}, "SparQ", 34.0, 0.008),
    ("sparq r=D/4", "sparq", {"r": "D/4"}, "SparQ", 68.0, 0.0021),
    ("double_sparsity c=D/4", "double_sparsity", {}, "Double Sparsity", 68.0, 0.004),
    ("loki r=D/4", "loki", {}, "Loki", 68.0, 0.011),
    ("thumbnail depth=2", "thumbnail", {}, "thumbnail", 144.0, 0.003),
    ("full 4-bit", "full", {}, "full 4-bit", 272.0, 0.00003),
    ("landmark size=8", "landmark", {}, "block landmark", 128.0, 0.2),
]
# label, method, options, control, bits, agreements of sessions 0 to 7
SESSION_METHODS: list[tuple[str, str, dict[str, Any], bool, float | None, list[float]]] = [
    ("dense", "dense", {}, True, None, [1.0] * 8),
    ("exact", "exact", {}, True, None, [1.0] * 8),
    ("dense, alone", "dense", {"batch": "alone"}, True, None, [1.0] * 7 + [0.6]),
    ("exact, alone", "exact", {"batch": "alone"}, True, None, [1.0] * 8),
    ("sparq r=D/8", "sparq", {}, False, 34.0, [0.5, 0.4, 0.6, 0.5, 0.3, 0.5, 0.4, 0.6]),
    ("fathom budget=48", "fathom", {"budget": 48}, False, 28.3, [0.8, 0.7, 0.9, 0.8, 0.6, 0.8, 0.7, 0.9]),
    ("landmark size=8", "landmark", {}, False, 128.0, [0.5, 0.1, 0.6, 0.2, 0.3, 0.1, 0.1, 0.7]),
]
_STEPS = ("fathom 40", 47.0), ("fathom 48", 56.0), ("fathom 64", 74.0), ("sparq 16", 68.0), ("channels 32", 136.0), ("landmark", 256.0)


def fidelity_records(contexts: Sequence[int] = (2048,), ks: Sequence[int] = (64, 128), windows: int = 8) -> Records:
    """Records of every scan, and of the controls."""
    records = []
    for context in contexts:
        for window in range(windows):
            ease = 1 + random.Random(f"{context}/{window}").uniform(-0.3, 0.3)
            for k in ks:
                own = 0.05 * ease * (64 / k) ** 0.5
                records.append(_fidelity(context, window, k, "exact", "exact", {}, "exact top-k", None, own, 0.0, control=True))
                for label, method, options, family, bits, excess in SCANS:
                    beyond = excess * ease * (64 / k) ** 0.5
                    records.append(_fidelity(context, window, k, label, method, options, family, bits, own + beyond, beyond * 1.4))
            records.append(_fidelity(context, window, None, "dense", "dense", {}, "dense", None, 0.0, None, control=True))
    return records


def _fidelity(
    context: int,
    window: int,
    k: int | None,
    label: str,
    method: str,
    options: dict[str, Any],
    family: str,
    bits: float | None,
    dense: float,
    exact: float | None,
    *,
    control: bool = False,
) -> dict[str, Any]:
    return {
        "kind": "fidelity",
        "task": "fidelity",
        "context": context,
        "sample": window,
        "k": k,
        "method": method,
        "options": options,
        "method_version": 1,
        "label": label,
        "family": family,
        "control": control,
        "finish": "complete",
        "error": None,
        "head_dim": 64,
        "error_dense": dense,
        "error_exact": exact,
        "excess": None if exact is None else exact / 1.4,
        "squared_error_dense": dense**2,
        "squared_error_exact": None if exact is None else exact**2,
        "squared_excess": None if exact is None else exact**2 / 2,
        "recall": None if exact is None else 1 - min(1.0, 8 * exact),
        "bits": bits,
        "declared_bits": bits,
        "active_channels": None if bits is None else bits / 2,
        "rows": 1.4 * (k or 0),
        "candidate_rows": 0.0,
    }


def timing_records(contexts: Sequence[int] = (32768, 131072, 1048576), indexes: Sequence[str] = ("host", "hbm")) -> Records:
    """Flat records of decode steps."""
    records = []
    for index in indexes:
        for context in contexts:
            for method, bits in _STEPS:
                scan = bits / 8 * context * 288 / 50e6 * (1 if index == "host" else 0.04)
                parts = {"scan": scan, "topk": 2.0 + context / 1e6, "rows": 4.1, "gemm": 5.9, "attention": 0.8, "other": 1.1}
                gpu = sum(parts.values())
                records.append(
                    {
                        "kind": "step",
                        "method": method,
                        "context": context,
                        "batch": 1,
                        "index": index,
                        "k": 512,
                        "rerank": 1,
                        "round": "first",
                        "gpu_ms": gpu,
                        "wall_ms": gpu * 1.02,
                        "wall_ms_p10": gpu * 1.01,
                        "wall_ms_p90": gpu * 1.05,
                        "link_bytes": scan * 50e6 + 200e6,
                        "weight_bytes": 16.4e9,
                        "floor_ms": scan + 4 + 5.5,
                        "parts_ms": parts,
                        "scan_bits": bits,
                        "active_channels": 31.2 if "fathom" in method else None,
                        "rows_bytes": 200e6,
                        "void": method == "landmark" and context == 32768,
                        "aliased_layers": 18 if context == 1048576 else 0,
                        "link_gb_s": 50.2,
                        "hbm_gb_s": 2728.0,
                        "device": "NVIDIA H200",
                    }
                )
    return records


def step_records(ks: Sequence[int] = (512,), sessions: int = 8, text: str = "I look at the file.", **changes: Any) -> Records:
    """Records of agent sessions."""
    records = []
    for session in range(sessions):
        for label, method, options, control, bits, agreements in SESSION_METHODS:
            for k in [None] if method == "dense" else list(ks):
                own = label in ("exact", "exact, alone")
                record = {
                    "kind": "sessions",
                    "task": "session",
                    "context": 7500,
                    "sample": session,
                    "k": k,
                    "method": method,
                    "options": options,
                    "method_version": 1,
                    "label": label,
                    "family": method,
                    "control": control,
                    "score": agreements[session],
                    "agreement_exact": None if k is None else agreements[session],
                    "agreement_dense": 0.25,
                    "agreement_recorded": 0.125,
                    "dense_agreement_exact": 0.9 if label == "exact" else None,
                    "exact_match": own,
                    "first_divergent_token": None if own else session,
                    "tool_call": "valid" if session % 2 else "none",
                    "recorded_tool_call": "valid",
                    "generation": f"{text} {label}",
                    "token_ids": [1, 2, 3] if own else [1, 2, 4],
                    "new_tokens": 3,
                    "finish": "stop",
                    "error": None,
                    "bits": bits,
                    "declared_bits": bits,
                    "rows": 700.0,
                    "fired": 6,
                    "steps": 3,
                    "session_id": f"id{session}",
                    "repo": "owner/project",
                    "sources": [{"trajectory": f"t{session}", "tokens": 7000, "whole": False}],
                    "prompt_tokens": 7001,
                    "memory": {"estimated_bytes": 1, "held_bytes": 1, "peak_bytes": None},
                }
                if label == "dense":
                    record["recorded_step"] = f"recorded {text}"
                records.append({**record, **changes})
    return records


def write_run(path: Path, records: Records, **details: Any) -> Path:
    """The records as a run directory; ``identity`` is taken from the details."""
    identity = details.pop("identity", {"model": "5f3c9a", "seed": 0})
    with Run.open(path, identity=identity, details={"model": "smollm2", "device": "a CPU", **details}) as run:
        run.append(records)
    return path
