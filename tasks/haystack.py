"""Sources of text that needles are hidden in."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import ModuleType

from fathom_eval.errors import UserError, did_you_mean
from fathom_eval.tasks.cleaning import documentation_sentences, is_wikitext, plain_sentences, wikitext_sentences

SOURCES = ("auto", "wikitext", "python-docs")
WIKITEXT, WIKITEXT_CONFIG = "Salesforce/wikitext", "wikitext-103-raw-v1"
HUB_PATIENCE = 2.0
"""Seconds that ``auto`` waits for the hub to answer."""


@dataclass(frozen=True)
class Haystack:
    """Cleaned text as sentences, and where it came from.

    ``"".join(sentences)`` is the text: a sentence carries the whitespace before it, and needles go between two sentences.
    ``sha256`` is the hash of that text in UTF-8.
    """

    name: str
    origin: str
    sentences: tuple[str, ...]
    sha256: str

    @classmethod
    def of(cls, name: str, origin: str, sentences: Sequence[str]) -> Haystack:
        """The haystack of these sentences. Raises ``UserError`` if they hold no text."""
        if not any(sentence.strip() for sentence in sentences):
            raise UserError(f"haystack {origin} is empty: it holds no text")
        return cls(name, origin, tuple(sentences), hashlib.sha256("".join(sentences).encode()).hexdigest())

    @property
    def title(self) -> str:
        """What a reader knows it by: the name, or that of the file."""
        return self.origin if self.name == "file" else self.name

    @cached_property
    def text(self) -> str:
        return "".join(self.sentences)


def _say_on_stderr(line: str) -> None:
    print(line, file=sys.stderr)


def load_haystack(
    spec: str = "auto", *, offline: bool = False, say: Callable[[str], None] = _say_on_stderr, split: str = "test"
) -> Haystack:
    """Load a haystack.

    Args:
        spec: ``wikitext`` (a split of WikiText-103, through ``datasets``), ``python-docs`` (the language reference
            that ships with CPython), a text file, or ``auto``: WikiText when it is in the datasets cache or the hub answers
            within ``HUB_PATIENCE`` seconds, otherwise python-docs.
        offline: Never use the network. ``HF_HUB_OFFLINE`` and ``HF_DATASETS_OFFLINE`` have the same effect.
        say: Told in one line what ``auto`` took.
        split: Of WikiText.

    Raises:
        UserError: The source is unknown, cannot be had, or is empty, binary or not UTF-8.
    """
    offline = offline or any(os.environ.get(name, "").upper() in {"1", "ON", "YES", "TRUE"} for name in _OFFLINE_SWITCHES)
    if spec == "python-docs":
        return _python_docs()
    if spec == "wikitext":
        return _wikitext(offline, split)
    if spec == "auto":
        return _automatic(offline, say, split)
    return _file(spec)


_OFFLINE_SWITCHES = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")


def _automatic(offline: bool, say: Callable[[str], None], split: str) -> Haystack:
    reason = "offline and it is not in the datasets cache"
    haystack = _cached_wikitext(split)
    if haystack is None and not offline:
        reason = f"the model hub did not answer within {HUB_PATIENCE:g} s"
        if _hub_answers(HUB_PATIENCE):
            try:
                haystack = _downloaded_wikitext(split)
            except UserError as error:
                reason = str(error)
    if haystack is None:
        haystack = _python_docs()
        say(f"haystack: {haystack.origin}, because WikiText cannot be had quickly ({reason})")
    else:
        say(f"haystack: {haystack.origin}")
    return haystack


def _python_docs() -> Haystack:
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise UserError("this Python comes without pydoc_data.topics; give a text file as the haystack") from error
    version = ".".join(map(str, sys.version_info[:3]))
    return Haystack.of("python-docs", f"pydoc_data.topics of CPython {version}", documentation_sentences(topics))


def _wikitext(offline: bool, split: str) -> Haystack:
    haystack = _cached_wikitext(split)
    if haystack is not None:
        return haystack
    if offline:
        raise UserError(
            f"haystack wikitext ({split} split) is not in the datasets cache and the network is off; use python-docs or a text file"
        )
    _datasets()  # where the package is missing, that is what to say
    if not _hub_answers(HUB_PATIENCE):
        raise UserError(f"haystack wikitext: the model hub did not answer within {HUB_PATIENCE:g} s; use python-docs or a text file")
    return _downloaded_wikitext(split)


def _downloaded_wikitext(split: str) -> Haystack:
    """One split alone: loading the named configuration would fetch its 300 MB train split as well."""
    datasets = _datasets()
    shown = datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        rows = datasets.load_dataset(
            WIKITEXT, data_files={split: f"{WIKITEXT_CONFIG}/{split}-*.parquet"}, split=split, verification_mode="no_checks"
        )
    except Exception as error:  # the client raises many types: connection, HTTP status, gated or missing repository, full disk
        lines = str(error).strip().splitlines() or [""]
        problem = f"{type(error).__name__}: {lines[0]}"
        raise UserError(f"haystack wikitext cannot be downloaded ({problem}); use python-docs or a text file") from error
    finally:
        if not shown:
            datasets.enable_progress_bars()
    sources = " ".join((rows.info.download_checksums or {}).keys())
    return _wikitext_haystack(rows["text"], split, _revision(sources))


def _cached_wikitext(split: str) -> Haystack | None:
    """A split from the datasets cache, opened in place: no network, no lock and no write."""
    home = Path(os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
    cache = Path(os.environ.get("HF_DATASETS_CACHE") or home / "datasets").expanduser() / WIKITEXT.replace("/", "___")
    for table in sorted(cache.glob(f"*/*/*/wikitext-{split}.arrow"), reverse=True):
        configuration, commit = table.parts[-4], table.parts[-2]
        try:
            facts = json.loads((table.parent / "dataset_info.json").read_text(encoding="utf-8"))
            sources = " ".join(facts.get("download_checksums") or {})
            if configuration == WIKITEXT_CONFIG or f"{WIKITEXT_CONFIG}/{split}" in sources:
                rows = _datasets().Dataset.from_file(str(table))
                return _wikitext_haystack(rows["text"], split, _revision(sources) or commit)
        except (OSError, ValueError, KeyError):
            continue  # a broken cache entry is no reason to fail: the next one, or the hub, may have the text
    return None


def _wikitext_haystack(rows: Sequence[str], split: str, revision: str) -> Haystack:
    text = "".join(row if row.endswith("\n") else f"{row}\n" for row in rows)
    origin = f"{WIKITEXT} {WIKITEXT_CONFIG}, {split} split, revision {revision or 'unknown'}"
    return Haystack.of("wikitext", origin, wikitext_sentences(text))


def _revision(sources: str) -> str:
    commit = re.search(r"@([0-9a-f]{40})/", sources)
    return commit[1] if commit else ""


def _datasets() -> ModuleType:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise UserError("haystack wikitext needs the package 'datasets': pip install datasets") from error


def _hub_answers(patience: float) -> bool:
    """Ask in a thread: name resolution ignores the request's own time limit."""
    from huggingface_hub import HfApi

    answered = threading.Event()

    def ask() -> None:
        try:
            HfApi().dataset_info(WIKITEXT, timeout=patience)
        except Exception:  # whatever keeps the hub from answering, the answer is no
            return
        answered.set()

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(patience)
    return answered.is_set()


def _file(spec: str) -> Haystack:
    path = Path(spec).expanduser()
    if not spec or not path.exists():
        if os.sep in spec or path.suffix:
            raise UserError(f"haystack file '{spec}' does not exist")
        raise UserError(f"unknown haystack '{spec}'; {did_you_mean(spec, SOURCES)}, or give a text file")
    if path.is_dir():
        raise UserError(f"haystack '{spec}' is a directory; give one text file")
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"haystack file '{spec}' cannot be read: {error.strerror}") from error
    if b"\0" in data:
        raise UserError(f"haystack file '{spec}' is binary (a zero byte at offset {data.index(0)}); give text in UTF-8")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        place = f"byte 0x{data[error.start]:02x} at offset {error.start}"
        raise UserError(f"haystack file '{spec}' is not UTF-8 ({place}); convert it, for example with iconv -t UTF-8") from error
    text = text.removeprefix("\ufeff").replace("\r\n", "\n").replace("\r", "\n")
    if not text.strip():
        raise UserError(f"haystack file '{spec}' is empty: it holds no text")
    return Haystack.of("file", path.name, wikitext_sentences(text) if is_wikitext(text) else plain_sentences(text))
