"""What is told of a sample while it is worked on: chunks, steps, branches, layers. Nobody has to listen."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import fathom_eval.console as console_module
from fathom_eval.batches import Batches
from fathom_eval.branches import Branch
from fathom_eval.cli import main
from fathom_eval.decode import BranchResult, DecodeProgress, decode
from fathom_eval.fidelity import Unit as WindowUnit
from fathom_eval.fidelity import evaluate as evaluate_windows
from fathom_eval.fidelity_windows import Windows
from fathom_eval.methods import parse_method, parse_methods
from fathom_eval.models import LoadedModel
from fathom_eval.offload.branches import RuntimeDecoder, decode_all
from fathom_eval.prefill import Prefix, prefill
from fathom_eval.ruler import Unit as SampleUnit
from fathom_eval.ruler import evaluate as evaluate_samples
from fathom_eval.sample_progress import SampleProgress
from fathom_eval.tasks.haystack import Haystack
from fathom_eval.tasks.samples import SampleBuilder
from tests.sessions.rows import chat_messages, rebench_row, write_jsonl
from tests.tiny import save_tiny, tiny_model


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_model("llama", head_dim=16)


@pytest.fixture(scope="module")
def prompt(loaded: LoadedModel) -> list[int]:
    return torch.randint(2, len(loaded.tokenizer), (150,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.fixture(scope="module")
def prefix(loaded: LoadedModel, prompt: list[int]) -> Prefix:
    return prefill(loaded, prompt)


def some(text: str, k: int = 40) -> list[Branch]:
    return [Branch(spec, None if spec == parse_method("dense") else k) for spec in parse_methods(text)]


def haystack(words: int) -> Haystack:
    return Haystack.of("file", "prose.txt", [f" The boat number {word} left the old harbour." for word in range(words)])


def test_a_step_tells_how_many_branches_go_on(loaded: LoadedModel, prefix: Prefix) -> None:
    branches = some("dense,exact,landmark,sparq:r=1")
    free = decode(loaded, prefix, branches, 12)
    end = free[0].token_ids[3]
    ending = LoadedModel(loaded.model, loaded.tokenizer, dataclasses.replace(loaded.facts, eos_token_ids=(end,)))
    seen: list[DecodeProgress] = []
    steps = [result.steps for result in decode(ending, prefix, branches, 12, progress=seen.append)]
    assert len(set(steps)) > 1, "some end before others"
    assert seen == [(step, sum(taken > step for taken in steps)) for step in range(1, max(steps) + 1)]


def test_a_prefill_tells_its_tokens(loaded: LoadedModel, prompt: list[int]) -> None:
    told: list[str] = []
    prefill(loaded, prompt * 10, chunk=600, progress=SampleProgress("boats 1", 1, told.append).prefilling(1499))
    assert told == [f"boats 1: prefill, {done} of 1,499 tokens" for done in ("0", "600", "1,200", "1,499")]


def test_batches_name_their_branches(loaded: LoadedModel, prefix: Prefix) -> None:
    """Also where one is halved for want of memory, and where a branch is given up."""
    told: list[str] = []
    watched = SampleProgress("boats", 5, told.append)

    def run(part: Sequence[Branch]) -> list[BranchResult]:
        with watched.decoding(len(part), 2) as progress:
            if any(branch.spec.method.name == "exact" for branch in part):
                raise torch.OutOfMemoryError("too much")
            return decode(loaded, prefix, part, 2, progress=progress)

    results = Batches(3).decode(run, some("dense,exact,fathom,landmark,sparq"))
    assert [result.finish for result, _ in results] == ["length", "error", "length", "length", "length"]

    def steps(which: str, running: Sequence[str]) -> list[str]:
        return [f"boats: decoding {which} of 5, {step} of 2 steps{rest}" for step, rest in enumerate(running)]

    pair = (", 2 running", ", 2 running", ", 0 running")
    assert told == [
        *steps("branches 1-3", (", 3 running",)),  # dense, exact, fathom
        *steps("branches 1-2", (", 2 running",)),
        *steps("branch 1", ("", "", "")),
        *steps("branch 2", ("",)),
        *steps("branch 3", ("", "", "")),
        *steps("branches 4-5", pair),
    ]


def test_the_runtime_tells_its_branches_too(loaded: LoadedModel, prefix: Prefix) -> None:
    told: list[str] = []
    branches, watched = some("dense,sparq"), SampleProgress("boats", 2, told.append)

    def lock_step(part: Sequence[Branch]) -> list[BranchResult]:
        with watched.decoding(len(part), 3) as progress:
            return decode(loaded, prefix, part, 3, progress=progress)

    runtime = RuntimeDecoder(loaded, "host")
    found = decode_all(runtime, Batches(8), lock_step, prefix, branches, 3, progress=watched)
    assert told == [f"boats: decoding branch {branch} of 2, {step} of 3 steps" for branch in (1, 2) for step in range(4)]
    silent = decode_all(runtime, Batches(8), lambda part: decode(loaded, prefix, part, 3), prefix, branches, 3)
    assert [result for result, _ in silent] == [result for result, _ in found]


def test_samples_tell_from_prefill_to_last_step(loaded: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    builder = SampleBuilder(loaded.tokenizer, haystack(400), seed=0, decoys=1, chat_template=False)
    units = [SampleUnit("niah_single", 300, index, tuple(some("dense,sparq,landmark"))) for index in range(2)]
    told: list[str] = []
    listened = list(evaluate_samples(loaded, builder, units, 2, progress=told.append))
    assert told[0].startswith("niah_single 300: prefill, 0 of ")
    assert told[1].startswith("niah_single 300: prefill, 2")
    assert told[2].startswith("niah_single 300: decoding branches 1-2 of 3, 0 of ")
    assert (
        [line.split(":")[1][:17] for line in told].count(" decoding branch ") == len([line for line in told if "branch 3 of 3" in line]) > 2
    )
    assert sum("prefill, 0 of" in line for line in told) == 2
    silent = list(evaluate_samples(loaded, builder, units, 2))
    without_seconds = [[{**record, "seconds": 0} for record in records] for records in (*listened, *silent)]
    assert without_seconds[:2] == without_seconds[2:]
    assert capsys.readouterr() == ("", "")


def test_windows_tell_their_layers_and_positions(loaded: LoadedModel, capsys: pytest.CaptureFixture[str]) -> None:
    windows, unit = Windows(loaded.tokenizer, haystack(100), seed=0), WindowUnit(300, 1, tuple(some("dense,sparq,fathom")))
    told: list[str] = []
    [_] = evaluate_windows(loaded, windows, [unit], positions=100, full_window=False, progress=told.append)
    assert [line.partition(": ")[0] for line in told] == ["window 1 of 300 tokens"] * len(told)
    stages = list(dict.fromkeys(line.partition(": ")[2] for line in told))
    # Blocks of 64 are sealed 32 tokens later: at 256 + 32 the positions 87 and on see another store.
    layers = [f"layer {layer} of 2, {done} of 100 positions" for layer in (1, 2) for done in (0, 23, 87)]
    assert stages == ["prefill, 0 of 300 tokens", "prefill, 300 of 300 tokens", *layers]
    [_] = evaluate_windows(loaded, windows, [unit], positions=100, full_window=False)
    assert capsys.readouterr() == ("", "")


def test_commands_show_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(console_module, "PLAIN_WORK_SECONDS", 0.0)
    model = save_tiny(tmp_path / "model", head_dim=16, max_positions=2048)
    prose = tmp_path / "prose.txt"
    prose.write_text(haystack(400).text, encoding="utf-8")
    trajectories = write_jsonl(tmp_path / "rows.jsonl", [rebench_row(chat_messages(6, words=3))])
    shared = ["--offline", f"--model={model}", "--k=40", "--methods=sparq"]
    sessions = [f"--trajectories={trajectories}", "--sessions=1", "--session-tokens=500:700", "--max-new-tokens=2"]
    ruler = [f"--haystack={prose}", "--context=300", "--tasks=niah_single", "--limit=1"]
    fidelity = [f"--haystack={prose}", "--context=300", "--windows=1", "--positions=4"]

    def shown(command: str, *options: str) -> str:
        assert main([command, *shared, f"--output={tmp_path / command}-{len(options)}", *options]) == 0
        return capsys.readouterr().err

    error = shown("sessions", *sessions)
    assert "sessions: 0/1 (0 %), session 0: prefill, 0 of " in error
    assert "sessions: 0/1 (0 %), session 0: decoding branches 1-3 of 5, 1 of 2 steps, 3 running\n" in error
    assert "sessions: 0/1 (0 %), session 0: decoding branch 5 of 5, 2 of 2 steps\n" in error, "the controls alone"
    assert "samples: 0/1 (0 %), niah_single 300: decoding branches 1-3 of 3, 1 of " in shown("ruler", *ruler)
    assert "windows: 0/1 (0 %), window 0 of 300 tokens: layer 2 of 2, 0 of 4 positions\n" in shown("fidelity", *fidelity)
    assert shown("sessions", *sessions, "--quiet") == ""
