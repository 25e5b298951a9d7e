"""Timed steps of a tiny shape: the command, its records, and a source of synthetic keys."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from fathom_eval.methods import parse_methods
from fathom_eval.offload.bench.sources import SyntheticSource
from fathom_eval.offload.weights import SHAPES
from fathom_eval.run import Run

TINY = [
    "bench",
    "step",
    "--model",
    "tiny-shape",
    "--device",
    "cpu",
    "--contexts",
    "4096",
    "--k",
    "96",
    "--repeats",
    "2",
    "--host-memory",
    "0.05",
]


def records(path: Path) -> list[dict[str, Any]]:
    with Run.load(path) as run:
        return run.records()


def tiny_source(methods: str, contexts: tuple[int, ...] = (4096,)) -> SyntheticSource:
    return SyntheticSource(
        SHAPES["tiny-shape"],
        parse_methods(methods),
        contexts,
        1,
        device=torch.device("cpu"),
        index="host",
        spread=1.0,
        host_limit=2**26,
        say=lambda line: None,
    )
