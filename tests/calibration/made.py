"""A short text, a calibration on one window of it, and the methods that read from one."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from fathom_eval.calibrate import TokenSource, describe, measure_statistics
from fathom_eval.calibration_file import Calibration, PlanSettings, calibration_path, save_calibration
from fathom_eval.models import LoadedModel
from fathom_eval.tasks.haystack import Haystack


def prose(words: int) -> Haystack:
    return Haystack.of("file", "prose.txt", [f" The boat number {word} left the old harbour." for word in range(words)])


PLAN = PlanSettings("klt", 300, 64, 8, (48, 64), "0" * 64)

METHODS = ("fathom:statistics={}", "fathom:basis=raw:statistics={}", "loki:statistics={}", "double_sparsity:statistics={}")


def calibrate(tiny: LoadedModel, window: list[int], name: str = "prose", **changes: Any) -> Calibration:
    source = TokenSource("prose.txt", "0" * 64, window, ())
    provenance = dataclasses.replace(describe(tiny, source, tokens=len(window), context=len(window)), **changes)
    tensors = measure_statistics(tiny, [window], chunk=128)
    if provenance.plan is not None:
        for mean in provenance.plan.means:
            tensors[f"plan_{mean}"] = torch.tensor([mean - 24, mean + 24])
    return save_calibration(calibration_path(name), tensors, provenance)
