"""A tiny model, a window of its tokens, and a cache of each test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

import fathom_eval.calibration_file as files
from fathom_eval.calibrate import text_source
from fathom_eval.models import LoadedModel
from tests.calibration.made import prose
from tests.tiny import tiny_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_READ", {})


@pytest.fixture(scope="module")
def tiny() -> LoadedModel:
    return tiny_model(layers=2, query_heads=4, kv_heads=2, head_dim=16)


@pytest.fixture(scope="module")
def window(tiny: LoadedModel) -> list[int]:
    return text_source(tiny.tokenizer, prose(100)).windows([300])[0]
