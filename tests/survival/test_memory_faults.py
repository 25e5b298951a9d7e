"""Memory that runs out: batches are halved, what does not fit alone is recorded, and the rest goes on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fathom_eval.agent_sessions as sessions_module
import fathom_eval.ruler as ruler_module
from fathom_eval.batches import Batches
from fathom_eval.branches import Branch
from fathom_eval.cli import main
from fathom_eval.decode import BranchResult
from fathom_eval.memory_errors import is_out_of_memory
from fathom_eval.methods import parse_method
from tests.survival.conftest import Arguments, Capture, errors_of
from tests.survival.kills import records

OUT_OF_MEMORY = {
    "gpu": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    "runtime": RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    "host": RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes."
    ),
    "python": MemoryError(),
}


def too_much(module: Any, monkeypatch: pytest.MonkeyPatch, refuses: Callable[[Sequence[Branch]], bool], error: BaseException) -> list[int]:
    """Let memory run out in batches that ``refuses`` names; the sizes of all batches that were tried."""
    decode, sizes = module.decode, list[int]()

    def limited(loaded: Any, prefix: Any, part: Sequence[Branch], *rest: Any, **named: Any) -> Any:
        sizes.append(len(part))
        if refuses(part):
            raise error
        return decode(loaded, prefix, part, *rest, **named)

    monkeypatch.setattr(module, "decode", limited)
    return sizes


@pytest.mark.parametrize("error", OUT_OF_MEMORY.values(), ids=OUT_OF_MEMORY.keys())
def test_a_batch_that_does_not_fit_is_halved(
    ruler: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture, error: BaseException
) -> None:
    assert main(ruler("whole")) == 0
    sizes = too_much(ruler_module, monkeypatch, lambda part: len(part) > 2, error)
    assert main([argument for argument in ruler("halves") if argument != "--quiet"]) == 0
    assert sizes[:4] == [5, 3, 2, 1]
    assert max(sizes[5:]) == 2, "what did not fit once is not tried again"
    assert records(tmp_path / "halves") == records(tmp_path / "whole")
    assert "a batch of 5 branches does not fit into memory: halved" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["ruler", "sessions"])
def test_a_method_that_does_not_fit_alone_is_recorded_and_the_rest_goes_on(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: Arguments = request.getfixturevalue(kind)
    module = ruler_module if kind == "ruler" else sessions_module
    assert main(arguments("whole")) == 0
    with monkeypatch.context() as patch:
        too_much(module, patch, lambda part: any(branch.spec.method.name == "sparq" for branch in part), OUT_OF_MEMORY["gpu"])
        assert main(arguments("without")) == 0
    whole, without = records(tmp_path / "whole"), records(tmp_path / "without")
    failed = [record for record in without if record["finish"] == "error"]
    assert {record["method"] for record in failed} == {"sparq"}
    assert all(record["error"] == "out of memory: CUDA out of memory. Tried to allocate 2.00 GiB." for record in failed)
    assert all(record["score"] is None for record in failed)
    assert [record for record in without if record["method"] != "sparq"] == [record for record in whole if record["method"] != "sparq"]
    assert len(without) == len(whole)


def test_a_size_stays_where_only_one_method_is_to_blame() -> None:
    branches = [Branch(parse_method("exact"), k) for k in range(40, 48)]
    lines: list[str] = []
    batches = Batches(8, lines.append)

    def run(part: Sequence[Branch]) -> list[BranchResult]:
        if any(branch.k == 45 for branch in part):
            raise torch.OutOfMemoryError("too much")
        return [BranchResult(branch, (1,), "length", None, 1, 2, 16.0, 16.0, 4.0, 40.0, 0.0) for branch in part]

    results = batches.decode(run, branches)
    assert [result.branch for result, _ in results] == branches
    assert [result.error for result, _ in results if result.error] == ["out of memory: too much"]
    assert batches.size == 8
    assert len(lines) == 3
    with pytest.raises(ZeroDivisionError):
        batches.decode(lambda part: [1 // 0 for _ in part], branches)
    assert not is_out_of_memory(RuntimeError("a shape is wrong"))


@pytest.mark.parametrize("kind", ["ruler", "sessions"])
def test_a_prefill_that_does_not_fit_ends_the_run_and_keeps_what_is_finished(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    arguments: Arguments = request.getfixturevalue(kind)
    module: Any = ruler_module if kind == "ruler" else sessions_module
    prefill, calls = module.prefill, itertools.count()

    def second_fails(*args: Any, **named: Any) -> Any:
        if next(calls) == 1:
            raise OUT_OF_MEMORY["gpu"]
        return prefill(*args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(module, "prefill", second_fails)
        assert main(arguments()) == 2
    [line] = errors_of(capsys)
    assert "does not fit into memory (CUDA out of memory" in line
    assert "finished work is kept" in line
    kept = records(tmp_path / "run")
    assert {record["sample"] for record in kept} == {0}
    assert main(arguments()) == 0
    assert records(tmp_path / "run")[: len(kept)] == kept
