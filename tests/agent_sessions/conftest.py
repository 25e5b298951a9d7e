"""Trajectories, a tiny model, and the arguments of a run of two sessions with them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.agent_sessions.runs import METHODS
from tests.sessions.rows import TOKENS, some_rows, write_jsonl
from tests.tiny import save_tiny

Arguments = Callable[..., list[str]]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(
        tmp_path_factory.mktemp("sessions") / "model", layers=2, query_heads=4, kv_heads=2, head_dim=16, max_positions=2048, seed=1
    )


@pytest.fixture
def trajectories(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", some_rows())


@pytest.fixture
def arguments(model: Path, trajectories: Path, tmp_path: Path) -> Arguments:
    """Those of the command, with ``changes``; the run is in ``tmp_path / "run"``."""

    def build(*flags: str, **changes: Any) -> list[str]:
        options = {
            "model": model,
            "trajectories": trajectories,
            "k": 400,
            "methods": METHODS,
            "sessions": 2,
            "session_tokens": TOKENS,
            "max_new_tokens": 24,
            "output": tmp_path / "run",
            **changes,
        }
        given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
        return ["sessions", "--offline", *given, *flags]

    return build
