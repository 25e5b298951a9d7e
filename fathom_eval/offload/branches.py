"""The evaluator's branches, decoded by the host-resident runtime: the step that is timed, whose tokens and reads are then recorded.

Branches that the runtime has no step for, dense attention and the oracle among them, stay with lock-step decoding.
"""

from __future__ import annotations

import dataclasses
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fathom_eval.batches import Batches, unmeasured
from fathom_eval.captures import CaptureError
from fathom_eval.decode import BranchResult, DecodeProgress, impossible_reads
from fathom_eval.errors import METHOD_ERRORS, UserError, raised_at
from fathom_eval.gguf_models import one_line
from fathom_eval.kernels.attend import workspace_size
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.kernels.rerank import ordered_size
from fathom_eval.kernels.topk import scratch_size
from fathom_eval.memory import MemoryEstimate, basis_work, estimate_memory
from fathom_eval.memory_errors import is_out_of_memory
from fathom_eval.offload.arena import Arena, check_index, release_pinned, segments_for
from fathom_eval.offload.generate import check_positions, decode_greedily, open_step, segment_shape
from fathom_eval.offload.scans import check_size, check_spec, scan_of_prefix, store_of
from fathom_eval.offload.step import DecodeStep, candidates_of, timed_score_dtype
from fathom_eval.offload.step_reads import StepReads
from fathom_eval.offload.weights import check_joined, check_model, moved_to, weights_of
from fathom_eval.planes import PlaneSpec
from fathom_eval.sample_progress import SampleProgress
from fathom_eval.stop_strings import StopStrings

if TYPE_CHECKING:
    from fathom_eval.branches import Branch
    from fathom_eval.methods import MethodSpec
    from fathom_eval.models import LoadedModel, ModelFacts
    from fathom_eval.prefill import Prefix

_MOST_GROUP = 31
"""Query heads a KV head that a row's mask has bits for."""


class RuntimeDecoder:
    """Decodes branches one by one with the timed step: one lane, rows by the GPU.

    The model's matrices are joined once, in place. A branch's K/V and index are written to host memory when its turn comes, and given
    back after it.

    Args:
        index: Where the scan index lies, ``host`` or ``hbm``.
        score_dtype: By default as the step is timed, :func:`~fathom_eval.offload.step.timed_score_dtype`; fp32 equals the evaluator's.

    Raises:
        UserError: The runtime does not compute this model.
    """

    def __init__(self, loaded: LoadedModel, index: str, score_dtype: torch.dtype | None = None) -> None:
        check_runtime(loaded, index)
        self.index = index
        self.facts = loaded.facts
        self._loaded, self._score_dtype = loaded, score_dtype
        self._weights = weights_of(loaded, 0, 1, in_place=True)

    @torch.inference_mode()
    def decode(
        self,
        prefix: Prefix,
        branch: Branch,
        max_new_tokens: int,
        *,
        stop_strings: tuple[str, ...] = (),
        graph: bool = True,
        progress: Callable[[DecodeProgress], None] | None = None,
    ) -> BranchResult:
        """Greedily decode one branch. The result means what :func:`fathom_eval.decode.decode`'s does; a failure is a result too.

        Args:
            graph: Decode from a CUDA graph where there is a GPU.
            progress: Called after every step.

        Raises:
            UserError: Prompt and generation exceed the model's positions, or the model's weights were replaced.
            RuntimeError: The GPU computes no more.
        """
        check_positions(prefix, max_new_tokens, self.facts)
        check_joined(self._weights, self._loaded)
        try:
            return self._decode(prefix, branch, max_new_tokens, stop_strings, graph, progress)
        except METHOD_ERRORS as error:
            problem = _problem_of(error)
        # Only here is the failed step gone: the error held its frames, and they its tensors.
        _free_unused(self._weights.device)
        return unmeasured(branch, problem)

    def _decode(
        self,
        prefix: Prefix,
        branch: Branch,
        max_new_tokens: int,
        stop_strings: tuple[str, ...],
        graph: bool,
        progress: Callable[[DecodeProgress], None] | None,
    ) -> BranchResult:
        loaded, facts, spec = self._loaded, self.facts, branch.spec
        weights = moved_to(self._weights, loaded, prefix.tokens, max_new_tokens + 1)
        try:
            scan = scan_of_prefix(spec, facts, prefix.layers)
        except METHOD_ERRORS as error:
            if is_out_of_memory(error):
                raise
            raise UserError(f"the prefix: {type(error).__name__}: {one_line(error)}{raised_at(error)}") from error
        stops = StopStrings(loaded.tokenizer, stop_strings, prefix.token_ids, 1) if stop_strings else None
        opened = open_step(weights, facts, prefix, branch, scan, max_new_tokens, index=self.index, score_dtype=self._score_dtype)
        with opened as step:
            reads = StepReads(step, spec, facts)
            if graph:
                _capture(step)
            found = decode_greedily(reads, max_new_tokens, facts.eos_token_ids, stops, progress)
            counts = reads.counts()
        problem = found.problem or impossible_reads(branch, counts)
        return BranchResult(branch, found.token_ids, found.finish if problem is None else "error", problem, **counts)


def _capture(step: DecodeStep) -> None:
    """Record the step; one that cannot be is launched kernel by kernel."""
    try:
        step.capture()
    except CaptureError as error:
        if _lack_of_memory(error) is not None:
            raise
        warnings.warn(f"a branch's steps are launched kernel by kernel, which is slower: {one_line(error)}", RuntimeWarning, stacklevel=2)


def _free_unused(device: torch.device) -> None:
    """Give memory back that nothing holds. After a fault of the GPU all branches would fail: it comes up here, and ends the run."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        release_pinned()


def _problem_of(error: BaseException) -> str:
    """Why a branch failed, in one line. Nobody may keep what it finds in the error: that holds the failed step."""
    lack = _lack_of_memory(error)
    if lack is not None:
        return f"out of memory: {one_line(lack, 120)}"
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {one_line(error)}{raised_at(error)}"


def _lack_of_memory(error: BaseException | None) -> BaseException | None:
    """The lack of memory in an error, or in what came before it: a capture that fails ends with an error of its own."""
    while error is not None and not is_out_of_memory(error):
        error = None if isinstance(error, UserError) else error.__context__
    return error


def check_runtime(loaded: LoadedModel, index: str) -> None:
    """Raise :class:`UserError` where the runtime cannot decode with a model, or for a place where no index lies."""
    check_index(index)
    check_model(loaded)
    facts = loaded.facts
    if len(facts.devices) > 1:
        raise UserError(f"the host-resident runtime computes a model on one device, and {facts.name} is spread over {facts.place}")
    size = facts.head_dim * torch.finfo(getattr(torch, facts.dtype)).bits // 8
    if size % 16:
        raise UserError(f"the host-resident runtime fetches rows in pieces of 16 bytes, and a key of {facts.name} has {size}")
    if facts.group > _MOST_GROUP:
        raise UserError(f"the host-resident runtime takes up to {_MOST_GROUP} query heads a KV head; {facts.name} has {facts.group}")


def has_step(spec: MethodSpec, facts: ModelFacts, k: int | None = None) -> bool:
    """Whether the runtime decodes a method, at a k if one is given; lock-step decoding does otherwise."""
    try:
        check_spec(spec, facts)
        if k is not None:
            check_size(spec, k, facts)
    except UserError:
        return False
    return True


def decoded_by(runtime: str | None, branch: Branch, facts: ModelFacts) -> dict[str, Any]:
    """What a record says of who decoded it: nothing in a run without the runtime."""
    return {} if runtime is None else {"decoded_by": "runtime" if has_step(branch.spec, facts, branch.k) else "lock-step"}


def runtime_identity(runtime: str | None, facts: ModelFacts) -> dict[str, str]:
    """What a run's identity says of the runtime: where the index lies, and on a GPU what its scores are. Nothing in a run without it."""
    if runtime is None:
        return {}
    return {"runtime": runtime, **({"runtime_scores": _scores_on(facts)} if facts.device.startswith("cuda") else {})}


def _scores_on(facts: ModelFacts) -> str:
    return str(timed_score_dtype(torch.device(facts.device))).removeprefix("torch.")


def describe_split(specs: Iterable[MethodSpec], facts: ModelFacts, index: str, k_values: Sequence[int] = ()) -> str:
    """Which methods the runtime decodes and which lock-step decoding does, in one line.

    Args:
        k_values: Of the run: one that the runtime does not hold is decoded in lock-step.
    """
    ours, others = list[str](), list[str]()
    for spec in specs:
        if not has_step(spec, facts):
            others.append(spec.label)
            continue
        large = [str(k) for k in k_values if not has_step(spec, facts, k)]
        if large:
            others.append(f"{spec.label} at k={'/'.join(large)}")
        if not large or len(large) < len(k_values):
            ours.append(spec.label)
    where = "host memory" if index == "host" else "HBM"
    on_gpu = f"rows in host memory, index in {where}, {_scores_on(facts)} scores"
    place = on_gpu if facts.device.startswith("cuda") else "all in the memory of the CPU"
    return f"decoded by the timed step ({place}): {_listed(ours)}; decoded in lock-step: {_listed(others)}"


def _listed(labels: Sequence[str]) -> str:
    return "; ".join(labels) if any("," in label for label in labels) else ", ".join(labels) or "none"


def runtime_of(loaded: LoadedModel, index: str | None) -> RuntimeDecoder | None:
    """The runtime of a run, None where lock-step decoding is asked for alone. Raises UserError as :class:`RuntimeDecoder` does."""
    return None if index is None else RuntimeDecoder(loaded, index)


def decode_all(
    runtime: RuntimeDecoder | None,
    batches: Batches,
    lock_step: Callable[[Sequence[Branch]], list[BranchResult]],
    prefix: Prefix,
    branches: Sequence[Branch],
    max_new_tokens: int,
    *,
    stop_strings: tuple[str, ...] = (),
    progress: SampleProgress | None = None,
) -> list[tuple[BranchResult, float]]:
    """Decode branches: those that the runtime has a step for by it, the others in lock-step.

    Args:
        lock_step: Decodes one batch of branches.
        progress: Of the sample, told of what the runtime decodes.

    Returns:
        Results in the order of ``branches``, each with its seconds, or its share of its batch's.
    """
    if runtime is None:
        return batches.decode(lock_step, branches)
    stepped, rest = list[int](), list[int]()
    for at, branch in enumerate(branches):
        (stepped if has_step(branch.spec, runtime.facts, branch.k) else rest).append(at)
    found = dict(zip(rest, batches.decode(lock_step, [branches[at] for at in rest]), strict=True))
    watched = SampleProgress("", len(branches)) if progress is None else progress
    for at in stepped:
        began = time.perf_counter()
        with watched.decoding(1, max_new_tokens) as told:
            result = runtime.decode(prefix, branches[at], max_new_tokens, stop_strings=stop_strings, progress=told)
        found[at] = result, time.perf_counter() - began
    return [found[at] for at in range(len(branches))]


def estimate_split(
    facts: ModelFacts, branches: Sequence[Branch], tokens: int, max_new_tokens: int, batch_size: int, index: str | None
) -> MemoryEstimate:
    """:func:`~fathom_eval.memory.estimate_memory` where the runtime decodes what it has a step for.

    It builds no stores in the prefix and holds one branch at a time: on a GPU the index, if it is to lie there, and the step's buffers,
    with K/V rows in pinned memory; on a CPU all of it in the same memory.
    """
    stepped = [branch for branch in branches if index is not None and has_step(branch.spec, facts, branch.k)]
    estimate = estimate_memory(facts, [branch for branch in branches if branch not in stepped], tokens, max_new_tokens, batch_size)
    work, pinned, device = estimate.work, 0, torch.device(facts.device)
    for branch in stepped:
        host, held = _bytes_of(branch, facts, tokens + 1 + max_new_tokens, device, index or "host")
        basis = basis_work(facts, tokens) if _turned(branch.spec, facts) else 0  # before the step is made
        work = max(work, basis, held + (host if device.type == "cpu" else 0))
        pinned = max(pinned, host if device.type != "cpu" else 0)
    return dataclasses.replace(estimate, work=work, pinned=pinned)


def _turned(spec: MethodSpec, facts: ModelFacts) -> bool:
    store = spec.method.store(facts)
    return isinstance(store, PlaneSpec) and store.basis == "klt"


def _bytes_of(branch: Branch, facts: ModelFacts, most: int, device: torch.device, index: str) -> tuple[int, int]:
    """Host and device bytes of one branch of at most ``most`` tokens: its segments, as :class:`Arena` counts them, and its buffers."""
    policy, dtype = branch.spec.policy, getattr(torch, facts.dtype)
    store, span = store_of(branch.spec)
    shape = segment_shape(facts, store, span, most, dtype)
    count = segments_for(most, shape.blocks)
    host, held = Arena(shape, device, index).estimate(facts.layers * count)
    heads, group, head_dim = facts.kv_heads, facts.group, facts.head_dim
    blocks, tail = count * shape.blocks, BLOCK + policy.local - 1
    candidates = candidates_of(branch.k or 0, policy, blocks * BLOCK + tail)
    slots, reranks = group * candidates + policy.sink + policy.local, policy.rerank > 1
    one_score = timed_score_dtype(device).itemsize
    # What a step allocates, in the order of its lane's buffers (offload/step.py).
    scores = facts.query_heads * (blocks * (BLOCK // span + 1) + tail) * one_score
    numbers = facts.query_heads * (scratch_size(candidates, tail) + candidates)
    numbers += heads * (2 * slots + tail) * (2 if reranks else 1)
    numbers += workspace_size(1, heads, group, head_dim, slots, tail) + (ordered_size(1, heads, group, slots, tail) if reranks else 0)
    rows = (2 * heads * slots + 2 * 2 * facts.layers * heads * tail) * head_dim * dtype.itemsize  # the tail is copied when it is sealed
    # A segment is written at once: its keys in fp32 and turned, and what is packed of them.
    written = 3 * heads * head_dim * min(most, BLOCK * shape.blocks) * (4 + dtype.itemsize)
    bases = facts.layers * heads * head_dim * (head_dim + 1) * 4 if _turned(branch.spec, facts) else 0
    return host, held + scores + 4 * numbers + rows + written + bases
