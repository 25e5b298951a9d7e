"""Runs on a tiny model, from the command line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.survival.kills import prepare

Arguments = Callable[..., list[str]]
Capture = pytest.CaptureFixture[str]


def errors_of(capsys: Capture) -> list[str]:
    """The error lines; nothing that went wrong may show a traceback."""
    printed = capsys.readouterr().err
    assert "Traceback" not in printed
    return [line for line in printed.splitlines() if line.startswith("error:")]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def _ruler(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return prepare("ruler", 4, tmp_path_factory.mktemp("ruler"))


@pytest.fixture(scope="session")
def _sessions(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return prepare("sessions", 2, tmp_path_factory.mktemp("sessions"))


def _with(arguments: list[str], output: Path, changes: dict[str, Any]) -> list[str]:
    return [*arguments, f"--output={output}", *(f"--{name.replace('_', '-')}={value}" for name, value in changes.items())]


@pytest.fixture
def ruler(_ruler: list[str], tmp_path: Path) -> Arguments:
    """Arguments of a RULER run of four samples, with ``changes``; the run is in ``tmp_path / output``."""
    return lambda output="run", **changes: _with(_ruler, tmp_path / output, changes)


@pytest.fixture
def sessions(_sessions: list[str], tmp_path: Path) -> Arguments:
    """Arguments of a run of two sessions."""
    return lambda output="run", **changes: _with(_sessions, tmp_path / output, changes)


@pytest.fixture
def fidelity(_ruler: list[str], tmp_path: Path) -> Arguments:
    """Arguments of a fidelity run of two windows."""
    kept = [argument for argument in _ruler[1:] if not argument.startswith(("--tasks", "--limit"))]
    settings = {"windows": 2, "positions": 8}
    return lambda output="run", **changes: _with(["fidelity", *kept], tmp_path / output, {**settings, **changes})
