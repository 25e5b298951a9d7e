"""GGUF files and the cache of converted models."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path
from random import Random

import pytest
import torch

from fathom_eval import gguf_models
from fathom_eval.errors import UserError
from fathom_eval.gguf_models import cache_root, cached_conversion, conversion_path, converted_gguf, sha256_of
from fathom_eval.models import LoadedModel, load_model
from tests.gguf_files import write_tiny_gguf


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    write_tiny_gguf(path, end_of_turn="e")
    return path


def load(path: Path) -> tuple[LoadedModel, list[str]]:
    lines: list[str] = []
    return load_model(str(path), say=lines.append), lines


def error_of(path: Path) -> str:
    with pytest.raises(UserError) as caught:
        load(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_file_is_converted_once_and_means_the_same(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "model.gguf"
    embedding = write_tiny_gguf(path, end_of_turn="e")
    first, lines = load(path)
    assert lines == ["converting model.gguf to safetensors, once"]
    again, lines = load(path)
    assert lines == []
    for loaded in (first, again):
        assert loaded.facts.name == "model.gguf"
        assert (loaded.facts.layers, loaded.facts.query_heads, loaded.facts.kv_heads, loaded.facts.head_dim) == (2, 4, 2, 16)
        assert torch.equal(loaded.model.model.embed_tokens.weight, embedding)
        # The end of a turn ends a generation as the end of the text does.
        assert loaded.facts.eos_token_ids == (1, loaded.tokenizer.convert_tokens_to_ids("e"))
        assert loaded.tokenizer("12 e").input_ids[:2] == loaded.tokenizer.convert_tokens_to_ids(["1", "2"])
    assert first.facts == again.facts
    assert [entry.name for entry in cache.iterdir()] == [conversion_path(sha256_of(path)).name]
    # A quantised file was made for half precision; the weights are kept exactly all the same.
    assert json.loads((conversion_path(sha256_of(path)) / "config.json").read_text())["dtype"] == "bfloat16"


def test_no_bar_of_a_conversion_goes_to_a_log(tiny_gguf: Path, cache: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with converted_gguf(tiny_gguf, say=lambda line: None):
        pass
    assert capfd.readouterr().err == ""


def test_the_file_decides_whether_a_text_starts_with_bos(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "bos.gguf", add_bos=True)
    loaded, _ = load(tmp_path / "bos.gguf")
    assert loaded.tokenizer("12").input_ids == [0, *loaded.tokenizer.convert_tokens_to_ids(["1", "2"])]


def test_a_damaged_file_is_refused_before_anything_is_kept(tmp_path: Path, tiny_gguf: Path, cache: Path) -> None:
    content = tiny_gguf.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    cases = {
        content[: len(content) - 4096]: "corrupt or truncated",
        content[:200]: "corrupt or truncated",
        content[:4]: "corrupt or truncated",
        b"": "no GGUF file",
        Random(0).randbytes(5000): "no GGUF file",
        b"GGUF" + Random(1).randbytes(5000): "corrupt or truncated",
        content[:4] + (99).to_bytes(4, "little") + content[8:]: "version",
        content.replace(b"llama", b"lxama"): "cannot be converted",
    }
    for broken, words in cases.items():
        damaged.write_bytes(broken)
        assert words in error_of(damaged)
    assert not cache.exists() or not list(cache.iterdir())


def test_weights_that_are_not_finite_are_refused(tmp_path: Path, cache: Path) -> None:
    write_tiny_gguf(tmp_path / "nan.gguf", value=float("nan"))
    assert "model.embed_tokens.weight is not finite" in error_of(tmp_path / "nan.gguf")
    assert not list(cache.iterdir())


def test_a_half_written_folder_is_never_used(tiny_gguf: Path) -> None:
    load(tiny_gguf)
    digest = sha256_of(tiny_gguf)
    folder = conversion_path(digest)
    weights = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(weights[:-1])
    assert cached_conversion(digest) is None
    loaded, lines = load(tiny_gguf)
    assert lines == ["converting tiny.gguf to safetensors, once"]
    assert loaded.facts.layers == 2
    assert (folder / "model.safetensors").read_bytes() == weights
    (folder / gguf_models.RECORD).unlink()
    assert cached_conversion(digest) is None


def test_a_killed_conversion_leaves_nothing_for_long(tiny_gguf: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, young = cache / ".partial-old", cache / ".partial-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
    os.utime(old, (time.time() - 2 * 86400,) * 2)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(gguf_models, "_record", interrupt)
    with pytest.raises(KeyboardInterrupt):
        load(tiny_gguf)
    assert [entry.name for entry in cache.iterdir()] == [".partial-young"]


def test_another_process_may_finish_first(tiny_gguf: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with converted_gguf(tiny_gguf, say=print) as folder:
        shutil.copytree(folder, tmp_path / "other")
    shutil.rmtree(folder)
    record = gguf_models._record

    def other_process_is_faster(staging: Path, source: str, sha256: str) -> None:
        record(staging, source, sha256)
        shutil.copytree(tmp_path / "other", folder)

    monkeypatch.setattr(gguf_models, "_record", other_process_is_faster)
    with converted_gguf(tiny_gguf, say=print) as used:
        assert used == folder
    assert [entry.name for entry in cache.iterdir()] == [folder.name]


def test_without_a_writable_cache_the_model_still_loads(tiny_gguf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "file"))
    loaded, lines = load(tiny_gguf)
    assert loaded.facts.layers == 2
    assert "cannot be written" in lines[0]


def test_no_disk_space_is_said_before_the_work(tiny_gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tiny_gguf)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    assert "not enough disk space" in error_of(tiny_gguf)


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_root().name == "cache"
    monkeypatch.delenv("FATHOM_EVAL_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_root() == Path("/somewhere/fathom-eval")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_root() == Path.home() / ".cache" / "fathom-eval"
