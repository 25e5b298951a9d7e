"""Reports on agent sessions: tables, CSV files, a figure a k, and the page."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fathom_eval.console import csv_safe, printable
from fathom_eval.errors import UserError
from fathom_eval.reports.cells import MINIMUM_PAIRS, Comparison
from fathom_eval.reports.narrative import Remark, count, join, number, signed
from fathom_eval.reports.session_cells import Pair, Role, SessionCell, Step, compute_session_cells, read_steps
from fathom_eval.reports.source import fact
from fathom_eval.reports.tables import results_csv
from fathom_eval.run import Run, canonical_json, raise_file_error

if TYPE_CHECKING:
    from fathom_eval.reports.build import ReportFiles

LEGEND = (
    "agreement: word-level ratio with the step of exact top-k at the same k, mean over sessions ± standard error; "
    "▼ below and ▲ above the baseline by a paired 95 % interval; alone: the same branch once more in its own batch, compared with itself"
)
# fmt: off
STEP_COLUMNS = (
    "run", "sample", "session_id", "repo", "prompt_tokens", "k", "label", "method", "options", "method_version", "family", "control",
    "agreement_exact", "agreement_dense", "agreement_recorded", "dense_agreement_exact", "exact_match", "first_divergent_token", "finish",
    "error", "tool_call", "recorded_tool_call", "new_tokens", "bits", "declared_bits", "active_channels", "rows", "candidate_rows", "fired",
    "steps", "seconds", "prefill_seconds", "memory", "sources", "generation", "recorded_step",
)
# fmt: on


@dataclass(frozen=True)
class SessionSource:
    """One run of sessions as a report sees it. ``name`` tells it from the other runs of the same report."""

    name: str
    run: Run
    steps: Sequence[Step]
    notes: Sequence[str]

    @cached_property
    def _computed(self) -> tuple[list[SessionCell], list[Pair]]:
        return compute_session_cells(self.steps, self.baseline)

    @property
    def cells(self) -> list[SessionCell]:
        """One cell a k and method."""
        return self._computed[0]

    @property
    def pairs(self) -> list[Pair]:
        """Every two methods at each k."""
        return self._computed[1]

    @cached_property
    def baseline(self) -> str | None:
        """Label of the method that the others are compared with: what the run's last start names, if it is measured."""
        starts = self.run.manifest.get("invocations") or [self.run.manifest]
        named = fact(starts[-1], "baseline") if isinstance(starts[-1], Mapping) else ""
        scans = [step.method.label for step in self.steps if step.method.role is Role.SCAN]
        return named if named in scans else next(iter(scans), None)

    @property
    def k_values(self) -> list[int | None]:
        """The k, ascending; None alone where a run has dense attention only."""
        return list(dict.fromkeys(cell.k for cell in self.cells))

    @property
    def sessions(self) -> int:
        """Sessions with records."""
        return len({step.session for step in self.steps})

    @property
    def trajectories(self) -> str:
        """The name of the set of trajectories."""
        return fact(self.run.manifest, "trajectories") or "an unnamed set"

    @property
    def scripted(self) -> bool:
        """Whether the trajectories are those of the built-in scripted agent."""
        named = self.run.manifest.get("trajectories")
        return isinstance(named, Mapping) and bool(named.get("scripted"))


def load_session_sources(paths: Sequence[Path]) -> list[SessionSource]:
    """Load the runs, each once. Raises UserError where one is missing, not of sessions, or without records."""
    unique = list({path.resolve(): path for path in paths}.values())
    sources = []
    for path in unique:
        run = Run.load(path)
        if not len(run):
            raise UserError(f"{path} has no records yet: run 'fathom-eval sessions … --output {path}' to fill it")
        same_name = [other for other in unique if other.resolve().name == path.resolve().name]
        sources.append(session_source(run, printable(path.resolve().name if len(same_name) == 1 else path)))
    return sources


def session_source(run: Run, name: str) -> SessionSource:
    """A run that has records. Raises UserError for records of another kind."""
    try:
        steps, notes = read_steps(run.iter_records())
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{run.path} holds a record that is not one of kind 'sessions': {type(error).__name__}: {error}") from error
    return SessionSource(name, run, steps, notes)


def build_sessions_report(run_paths: Sequence[Path], output: Path) -> ReportFiles:
    """Write the report of one run of sessions, or of several side by side, into the folder ``output``.

    The overview file holds every pair of methods, the samples file a row a step.

    Raises:
        UserError: see :func:`load_session_sources`; or ``output`` cannot be written.
    """
    from fathom_eval.reports.build import ReportFiles
    from fathom_eval.reports.session_figures import draw_sessions
    from fathom_eval.reports.session_page import render_sessions

    sources = load_session_sources(run_paths)
    drawings = draw_sessions(sources)
    files = ReportFiles(
        html=output / "report.html",
        csv=output / "results.csv",
        overview_csv=output / "paired.csv",
        samples_csv=output / "steps.csv",
        markdown=output / "results.md",
        figures=tuple(
            output / "figures" / f"{drawing.name}.{ending}"
            for source in sources
            for drawing in drawings[source.name]
            for ending in ("svg", "png")
        ),
        warnings=tuple(f"{source.name}: {problem}" for source in sources for problem in source.run.problems),
    )
    page = render_sessions(sources, drawings)
    try:
        (output / "figures").mkdir(parents=True, exist_ok=True)
        for source in sources:
            for drawing in drawings[source.name]:
                (output / "figures" / f"{drawing.name}.svg").write_text(drawing.svg, encoding="utf-8")
                (output / "figures" / f"{drawing.name}.png").write_bytes(drawing.png)
        files.csv.write_text(results_csv([_results(source) for source in sources]), encoding="utf-8")
        files.overview_csv.write_text(results_csv([_paired(source) for source in sources]), encoding="utf-8")
        _write_steps_csv(files.samples_csv, sources)
        files.markdown.write_text(_markdown(sources), encoding="utf-8")
        files.html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise_file_error(output, "write", error)
    return files


def summary_table(run: Run) -> pd.DataFrame:
    """The table that the ``sessions`` command prints at its end: texts, to two decimals so that a terminal holds them."""
    source = session_source(run, run.path.name)
    frame = _table(source, source.cells, digits=2)
    if len(source.k_values) == 1:
        frame = frame.drop(columns="k")
    frame.attrs["note"] = "\n".join([LEGEND, *(f"{'warning' if one.grave else 'note'}: {one.text}" for one in session_remarks(source))])
    return frame


def mark(cell: SessionCell) -> str:
    """The sign that stands beside an agreement; readable without colour."""
    found = cell.against_baseline
    return "" if found is None else "▼" if found.below else "▲" if found.above else ""


def difference(found: Comparison | None, digits: int = 3) -> str:
    """A paired difference with its interval."""
    if found is None:
        return ""
    mean = signed(found.mean, digits)
    # The interval of a single pair is no number.
    return mean if found.low != found.low else f"{mean} [{signed(found.low, digits)}, {signed(found.high, digits)}]"


def session_remarks(source: SessionSource) -> list[Remark]:
    """What limits the numbers."""
    found = []
    if source.scripted:
        text = "The trajectories are scripted: no model wrote the recorded steps. They show how the command works, not how methods do."
        found.append(Remark(text, grave=True))
    floor = [f"{cell.method.label} {number(cell.agreement)}" for cell in source.cells if cell.method.role is Role.NOISE and cell.agreement]
    if floor:
        text = f"Noise floor, agreement of a branch with itself in another batch: {join(list(dict.fromkeys(floor)))}."
        found.append(Remark(text))
    if source.sessions < MINIMUM_PAIRS:
        found.append(Remark(f"{count(source.sessions, 'session')}: fewer than {MINIMUM_PAIRS} separate no two methods."))
    failed = sum(step.failed for step in source.steps)
    if failed:
        found.append(Remark(f"{count(failed, 'step')} failed and are in no mean; steps.csv names them.", grave=True))
    gaps = [f"{cell.method.label} ({cell.sessions + cell.failures} of {cell.expected})" for cell in source.cells if is_incomplete(cell)]
    if gaps:
        found.append(Remark(f"Not every session is measured: {join(list(dict.fromkeys(gaps)))}. Comparisons use shared sessions only."))
    if source.run.problems:
        found.append(Remark(f"{count(len(source.run.problems), 'damaged line')} of the records skipped.", grave=True))
    return found + [Remark(f"{note}.") for note in source.notes]


def is_incomplete(cell: SessionCell) -> bool:
    """Whether a method lacks sessions that the run has."""
    return cell.k is not None and cell.sessions + cell.failures < cell.expected


def _table(source: SessionSource, cells: Sequence[SessionCell], digits: int) -> pd.DataFrame:
    against = f"minus {source.baseline}" if source.baseline else "difference"
    rows = []
    for cell in cells:
        found = cell.against_baseline
        error = "" if cell.standard_error is None else f" ± {number(cell.standard_error, digits)}"
        rows.append(
            {
                "k": "" if cell.k is None else f"{cell.k:,}",
                "method": cell.method.label,
                "bits": "" if cell.bits is None else number(cell.bits, 1),
                "agreement": f"{number(cell.agreement, digits)}{error} {mark(cell)}".rstrip(),
                against: difference(found, digits),
                "w/t/l": "" if found is None else f"{found.wins}/{found.ties}/{found.losses}",
                "exact match": number(cell.exact_match, digits),
                "first difference": number(cell.first_divergence, 0),
                "with dense": number(cell.agreement_dense, digits),
                "with recorded": number(cell.agreement_recorded, digits),
                "valid calls": number(cell.valid_calls, digits),
            }
        )
    return pd.DataFrame(rows)


def _results(source: SessionSource) -> pd.DataFrame:
    """One row a cell, numbers unrounded."""
    rows = []
    for cell in source.cells:
        found = cell.against_baseline
        rows.append(
            {
                "run": source.name,
                "k": cell.k,
                "method": cell.method.label,
                "family": cell.method.family,
                "role": cell.method.role.value,
                "sessions": cell.sessions,
                "agreement": cell.agreement,
                "standard_error": cell.standard_error,
                "baseline": source.baseline,
                **_comparison_columns(found),
                "exact_match": cell.exact_match,
                "first_divergent_token": cell.first_divergence,
                "agreement_dense": cell.agreement_dense,
                "agreement_recorded": cell.agreement_recorded,
                "valid_tool_calls": cell.valid_calls,
                "bits": cell.bits,
                "rows": cell.rows,
                "failures": cell.failures,
                "expected_sessions": cell.expected,
            }
        )
    return pd.DataFrame(rows)


def _paired(source: SessionSource) -> pd.DataFrame:
    """One row for every two methods at each k."""
    names = ["run", "k", "method", "other", *_comparison_columns(None)]
    rows = [
        {
            "run": source.name,
            "k": pair.k,
            "method": pair.method.label,
            "other": pair.other.label,
            **_comparison_columns(pair.comparison),
        }
        for pair in source.pairs
    ]
    return pd.DataFrame(rows, columns=names)


def _comparison_columns(found: Comparison | None) -> dict[str, Any]:
    return {
        "pairs": found.pairs if found else None,
        "difference": found.mean if found else None,
        "difference_low": found.low if found else None,
        "difference_high": found.high if found else None,
        "wins": found.wins if found else None,
        "ties": found.ties if found else None,
        "losses": found.losses if found else None,
    }


def _write_steps_csv(path: Path, sources: Sequence[SessionSource]) -> None:
    with path.open("w", encoding="utf-8", newline="") as handle:
        writer = csv.writer(handle, lineterminator="\n")
        writer.writerow(STEP_COLUMNS)
        for source in sources:
            for record in source.run.iter_records():
                writer.writerow([_csv_cell({"run": source.name, **record}.get(name)) for name in STEP_COLUMNS])


def _csv_cell(value: object) -> object:
    if value is None or isinstance(value, (int, float)):
        return value
    return csv_safe(value if isinstance(value, str) else canonical_json(value))


def subject(source: SessionSource) -> str:
    """What was compared."""
    scans = {cell.method for cell in source.cells if cell.method.role is Role.SCAN}
    device = fact(source.run.manifest, "device")
    model = fact(source.run.manifest, "model") or "an unnamed model"
    tokens = re.sub(r"\d+", lambda found: f"{int(found[0]):,}", fact(source.run.manifest, "session_tokens").replace(":", " to "))
    length = f" of {tokens} tokens" if tokens else ""
    return (
        f"{count(len(scans), 'scan')} of {model}{f' on {device}' if device else ''}: the agent's next step in "
        f"{count(source.sessions, 'session')}{length} made of {source.trajectories} trajectories, compared with the step of exact top-k "
        "at the same k."
    )


def _markdown(sources: Sequence[SessionSource]) -> str:
    from fathom_eval.reports.tables import markdown_safe, markdown_table

    lines = ["# Agent sessions", ""]
    for source in sources:
        lines += [f"## Run {markdown_safe(source.name)}", "", markdown_safe(subject(source)), ""]
        lines += [f"- {'**Warning:**' if one.grave else 'Note:'} {markdown_safe(one.text)}" for one in session_remarks(source)]
        for k in source.k_values:
            frame = _table(source, [cell for cell in source.cells if cell.k == k], digits=3).drop(columns="k")
            lines += ["", f"### k = {k:,}" if k is not None else "### dense", "", *markdown_table(frame)]
        lines += ["", f"{LEGEND}.", ""]
    return "\n".join(lines)
