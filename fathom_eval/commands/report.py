"""``fathom-eval report``: tables, figures and a page from the records of one run or of several."""

from __future__ import annotations

import argparse
from pathlib import Path

from fathom_eval.errors import UserError

HELP = "Write tables, figures and one self-contained HTML page from recorded runs."
EXAMPLE = "fathom-eval report runs/first runs/second --output reports/both"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument(
        "runs", nargs="+", type=_path, metavar="RUN", help="run directory of any kind; several are shown side by side, never averaged"
    )
    parser.add_argument("--output", "--output-path", type=_path, metavar="DIR", help="where to write (default: RUN/report, for one run)")
    parser.add_argument("--output_path", dest="output", type=_path, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true", help="print the paths as one JSON document")
    parser.add_argument("--quiet", action="store_true", help="print only the path of the page")


def _path(text: str) -> Path:
    if not text:
        raise UserError("the name of a folder is empty: give one such as runs/first")
    return Path(text)


def run(args: argparse.Namespace) -> int:
    """Write the report and print where it is."""
    from fathom_eval.console import Console
    from fathom_eval.reports.output import LATEX, MARKDOWN, PAGE, RESULTS, check_output
    from fathom_eval.run_files import check_can_be_made

    console = Console(quiet=args.quiet, json=args.json)
    runs: list[Path] = args.runs
    output: Path | None = args.output
    if output is None:
        if len({path.resolve() for path in runs}) > 1:
            raise UserError("several runs have no folder of their own for a common report: give one with --output DIR")
        if runs[0].is_file():
            raise UserError(f"{runs[0]} is a file, with no folder of its own for a report: give one with --output DIR")
        output = runs[0] / "report"
    check_can_be_made(output)
    if output.exists() and not output.is_dir():
        raise UserError(f"{output} is a file: --output takes a folder")
    # What every report writes; of all other files it is known when the records are read.
    check_output(output, runs, [PAGE, MARKDOWN, LATEX, *([RESULTS] if len(runs) == 1 else [])])

    from fathom_eval.reports.build import build_report

    files = build_report(runs, output, protect=True)
    for warning in files.warnings:
        console.warn(warning)
    console.document(
        {
            "html": str(files.html),
            "csv": str(files.csv),
            "data": [str(path) for path in files.data],
            "tables": [str(path) for path in files.tables],
            "markdown": str(files.markdown),
            "latex": str(files.latex),
            "figures": [str(path) for path in files.figures],
            "warnings": list(files.warnings),
        }
    )
    if not args.json:
        console.result(files.html, "page")
        for path in files.data:
            console.say(f"data: {path}")
        console.say(f"tables: {len(files.tables)} files in {files.html.parent / 'tables'}; {files.markdown.name}, {files.latex.name}")
        console.say(f"figures: {len(files.figures)} files in {files.html.parent / 'figures'}")
    return 0
