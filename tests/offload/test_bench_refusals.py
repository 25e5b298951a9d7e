"""What the measurements of the runtime refuse, before memory is taken wherever that can be known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fathom_eval.cli import main
from fathom_eval.errors import UserError
from fathom_eval.offload.bench import steps
from fathom_eval.offload.bench.sources import SyntheticSource
from fathom_eval.offload.gatherer import Box
from tests.offload.bench_runs import TINY, records, tiny_source


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lanes", "3"], "--lanes 3 --batch 1: 1 sessions of 2 KV heads cannot be shared among 3 lanes"),
        (["--batch", "2", "--lanes", "1"], ""),
        (["--batch", "2", "--lanes", "3"], "--lanes 3 --batch 2: 2 sessions of 2 KV heads cannot be shared among 3 lanes"),
        (["--last-lane", "2"], "--lanes 2 --batch 1 --last-lane 2: 1 sessions of 2 KV heads cannot be shared among 2 lanes"),
    ],
)
def test_lanes_that_cannot_be_are_refused_before_memory_is_taken(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[SyntheticSource] = []

    def build(source: SyntheticSource) -> None:
        built.append(source)
        raise UserError("built")

    monkeypatch.setattr(SyntheticSource, "build", build)
    command = [*TINY, "--methods", "fathom:basis=raw", *options, "--output", str(tmp_path / "run")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert (message or "built") in error
    assert bool(built) == (not message)
    assert (tmp_path / "run").exists() == (not message)


def test_rows_that_nobody_gathered_are_the_reason_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Box, "gather", lambda box: 1 / 0)
    assert main([*TINY, "--methods", "fathom:basis=raw", "--rows", "cpu", "--output", str(tmp_path / "run")]) == 2
    assert "the CPU could not gather rows: division by zero" in capsys.readouterr().err


def test_landmarks_of_two_sizes_need_runs_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--methods", "landmark:size=4,landmark:size=8", "--output", str(tmp_path / "run")]) == 2
    assert "landmarks of 4 and 8 tokens" in capsys.readouterr().err
    assert main([*TINY, "--methods", "landmark:size=4", "--output", str(tmp_path / "run")]) == 0
    assert records(tmp_path / "run")[0]["scan_bits"] == 16 * 32 / 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "copy"], "cannot time 'copy'"),
        (["bench", "equal-error"], "needs --errors"),
        (["bench", "step", "--methods", "dense"], "would read every key"),
        ([*TINY, "--methods", "fathom:basis=klt:depths=measured"], "the runtime has no depth tables"),
        ([*TINY, "--methods", "fathom:basis=klt:scales=fp8"], "the runtime has no step for this method"),
        ([*TINY, "--methods", "loki:bits=16"], "the runtime has no step for this method"),
        ([*TINY, "--methods", "loki:r=D/5"], "head_dim 32 is not a multiple of 5"),
        ([*TINY, "--contexts", "5000"], "context 5000 is not a multiple of 4096 tokens, the size of a segment: give 4096 or 8192"),
        ([*TINY, "--contexts", "100"], "context 100 is not a multiple of 128 tokens, the size of a segment: give 128"),
        ([*TINY, "--host-memory", "0.0001"], "of host memory and 0.0001 GiB are allowed: give a shorter one or a larger --host-memory"),
        ([*TINY, "--host-memory", "0"], "--host-memory 0 must be above 0"),
        ([*TINY, "--lanes", "3"], "cannot be shared among 3 lanes"),
        ([*TINY, "--rerank", "x"], "--rerank"),
        ([*TINY, "--rerank", "0.5"], "--rerank: '0.5' is not a list of numbers of at least 1"),
        ([*TINY, "--spread", "-0.5"], "--spread -0.5 must be at least 0"),
        ([*TINY, "--spread", "nan"], "--spread nan must be at least 0"),
        ([*TINY, "--k", "36"], "k=36"),
        ([*TINY, "--batch", "9"], "more than the 8"),
        ([*TINY, "--rows", "gpu,host"], "--rows: no 'host'"),
        ([*TINY, "--lanes", "2", "--rows", "cpu", "--gather-threads", "0"], "--gather-threads 0 must be at least 1"),
        ([*TINY, "--lanes", "2", "--last-lane", "2"], "2 lanes, the last one of 2"),
        ([*TINY, "--index", "disk"], "--index: no 'disk'; choose from hbm, host"),
        (["bench", "step", "--model", "tiny-shap", "--device", "cpu"], "unknown model 'tiny-shap'; did you mean 'tiny-shape'?"),
    ],
)
def test_what_cannot_be_timed_is_said_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[1] == "step" and "--model" not in arguments:
        arguments = [*arguments, "--model", "tiny-shape"]
    assert main([*arguments, "--output", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


def test_a_difference_from_the_reference_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = steps.DecodeStep._scan_lane

    def scan(self: Any, number: int, work: Any, tables: Any, query: Any) -> None:
        real(self, number, work, tables, query)
        work.scores[0, 0, 0, 5] += 1000

    monkeypatch.setattr(steps.DecodeStep, "_scan_lane", scan)
    assert main([*TINY, "--methods", "fathom", "--output", str(tmp_path / "run")]) == 2
    assert "differ from the torch reference" in capsys.readouterr().err


@pytest.mark.parametrize("method", ["fathom:basis=klt:statistics=text", "fathom:layer_plan=text", "loki:statistics=text"])
def test_synthetic_keys_have_no_calibration(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("fathom", "loki"):
        monkeypatch.setattr(f"fathom_eval.methods.{module}.resolve", lambda name, what, session=True: name)
    assert main([*TINY, "--methods", method, "--output", str(tmp_path / "run")]) == 2
    assert "synthetic keys have statistics of their own; leave the calibration out" in capsys.readouterr().err


@pytest.mark.parametrize("contexts", [(1,), (36,), (63, 4096)])
def test_contexts_shorter_than_a_block_are_refused(contexts: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="is not a multiple of 128 tokens"):
        tiny_source("sparq:r=4", contexts)
