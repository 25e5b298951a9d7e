"""``fathom-eval report``: tables, figures and a page from the records of one run or of several."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fathom_eval.errors import UserError

if TYPE_CHECKING:
    from fathom_eval.console import Console

HELP = "Write tables, figures and one self-contained HTML page from recorded runs."
EXAMPLE = "fathom-eval report runs/first --output reports/first"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run directory; several are shown side by side, never averaged")
    parser.add_argument("--output", "--output-path", type=Path, metavar="DIR", help="where to write (default: RUN/report, for one run)")
    parser.add_argument("--output_path", dest="output", type=Path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the paths as one JSON document")
    parser.add_argument("--quiet", action="store_true", help="print only the path of the page")


def run(args: argparse.Namespace) -> int:
    """Write the report and print where it is."""
    from fathom_eval.console import Console

    console = Console(quiet=args.quiet, json=args.json)
    runs: list[Path] = args.runs
    output: Path | None = args.output
    if output is None:
        if len({path.resolve() for path in runs}) > 1:
            raise UserError("several runs have no folder of their own for a common report: give one with --output DIR")
        output = runs[0] / "report"
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file: --output takes a folder")

    from fathom_eval.run import Run

    if len(runs) == 1 and Run.load(runs[0]).manifest.get("kind") == "fidelity":
        return _report_fidelity(console, runs[0], output)
    from fathom_eval.reports.build import build_report

    files = build_report(runs, output)
    for warning in files.warnings:
        console.warn(warning)
    console.document(
        {
            "html": str(files.html),
            "csv": str(files.csv),
            "overview_csv": str(files.overview_csv),
            "samples_csv": str(files.samples_csv),
            "markdown": str(files.markdown),
            "figures": [str(path) for path in files.figures],
            "warnings": list(files.warnings),
        }
    )
    if not args.json:
        console.result(files.html, "page")
        console.say(f"table: {files.csv}")
        console.say(f"overview: {files.overview_csv}")
        console.say(f"samples: {files.samples_csv}")
        console.say(f"figures: {len(files.figures)} files in {files.html.parent / 'figures'}")
    return 0


def _report_fidelity(console: Console, run_path: Path, output: Path) -> int:
    """A fidelity run has tables and a figure, and no page yet."""
    from fathom_eval.reports.fidelity import build_fidelity_report

    files = build_fidelity_report(run_path, output)
    figures = [str(path) for path in files.figures]
    console.document({"csv": str(files.csv), "pairs_csv": str(files.pairs_csv), "figures": figures})
    if not console.json:
        console.result(files.csv, "table")
        console.say(f"pairs: {files.pairs_csv}")
        for figure in figures:
            console.say(f"figure: {figure}")
    return 0
