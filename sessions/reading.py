"""Trajectories of a file, a folder or a set of the hub, in any of the known formats."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from fathom_eval.errors import UserError, did_you_mean
from fathom_eval.sessions.readers import READERS, detect, reader_named
from fathom_eval.sessions.readers.fields import UnusableRowError
from fathom_eval.sessions.report import ReadReport
from fathom_eval.sessions.safe_text import visible
from fathom_eval.sessions.sources import Record, iter_records
from fathom_eval.sessions.steps import Assistant, Trajectory

CONDENSATIONS = ("full", "condensed")


def read_trajectories(
    spec: str,
    report: ReadReport,
    *,
    format_name: str | None = None,
    revision: str | None = None,
    condensation: str = "full",
    default_repo: str = "",
) -> Iterator[Trajectory]:
    """Read trajectories one at a time.

    Args:
        spec: file (jsonl, json, parquet; plain or gzip), folder of files or of event files, or hub id.
        report: filled as reading goes on.
        format_name: one of :data:`READERS`; found out row by row if None.
        revision: branch, tag or commit of a hub set.
        condensation: ``full`` shows all events of a log; ``condensed`` shows what the model still saw after its history was condensed.
        default_repo: repository of trajectories that name none.

    Raises:
        UserError: nothing is there or can be read, no row has a known format, no row gives a trajectory, an unknown option.
    """
    reader = None if format_name is None else reader_named(format_name)
    if condensation not in CONDENSATIONS:
        raise UserError(f"unknown condensation '{condensation}'; {did_you_mean(condensation, CONDENSATIONS)}")
    names: Counter[str] = Counter()
    for record in iter_records(spec, report, revision=revision):
        chosen = reader or detect(record.row)
        if chosen is None:
            _skip_unknown(record, report)
            continue
        try:
            trajectory = chosen.read(record.row, record.where, condensed=condensation == "condensed")
        except UnusableRowError as error:
            report.skip(record.where, str(error), "rows without steps")
            continue
        if not any(isinstance(step, Assistant) for step in trajectory.steps):
            why = "; ".join(note for note in trajectory.notes if "error: " in note)
            report.skip(record.where, f"no response of the model{f' ({why})' if why else ''}", "trajectories without a response")
            continue
        name = trajectory.id or record.where
        names[name] += 1
        unique = f"{name}#{names[name]}" if names[name] > 1 else name
        report.trajectories += 1
        report.formats[trajectory.format] += 1
        yield dataclasses.replace(trajectory, id=unique, repo=trajectory.repo or default_repo)
    if report.trajectories == 0:
        raise UserError(_nothing_found(spec, report, format_name))


def _skip_unknown(record: Record, report: ReadReport) -> None:
    keys = ", ".join(visible(key, 24) for key in list(record.row)[:8]) or "none"
    report.unknown_keys = report.unknown_keys or keys
    if known := next((key for key in ("trajectory", "messages", "history", "events") if key in record.row), None):
        report.skip(record.where, f"no messages or events in '{known}'", "rows without steps")
    else:
        report.skip(record.where, f"no known format (keys: {keys})", "rows of no known format")


def _nothing_found(spec: str, report: ReadReport, format_name: str | None) -> str:
    known = ", ".join(f"{name} ({reader.KEYS})" for name, reader in READERS.items())
    where = visible(spec, 200)
    problem = report.why_nothing()
    if format_name is not None:
        return f"{where} holds no trajectory of format {format_name}: {problem or 'it is empty'}"
    if report.unknown_keys and len(report.skipped) == report.reasons["rows of no known format"]:
        return f"{where} has no known format: the keys are {report.unknown_keys}; known are {known}"
    return f"{where} holds no usable trajectory: {problem or 'it is empty'}"
