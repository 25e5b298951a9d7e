"""Runs of made-up records."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fathom_eval.run import Run

IDENTITY = {"model": "5f3c", "tokenizer": "aa01", "data_sha256": "00ff", "seed": 0, "protocol": {"sink": 4, "local": 32}}
DETAILS = {"kind": "ruler", "versions": {"torch": "2.13"}, "device": "cpu", "settings": {"limit": 4}}


def record(sample: int = 0, method: str = "fathom", **other: Any) -> dict[str, Any]:
    return {
        "kind": "ruler",
        "task": "niah_single",
        "context": 2048,
        "sample": sample,
        "k": 128,
        "method": method,
        "options": {"budget": 24},
        "method_version": 1,
        "score": 1.0,
        **other,
    }


def unit(sample: int, methods: Sequence[str] = ("dense", "exact", "fathom")) -> list[dict[str, Any]]:
    return [record(sample, method) for method in methods]


def open_run(path: Path, **identity: Any) -> Run:
    return Run.open(path, identity={**IDENTITY, **identity}, details=DETAILS)
