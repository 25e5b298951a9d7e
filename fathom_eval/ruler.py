"""RULER-style tasks: one dense prefill a sample, every method branched from it, one record a branch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fathom_eval.batches import Batches, memory_for, unmeasured
from fathom_eval.branches import Branch
from fathom_eval.decode import BranchResult, decode
from fathom_eval.methods import MethodSpec
from fathom_eval.models import LoadedModel, ModelFacts
from fathom_eval.observations import needed_observations
from fathom_eval.offload.branches import RuntimeDecoder, decode_all, decoded_by, runtime_identity, runtime_of
from fathom_eval.prefill import prefill
from fathom_eval.run import Run, record_key
from fathom_eval.sample_progress import SampleProgress
from fathom_eval.scoring import hits
from fathom_eval.tasks.haystack import Haystack
from fathom_eval.tasks.samples import Sample, SampleBuilder
from fathom_eval.workers import Measured, ModelRequest

PROTOCOL = 1
"""Raise it when the store, the selection or the decoding changes what is measured: it is part of every run's identity."""


@dataclass(frozen=True)
class Unit:
    """One sample and the branches of it that are still to be measured: prefilled once, its records written together."""

    task: str
    context: int
    index: int
    branches: tuple[Branch, ...]


def run_identity(facts: ModelFacts, builder: SampleBuilder, runtime: str | None = None) -> dict[str, Any]:
    """Everything that can change a number of this run, apart from what each record carries itself.

    Args:
        runtime: Where the index lies of the runtime that decodes what it can; None for lock-step decoding alone.
    """
    return {
        "protocol": PROTOCOL,
        "model": facts.model_fingerprint,
        "tokenizer": facts.tokenizer_fingerprint,
        "dtype": facts.dtype,
        "device": facts.device.split(":")[0],
        "end_tokens": list(facts.eos_token_ids),
        **builder.identity,
        **runtime_identity(runtime, facts),
    }


def all_branches(specs: Sequence[MethodSpec], k_values: Sequence[int], facts: ModelFacts) -> tuple[Branch, ...]:
    """Every method at every k at which it can run; a method without a selection once."""
    branches = []
    for spec in specs:
        selects = spec.method.store(facts) is not None
        branches += [Branch(spec, k) for k in k_values if k not in spec.impossible] if selects else [Branch(spec, None)]
    return tuple(branches)


def missing_units(
    run: Run, tasks: Sequence[str], contexts: Sequence[int], limit: int, branches: Sequence[Branch], *, retry_failed: bool = False
) -> list[Unit]:
    """What a run still lacks, and what failed if asked, in the order of work: all tasks advance together, shorter contexts first."""
    done = run.keys() - run.failed_keys() if retry_failed else run.keys()
    units = []
    for context in contexts:
        for index in range(limit):
            for task in tasks:
                missing = tuple(branch for branch in branches if record_key(_identity(task, context, index, branch)) not in done)
                if missing:
                    units.append(Unit(task, context, index, missing))
    return units


def evaluate(
    loaded: LoadedModel,
    builder: SampleBuilder,
    units: Sequence[Unit],
    batch_size: int,
    *,
    runtime: str | None = None,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[list[dict[str, Any]]]:
    """Measure units one by one.

    Args:
        batch_size: The most branches that are decoded in one batch; all of them still share one prefill.
        runtime: Decode what the host-resident runtime has a step for by it, with its index there; see :mod:`fathom_eval.offload.branches`.
        say: Takes a line for every batch that memory made smaller.
        progress: Told what is at work, after every chunk of a prefill and every step.

    Yields:
        The records of each sample, to be written together.

    Raises:
        UserError: The prefill of a sample does not fit into memory, or the runtime does not compute the model.
    """
    batches, stepper = Batches(batch_size, say), runtime_of(loaded, runtime)
    for unit in units:
        yield _measure(loaded, builder, unit, batches, stepper, progress)


def _measure(
    loaded: LoadedModel,
    builder: SampleBuilder,
    unit: Unit,
    batches: Batches,
    runtime: RuntimeDecoder | None,
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    sample = builder.build(unit.task, unit.context, unit.index)
    watched = SampleProgress(f"{unit.task} {unit.context}", len(unit.branches), progress)
    with memory_for(f"the prefill of {len(sample.prompt_ids):,} tokens on {loaded.facts.place}"):
        observations = needed_observations((branch.spec.method for branch in unit.branches), loaded.facts)
        prefix = prefill(loaded, sample.prompt_ids, observations=observations, progress=watched.prefilling(len(sample.prompt_ids) - 1))
    most = sample.max_new_tokens

    def run(part: Sequence[Branch]) -> list[BranchResult]:
        with watched.decoding(len(part), most) as told:
            return decode(loaded, prefix, part, most, progress=told)

    results = decode_all(runtime, batches, run, prefix, unit.branches, most, progress=watched)
    place = None if runtime is None else runtime.index
    return [_record(loaded, unit, sample, result, seconds, place) for result, seconds in results]


@dataclass(frozen=True)
class RulerWork:
    """What a worker needs for any unit; see :mod:`fathom_eval.workers`."""

    model: ModelRequest
    haystack: Haystack
    seed: int
    decoys: int
    chat_template: bool
    batch_size: int
    runtime: str | None = None

    def builder(self, loaded: LoadedModel) -> SampleBuilder:
        """The builder of the samples."""
        return SampleBuilder(loaded.tokenizer, self.haystack, seed=self.seed, decoys=self.decoys, chat_template=self.chat_template)

    def prepare(self, loaded: LoadedModel) -> Callable[[Unit], Measured]:
        """See :class:`fathom_eval.workers.Work`."""
        builder, notes = self.builder(loaded), list[str]()
        batches = Batches(self.batch_size, notes.append)
        runtime = runtime_of(loaded, self.runtime)

        def measure(unit: Unit) -> Measured:
            notes.clear()
            return Measured(_measure(loaded, builder, unit, batches, runtime), tuple(notes))

        return measure


def failed_records(loaded: LoadedModel, builder: SampleBuilder, runtime: str | None, unit: Unit, reason: str) -> list[dict[str, Any]]:
    """The records of a unit that could not be measured."""
    sample = builder.build(unit.task, unit.context, unit.index)
    return [_record(loaded, unit, sample, unmeasured(branch, reason), 0.0, runtime) for branch in unit.branches]


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


def _record(loaded: LoadedModel, unit: Unit, sample: Sample, result: BranchResult, seconds: float, runtime: str | None) -> dict[str, Any]:
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
        "prompt_tokens": len(sample.prompt_ids),
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
        **decoded_by(runtime, result.branch, loaded.facts),
    }


def versions() -> Mapping[str, str]:
    """Versions of what can change a number, for the manifest."""
    import platform
    from importlib.metadata import version

    from fathom_eval import __version__

    names = ("torch", "transformers", "tokenizers", "numpy")
    return {"fathom-eval": __version__, "python": platform.python_version(), **{name: version(name) for name in names}}
