"""Whether a folder may take a report: one that would replace somebody's files, or lie among those of another run, is refused."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from fathom_eval.errors import UserError
from fathom_eval.run import MANIFEST, PACKED, RECORDS
from fathom_eval.run_files import file_errors

LIST = "files.json"
"""Names what a report wrote with its hash, so that the next one into the same folder can remove what it does not write again."""
PAGE, MARKDOWN, LATEX, RESULTS = "report.html", "results.md", "results.tex", "results.csv"
GENERATOR = '<meta name="generator" content="fathom-eval '
_BEGINNING = 4096
_MOST_NAMED = 5


def check_output(output: Path, runs: Sequence[Path], names: Iterable[str]) -> None:
    """Raise UserError where a report may not be written into ``output``.

    The folder of a reported run may take its report, and a folder that holds a report may take the next.

    Args:
        runs: What is reported: folders of runs, or files of records.
        names: Files that are to be written, relative to the folder.
    """
    with file_errors(output, "read"):
        if not output.is_dir() or output.resolve() in {run_of(path).resolve() for path in runs}:
            return
        if _holds_run(output):
            raise UserError(f"{output} holds another run, which is not among those of the report: give --output another folder")
        if _holds_report(output):
            return
        found = sorted(name for name in {*names, LIST} if (output / name).exists())
    if found:
        more = f" and {len(found) - _MOST_NAMED} more files" if len(found) > _MOST_NAMED else ""
        raise UserError(
            f"{output} holds {', '.join(found[:_MOST_NAMED])}{more}, not written by fathom-eval, which the report would replace: "
            "give --output another folder"
        )


def run_of(path: Path) -> Path:
    """The folder of a run where its file of records is given."""
    return path.parent if path.name in (RECORDS, PACKED) and path.is_file() and (path.parent / MANIFEST).is_file() else path


def _holds_run(folder: Path) -> bool:
    if any((folder / name).exists() for name in (RECORDS, PACKED)):
        return True
    manifest = _json(folder / MANIFEST)
    # Other programs have files of that name as well.
    return isinstance(manifest, dict) and {"schema", "identity"} <= manifest.keys()


def _holds_report(folder: Path) -> bool:
    """By the list that every report leaves, or by its page where only some files of the report were kept."""
    listed = _json(folder / LIST)
    if isinstance(listed, dict) and isinstance(listed.get("report"), dict):
        return True
    page = folder / PAGE
    if not page.is_file():
        return False
    with page.open("rb") as file:
        return GENERATOR.encode() in file.read(_BEGINNING)


def _json(file: Path) -> object:
    try:
        return json.loads(file.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
