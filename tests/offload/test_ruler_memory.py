"""What the ruler command says of pinned host memory, and refuses before any prefill, where the runtime decodes beside a GPU."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fathom_eval.branches import Branch
from fathom_eval.cli import main
from fathom_eval.commands.spreading import copies_here
from fathom_eval.memory import MemoryEstimate
from fathom_eval.models import ModelFacts
from fathom_eval.offload import branches as runtime_branches
from tests.tiny import save_tiny


class PrefillBeganError(Exception):
    """A prefill began."""


@pytest.fixture
def estimates(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, MemoryEstimate]]:
    """Tokens, limit of the generation and estimate of every one that is made, for a GPU's facts; a prefill ends the command."""
    found: list[tuple[int, int, MemoryEstimate]] = []
    real = runtime_branches.estimate_split

    def estimate(facts: ModelFacts, branches: Sequence[Branch], tokens: int, most: int, batch: int, index: str | None) -> MemoryEstimate:
        made = real(dataclasses.replace(facts, device="cuda:0"), branches, tokens, most, batch, index)
        found.append((tokens, most, made))
        return made

    def started(*_: object, **__: object) -> None:
        raise PrefillBeganError

    monkeypatch.setattr(runtime_branches, "estimate_split", estimate)
    monkeypatch.setattr("fathom_eval.ruler.prefill", started)
    monkeypatch.setattr("fathom_eval.commands.ruler.release_weights", started)
    return found


@pytest.fixture
def command(tmp_path: Path) -> Callable[..., list[str]]:
    model = save_tiny(tmp_path / "model", layers=2, query_heads=4, kv_heads=2, head_dim=16, max_positions=4096)
    text = tmp_path / "prose.txt"
    lines = (f"The boat number {word} left the old harbour early. Nobody saw it." for word in range(400))
    text.write_text("\n".join(lines), encoding="utf-8")
    fixed = ["--offline", "--k=64", "--limit=1", "--methods=sparq,landmark", f"--model={model}", f"--haystack={text}"]
    return lambda *more: ["ruler", *fixed, "--context=600,1800", "--tasks=niah_single,vt", f"--output={tmp_path / 'run'}", *more]


def test_the_longest_prompt_is_refused_before_any_prefill(
    command: Callable[..., list[str]],
    estimates: list[tuple[int, int, MemoryEstimate]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(PrefillBeganError):
        main(command("--runtime=host"))
    [(tokens, most, estimate)] = estimates
    assert (tokens, most) == (1800, 40), "of the longest context the longest generation"
    rows = 2 * 2 * 2 * (1800 + most) * 16 * 4
    assert estimate.pinned >= rows
    figure = f"{estimate.pinned / 2**20:.0f} MiB"
    assert f"pinned host memory: about {figure} for a prompt of 1,800 tokens\n" in capsys.readouterr().out

    monkeypatch.setattr("fathom_eval.memory.host_bytes", lambda: estimate.pinned)
    with pytest.raises(PrefillBeganError):
        main(command("--runtime=host"))
    capsys.readouterr()
    monkeypatch.setattr("fathom_eval.memory.host_bytes", lambda: estimate.pinned - 1)
    assert main(command("--runtime=host")) == 2
    assert capsys.readouterr().err == (
        f"error: a prompt of 1,800 tokens needs about {figure} of pinned host memory, and {figure} are free: give a shorter --context, "
        "--runtime hbm, or leave --runtime out\n"
    )
    with pytest.raises(PrefillBeganError):
        main(command("--runtime=host", "--context=600"))
    with pytest.raises(PrefillBeganError):
        main(command(f"--output={tmp_path / 'plain'}"))


def test_every_worker_pins_its_own(
    command: Callable[..., list[str]],
    estimates: list[tuple[int, int, MemoryEstimate]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(PrefillBeganError):
        main(command("--runtime=hbm", "--workers=3"))
    [(*_, estimate)] = estimates
    monkeypatch.setattr("fathom_eval.memory.host_bytes", lambda: 3 * estimate.pinned - 1)
    with pytest.raises(PrefillBeganError):
        main(command("--runtime=hbm", "--workers=2"))
    assert main(command("--runtime=hbm", "--workers=3")) == 2
    error = capsys.readouterr().err
    assert "error: a prompt of 1,800 tokens in each of 3 workers needs about" in error
    assert "are free: give a shorter --context, fewer --workers, or leave --runtime out\n" in error, "the index is in HBM already"


def test_nothing_is_pinned_without_a_gpu(
    command: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("fathom_eval.memory.host_bytes", lambda: 0)
    assert main(command("--runtime=host", "--context=300", "--tasks=niah_single", "--methods=sparq")) == 0
    assert "pinned host memory" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("workers", "ray", "device", "devices", "copies"),
    [
        (None, None, "cuda:0", 1, 1),
        (3, None, "cuda:0", 1, 3),
        (None, "local", "cuda:0", 1, 4),
        (None, "local", "cuda:0", 2, 2),
        (2, "local", "cuda:0", 1, 2),
        (None, "local", "cpu", 1, 1),
    ],
)
def test_copies_of_the_model_on_this_machine(
    workers: int | None, ray: str | None, device: str, devices: int, copies: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local Ray cluster has an actor a GPU, or for as many as a copy takes, where no number is asked for."""
    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    facts: Any = SimpleNamespace(device=device, devices=dict.fromkeys(range(devices)))
    assert copies_here(argparse.Namespace(workers=workers, ray=ray), facts) == copies
