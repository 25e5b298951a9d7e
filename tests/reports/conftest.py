"""Synthetic records: what the evaluator writes, with scores drawn from a stated quality."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.run import Run

# label, name, family, control, options, scan bits, chance that a gold string is found
METHODS: list[tuple[str, str, str, bool, dict[str, Any], float | None, float]] = [
    ("dense", "dense", "dense", True, {}, None, 0.96),
    ("exact top-k", "exact_topk", "exact top-k", True, {}, None, 0.94),
    ("fathom budget=20 basis=klt", "fathom", "Fathom", False, {"budget": 20, "basis": "klt"}, 23.1, 0.90),
    ("fathom budget=24 basis=klt", "fathom", "Fathom", False, {"budget": 24, "basis": "klt"}, 27.8, 0.93),
    ("fathom budget=32 basis=klt", "fathom", "Fathom", False, {"budget": 32, "basis": "klt"}, 36.9, 0.94),
    ("sparq r=8", "sparq", "SparQ", False, {"r": 8}, 34.0, 0.55),
    ("sparq r=16", "sparq", "SparQ", False, {"r": 16}, 68.0, 0.86),
    ("double_sparsity c=16", "double_sparsity", "Double Sparsity", False, {"c": 16}, 68.0, 0.72),
    ("loki r=16", "loki", "Loki", False, {"r": 16}, 68.0, 0.90),
    ("loki r=32", "loki", "Loki", False, {"r": 32}, 136.0, 0.94),
    ("thumbnail bits=2", "thumbnail", "Flat codes", False, {"bits": 2}, 144.0, 0.94),
    ("full_scan bits=4", "full_scan", "Flat codes", False, {"bits": 4}, 272.0, 0.94),
    ("landmark block=8", "landmark", "Block landmark", False, {"block": 8}, 128.0, 0.25),
]

MakeRecords = Callable[..., list[dict[str, Any]]]


def _quality(quality: float, task: str, k: int | None, dense_at_floor: Sequence[str]) -> float:
    if task in dense_at_floor:
        return 0.02
    loss = (1 - quality) * (1.6 if task == "niah_multikey" else 0.8)
    return max(0.0, 1 - loss * (1 if k is None else (128 / k) ** 0.5))


@pytest.fixture(scope="session")
def make_records() -> MakeRecords:
    """Records of the methods above: ``make_records(tasks=…, contexts=…, ks=…, samples=…, dense_at_floor=…)``."""

    def make(
        tasks: Sequence[str] = ("niah_single", "niah_multikey", "vt"),
        contexts: Sequence[int] = (2048,),
        ks: Sequence[int] = (128,),
        samples: int = 24,
        dense_at_floor: Sequence[str] = (),
        methods: Sequence[tuple[str, str, str, bool, dict[str, Any], float | None, float]] = METHODS,
    ) -> list[dict[str, Any]]:
        records = []
        for context in contexts:
            for task in tasks:
                gold = ["1234567"] if task in ("niah_single", "niah_multikey") else ["ABCDE", "FGHIJ", "KLMNO", "PQRST"]
                for sample in range(samples):
                    for label, name, family, control, options, bits, quality in methods:
                        for k in [None] if name == "dense" else list(ks):
                            # One draw a sample for all methods, as one sample is hard for all alike: differences are paired.
                            draw = random.Random(f"{context}/{task!r}/{sample}")
                            chance = _quality(quality, task, k, dense_at_floor)
                            hits = [draw.random() < chance for _ in gold]
                            records.append(
                                {
                                    "kind": "ruler",
                                    "task": task,
                                    "context": context,
                                    "sample": sample,
                                    "k": k,
                                    "method": name,
                                    "label": label,
                                    "options": options,
                                    "method_version": 1,
                                    "family": family,
                                    "control": control,
                                    "score": sum(hits) / len(hits),
                                    "hits": hits,
                                    "gold": gold,
                                    "generation": f" {gold[0]}. The grass",
                                    "new_tokens": 12,
                                    "finish": "length",
                                    "error": None,
                                    "prompt_tokens": context - 17,
                                    "depths": [0.31] * len(gold),
                                    "head_dim": 64,
                                    "bits": bits,
                                    "declared_bits": bits,
                                    "active_channels": None if bits is None else 16.1,
                                    "rows": None if name == "dense" else 1.57 * (k or 0),
                                    "fired": 0 if name == "dense" else 360,
                                    "steps": 12,
                                    "seconds": 0.8,
                                    "first_divergence": None if name == "dense" else 4,
                                }
                            )
        return records

    return make


@pytest.fixture
def write_run(tmp_path: Path) -> Callable[..., Path]:
    """Write records as a run of their own: ``write_run(records, name="first", haystack="wikitext", seed=0)``."""

    def write(
        records: Sequence[dict[str, Any]], name: str = "first", haystack: str = "wikitext", seed: int = 0, model: str = "smollm2"
    ) -> Path:
        path = tmp_path / name
        identity = {"model": "5f3c9a", "tokenizer": "aa01", "data_sha256": "0" * 64, "seed": seed, "protocol": {"sink": 4, "local": 32}}
        details = {
            "kind": "ruler",
            "versions": {"fathom-eval": "0.1.0", "torch": "2.13.0"},
            "device": "cpu (2 threads)",
            "settings": {
                "model": model,
                "haystack": haystack,
                "tasks": ["niah_single", "niah_multikey", "vt"],
                "dtype": "bfloat16",
                "seed": seed,
            },
        }
        with Run.open(path, identity=identity, details=details) as run:
            run.append(records)
        return path

    return write
