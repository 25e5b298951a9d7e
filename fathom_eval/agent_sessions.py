"""Agent sessions: the next recorded step decoded by every method from one prefill, compared with the step of exact top-k."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from fathom_eval.batches import Batches, memory_for, unmeasured
from fathom_eval.branches import Branch
from fathom_eval.decode import BranchResult, decode
from fathom_eval.memory import MemoryEstimate, check_memory
from fathom_eval.methods import MethodSpec, parse_method
from fathom_eval.models import LoadedModel, ModelFacts
from fathom_eval.observations import needed_observations
from fathom_eval.offload.branches import RuntimeDecoder, decode_all, decoded_by, estimate_split, runtime_identity, runtime_of
from fathom_eval.prefill import prefill
from fathom_eval.ruler import PROTOCOL as DECODING_PROTOCOL
from fathom_eval.ruler import all_branches
from fathom_eval.run import Run, record_key
from fathom_eval.sample_progress import SampleProgress
from fathom_eval.scoring import step_agreement
from fathom_eval.sessions.safe_text import visible
from fathom_eval.tool_calls import tool_call_state
from fathom_eval.workers import Measured, ModelRequest

if TYPE_CHECKING:
    from fathom_eval.session_data import PreparedSession, SessionData

PROTOCOL = 1
"""Raise it when what is recorded of a step changes its meaning: it is part of every run's identity."""
TASK = "session"
ALONE = "alone"
"""Value of the option ``batch`` in the records of the noise floor."""


@dataclass(frozen=True)
class StepBranch:
    """A branch of a session. ``alone``: a control decoded once more, in a batch of its own, to show what rounding alone changes."""

    branch: Branch
    alone: bool = False

    @property
    def options(self) -> dict[str, Any]:
        """Options of its record."""
        return {**self.branch.spec.options, **({"batch": ALONE} if self.alone else {})}

    @property
    def is_reference(self) -> bool:
        """Whether others are compared with it: dense attention or exact top-k, in the common batch and under no other option."""
        return not self.options and self.branch.spec.method.name in ("dense", "exact")

    @property
    def label(self) -> str:
        """Its name in tables."""
        return f"{self.branch.spec.label}, {ALONE}" if self.alone else self.branch.spec.label


@dataclass(frozen=True)
class Unit:
    """One session and the branches of it that are still to be measured: prefilled once, its records written together."""

    index: int
    branches: tuple[StepBranch, ...]


@dataclass(frozen=True)
class Step:
    """A decoded step: its tokens, and its text up to the stop string. ``failed`` where the branch gave no usable logits."""

    token_ids: tuple[int, ...]
    text: str
    failed: bool


@dataclass(frozen=True)
class DecodeSettings:
    """How steps are decoded and what of them is kept.

    Attributes:
        max_new_tokens: Limit of a step.
        batch_size: The most branches of one batch; all of them share one prefill.
        keep_text: Keep the text of generated steps in the records. Their tokens always are.
        keep_recorded_text: Keep the recorded step in the record of dense attention.
        runtime: Decode what the host-resident runtime has a step for by it, with its index in ``host`` memory or ``hbm``.
    """

    max_new_tokens: int
    batch_size: int
    keep_text: bool = True
    keep_recorded_text: bool = True
    runtime: str | None = None


def with_controls(specs: Sequence[MethodSpec]) -> list[MethodSpec]:
    """The methods with dense attention and exact top-k before them: every agreement is one with these."""
    controls = [parse_method("dense"), parse_method("exact")]
    return [*controls, *(spec for spec in specs if spec not in controls)]


def step_branches(specs: Sequence[MethodSpec], k_values: Sequence[int], facts: ModelFacts) -> tuple[StepBranch, ...]:
    """Every method at every k, and the controls once more alone."""
    branches = all_branches(specs, k_values, facts)
    floor = [branch for branch in branches if branch.spec in (parse_method("dense"), parse_method("exact"))]
    return (*(StepBranch(branch) for branch in branches), *(StepBranch(branch, alone=True) for branch in floor))


def run_identity(facts: ModelFacts, data: SessionData, max_new_tokens: int, runtime: str | None = None) -> dict[str, Any]:
    """Everything that can change a number of this run, apart from what each record carries itself; see :class:`DecodeSettings`."""
    return {
        "protocol": [DECODING_PROTOCOL, PROTOCOL],
        "model": facts.model_fingerprint,
        "tokenizer": facts.tokenizer_fingerprint,
        "dtype": facts.dtype,
        "device": facts.device.split(":")[0],
        "max_new_tokens": max_new_tokens,
        **data.identity,
        **runtime_identity(runtime, facts),
    }


def missing_units(run: Run, data: SessionData, branches: Sequence[StepBranch], *, retry_failed: bool = False) -> list[Unit]:
    """What a run still lacks, session by session; if asked also what failed, and what was compared with a step that did."""
    done = {record_key(record) for record in run.iter_records() if _is_settled(record)} if retry_failed else run.keys()
    units = []
    for index in range(len(data.sessions)):
        missing = tuple(branch for branch in branches if record_key(_identity(data.high, index, branch)) not in done)
        if missing:
            units.append(Unit(index, missing))
    return units


def _is_settled(record: Mapping[str, Any]) -> bool:
    return record["finish"] != "error" and record["score"] is not None and record["agreement_dense"] is not None


def stored_references(records: Iterable[Mapping[str, Any]], loaded: LoadedModel, data: SessionData) -> dict[tuple[int, int | None], Step]:
    """Steps of dense attention (k None) and exact top-k that a run holds, by session and k: what added methods are compared with."""
    found = {}
    for record in records:
        if record["method"] in ("dense", "exact") and not record["options"]:
            failed = record["finish"] == "error"
            found[record["sample"], record["k"]] = _step(loaded, data, tuple(record["token_ids"]), record["finish"], failed)
    return found


def evaluate(
    loaded: LoadedModel,
    data: SessionData,
    units: Sequence[Unit],
    settings: DecodeSettings,
    *,
    references: Mapping[tuple[int, int | None], Step] | None = None,
    say: Callable[[str], None] = lambda line: None,
    progress: Callable[[str], None] | None = None,
) -> Iterator[tuple[PreparedSession, list[dict[str, Any]]]]:
    """Measure units one by one.

    Args:
        references: Steps of earlier starts of the run, from :func:`stored_references`.
        say: Takes the memory estimate before each prefill.
        progress: Told what is at work, after every chunk of a prefill and every step.

    Yields:
        Each session with its records, to be written together.

    Raises:
        UserError: A session needs more memory than is free, raised before its prefill; or the runtime does not compute the model.
    """
    batches, runtime = Batches(settings.batch_size, say), runtime_of(loaded, settings.runtime)
    known = dict(references or {})
    for unit in units:
        session = data.sessions[unit.index]
        yield session, _measure(loaded, data, SessionUnit(unit, session, known), settings, batches, runtime, say, progress)


@dataclass(frozen=True)
class SessionUnit:
    """A unit with its session, and the steps of earlier starts that its own are compared with."""

    unit: Unit
    session: PreparedSession
    references: Mapping[tuple[int, int | None], Step]


@dataclass(frozen=True)
class SessionWork:
    """What a worker needs for any unit (:class:`SessionUnit`); see :mod:`fathom_eval.workers`.

    Attributes:
        data: Without sessions: they come with the units.
    """

    model: ModelRequest
    data: SessionData
    settings: DecodeSettings

    def prepare(self, loaded: LoadedModel) -> Callable[[SessionUnit], Measured]:
        """See :class:`fathom_eval.workers.Work`."""
        notes: list[str] = []
        batches, runtime = Batches(self.settings.batch_size, notes.append), runtime_of(loaded, self.settings.runtime)

        def measure(unit: SessionUnit) -> Measured:
            notes.clear()
            return Measured(_measure(loaded, self.data, unit, self.settings, batches, runtime, notes.append), tuple(notes))

        return measure


def failed_records(
    loaded: LoadedModel, data: SessionData, unit: SessionUnit, settings: DecodeSettings, reason: str
) -> list[dict[str, Any]]:
    """The records of a unit that could not be measured."""
    decoded = []
    references = dict(unit.references)
    for branch in unit.unit.branches:
        step = Step((), "", failed=True)
        decoded.append((branch, unmeasured(branch.branch, reason), step, 0.0))
        if branch.is_reference:
            references[unit.unit.index, branch.branch.k] = step
    estimate = _estimate(loaded, unit, settings)
    return _records(loaded, data, unit, settings, decoded, references, {**_memory(estimate), "prefill_seconds": 0.0})


def _estimate(loaded: LoadedModel, unit: SessionUnit, settings: DecodeSettings) -> MemoryEstimate:
    steps = unit.unit.branches
    batch = [step.branch for step in steps if not step.alone] or [step.branch for step in steps]
    tokens, most = len(unit.session.prompt_ids), settings.max_new_tokens
    return estimate_split(loaded.facts, batch, tokens, most, settings.batch_size, settings.runtime)


def _measure(
    loaded: LoadedModel,
    data: SessionData,
    unit: SessionUnit,
    settings: DecodeSettings,
    batches: Batches,
    runtime: RuntimeDecoder | None,
    say: Callable[[str], None],
    progress: Callable[[str], None] | None = None,
) -> list[dict[str, Any]]:
    session, facts, index = unit.session, loaded.facts, unit.unit.index
    gpus = [device for device in facts.devices if device.startswith("cuda")]
    estimate = _estimate(loaded, unit, settings)
    name = f"session {index} ({visible(session.repo, 60)}, {len(session.prompt_ids):,} tokens)"
    say(f"{name}: about {estimate} beside the model")
    check_memory(estimate, facts.devices, name)
    for gpu in gpus:
        torch.cuda.reset_peak_memory_stats(gpu)
    before = sum(torch.cuda.memory_allocated(gpu) for gpu in gpus)
    watched = SampleProgress(f"session {index}", len(unit.unit.branches), progress)
    began = time.perf_counter()
    with memory_for(f"the prefill of {name} on {facts.place}"):
        observations = needed_observations((step.branch.spec.method for step in unit.unit.branches), facts)
        told = watched.prefilling(len(session.prompt_ids) - 1)
        prefix = prefill(loaded, session.prompt_ids, observations=observations, progress=told)
    prefill_seconds = time.perf_counter() - began

    most, stops = settings.max_new_tokens, data.renderer.stop_strings

    def run(part: Sequence[Branch]) -> list[BranchResult]:
        with watched.decoding(len(part), most) as told:
            return decode(loaded, prefix, part, most, stop_strings=stops, progress=told)

    together = [step for step in unit.unit.branches if not step.alone]
    alone = [step for step in unit.unit.branches if step.alone]
    branches = [step.branch for step in together]
    results = decode_all(runtime, batches, run, prefix, branches, most, stop_strings=stops, progress=watched)
    for repeated in alone:
        results += batches.decode(run, [repeated.branch])
    decoded: list[tuple[StepBranch, BranchResult, Step, float]] = []
    references = dict(unit.references)
    for branch, (result, seconds) in zip([*together, *alone], results, strict=True):
        step = _step(loaded, data, result.token_ids, result.finish, result.finish == "error")
        decoded.append((branch, result, step, seconds))
        if branch.is_reference:
            references[index, branch.branch.k] = step
    held = prefix.bytes + prefix.store_bytes
    peak = sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) - before if gpus else None
    facts_of_start = {**_memory(estimate, held, peak), "prefill_seconds": prefill_seconds}
    return _records(loaded, data, unit, settings, decoded, references, facts_of_start)


def _memory(estimate: MemoryEstimate, held: int = 0, peak: int | None = None) -> dict[str, Any]:
    estimated = {"estimated_bytes": estimate.total, "estimated_held_bytes": estimate.prefix + estimate.stores}
    return {"memory": {**estimated, "held_bytes": held, "peak_bytes": peak}}


def _records(
    loaded: LoadedModel,
    data: SessionData,
    unit: SessionUnit,
    settings: DecodeSettings,
    decoded: Sequence[tuple[StepBranch, BranchResult, Step, float]],
    references: Mapping[tuple[int, int | None], Step],
    shared: Mapping[str, Any],
) -> list[dict[str, Any]]:
    session = unit.session
    shared = {
        "session_id": session.id,
        "repo": session.repo,
        "sources": session.sources,
        "target_step": session.target_step,
        "prompt_tokens": len(session.prompt_ids),
        "recorded_tool_call": session.recorded_tool_call,
        **shared,
    }
    return [
        {**_record(loaded, data, unit, branch, result, step, settings, references), "seconds": seconds, **shared}
        for branch, result, step, seconds in decoded
    ]


def _identity(context: int, index: int, step: StepBranch) -> dict[str, Any]:
    method = step.branch.spec.method
    return {
        "kind": "sessions",
        "task": TASK,
        "context": context,
        "sample": index,
        "k": step.branch.k,
        "method": method.name,
        "options": step.options,
        "method_version": method.version,
    }


def _record(
    loaded: LoadedModel,
    data: SessionData,
    unit: SessionUnit,
    branch: StepBranch,
    result: BranchResult,
    step: Step,
    settings: DecodeSettings,
    references: Mapping[tuple[int, int | None], Step],
) -> dict[str, Any]:
    session, index, spec, k = unit.session, unit.unit.index, branch.branch.spec, branch.branch.k
    dense, exact = references.get((index, None)), references.get((index, k))
    # Dense attention has no k: what it agrees with at each k stands in the record of exact top-k there, and its own repetition is
    # compared with itself.
    is_dense = k is None
    reference = dense if is_dense else exact
    is_exact = spec.method.name == "exact" and not branch.options
    record = {
        **_identity(data.high, index, branch),
        "label": branch.label,
        "family": spec.method.family,
        "control": spec.method.control,
        "score": _agreement(reference, step),
        "agreement_exact": None if is_dense else _agreement(exact, step),
        "agreement_dense": _agreement(dense, step),
        "agreement_recorded": None if step.failed else step_agreement(session.target_text, step.text),
        "dense_agreement_exact": _agreement(exact, dense) if is_exact else None,
        "exact_match": None if reference is None or reference.failed or step.failed else reference.token_ids == step.token_ids,
        "first_divergent_token": _first_divergence(reference, step),
        "tool_call": None if step.failed else _tool_call(loaded, data, session, step, result.finish),
        "generation": step.text if settings.keep_text else None,
        "token_ids": list(result.token_ids),
        "new_tokens": len(result.token_ids),
        "finish": result.finish,
        "error": result.error,
        "head_dim": loaded.facts.head_dim,
        "bits": result.bits,
        "declared_bits": result.declared_bits,
        "active_channels": result.channels,
        "rows": result.rows,
        "candidate_rows": result.candidate_rows,
        "fired": result.fired,
        "steps": result.steps,
        **decoded_by(settings.runtime, branch.branch, loaded.facts),
    }
    if is_dense and not branch.alone and settings.keep_recorded_text:
        record["recorded_step"] = session.target_text
    return record


def _agreement(reference: Step | None, step: Step | None) -> float | None:
    if reference is None or step is None or reference.failed or step.failed:
        return None
    return step_agreement(reference.text, step.text)


def _first_divergence(reference: Step | None, step: Step) -> int | None:
    """Position of the first generated token that differs from the reference; None where all agree or one has failed."""
    if reference is None or reference.failed or step.failed or reference.token_ids == step.token_ids:
        return None
    pairs = enumerate(zip(reference.token_ids, step.token_ids, strict=False))
    return next((position for position, (a, b) in pairs if a != b), min(len(reference.token_ids), len(step.token_ids)))


def _step(loaded: LoadedModel, data: SessionData, token_ids: tuple[int, ...], finish: str, failed: bool) -> Step:
    text = str(loaded.tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))
    return Step(token_ids, before_stop(text, data.renderer.stop_strings, finish), failed)


def before_stop(text: str, stop_strings: Sequence[str], finish: str) -> str:
    """The text before the stop string that ended it. One that began in the prompt leaves nothing."""
    if finish != "stop":
        return text
    return text[: min((at for stop in stop_strings if (at := text.find(stop)) >= 0), default=0)]


def _tool_call(loaded: LoadedModel, data: SessionData, session: PreparedSession, step: Step, finish: str) -> str:
    # Some templates mark calls with special tokens, which the step's text is without.
    kept = [token for token in step.token_ids if token not in loaded.facts.eos_token_ids]
    text = str(loaded.tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))
    plain = not data.renderer.raw_special_tokens
    return tool_call_state(before_stop(text, data.renderer.stop_strings, finish), session.tools, plain=plain, cut=finish == "length")
