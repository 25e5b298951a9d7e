"""From run directories to the files of a report, by one call."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from fathom_eval.errors import UserError
from fathom_eval.reports.canvas import Style, family_styles
from fathom_eval.reports.cells import Role
from fathom_eval.reports.comparing import comparison_blocks
from fathom_eval.reports.document import Block, Document, Section, Steps, renamed
from fathom_eval.reports.fidelity_section import fidelity_section
from fathom_eval.reports.fidelity_source import fidelity_source
from fathom_eval.reports.gaps import NOUNS, half_remarks, unrecorded_words
from fathom_eval.reports.loading import Loaded, load_runs
from fathom_eval.reports.output import LATEX, MARKDOWN, PAGE, check_output
from fathom_eval.reports.page import render
from fathom_eval.reports.paper import paper_blocks
from fathom_eval.reports.ruler import ruler_section
from fathom_eval.reports.ruler_source import ruler_source
from fathom_eval.reports.session_cells import Role as SessionRole
from fathom_eval.reports.session_source import load_session_source
from fathom_eval.reports.sessions import session_section
from fathom_eval.reports.timing_section import timing_section
from fathom_eval.reports.timing_source import timing_source
from fathom_eval.reports.writing import Folder, latex, markdown, missing_csv, table_csv
from fathom_eval.run_files import raise_file_error

TITLES = {
    "ruler": "Key scans against dense attention and exact top-k",
    "sessions": "Agent sessions: the next step under each key scan",
    "fidelity": "The error of attention outputs over the bits that scans read",
    "timing": "The time of decode steps and kernels",
}

Build = Callable[[str, dict[str, Style]], Section]


@dataclass(frozen=True)
class ReportFiles:
    """The files of a report.

    Attributes:
        html: The page; it stands alone and asks for nothing.
        csv: The main results, unrounded.
        data: All files of unrounded results and records, ``csv`` among them.
        tables: Every table of the page as CSV.
        markdown, latex: Text and tables.
        figures: An SVG and a PNG a figure.
        list: Names of all these, so that a later report knows them.
        warnings: What a reader should know, one line each.
    """

    html: Path
    csv: Path
    data: tuple[Path, ...]
    tables: tuple[Path, ...]
    markdown: Path
    latex: Path
    figures: tuple[Path, ...]
    list: Path
    warnings: tuple[str, ...]


def build_report(run_paths: Sequence[Path], output: Path, *, protect: bool = False) -> ReportFiles:
    """Write the report of one run, or of several side by side, into the folder ``output``.

    Runs may be of different kinds. Files that an earlier report left in the folder are replaced or removed.

    Args:
        protect: Refuse a folder in which files that no report wrote would be replaced; see :mod:`fathom_eval.reports.output`.

    Raises:
        UserError: Not one of the runs is there, of a known kind and schema, and with records; or ``output`` cannot be written.
    """
    if not run_paths:
        raise UserError("a report needs at least one run directory")
    with ExitStack() as stack:
        loaded, left_out = load_runs(run_paths, stack)
        document, more = build_document(loaded, left_out)
        warnings = [*more, *(f"{section.name}: {line}" for section in document.sections for line in section.warnings)]
        warnings += [f"{one.name}: {problem}" for one in loaded for problem in one.records.problems]
        for one in loaded:
            warnings += [f"{one.name}: {words}" for words in [unrecorded_words(one.unrecorded)] if words]
            warnings += [f"{one.name}: {remark.text}" for remark in half_remarks([], one.records.torn, NOUNS.get(one.kind, "record"))]
        try:
            return _write(document, output, tuple(warnings), run_paths if protect else None)
        except OSError as error:
            raise_file_error(output, "write", error)


def build_document(loaded: Sequence[Loaded], left_out: Sequence[str]) -> tuple[Document, list[str]]:
    """The report of loaded runs, and what could not be reported. Raises UserError where nothing could."""
    builders: list[Build] = []
    families: list[str] = []
    lacking: list[str] = []
    errors: list[str] = []
    for one in loaded:
        try:
            build, own = _builder(one)
        except UserError as error:
            errors.append(str(error))
            continue
        builders.append(build)
        lacking.append(unrecorded_words(one.unrecorded))
        families += own
    if not builders:
        raise UserError("; ".join([*left_out, *errors]))
    styles = family_styles(families)
    sections = [build(f"run-{index}", styles) for index, build in enumerate(builders, start=1)]
    sections = [
        replace(section, answer=" ".join(part for part in (words, section.answer) if part))
        for words, section in zip(lacking, sections, strict=True)
    ]
    if len(sections) > 1:
        sections = [_told_apart(section, f"run{index}-") for index, section in enumerate(sections, start=1)]
    shared = [*(comparison_blocks(sections) if len(sections) > 1 else []), *paper_blocks(sections)]
    kinds = list(dict.fromkeys(section.kind for section in sections))
    title = TITLES[kinds[0]] if len(kinds) == 1 else "Key scans: what was measured"
    problems = [*left_out, *errors]
    return Document(title, sections, shared, problems), problems


def _builder(one: Loaded) -> tuple[Build, list[str]]:
    """What makes the section of a run, and the families that its figures show."""
    if one.kind == "ruler":
        ruler = ruler_source(one)
        families = [cell.method.family for cell in ruler.cells if cell.method.role is Role.SCAN]
        return lambda anchor, styles: ruler_section(ruler, anchor, styles), families
    if one.kind == "sessions":
        sessions = load_session_source(one)
        families = [cell.method.family for cell in sessions.cells if cell.method.role is SessionRole.SCAN]
        return lambda anchor, styles: session_section(sessions, anchor, styles), families
    if one.kind == "fidelity":
        fidelity = fidelity_source(one)
        return lambda anchor, styles: fidelity_section(fidelity, anchor, styles), fidelity.families
    timing = timing_source(one)
    return lambda anchor, styles: timing_section(timing, anchor, styles), timing.families


def _told_apart(section: Section, prefix: str) -> Section:
    """The section with file names that no other run of the report has."""

    def own(block: Block) -> Block:
        return replace(block, items=[item if isinstance(item, Steps) else renamed(item, prefix) for item in block.items])

    return replace(section, blocks=[own(block) for block in section.blocks])


def _write(document: Document, output: Path, warnings: tuple[str, ...], protected: Sequence[Path] | None) -> ReportFiles:
    writers: dict[str, list[Callable[[Path], None]]] = defaultdict(list)
    mixed = len({section.kind for section in document.sections}) > 1
    for section in document.sections:
        for name, writer in section.data.items():
            writers[f"{section.kind}-{name}" if mixed else name].append(writer)
    names = list(writers)
    missing = any(section.missing for section in document.sections)
    figure_files = {
        f"figures/{drawing.name}.{ending}": content
        for drawing in document.drawings
        for ending, content in (("svg", drawing.svg), ("png", drawing.png))
    }
    if protected is not None:
        tables_of = [f"tables/{table.name}.csv" for table in document.tables]
        check_output(output, protected, [PAGE, MARKDOWN, LATEX, *names, *(["missing.csv"] if missing else []), *tables_of, *figure_files])
    page = render(document, [*names, *(["missing.csv"] if missing else [])])
    folder = Folder(output)
    data = [folder.fill_all(name, found) for name, found in writers.items()]
    if missing:
        data.append(folder.write("missing.csv", missing_csv(document)))
    tables = [folder.write(f"tables/{table.name}.csv", table_csv(table)) for table in document.tables]
    figures = [folder.write(name, content) for name, content in figure_files.items()]
    return ReportFiles(
        html=folder.write(PAGE, page),
        csv=data[0],
        data=tuple(data),
        tables=tuple(tables),
        markdown=folder.write(MARKDOWN, markdown(document)),
        latex=folder.write(LATEX, latex(document)),
        figures=tuple(figures),
        list=folder.finish(),
        warnings=warnings,
    )
