"""RULER-style tasks: one dense prefill a sample, every method branched from it, one record a branch."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fathom_eval.branches import Branch
from fathom_eval.decode import BranchResult, decode
from fathom_eval.methods import MethodSpec
from fathom_eval.models import LoadedModel, ModelFacts
from fathom_eval.prefill import Prefix, prefill
from fathom_eval.run import Run, record_key
from fathom_eval.scoring import hits
from fathom_eval.tasks.samples import Sample, SampleBuilder

PROTOCOL = 1
"""Raise it when the store, the selection or the decoding changes what is measured: it is part of every run's identity."""


@dataclass(frozen=True)
class Unit:
    """One sample and the branches of it that are still to be measured: prefilled once, its records written together."""

    task: str
    context: int
    index: int
    branches: tuple[Branch, ...]


def run_identity(facts: ModelFacts, builder: SampleBuilder) -> dict[str, Any]:
    """Everything that can change a number of this run, apart from what each record carries itself."""
    return {
        "protocol": PROTOCOL,
        "model": facts.model_fingerprint,
        "tokenizer": facts.tokenizer_fingerprint,
        "dtype": facts.dtype,
        "device": facts.device.split(":")[0],
        "end_tokens": list(facts.eos_token_ids),
        **builder.identity,
    }


def all_branches(specs: Sequence[MethodSpec], k_values: Sequence[int], facts: ModelFacts) -> tuple[Branch, ...]:
    """Every method at every k; a method without a selection once."""
    branches = []
    for spec in specs:
        selects = spec.method.store(facts) is not None
        branches += [Branch(spec, k) for k in k_values] if selects else [Branch(spec, None)]
    return tuple(branches)


def missing_units(run: Run, tasks: Sequence[str], contexts: Sequence[int], limit: int, branches: Sequence[Branch]) -> list[Unit]:
    """What a run still lacks, in the order of work: all tasks advance together, shorter contexts first."""
    done = run.keys()
    units = []
    for context in contexts:
        for index in range(limit):
            for task in tasks:
                missing = tuple(branch for branch in branches if record_key(_identity(task, context, index, branch)) not in done)
                if missing:
                    units.append(Unit(task, context, index, missing))
    return units


def evaluate(loaded: LoadedModel, builder: SampleBuilder, units: Sequence[Unit], batch_size: int) -> Iterator[list[dict[str, Any]]]:
    """Measure units one by one.

    Args:
        batch_size: The most branches that are decoded in one batch; all of them still share one prefill.

    Yields:
        The records of each sample, to be written together.
    """
    for unit in units:
        sample = builder.build(unit.task, unit.context, unit.index)
        prefix = prefill(loaded, sample.prompt_ids)
        records = []
        for start in range(0, len(unit.branches), batch_size):
            part = unit.branches[start : start + batch_size]
            began = time.perf_counter()
            results = decode(loaded, prefix, part, sample.max_new_tokens)
            seconds = (time.perf_counter() - began) / len(part)
            records += [_record(loaded, unit, sample, prefix, result, seconds) for result in results]
        yield records


def _identity(task: str, context: int, index: int, branch: Branch) -> dict[str, Any]:
    method = branch.spec.method
    return {
        "kind": "ruler",
        "task": task,
        "context": context,
        "sample": index,
        "k": branch.k,
        "method": method.name,
        "options": branch.spec.options,
        "method_version": method.version,
    }


def _record(loaded: LoadedModel, unit: Unit, sample: Sample, prefix: Prefix, result: BranchResult, seconds: float) -> dict[str, Any]:
    spec = result.branch.spec
    generation = loaded.tokenizer.decode(result.token_ids, skip_special_tokens=True)
    found = hits(generation, sample.gold)
    return {
        **_identity(unit.task, unit.context, unit.index, result.branch),
        "label": spec.label,
        "family": spec.line,
        "control": spec.method.control,
        "score": None if result.finish == "error" else sum(found) / len(found),
        "hits": found,
        "gold": list(sample.gold),
        "generation": generation,
        "token_ids": list(result.token_ids),
        "new_tokens": len(result.token_ids),
        "finish": result.finish,
        "error": result.error,
        "prompt_tokens": len(prefix.token_ids),
        "depths": list(sample.depths),
        "head_dim": loaded.facts.head_dim,
        "bits": result.bits,
        "declared_bits": result.declared_bits,
        "active_channels": result.channels,
        "rows": result.rows,
        "candidate_rows": result.candidate_rows,
        "fired": result.fired,
        "steps": result.steps,
        "seconds": seconds,
    }


def versions() -> Mapping[str, str]:
    """Versions of what can change a number, for the manifest."""
    import platform
    from importlib.metadata import version

    from fathom_eval import __version__

    names = ("torch", "transformers", "tokenizers", "numpy")
    return {"fathom-eval": __version__, "python": platform.python_version(), **{name: version(name) for name in names}}
