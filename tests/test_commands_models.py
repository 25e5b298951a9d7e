"""The commands ``models`` and ``doctor``."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.bundled import BUNDLED
from fathom_eval.cli import main
from fathom_eval.commands import doctor
from fathom_eval.gguf_models import RECORD


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def cached() -> Path:
    """A folder that counts as the converted default model."""
    model = BUNDLED["smollm2"]
    model.path.mkdir(parents=True)
    (model.path / "config.json").write_text("{}")
    (model.path / RECORD).write_text(json.dumps({"sha256": model.sha256, "files": {"config.json": 2}}))
    return model.path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(arguments)
    output = capsys.readouterr()
    return code, output.out, output.err


def test_models_lists_the_bundled_one_and_what_else_is_accepted(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    code, out, _ = run(capsys, "models")
    assert code == 0
    for words in ("smollm2 (default)", "Apache-2.0", "93 MB", "fathom-eval models fetch smollm2", "FILE.gguf", "OWNER/NAME", str(cache)):
        assert words in out


def test_models_says_where_the_cached_one_is(capsys: pytest.CaptureFixture[str], cached: Path) -> None:
    assert str(cached) in run(capsys, "models", "list")[1]
    document = json.loads(run(capsys, "models", "--json")[1])
    assert document["default"] == "smollm2"
    assert document["bundled"][0]["cached"] is True
    assert document["bundled"][0]["path"] == str(cached)
    assert [entry["form"] for entry in document["accepted"]] == ["NAME", "FOLDER", "FILE.gguf", "OWNER/NAME"]


def test_fetch_of_what_is_there_prints_its_place(capsys: pytest.CaptureFixture[str], cached: Path) -> None:
    assert run(capsys, "models", "fetch", "smollm2", "--offline")[:2] == (0, f"smollm2 is already there: {cached}\n")
    code, out, _ = run(capsys, "models", "fetch", "--offline", "--json")
    assert (code, json.loads(out)) == (0, {"model": "smollm2", "path": str(cached), "fetched": False})


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["fetch", "smollm2", "--offline"], "run 'fathom-eval models fetch smollm2' once with a network"),
        (["fetch", "smolm2"], "did you mean 'smollm2'?"),
        (["fetsh"], "did you mean 'fetch'?"),
        (["list", "smollm2"], "takes no model"),
    ],
)
def test_what_models_refuses(capsys: pytest.CaptureFixture[str], arguments: list[str], words: str) -> None:
    code, out, error = run(capsys, "models", *arguments)
    assert (code, out) == (2, "")
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert words in error


def test_doctor_is_content_where_everything_is_there(capsys: pytest.CaptureFixture[str], cached: Path) -> None:
    code, out, _ = run(capsys, "doctor", "--offline")
    assert (code, out.splitlines()[-1]) == (0, "ready: a run on the default model can start")
    code, out, _ = run(capsys, "doctor", "--offline", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["ready"] is True
    assert report["versions"]["torch"]
    assert report["default_model"]["cached"] is True
    assert report["hub"] == "not tried (--offline)"


def test_doctor_offline_without_the_model_fails(capsys: pytest.CaptureFixture[str], cache: Path) -> None:
    code, out, _ = run(capsys, "doctor", "--offline")
    assert code == 1
    assert out.splitlines()[-1] == "missing: the default model is not cached (fathom-eval models fetch smollm2)"
    assert not cache.exists()


def test_doctor_names_what_is_not_installed(capsys: pytest.CaptureFixture[str], cached: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: None if name in ("triton", "gguf") else version(name))
    code, out, _ = run(capsys, "doctor", "--offline")
    assert code == 0
    assert "triton        not installed: no GPU kernels" in out
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "pandas" else "5.7.0" if name == "transformers" else version(name))
    code, out, _ = run(capsys, "doctor", "--offline")
    assert code == 1
    assert out.splitlines()[-1] == "missing: pandas is not installed; transformers 5.7.0 is older than 5.8"
    shutil.rmtree(cached)
    monkeypatch.setattr(doctor, "_version", lambda name: None if name == "gguf" else version(name))
    assert "gguf is not installed" in doctor.examine(offline=True)["missing"]


def test_doctor_says_when_the_disk_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_hub_state", lambda offline: "not tried")
    assert doctor.examine(offline=False)["missing"] == []
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "fetching the default model takes 1.2 GB" in doctor.examine(offline=False)["missing"][0]


def test_an_address_that_never_answers_costs_two_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    import urllib.request

    release = threading.Event()

    def never(*_: Any, **__: Any) -> None:
        release.wait(30)
        raise OSError

    monkeypatch.setattr(urllib.request, "urlopen", never)
    start = time.perf_counter()
    assert not doctor._answers("http://nowhere.invalid")
    release.set()
    assert time.perf_counter() - start < 10
