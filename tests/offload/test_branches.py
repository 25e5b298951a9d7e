"""Branches that the timed step decodes: every field of the evaluator's result, counters included, and one branch's failure is its own."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from fathom_eval.batches import Batches
from fathom_eval.branches import Branch
from fathom_eval.captures import CaptureError
from fathom_eval.decode import BranchResult, decode
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method, parse_methods
from fathom_eval.models import LoadedModel
from fathom_eval.offload.arena import Arena
from fathom_eval.offload.branches import (
    RuntimeDecoder,
    _free_unused,
    decode_all,
    decoded_by,
    describe_split,
    has_step,
    runtime_identity,
)
from fathom_eval.offload.scans import scan_of_prefix, store_of
from fathom_eval.offload.step import DecodeStep
from fathom_eval.prefill import Prefix, prefill
from tests.offload.test_generate import METHODS
from tests.tiny import tiny_model, token_ids


def branch(text: str, k: int = 60) -> Branch:
    return Branch(parse_method(text), k)


def compare(loaded: LoadedModel, prefix: Prefix, one: Branch, new: int, index: str = "host", **options: Any) -> BranchResult:
    """The runtime's result, which is the evaluator's to the last bit."""
    [expected] = decode(loaded, prefix, [one], new, **options)
    found = RuntimeDecoder(loaded, index).decode(prefix, one, new, **options)
    assert found == expected
    return found


@pytest.mark.parametrize("text", METHODS)
def test_every_field_is_the_evaluators(loaded: LoadedModel, prefix: Prefix, text: str) -> None:
    """Long enough that blocks are sealed while decoding, so that each step weighs by what it scanned."""
    found = compare(loaded, prefix, branch(text), 70, "hbm")
    assert found.error is None
    assert found.bits == found.declared_bits
    assert found.fired == 2 * found.steps
    assert (found.candidate_rows > 0) == (found.branch.spec.policy.rerank > 1)


@pytest.mark.parametrize("text", ["fathom:rerank=2:attend=union", "landmark", "sparq:r=D/4:rerank=1.5"])
@pytest.mark.parametrize("k", [37, 90, 500])
def test_every_k(loaded: LoadedModel, prefix: Prefix, text: str, k: int) -> None:
    """500 is more than there are tokens."""
    compare(loaded, prefix, branch(text, k), 8)


@pytest.mark.parametrize("tokens", [4, 36, 95, 96])
@pytest.mark.parametrize("text", ["fathom", "landmark", "loki"])
def test_prompts_of_which_nothing_is_sealed_yet(loaded: LoadedModel, text: str, tokens: int) -> None:
    """Alone and up to the step that scans the first block."""
    found = compare(loaded, prefill(loaded, token_ids(loaded, tokens)), branch(text, 44), 3)
    assert (found.bits is None) == (tokens < 94)


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_every_architecture(family: str) -> None:
    loaded = tiny_model(family, head_dim=32, layers=3)
    compare(loaded, prefill(loaded, token_ids(loaded, 200)), branch("fathom", 50), 12)


def test_ends_by_a_token_and_by_text(loaded: LoadedModel, prefix: Prefix) -> None:
    one = branch("sparq:r=D/8")
    [free] = decode(loaded, prefix, [one], 30)
    text = loaded.tokenizer.decode(free.token_ids)
    # Out of what the model writes, within one token or across several; one that begins in the prompt; one that never comes.
    before = loaded.tokenizer.decode(prefix.token_ids)
    finishes = []
    for stops in ((text[5:8],), (text[9:14], "never this"), (before[-2:] + text[:1],), ("no such text",)):
        finishes.append(compare(loaded, prefix, one, 30, stop_strings=stops).finish)
    assert finishes == ["stop", "stop", "stop", "length"]
    ending = dataclasses.replace(loaded, facts=dataclasses.replace(loaded.facts, eos_token_ids=(free.token_ids[7],)))
    found = compare(ending, prefix, one, 30, stop_strings=("no such text",))
    assert found.finish == "eos"
    assert found.token_ids == free.token_ids[: found.steps]
    # A token that ends both by itself and by its text has ended by itself.
    last = loaded.tokenizer.decode(free.token_ids[: found.steps])[-1:]
    first = next(token for token in free.token_ids if last in loaded.tokenizer.decode([token]))
    both = dataclasses.replace(loaded, facts=dataclasses.replace(loaded.facts, eos_token_ids=(first,)))
    assert compare(both, prefix, one, 30, stop_strings=(last,)).finish == "eos"


def test_logits_that_are_not_finite_are_the_evaluators_error() -> None:
    loaded = tiny_model("llama", seed=3)
    prefix = prefill(loaded, token_ids(loaded, 200))
    loaded.model.lm_head.weight.data[5] = torch.nan
    found = compare(loaded, prefix, branch("sparq"), 5)
    assert found.error == "the logits of step 0 are not finite"
    assert (found.token_ids, found.steps, found.finish) == ((), 1, "error")


def test_a_key_that_cannot_be_stored_ends_the_branch() -> None:
    loaded = tiny_model("llama", seed=3)
    prefix = prefill(loaded, token_ids(loaded, 200))
    with torch.inference_mode():
        prefix.layers[1].keys[1, 3] = 1e9
    found = RuntimeDecoder(loaded, "host").decode(prefix, branch("sparq"), 5)
    assert found.error is not None
    assert "fp16" in found.error
    assert found.steps == 0


def test_keys_without_statistics_end_the_branch_as_in_lock_step() -> None:
    loaded = tiny_model("llama", seed=3)
    prefix = prefill(loaded, token_ids(loaded, 200))
    with torch.inference_mode():
        prefix.layers[0].keys[0, 3] = torch.nan
    [expected] = decode(loaded, prefix, [branch("fathom:basis=klt")], 2)
    found = RuntimeDecoder(loaded, "host").decode(prefix, branch("fathom:basis=klt"), 2)
    assert (found.error or "").startswith("the prefix: ")
    assert found.error == expected.error


@contextlib.contextmanager
def arenas(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Arena]]:
    """The arenas that are made meanwhile."""
    made: list[Arena] = []
    entered = Arena.__enter__
    with monkeypatch.context() as patch:
        patch.setattr(Arena, "__enter__", lambda arena: (made.append(arena), entered(arena))[1])
        yield made


def failing_at(step: int, error: BaseException, run: Callable[[DecodeStep], None] = DecodeStep.run) -> Callable[[DecodeStep], None]:
    def fails(decode_step: DecodeStep) -> None:
        if decode_step.scan.store == "landmarks" and decode_step.cache.lengths[0] == 330 - 1 + step:
            assert decode_step.cache.arena.segments
            raise error
        run(decode_step)

    return fails


class CompilationError(Exception):
    """What a compiler of kernels raises is no RuntimeError."""


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (UserError("rows were not gathered"), "rows were not gathered"),
        (torch.OutOfMemoryError("no more"), "out of memory: no more"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), "out of memory: "),
        (ValueError("65,537 blocks are more than the 65,536"), "ValueError: 65,537 blocks are more"),
        (CompilationError("at 3:4:\ntoo large"), "CompilationError: at 3:4: too large"),
    ],
)
def test_a_step_that_fails_ends_its_branch_alone(
    loaded: LoadedModel, prefix: Prefix, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    branches = [branch("sparq"), branch("landmark"), branch("thumbnail"), branch("quest:page=16")]
    expected = decode(loaded, prefix, branches, 6)
    runtime = RuntimeDecoder(loaded, "host")
    monkeypatch.setattr(DecodeStep, "run", failing_at(3, error))
    with arenas(monkeypatch) as made:
        found = [
            result for result, _ in decode_all(runtime, Batches(64), lambda part: decode(loaded, prefix, part, 6), prefix, branches, 6)
        ]
    assert [found[at] for at in (0, 2, 3)] == [expected[at] for at in (0, 2, 3)]
    assert found[1].finish == "error"
    assert (found[1].error or "").startswith(says)
    assert (found[1].token_ids, found[1].steps, found[1].bits) == ((), 0, None)
    assert len(made) == 3
    assert not any(arena.segments for arena in made)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit()])
def test_what_is_no_failure_of_a_branch_comes_through_and_leaves_nothing(
    loaded: LoadedModel, prefix: Prefix, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    monkeypatch.setattr(DecodeStep, "run", failing_at(2, error))
    with arenas(monkeypatch) as made, pytest.raises(type(error)):
        RuntimeDecoder(loaded, "host").decode(prefix, branch("landmark"), 6)
    assert [arena.segments for arena in made] == [[]]


def test_a_lack_of_host_memory_is_the_branchs_error(loaded: LoadedModel, prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fathom_eval.offload.arena.host_bytes", lambda: 1000)
    found = RuntimeDecoder(loaded, "host").decode(prefix, branch("sparq"), 6)
    assert "of host memory and 0 MiB are free" in (found.error or "")


def test_segments_go_while_somebody_holds_the_step(loaded: LoadedModel, prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[DecodeStep] = []
    original = DecodeStep.release
    monkeypatch.setattr(DecodeStep, "release", lambda step: (held.append(step), original(step))[1])
    RuntimeDecoder(loaded, "host").decode(prefix, branch("sparq"), 2)
    [step] = held
    assert not step.cache.layers


def test_nothing_is_held_after_a_branch(loaded: LoadedModel, prefix: Prefix) -> None:
    def tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    runtime = RuntimeDecoder(loaded, "host")
    runtime.decode(prefix, branch("fathom:basis=raw"), 3)
    before = tensors()
    for _ in range(2):
        runtime.decode(prefix, branch("fathom:basis=raw"), 3)
    assert tensors() == before


@contextlib.contextmanager
def no_collector() -> Iterator[None]:
    """Only what nothing refers to is gone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize("capturing", [False, True])
@pytest.mark.parametrize("error", [None, RuntimeError, torch.OutOfMemoryError, UserError])
def test_the_step_is_gone_before_its_memory_is_given_back(
    loaded: LoadedModel, prefix: Prefix, monkeypatch: pytest.MonkeyPatch, error: type[Exception] | None, capturing: bool
) -> None:
    made: list[weakref.ref[DecodeStep]] = []
    alive: list[list[DecodeStep | None]] = []

    def fail(step: DecodeStep) -> None:
        made.append(weakref.ref(step))
        if error is not None and capturing:
            try:
                raise error("a first one")
            except Exception as first:
                raise CaptureError("the step could not be recorded") from first
        if error is not None and step.cache.lengths[0] > 330:
            raise error("no more")
        if not capturing:
            run(step)

    run = DecodeStep.run
    monkeypatch.setattr(DecodeStep, "capture" if capturing else "run", fail)
    monkeypatch.setattr("fathom_eval.offload.branches._free_unused", lambda device: alive.append([one() for one in made]))
    runtime = RuntimeDecoder(loaded, "host")
    with no_collector(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = runtime.decode(prefix, branch("fathom:basis=raw"), 4)
        assert made
        assert [one() for one in made] == [None] * len(made)
    if error is None or (capturing and error is not torch.OutOfMemoryError):
        assert (found.error, alive) == (None, [])
    else:
        assert found.error is not None
        assert alive == [[None] * len(made)]


def test_a_step_that_cannot_be_recorded_is_launched(loaded: LoadedModel, prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    one = branch("sparq:rerank=2")
    [expected] = decode(loaded, prefix, [one], 6)

    def fail(step: DecodeStep) -> None:
        try:
            raise cause
        except Exception as error:
            raise CaptureError(f"the step could not be recorded: {error}") from error

    monkeypatch.setattr(DecodeStep, "capture", fail)
    cause: Exception = RuntimeError("operation not permitted")
    with pytest.warns(RuntimeWarning, match="kernel by kernel, which is slower: the step could not be recorded: operation not permitted"):
        assert RuntimeDecoder(loaded, "host").decode(prefix, one, 6) == expected
    cause = torch.OutOfMemoryError("CUDA out of memory. Tried")
    found = RuntimeDecoder(loaded, "host").decode(prefix, one, 6)
    assert found.error == "out of memory: the step could not be recorded: CUDA out of memory. Tried"


def test_a_fault_of_the_gpu_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def synchronize(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _free_unused(torch.device("cuda", 0))
    _free_unused(torch.device("cpu"))


def test_more_candidates_than_there_are_tokens_take_no_more_room(loaded: LoadedModel, prefix: Prefix) -> None:
    made: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        capture = DecodeStep.capture
        patch.setattr(DecodeStep, "capture", lambda step: (made.append((step._candidates, step._count)), capture(step))[1])
        for text, k in (("sparq:rerank=100", 500), ("landmark:rerank=4", 100_000), ("sparq:attend=union", 5000)):
            compare(loaded, prefix, branch(text, k), 3)
    assert all(candidates <= 512 + 95 and count <= 512 + 95 for candidates, count in made)


def test_results_stand_in_the_order_of_the_branches(loaded: LoadedModel, prefix: Prefix) -> None:
    branches = [Branch(parse_method("dense"), None), branch("landmark"), branch("exact"), branch("sparq", 44), branch("sparq", 60)]
    batches: list[list[str]] = []

    def lock_step(part: Any) -> list[BranchResult]:
        batches.append([one.spec.method.name for one in part])
        return decode(loaded, prefix, part, 4)

    found = decode_all(RuntimeDecoder(loaded, "host"), Batches(64), lock_step, prefix, branches, 4)
    assert [result for result, _ in found] == decode(loaded, prefix, branches, 4)
    assert batches == [["dense", "exact"]]
    assert all(seconds > 0 for _, seconds in found)
    batches.clear()
    decode_all(None, Batches(64), lock_step, prefix, branches, 4)
    assert len(batches[0]) == 5


def test_more_positions_than_the_model_has_are_refused() -> None:
    loaded = tiny_model("llama", max_positions=128)
    prefix = prefill(loaded, token_ids(loaded, 100))
    with pytest.raises(UserError, match="exceed the 128"):
        RuntimeDecoder(loaded, "host").decode(prefix, branch("fathom", 44), 40)


def test_what_no_program_of_a_gpu_holds_is_decoded_in_lock_step(loaded: LoadedModel) -> None:
    there = dataclasses.replace(loaded.facts, device="cuda:0", query_heads=16, kv_heads=2)  # groups of eight
    for text, most in (("sparq", 2**14), ("sparq:rerank=2", 2**13)):
        spec = parse_method(text)
        for more, holds in ((36, True), (37, False)):
            assert has_step(spec, there, most + more) == holds
            assert has_step(spec, loaded.facts, most + more), "a CPU has no such limit"
            by = decoded_by("hbm", Branch(spec, most + more), there)
            assert by == {"decoded_by": "runtime" if holds else "lock-step"}
    assert decoded_by(None, branch("sparq"), there) == {}
    line = describe_split(parse_methods("sparq,landmark,quest"), there, "host", [128, 2**15])
    both = "sparq r=D/8 at k=32768, landmark size=8 at k=32768, quest page=16"
    assert line.endswith(f": sparq r=D/8, landmark size=8; decoded in lock-step: {both}")
    assert ": none; decoded in lock-step: landmark size=8 at k=" in describe_split(parse_methods("landmark"), there, "host", [2**15])


def test_a_run_on_a_gpu_says_what_its_scores_are(loaded: LoadedModel) -> None:
    there = dataclasses.replace(loaded.facts, device="cuda:0")
    assert runtime_identity(None, there) == {}
    assert runtime_identity("hbm", there) == {"runtime": "hbm", "runtime_scores": "float16"}
    assert runtime_identity("hbm", loaded.facts) == {"runtime": "hbm"}


@pytest.mark.parametrize(("given", "expected"), [(None, torch.float32), (torch.float16, torch.float16)])
def test_scores_are_those_of_the_timed_step(
    loaded: LoadedModel, prefix: Prefix, given: torch.dtype | None, expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[torch.dtype] = []
    capture = DecodeStep.capture
    monkeypatch.setattr(DecodeStep, "capture", lambda step: (kinds.append(step.tail_scores.dtype), capture(step))[1])
    found = RuntimeDecoder(loaded, "host", given).decode(prefix, branch("sparq"), 2)
    assert (kinds, found.error) == ([expected], None)


def test_who_decodes_what_is_one_line(loaded: LoadedModel) -> None:
    line = describe_split(parse_methods("dense,sparq,quest,landmark"), loaded.facts, "hbm")
    assert line == (
        "decoded by the timed step (all in the memory of the CPU): sparq r=D/8, landmark size=8; decoded in lock-step: dense, quest page=16"
    )
    on_gpu = dataclasses.replace(loaded.facts, device="cuda:0")
    assert "(rows in host memory, index in HBM, float16 scores): none; decoded in lock-step: dense" in describe_split(
        parse_methods("dense"), on_gpu, "hbm"
    )


@pytest.mark.parametrize("text", METHODS)
def test_a_store_is_known_without_a_prefix(loaded: LoadedModel, prefix: Prefix, text: str) -> None:
    spec = parse_method(text)
    assert has_step(spec, loaded.facts)
    scan = scan_of_prefix(spec, loaded.facts, prefix.layers)
    assert store_of(spec) == (scan.store, scan.span)
