"""Finding the records of a report: run directories, published ones with packed records, and the plain JSON lines of timing scripts."""

from __future__ import annotations

import gzip
import json
import shutil
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from fathom_eval.console import printable
from fathom_eval.errors import UserError
from fathom_eval.reports.facts import last_settings
from fathom_eval.reports.gaps import unrecorded
from fathom_eval.reports.output import MARKDOWN, PAGE, RESULTS, run_of
from fathom_eval.reports.wording import count
from fathom_eval.run import MANIFEST, PACKED, RECORDS, Run

RUN_KINDS = ("ruler", "sessions", "fidelity")
TIMING = "timing"
# What the lines of a timing script say they are; a manifest may say so too.
_TIMING_KINDS = frozenset(
    {
        "step",
        "bench",
        TIMING,
        "kernel",
        "kernels",
        "link",
        "rate",
        "device",
        "sweep",
        "selection",
        "pack",
        "index in HBM",
        "index in pinned host memory",
    }
)
_MAX_LINE = 1 << 20
_MOST_UNPACKED, _LEAST_LIMIT = 200, 1 << 26
"""How many times its size a packed file may hold, and a number of bytes that any may: records hold 10 to 30 times, a bomb 1,000 times."""
_REPORT_FILES = (PAGE, RESULTS, MARKDOWN)


class Records(Protocol):
    """What a report needs of a run; :class:`~fathom_eval.run.Run` is one."""

    manifest: dict[str, Any]
    problems: list[str]
    torn: dict[tuple[str, int], int]

    def iter_records(self) -> Iterator[dict[str, Any]]:
        """The records, one at a time."""

    def __len__(self) -> int: ...


@dataclass(frozen=True)
class Loaded:
    """One run as a report meets it. ``name`` tells it from the other runs of the same report."""

    name: str
    kind: str
    path: Path
    records: Records

    @cached_property
    def unrecorded(self) -> list[str]:
        """Methods that the last start asked for, and could measure, of which there is not one record."""
        if self.kind not in RUN_KINDS:
            return []
        labels = {printable(record.get("label") or record.get("method")) for record in self.records.iter_records()}
        return unrecorded(last_settings(self.records.manifest), labels)


@dataclass
class LineRecords:
    """Records that stand in JSON-lines files without a manifest, as the timing scripts print them."""

    lines: list[dict[str, Any]]
    manifest: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    torn: dict[tuple[str, int], int] = field(default_factory=dict)

    def iter_records(self) -> Iterator[dict[str, Any]]:
        """The records, one at a time."""
        yield from self.lines

    def __len__(self) -> int:
        return len(self.lines)


def load_runs(paths: Sequence[Path], stack: ExitStack) -> tuple[list[Loaded], list[str]]:
    """Load every run once.

    Args:
        stack: Holds what must live as long as the records are read.

    Returns:
        The runs, and one line for each that could not be loaded.

    Raises:
        UserError: Not one of them could be loaded.
    """
    unique = list({path.resolve(): path for path in map(run_of, paths)}.values())
    loaded, errors = [], []
    for path in unique:
        same_name = [other for other in unique if other.resolve().name == path.resolve().name]
        name = printable(path.resolve().name if len(same_name) == 1 else path)
        try:
            records = _records(path, stack)
            loaded.append(Loaded(name, _kind(path, records), path, records))
        except UserError as error:
            errors.append(str(error))
    if not loaded:
        raise UserError("; ".join(errors))
    return loaded, errors


def _records(path: Path, stack: ExitStack) -> Records:
    if path.is_file() and path.name.endswith((".jsonl", ".jsonl.gz")):
        return _read_lines([path])
    if path.is_dir() and not (path / MANIFEST).exists():
        files = sorted(path.glob("*.jsonl"))
        if files:
            return _read_lines(files)
    if path.is_dir() and not (path / RECORDS).exists():
        if (path / PACKED).is_file() and (path / MANIFEST).is_file():
            return _load_packed(path, path / PACKED, stack)
        if made := [name for name in _REPORT_FILES if (path / name).is_file()]:
            missing = [name for name in (MANIFEST, f"{RECORDS} (or {PACKED})") if not (path / name.split(" ")[0]).exists()]
            raise UserError(
                f"{path} holds a report ({', '.join(made)}) without the records that it was made of: "
                f"{' and '.join(missing)} must lie beside it, as a run writes them"
            )
    return Run.load(path)


def _load_packed(path: Path, packed: Path, stack: ExitStack) -> Run:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fathom-eval-"))) / path.resolve().name
    cut: list[str] = []
    try:
        folder.mkdir()
        shutil.copyfile(path / MANIFEST, folder / MANIFEST)
        with (folder / RECORDS).open("wb") as target:
            target.writelines(_unpacked(packed, cut))
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(f"{packed} cannot be unpacked: {error}") from error
    # A report names the files that it was made of, not where they lay for a while.
    try:
        run = Run.load(folder)
    except UserError as error:
        raise UserError(str(error).replace(str(folder), str(path))) from error
    run.problems = [*cut, *(problem.replace(str(folder / RECORDS), str(packed)) for problem in run.problems)]
    return run


def _unpacked(file: Path, problems: list[str]) -> Iterator[bytes]:
    """The content of a packed file, part by part; of one that is cut off what is there, and a line is added to ``problems``.

    Raises UserError where it is far more than records can be, and EOFError where nothing of it can be read.
    """
    limit, total = max(_LEAST_LIMIT, _MOST_UNPACKED * file.stat().st_size), 0
    with gzip.open(file, "rb") as source:
        while True:
            try:
                # Not read(): that loses what it had unpacked before it met the end.
                part = source.read1(_MAX_LINE)
            except EOFError:
                if not total:
                    raise
                problems.append(f"{file} is cut off: what follows its first {total:,} unpacked bytes is lost")
                return
            if not part:
                return
            total += len(part)
            if total > limit:
                raise UserError(
                    f"{file} holds over {_MOST_UNPACKED} times its own size, which records do not; unpack it to read it all the same"
                )
            yield part


def _read_lines(files: Sequence[Path]) -> LineRecords:
    found = LineRecords([])
    for file in files:
        try:
            content = b"".join(_unpacked(file, found.problems)) if file.suffix == ".gz" else file.read_bytes()
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{file} cannot be read: {getattr(error, 'strerror', None) or error}") from error
        text = content.decode("utf-8", errors="replace")
        for number, line in enumerate(text.split("\n"), start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line) if len(line) < _MAX_LINE else None
            except (ValueError, RecursionError):
                record = None
            if isinstance(record, dict):
                found.lines.append(record)
            else:
                found.problems.append(f"{file}: line {number} is damaged and is skipped")
    if not found.lines:
        raise UserError(f"{files[0]} has no records")
    devices = [record for record in found.lines if record.get("kind") == "device"]
    if devices:
        found.manifest = {"kind": TIMING, "device": devices[-1].get("name"), "versions": {"torch": devices[-1].get("torch")}}
    return found


def _kind(path: Path, records: Records) -> str:
    manifest_kind = records.manifest.get("kind")
    first: Mapping[str, Any] = next(records.iter_records(), {})
    # The records decide; where there are none the manifest says what they would have been.
    for kind in (first.get("kind"), manifest_kind):
        if kind in RUN_KINDS:
            found = str(kind)
            break
        if isinstance(kind, str) and kind in _TIMING_KINDS:
            found = TIMING
            break
    else:
        named = manifest_kind if manifest_kind is not None else first.get("kind")
        what = "holds no run: no record with a kind" if named is None else f"is a run of kind '{printable(named)[:80]}'"
        raise UserError(f"{path} {what}; this version makes reports of {', '.join((*RUN_KINDS, TIMING))}")
    if not len(records):
        damage = f", only {count(len(records.problems), 'damaged line')}" if records.problems else " yet"
        raise UserError(f"{path} has no records{damage}: run 'fathom-eval {printable(manifest_kind)} … --output {path}' to fill it")
    return found
