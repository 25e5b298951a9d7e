from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from fathom_eval.errors import UserError
from fathom_eval.tasks import haystack
from fathom_eval.tasks.haystack import Haystack, load_haystack

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(autouse=True)
def empty_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    cache = tmp_path / "datasets-cache"
    monkeypatch.setenv("HF_DATASETS_CACHE", str(cache))
    return cache


@pytest.fixture
def online(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.delenv("HF_DATASETS_OFFLINE")


def fill_cache(cache: Path, configuration: str, source: str, rows: list[str]) -> None:
    datasets = pytest.importorskip("datasets")

    folder = cache / "Salesforce___wikitext" / configuration / "0.0.0" / "f00d"
    datasets.Dataset.from_dict({"text": rows}).save_to_disk(folder)
    (table,) = folder.glob("*.arrow")
    table.rename(folder / "wikitext-test.arrow")
    facts = {"download_checksums": {f"hf://datasets/Salesforce/wikitext@{COMMIT}/{source}/test-00000-of-00001.parquet": {}}}
    (folder / "dataset_info.json").write_text(json.dumps(facts))


def no_network(*args: object, **options: object) -> bool:
    raise AssertionError("the network was asked")


def test_python_docs_reads_as_prose():
    docs = load_haystack("python-docs")
    assert docs.name == "python-docs"
    assert docs.origin == f"pydoc_data.topics of CPython {'.'.join(map(str, sys.version_info[:3]))}"
    assert docs.sha256 == hashlib.sha256(docs.text.encode()).hexdigest()
    assert len(docs.sentences) > 1500
    assert not any(noise in docs.text for noise in ("::=", ">>>", "****", "====", "|"))


def test_file_keeps_its_name_but_not_its_folder(tmp_path: Path):
    path = tmp_path / "book.txt"
    path.write_bytes("\ufeffFirst sentence.\r\nSecond one.\r\n\r\nThird.".encode())
    book = load_haystack(str(path))
    assert (book.name, book.origin) == ("file", "book.txt")
    assert book.sentences == ("First sentence.", " Second one.", "\nThird.")


def test_file_and_dataset_of_the_same_text_are_the_same_haystack(tmp_path: Path, empty_cache: Path):
    rows = ["", " = Title = \n", "", " A well @-@ known text . It goes on . \n", " Another paragraph . \n", ""]
    fill_cache(empty_cache, "wikitext-103-raw-v1", "wikitext-103-raw-v1", rows)
    path = tmp_path / "wiki.test.raw"
    path.write_text("".join(row or " \n" for row in rows))
    cached, from_file = load_haystack("wikitext"), load_haystack(str(path))
    assert cached.sentences == from_file.sentences == ("A well-known text.", " It goes on.", "\nAnother paragraph.")
    assert cached.sha256 == from_file.sha256
    assert cached.origin == f"Salesforce/wikitext wikitext-103-raw-v1, test split, revision {COMMIT}"


def test_cache_of_the_test_file_alone_is_found_and_other_configurations_are_not(empty_cache: Path):
    fill_cache(empty_cache, "wikitext-2-raw-v1", "wikitext-2-raw-v1", ["Another text . \n"])
    with pytest.raises(UserError, match="not in the datasets cache and the network is off; use python-docs"):
        load_haystack("wikitext", offline=True)
    fill_cache(empty_cache, "default-abc", "wikitext-103-raw-v1", ["The text . \n"])
    assert load_haystack("wikitext", offline=True).sentences == ("The text .",) or load_haystack("wikitext").text == "The text."


def test_read_only_cache_can_be_used(empty_cache: Path):
    fill_cache(empty_cache, "wikitext-103-raw-v1", "wikitext-103-raw-v1", ["The text . \n"])
    folders = [folder for folder in (empty_cache, *empty_cache.rglob("*")) if folder.is_dir()]
    before = sorted(empty_cache.rglob("*"))
    for folder in folders:
        folder.chmod(0o555)
    try:
        assert load_haystack("wikitext").text == "The text."
        assert sorted(empty_cache.rglob("*")) == before
    finally:
        for folder in folders:
            folder.chmod(0o755)


def test_broken_cache_entry_is_passed_over(empty_cache: Path):
    fill_cache(empty_cache, "wikitext-103-raw-v1", "wikitext-103-raw-v1", ["The text . \n"])
    (table,) = empty_cache.rglob("wikitext-test.arrow")
    table.write_bytes(b"not a table")
    with pytest.raises(UserError, match="not in the datasets cache"):
        load_haystack("wikitext")


def test_auto_says_what_it_took(empty_cache: Path):
    said: list[str] = []
    assert load_haystack("auto", say=said.append).name == "python-docs"
    fill_cache(empty_cache, "wikitext-103-raw-v1", "wikitext-103-raw-v1", ["The text . \n"])
    assert load_haystack("auto", say=said.append).name == "wikitext"
    assert len(said) == 2
    assert "pydoc_data.topics" in said[0]
    assert "offline" in said[0]
    assert "Salesforce/wikitext" in said[1]
    assert not any("\n" in line for line in said)


@pytest.mark.parametrize("variable", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", None])
def test_offline_never_asks_the_network(online: None, monkeypatch: pytest.MonkeyPatch, variable: str | None):
    monkeypatch.setattr(haystack, "_hub_answers", no_network)
    monkeypatch.setattr(haystack, "_downloaded_wikitext", no_network)
    if variable:
        monkeypatch.setenv(variable, "1")
    assert load_haystack("auto", offline=variable is None, say=lambda _: None).name == "python-docs"
    with pytest.raises(UserError, match="network is off"):
        load_haystack("wikitext", offline=variable is None)


def test_auto_does_not_wait_for_a_silent_hub(online: None, monkeypatch: pytest.MonkeyPatch):
    import huggingface_hub

    class Silent:
        def dataset_info(self, name: str, timeout: float) -> None:
            time.sleep(30)

    monkeypatch.setattr(huggingface_hub, "HfApi", Silent)
    monkeypatch.setattr(haystack, "HUB_PATIENCE", 0.2)
    said: list[str] = []
    started = time.monotonic()
    assert load_haystack("auto", say=said.append).name == "python-docs"
    assert time.monotonic() - started < 10
    assert "did not answer within 0.2 s" in said[0]


def test_download_takes_the_test_split_alone(online: None, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")
    import huggingface_hub

    asked: dict[str, object] = {}

    class Split(dict[str, list[str]]):
        info = SimpleNamespace(download_checksums={f"hf://datasets/Salesforce/wikitext@{COMMIT}/wikitext-103-raw-v1/test.parquet": {}})

    def load_dataset(name: str, **options: object) -> Split:
        asked.update(options, name=name, bars=not datasets.are_progress_bars_disabled())
        return Split(text=["The text . \n"])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: SimpleNamespace(dataset_info=lambda name, timeout: None))
    bars = datasets.are_progress_bars_disabled()
    for spec in ("wikitext", "auto"):
        text = load_haystack(spec, say=lambda _: None)
        assert (text.name, text.text) == ("wikitext", "The text.")
        assert COMMIT in text.origin
    assert asked["name"] == "Salesforce/wikitext"
    assert asked["data_files"] == {"test": "wikitext-103-raw-v1/test-*.parquet"}
    assert asked["bars"] is False
    assert datasets.are_progress_bars_disabled() == bars


def test_failed_download_is_one_line_and_auto_goes_on_without_it(online: None, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*args: object, **options: object) -> None:
        raise ConnectionError("cannot reach the hub\nmany more lines")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    monkeypatch.setattr(haystack, "_hub_answers", lambda patience: True)
    with pytest.raises(UserError, match=r"^haystack wikitext cannot be downloaded \(ConnectionError: cannot reach the hub\); use") as error:
        load_haystack("wikitext")
    assert "\n" not in str(error.value)
    said: list[str] = []
    assert load_haystack("auto", say=said.append).name == "python-docs"
    assert "ConnectionError" in said[0]


def test_without_the_datasets_package(online: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match="pip install datasets"):
        load_haystack("wikitext")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b" \n\r\n\t", "is empty"),
        (b" = Title = \n", "is empty"),
        (b"\xef\xbb\xbf", "is empty"),
        (b"\x7fELF\x02\x01\x01\x00 text", "is binary .a zero byte at offset 7"),
        ("text".encode("utf-16"), "is binary"),
        (b"caf\xe9 au lait", "is not UTF-8 .byte 0xe9 at offset 3"),
    ],
)
def test_files_that_are_no_text(tmp_path: Path, content: bytes, message: str):
    path = tmp_path / "input.txt"
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        load_haystack(str(path))
    assert "input.txt" in str(error.value)


def test_places_that_are_no_file(tmp_path: Path):
    with pytest.raises(UserError, match="is a directory"):
        load_haystack(str(tmp_path))
    with pytest.raises(UserError, match=r"nowhere\.txt' does not exist"):
        load_haystack("nowhere.txt")
    with pytest.raises(UserError, match="does not exist"):
        load_haystack(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="unknown haystack 'wikitxt'; did you mean 'wikitext'"):
        load_haystack("wikitxt")
    with pytest.raises(UserError, match="unknown haystack ''"):
        load_haystack("")


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_unreadable_file(tmp_path: Path):
    path = tmp_path / "secret.txt"
    path.write_text("text")
    path.chmod(0)
    with pytest.raises(UserError, match=r"cannot be read: Permission denied"):
        load_haystack(str(path))


def test_haystack_without_text_is_an_error():
    with pytest.raises(UserError, match="is empty"):
        Haystack.of("file", "book.txt", [" ", "\n"])
