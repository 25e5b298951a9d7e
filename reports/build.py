"""From run directories to the files of a report, by one call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from fathom_eval.errors import UserError
from fathom_eval.reports.figures import draw
from fathom_eval.reports.page import render
from fathom_eval.reports.source import load_sources, report_kind
from fathom_eval.reports.tables import markdown, results_csv, results_frame, write_samples_csv
from fathom_eval.run import raise_file_error


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report; those of agent sessions are named in :func:`fathom_eval.reports.sessions.build_sessions_report`.

    Attributes:
        html: the page; it stands alone and asks for nothing.
        csv: one row a task, context, k and method.
        overview_csv: one row a context, k and method over all discriminative tasks.
        samples_csv: one row a record.
        markdown: text and tables.
        figures: an SVG and a PNG a figure.
        warnings: what a reader should know, one line each.
    """

    html: Path
    csv: Path
    overview_csv: Path
    samples_csv: Path
    markdown: Path
    figures: tuple[Path, ...]
    warnings: tuple[str, ...]


def build_report(run_paths: Sequence[Path], output: Path) -> ReportFiles:
    """Write the report of one run, or of several side by side, into the folder ``output``. Files of the same names there are replaced.

    Raises:
        UserError: a run is missing, empty, of a newer schema or without records, or ``output`` cannot be written.
    """
    if not run_paths:
        raise UserError("a report needs at least one run directory")
    if report_kind(run_paths) == "sessions":
        from fathom_eval.reports.sessions import build_sessions_report

        return build_sessions_report(run_paths, output)
    sources = load_sources(run_paths)
    drawings = draw(sources)
    files = ReportFiles(
        html=output / "report.html",
        csv=output / "results.csv",
        overview_csv=output / "overview.csv",
        samples_csv=output / "samples.csv",
        markdown=output / "results.md",
        figures=tuple(
            output / "figures" / f"{drawing.name}.{ending}"
            for source in sources
            for drawing in drawings[source.name]
            for ending in ("svg", "png")
        ),
        warnings=tuple(f"{source.name}: {problem}" for source in sources for problem in source.run.problems),
    )
    page = render(sources, drawings)
    try:
        (output / "figures").mkdir(parents=True, exist_ok=True)
        for source in sources:
            for drawing in drawings[source.name]:
                (output / "figures" / f"{drawing.name}.svg").write_text(drawing.svg, encoding="utf-8")
                (output / "figures" / f"{drawing.name}.png").write_bytes(drawing.png)
        files.csv.write_text(results_csv([results_frame(source, source.cells) for source in sources]), encoding="utf-8")
        files.overview_csv.write_text(results_csv([results_frame(source, source.overview) for source in sources]), encoding="utf-8")
        write_samples_csv(files.samples_csv, sources)
        files.markdown.write_text(markdown(sources), encoding="utf-8")
        files.html.write_text(page, encoding="utf-8")
    except OSError as error:
        raise_file_error(output, "write", error)
    return files
