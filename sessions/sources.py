"""Where records come from: a file (jsonl, json, parquet, gzip of these), a folder of them, a folder of event files, a set of the hub.

Everything is streamed: no more than one record, or one row group of a parquet file, is held.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fathom_eval.errors import UserError
from fathom_eval.hub import PATIENCE_SECONDS, hub_answers
from fathom_eval.sessions.json_stream import MAX_RECORD_BYTES, Piece, split_lines, split_values
from fathom_eval.sessions.report import ReadReport
from fathom_eval.sessions.safe_text import visible

_CHUNK_BYTES = 1 << 20
_GZIP_MAGIC = b"\x1f\x8b"
_PARQUET_MAGIC = b"PAR1"
_OTHER_MAGIC = {
    b"\x28\xb5\x2f\xfd": "zstandard",
    b"PK\x03\x04": "zip",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
}
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet")
_EVENT_FILE = re.compile(r"(?:event-)?(\d+)(?:-[\w-]*)?\.json")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PARQUET_ROWS = 8


@dataclass(frozen=True)
class Record:
    """One JSON object, and where it stands."""

    where: str
    row: Mapping[str, Any]


def iter_records(spec: str, report: ReadReport, *, revision: str | None = None) -> Iterator[Record]:
    """Records of a file, a folder or a set of the hub.

    Args:
        spec: path or hub id.
        report: takes what cannot be read.
        revision: branch, tag or commit of a hub set.

    Raises:
        UserError: there is no such file, folder or set; it is empty, unreadable or of a kind that is not read here.
    """
    path = Path(spec).expanduser()
    try:
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError):
        is_folder = is_file = False
    if revision is not None and (is_folder or is_file):
        raise UserError(f"a revision is for sets of the hub; {visible(spec)} is local")
    if is_folder:
        yield from _folder(path, report)
    elif is_file:
        yield from _file(path, path.name, report)
    elif _HUB_ID.fullmatch(spec) and not spec.endswith((*_SUFFIXES, ".gz")):
        yield from _hub(spec, revision, report)
    else:
        raise UserError(f"there is no file or folder '{visible(spec)}' (a set of the hub is named OWNER/NAME)")


def _file(path: Path, name: str, report: ReadReport) -> Iterator[Record]:
    name = visible(name, 120)
    try:
        with path.open("rb") as handle:
            head = handle.read(8)
    except OSError as error:
        raise UserError(f"{name} cannot be read: {error.strerror or error}") from None
    if not head:
        raise UserError(f"{name} is empty")
    suffix = path.suffix.lower()
    zipped = head.startswith(_GZIP_MAGIC)
    if zipped:
        suffix = Path(path.stem).suffix.lower()
        first = next(iter(_unzipped(path, name, ReadReport())), b"")
        if not first:
            reason = next(iter(_reasons_of_gzip(path, name)), "its content is empty")
            raise UserError(f"{name} holds nothing: {reason}")
        head = first[:8]
    for magic, kind in _OTHER_MAGIC.items():
        if head.startswith(magic):
            raise UserError(f"{name} is a {kind} file; jsonl, json and parquet are read, plain or with gzip")
    if head.startswith(_PARQUET_MAGIC):
        yield from _parquet_file(path, name, zipped, report)
        return
    if suffix == ".parquet":
        raise UserError(f"{name} is no parquet file")
    chunks = _unzipped(path, name, report) if zipped else _plain(path, name, report)
    yield from _json_records(chunks, name, suffix, report)


def _plain(path: Path, name: str, report: ReadReport) -> Iterator[bytes]:
    try:
        with path.open("rb") as handle:
            while chunk := handle.read(_CHUNK_BYTES):
                yield chunk
    except OSError as error:
        report.cut_short(name, f"reading failed ({error.strerror or error})")


def _unzipped(path: Path, name: str, report: ReadReport) -> Iterator[bytes]:
    try:
        with gzip.open(path, "rb") as handle:
            # read1 hands out what is there before it raises for what is missing.
            while chunk := handle.read1(_CHUNK_BYTES):
                yield chunk
    except (EOFError, zlib.error, gzip.BadGzipFile, OSError) as error:
        kind = "the gzip file is cut short" if isinstance(error, EOFError) else f"the gzip file is damaged ({error})"
        report.cut_short(name, kind)


def _reasons_of_gzip(path: Path, name: str) -> list[str]:
    report = ReadReport()
    for _ in _unzipped(path, name, report):
        break
    return [line.split(": ", 1)[1].split(";")[0] for line in report.cut]


def _json_records(chunks: Iterator[bytes], name: str, suffix: str, report: ReadReport) -> Iterator[Record]:
    first = next(chunks, b"").removeprefix(_BYTE_ORDER_MARK)
    while first.isspace():
        first = next(chunks, b"")
    if not first:
        raise UserError(f"{name} is empty")
    if first.lstrip()[:1] not in (b"{", b"["):
        start = visible(first.lstrip()[:20].decode(errors="replace"), 24)
        raise UserError(f"{name} is no JSON: it starts with '{start}'; jsonl, json and parquet are read")
    chunks = chain([first], chunks)
    if suffix in (".jsonl", ".ndjson") or (first.lstrip()[:1] == b"{" and _is_whole_object(first.lstrip().split(b"\n", 1)[0])):
        yield from _parsed(split_lines(chunks), name, "line", report)
    else:
        yield from _rows_of_values(_parsed_values(split_values(chunks), name, "element", report), name)


def _is_whole_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False


def _parsed(pieces: Iterator[Piece], name: str, unit: str, report: ReadReport) -> Iterator[Record]:
    for where, value in _parsed_values(pieces, name, unit, report):
        if isinstance(value, dict):
            yield Record(where, value)
        else:
            report.break_off(where, "no JSON object")


def _parsed_values(pieces: Iterator[Piece], name: str, unit: str, report: ReadReport) -> Iterator[tuple[str, Any]]:
    for piece in pieces:
        where = f"{name}, {unit} {piece.number}"
        if piece.content is not None and not piece.content.strip():
            continue
        report.records += 1
        if piece.content is None:
            report.break_off(where, f"longer than {MAX_RECORD_BYTES >> 20} MiB")
        elif not piece.complete:
            report.break_off(where, "the file ends within it")
        else:
            try:
                yield where, json.loads(piece.content)
            except UnicodeDecodeError:
                report.break_off(where, "no UTF-8")
            except RecursionError:
                report.break_off(where, "nested too deeply")
            except ValueError as error:
                report.break_off(where, f"broken JSON ({error})")


def _rows_of_values(values: Iterator[tuple[str, Any]], name: str) -> Iterator[Record]:
    """Rows of a JSON file. A file that is one list of messages or events is one row."""
    loose: list[Any] = []
    for where, value in values:
        if isinstance(value, list):
            yield Record(where, row_of_list(value, ""))
        elif isinstance(value, dict) and (loose or _is_part(value)):
            loose.append(value)
        elif isinstance(value, dict):
            yield Record(where, value)
    if loose:
        yield Record(name, row_of_list(loose, ""))


def _is_part(value: Mapping[str, Any]) -> bool:
    """Whether an object is a message or an event, not a row of them."""
    rows = ("trajectory", "messages", "history", "events")
    return any(key in value for key in ("role", "kind", "action", "observation")) and not any(key in value for key in rows)


def row_of_list(items: list[Any], identifier: str) -> dict[str, Any]:
    """A row for messages or events that stand alone."""
    first = next((item for item in items if isinstance(item, Mapping)), {})
    if "role" in first:
        return {"instance_id": identifier, "messages": items}
    if "kind" in first:
        return {"conversation_id": identifier, "events": items}
    return {"instance_id": identifier, "history": items}


def _parquet_file(path: Path, name: str, zipped: bool, report: ReadReport) -> Iterator[Record]:
    if not zipped:
        yield from _parquet(path, name, report)
        return
    # Parquet is read from its end, so it has to be a file.
    with tempfile.TemporaryDirectory(prefix="fathom-eval-") as folder:
        unzipped = Path(folder) / "rows.parquet"
        with unzipped.open("wb") as sink:
            for chunk in _unzipped(path, name, report):
                sink.write(chunk)
        yield from _parquet(unzipped, name, report)


def _parquet(path: Path, name: str, report: ReadReport) -> Iterator[Record]:
    from pyarrow import ArrowException, parquet  # type: ignore[import-untyped]

    try:
        file = parquet.ParquetFile(path)
    except (ArrowException, OSError) as error:
        raise UserError(f"{name} cannot be read as parquet, it is cut short or damaged: {visible(error, 120)}") from None
    number = 0
    with file:
        try:
            for batch in file.iter_batches(batch_size=_PARQUET_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    report.records += 1
                    yield Record(f"{name}, row {number}", row)
        except (ArrowException, OSError) as error:
            report.cut_short(name, f"damaged after row {number} ({visible(error, 120)})")


def _folder(root: Path, report: ReadReport) -> Iterator[Record]:
    found = False
    for place, folders, names in os.walk(root):
        folders[:] = sorted(name for name in folders if name != "event_cache" and not name.startswith("."))
        folder = Path(place)
        files = [folder / name for name in sorted(names) if not (folder / name).is_symlink()]
        events = sorted((int(match[1]), file) for file in files if (match := _EVENT_FILE.fullmatch(file.name)))
        if events:
            found = True
            yield from _event_files(root, folder, [file for _, file in events], report)
            continue
        for file in files:
            if file.name.lower().removesuffix(".gz").endswith(_SUFFIXES) and file.name != "base_state.json":
                found = True
                try:
                    yield from _file(file, str(file.relative_to(root)), report)
                except UserError as error:
                    report.skip(str(file.relative_to(root)), str(error), "files left out")
    if not found:
        raise UserError(f"the folder {visible(root)} holds no jsonl, json, parquet or event files")


def _event_files(root: Path, folder: Path, files: list[Path], report: ReadReport) -> Iterator[Record]:
    """One conversation whose events are files. Missing numbers do not matter."""
    report.records += 1
    owner = folder.parent if folder.name == "events" and folder != root else folder
    owner = owner if owner.name else owner.resolve()
    where = visible(owner.name or "events", 120)
    events: list[Any] = []
    size = 0
    for file in files:
        try:
            size += file.stat().st_size
            if size > MAX_RECORD_BYTES:
                report.cut_short(where, f"more than {MAX_RECORD_BYTES >> 20} MiB of events")
                break
            events.append(json.loads(file.read_bytes()))
        except (OSError, ValueError, RecursionError) as error:
            report.break_off(f"{where}/{file.name}", f"no readable event ({error})")
    yield Record(where, row_of_list(events, owner.name))


def _hub(spec: str, revision: str | None, report: ReadReport) -> Iterator[Record]:
    """Rows of all splits of a set of the hub. What goes wrong after the first row ends the stream and is reported."""
    from huggingface_hub import is_offline_mode

    number = 0
    try:
        from datasets import load_dataset  # type: ignore[import-untyped]

        if not (is_offline_mode() or hub_answers()):
            raise ConnectionError(f"the hub did not answer within {PATIENCE_SECONDS:g} s")
        splits = load_dataset(spec, revision=revision, streaming=True)
        for split, rows in sorted(splits.items()):
            for number, row in enumerate(rows, start=1):
                report.records += 1
                yield Record(f"{spec}, {split} row {number}", row)
    # Network trouble, a missing set, a gated set, a bad revision, offline mode: the libraries below have a type of error for each.
    except Exception as error:
        reason = visible(" ".join(str(error).split()) or type(error).__name__, 160)
        if number == 0:
            at = f" at revision '{visible(revision)}'" if revision else ""
            raise UserError(
                f"'{spec}' is no local file or folder, and the hub set of that name{at} cannot be streamed: {reason}; "
                "give a local file instead"
            ) from None
        report.cut_short(spec, f"the stream ended after {number} rows ({reason})")
