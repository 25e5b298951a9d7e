"""The run directory: a manifest that says what was measured, and records that are appended and never lost.

``manifest.json`` is written before any record. ``records.jsonl`` only grows: one write a unit of work, flushed to the disk. A run that
was killed goes on where it stopped, because :meth:`Run.keys` tells what is already there; only a run with another *identity* (model,
tokenizer, data, seed, protocol, …) is refused, since its numbers could not stand beside the ones already recorded.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from fathom_eval.errors import UserError
from fathom_eval.record_checks import Damages, RecordKey, begins_record, check_key, check_record
from fathom_eval.run_files import (
    LOCK,
    TEMPORARY,
    acquire_lock,
    check_can_be_made,
    file_errors,
    readable_size,
    sync_folder,
    write_all,
    write_atomically,
)
from fathom_eval.run_identity import refuse_other_identity, refuse_other_kind

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
RECORDS = "records.jsonl"
PACKED = "records.jsonl.gz"
# What a start that was killed before its manifest can leave behind: such a folder holds nothing and may be used.
_LEFTOVERS = frozenset({LOCK, MANIFEST + TEMPORARY})
_KEY_FIELDS = ("kind", "task", "context", "sample", "k", "method", "method_version")
# Position of a record within the records that were written together; kept in the file only, so that a torn unit is seen.
_UNIT = "unit"
_MAX_LINE_BYTES = 16 << 20


def canonical_json(value: object) -> str:
    """One text for equal values: sorted keys, no spaces, ASCII. Raises ValueError for NaN and infinities."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def identity_sha256(identity: Mapping[str, Any]) -> str:
    """The run identity as one hash (hex)."""
    return hashlib.sha256(canonical_json(dict(identity)).encode()).hexdigest()


def record_key(record: Mapping[str, Any]) -> RecordKey:
    """The identity of a record within its run: kind, task, context, sample, k, method, options (canonical JSON), method_version.

    Raises ValueError if one of them is missing or is not a plain value.
    """
    try:
        values = {field: record[field] for field in _KEY_FIELDS}
        options = canonical_json(record["options"])
    except KeyError as error:
        raise ValueError(f"a record needs the field {error}") from None
    for field, value in values.items():
        if value is not None and not isinstance(value, (str, int)):
            raise ValueError(f"the field '{field}' of a record must be text, a whole number or null, not {type(value).__name__}")
    kind, task, context, sample, k, method, version = values.values()
    return (kind, task, context, sample, k, method, options, version)


def default_run_path(kind: str, model_name: str, identity: Mapping[str, Any]) -> Path:
    """``runs/<kind>-<model>-<short hash>``: the same command finds its own run again, another identity gets another folder."""
    model = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(model_name).name or model_name).strip("-._")[:60] or "model"
    return Path("runs") / f"{kind}-{model}-{identity_sha256(identity)[:8]}"


class Run:
    """One run directory. Make it with :meth:`open` (to add records) or :meth:`load` (to read them); it is a context manager.

    Attributes:
        path: the run directory.
        manifest: content of ``manifest.json``: ``schema``, ``kind``, ``identity``, ``identity_sha256``, the details of the first start
            (``versions``, ``device``, ``settings``, …) and ``invocations``, a list with time and details of every start.
        problems: damage found in ``records.jsonl``, one line each. A damaged record counts as missing, so it is computed again; a damaged
            line whose record is there again is no problem any more.
        torn: (task, sample) and number of the records at the end of ``records.jsonl`` whose unit is not written whole: they do not count.
    """

    def __init__(self, path: Path, manifest: dict[str, Any], lock: IO[str] | None) -> None:
        self.path = path
        self.manifest = manifest
        self.problems: list[str] = []
        self.torn: dict[tuple[str, int], int] = {}
        self._lock = lock
        self._offsets: dict[RecordKey, int] = {}
        self._end = 0
        self._records_fd: int | None = None
        self._index()

    @classmethod
    def check(cls, path: Path, kind: str | None = None) -> dict[str, Any] | None:
        """Raise the UserError that :meth:`open` would raise for ``path`` whatever the identity: to be told before expensive work.

        Args:
            kind: of the run that is to be there; None for any.

        Returns:
            The manifest of the run that is there, None where there is none yet.
        """
        check_can_be_made(path)
        _refuse_foreign(path)
        manifest = _read_manifest(path) if (path / MANIFEST).exists() else None
        if manifest is not None and kind is not None:
            refuse_other_kind(path, manifest, kind)
        if (path / LOCK).exists():
            with file_errors(path):
                acquire_lock(path).close()
        return manifest

    @classmethod
    def open(cls, path: Path, *, identity: Mapping[str, Any], details: Mapping[str, Any]) -> Run:
        """Create the run, or resume it, and hold its lock until :meth:`close` or the end of the process.

        Args:
            path: the run directory; it and its parents are made where missing.
            identity: every fact that could change a number (model and tokenizer fingerprints, data hash, seed, protocol, dtype, …).
            details: facts to record that do not make it another run: ``kind`` (default ``ruler``), ``versions``, ``device``, …;
                ``arguments`` are recorded of each start alone, and no report shows them.

        Raises:
            UserError: the folder holds something else, another run's identity or a newer schema, is in use by another process, or cannot
                be written.
        """
        # Through JSON and back, so that tuples and lists compare alike.
        identity = json.loads(canonical_json(dict(identity)))
        facts = dict(details)
        kind = facts.pop("kind", "ruler")
        arguments = {"arguments": facts.pop("arguments")} if "arguments" in facts else {}
        _refuse_foreign(path)
        if (path / MANIFEST).exists():
            refuse_other_identity(path, _read_manifest(path), kind, identity)
        with file_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            lock = acquire_lock(path)
        try:
            invocation = {"time": datetime.now(UTC).isoformat(timespec="seconds"), **facts, **arguments}
            if (path / MANIFEST).exists():
                manifest = _read_manifest(path)
                refuse_other_identity(path, manifest, kind, identity)
                manifest["invocations"] = [*manifest.get("invocations", []), invocation]
            else:
                manifest = {
                    "schema": SCHEMA_VERSION,
                    "kind": kind,
                    "identity": identity,
                    "identity_sha256": identity_sha256(identity),
                    **facts,
                    "invocations": [invocation],
                }
            with file_errors(path):
                write_atomically(path / MANIFEST, (json.dumps(manifest, indent=2, allow_nan=False) + "\n").encode())
            return cls(path, manifest, lock)
        except BaseException:
            lock.close()
            raise

    @classmethod
    def load(cls, path: Path) -> Run:
        """Open a run to read it, also while another process adds to it. Raises UserError if there is no run or its schema is newer."""
        if not path.exists():
            raise UserError(f"no run at {path}: there is no such folder")
        if not path.is_dir():
            raise UserError(f"{path} is not a run directory: it is a file")
        with file_errors(path, "read"):
            names = {entry.name for entry in path.iterdir()}
        if not names:
            raise UserError(f"{path} is not a run directory: it is empty")
        if MANIFEST not in names:
            half = "a start was stopped there before it wrote its" if names <= _LEFTOVERS else "it has no"
            raise UserError(f"{path} is not a run directory: {half} {MANIFEST}")
        return cls(path, _read_manifest(path), None)

    def records(self) -> list[dict[str, Any]]:
        """All records, the newest of each key, in the order they were written."""
        return list(self.iter_records())

    def iter_records(self) -> Iterator[dict[str, Any]]:
        """The records of :meth:`records`, one at a time: only their places in the file are held in memory."""
        if not self._offsets:
            return
        with file_errors(self.path, "read"), (self.path / RECORDS).open("rb") as handle:
            for offset in sorted(self._offsets.values()):
                handle.seek(offset)
                record: dict[str, Any] = json.loads(handle.readline(_MAX_LINE_BYTES))
                record.pop(_UNIT, None)
                yield record

    def keys(self) -> set[RecordKey]:
        """The keys (:func:`record_key`) of all records present."""
        return set(self._offsets)

    def failed_keys(self) -> set[RecordKey]:
        """The keys of the records that say why their method gave no result."""
        return {record_key(record) for record in self.iter_records() if record.get("finish") == "error"}

    def __len__(self) -> int:
        return len(self._offsets)

    def append(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add the records of one unit of work in one write, and return when the disk has them.

        A later record of the same key replaces the earlier one. A unit that was torn by a crash counts as not written at all.

        Raises:
            UserError: the disk is full or cannot be written. Everything appended before is intact.
            ValueError: a record lacks a key field, holds something that JSON cannot, or would count as damaged when it is read.
        """
        if self._lock is None:
            raise RuntimeError("this run was opened to be read, or is closed")
        if not records:
            return
        keys = [record_key(record) for record in records]
        for record in records:
            check_record(record)
        lines = [
            json.dumps({**record, _UNIT: [index, len(records)]}, ensure_ascii=True, allow_nan=False).encode() + b"\n"
            for index, record in enumerate(records, start=1)
        ]
        if max(map(len, lines)) >= _MAX_LINE_BYTES:
            raise ValueError(f"a record takes more than {readable_size(_MAX_LINE_BYTES)}")
        with file_errors(self.path):
            descriptor = self._descriptor()
            # A torn tail, of an earlier process or of a write of this one that failed, must go before anything follows it.
            if os.fstat(descriptor).st_size != self._end:
                os.ftruncate(descriptor, self._end)
            try:
                write_all(descriptor, b"".join(lines))
                os.fsync(descriptor)
            except OSError:
                with contextlib.suppress(OSError):
                    os.ftruncate(descriptor, self._end)
                raise
        for key, line in zip(keys, lines, strict=True):
            self._offsets[key] = self._end
            self._end += len(line)

    def close(self) -> None:
        """Release the lock. Closing twice does no harm."""
        if self._records_fd is not None:
            os.close(self._records_fd)
            self._records_fd = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _descriptor(self) -> int:
        if self._records_fd is None:
            self._records_fd = os.open(self.path / RECORDS, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            sync_folder(self.path)
        return self._records_fd

    def _index(self) -> None:
        """Find every whole record. ``_end`` becomes the end of the last unit that is written whole: what follows it is a torn tail."""
        file = self.path / RECORDS
        if not file.exists():
            return
        pending: dict[RecordKey, int] = {}
        damages = Damages()
        torn_line = None
        with file_errors(self.path, "read"), file.open("rb") as handle:
            for number, offset, length, line in _lines(handle):
                if line is not None and not line.endswith(b"\n"):
                    self._note_torn(*_named_in(line))
                    if not begins_record(line):
                        torn_line = f"{file}: line {number} is damaged and is skipped (no record begins like this)"
                    break
                try:
                    if line is None:
                        raise ValueError(f"longer than {readable_size(_MAX_LINE_BYTES)}")
                    key, place, size = _parse(line)
                except (ValueError, RecursionError) as error:
                    # Of a damaged line nobody knows whether it ended its unit, so the records before it stand.
                    problem = f"{file}: line {number} is damaged and is skipped ({str(error)[:120]})"
                    damages.add(problem, line or b"", offset + length, _key_in(line or b""))
                else:
                    damages.pass_record(key, place, size, offset, offset + length)
                    pending[key] = offset
                    if place != size:
                        continue
                self._offsets.update(pending)
                pending.clear()
                self._end = offset + length
        for _, task, _, sample, *_ in pending:
            self._note_torn(task, sample)
        self.problems = [*damages.standing(self._offsets), *([torn_line] if torn_line is not None else [])]

    def _note_torn(self, task: str, sample: int | None) -> None:
        if sample is not None:
            self.torn[task, sample] = self.torn.get((task, sample), 0) + 1


def _parse(line: bytes) -> tuple[RecordKey, int, int]:
    """Key of a record line, its number in its unit, and how many the unit has. Raises ValueError if it is no record."""
    record = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("not a JSON object")
    key = record_key(record)
    check_record(record)
    unit = record.get(_UNIT)
    number, size = unit if isinstance(unit, list) and len(unit) == 2 and all(isinstance(part, int) for part in unit) else (1, 1)
    return key, number, size


def _key_in(line: bytes) -> RecordKey | None:
    """Key of a record that is damaged in another field; None where the line does not say it."""
    try:
        record = json.loads(line)
        check_key(record)
        return record_key(record)
    except (ValueError, AttributeError, RecursionError):
        return None


def _named_in(line: bytes) -> tuple[str, int | None]:
    """Task and sample that a record whose end is missing names; without a sample where it does not come that far."""
    task, sample = re.search(rb'"task": "([^"\\]*)"', line), re.search(rb'"sample": (\d{1,18}),', line)
    return task[1].decode(errors="replace") if task else "", int(sample[1]) if sample else None


def _lines(handle: IO[bytes]) -> Iterator[tuple[int, int, int, bytes | None]]:
    """Number, offset, length and bytes of every line; the bytes are None for a line over the limit, which is never held in memory."""
    number = offset = 0
    while line := handle.readline(_MAX_LINE_BYTES):
        number += 1
        length, content, part = len(line), line, line
        while not part.endswith(b"\n") and len(part) == _MAX_LINE_BYTES:
            part = handle.readline(_MAX_LINE_BYTES)
            length += len(part)
        yield number, offset, length, content if length < _MAX_LINE_BYTES else None
        offset += length


def _refuse_foreign(path: Path) -> None:
    if not path.exists():
        return
    if not path.is_dir():
        raise UserError(f"{path} is a file: a run needs a folder of its own")
    with file_errors(path, "read"):
        names = {entry.name for entry in path.iterdir()}
    if {MANIFEST, PACKED} <= names and RECORDS not in names:
        raise UserError(f"the records of {path} are packed: unpack them first (gunzip -k {path / PACKED}), or they would be computed anew")
    if MANIFEST in names or names <= _LEFTOVERS:
        return
    found = ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")
    raise UserError(f"{path} holds something else than a run ({found}): give a new or empty folder")


def _read_manifest(path: Path) -> dict[str, Any]:
    file = path / MANIFEST
    try:
        with file_errors(path, "read"):
            manifest = json.loads(file.read_bytes())
    except (ValueError, RecursionError):
        raise UserError(f"{file} is damaged: it is not JSON") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("schema"), int) or not isinstance(manifest.get("identity"), dict):
        raise UserError(f"{file} is not the manifest of a run")
    if manifest["schema"] > SCHEMA_VERSION:
        newer = f"schema {manifest['schema']}; this version reads up to {SCHEMA_VERSION}"
        raise UserError(f"{path} was written by a newer fathom-eval ({newer}): upgrade fathom-eval")
    return manifest
