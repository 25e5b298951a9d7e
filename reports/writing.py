"""The files of a report: tables as CSV, Markdown and LaTeX, figures, the page, and the list that tells its own files from others'."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import re
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path, PurePosixPath

from fathom_eval.console import csv_safe, printable
from fathom_eval.reports.document import Document, Entry, Table
from fathom_eval.reports.output import LIST

_LATEX = {
    "\\": r"\textbackslash{}", "{": r"\{", "}": r"\}", "$": r"\$", "&": r"\&", "#": r"\#", "_": r"\_", "%": r"\%",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}", "±": r"$\pm$", "−": "$-$", "▼": r"$\downarrow$", "▲": r"$\uparrow$", "≈": r"$\approx$", "≡": r"$\equiv$",
    "×": r"$\times$", "÷": r"$\div$", "∪": r"$\cup$", "–": "--", "…": r"\ldots{}", "‖": r"$\|$", "√": r"$\surd$",
}  # fmt: skip


def table_csv(table: Table) -> str:
    """The table with unrounded numbers; standard errors and interval bounds get columns of their own."""
    extras = [
        [name for name in ("error", "low", "high") if any(getattr(row.entries[index], name) is not None for row in table.rows)]
        for index in range(len(table.columns))
    ]
    endings = {"error": "standard error", "low": "low", "high": "high"}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    header = []
    for column, names in zip(table.columns, extras, strict=True):
        title = " ".join(part for part in (column.title, column.small if re.search(r"\d", column.small) else "") if part)
        header += [csv_safe(title), *(csv_safe(f"{title} {endings[name]}") for name in names)]
    writer.writerow(header)
    for row in table.rows:
        line: list[object] = []
        for entry, names in zip(row.entries, extras, strict=True):
            line += [_csv_value(entry), *(getattr(entry, name) for name in names)]
        writer.writerow(line)
    return text.getvalue()


def missing_csv(document: Document) -> str:
    """What every run lacks, the worst first; numbers of the missing samples in the last column."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("run", "method", "methods", "task", "context", "k", "present", "expected", "missing", "missing_samples"))
    for section in document.sections:
        for gap in section.missing:
            place = (gap.task, gap.context, gap.k, gap.present, gap.expected, len(gap.missing), " ".join(map(str, gap.missing)))
            writer.writerow([csv_safe(one) if isinstance(one, str) else one for one in (section.name, gap.label, gap.methods, *place)])
    return text.getvalue()


def _csv_value(entry: Entry) -> object:
    if entry.value is None:
        return csv_safe("" if entry.text == "–" else entry.text)
    return csv_safe(entry.value) if isinstance(entry.value, str) else entry.value


def markdown(document: Document) -> str:
    """The report's text and tables as Markdown."""
    lines = ["# Results", ""]
    lines += [f"**Not in this report:** {markdown_safe(problem)}." for problem in document.left_out]
    for section in document.sections:
        lines += [f"## Run {markdown_safe(section.name)}", "", markdown_safe(f"{section.subject} {section.answer}".strip()), ""]
        lines += [f"- {'**Warning:**' if remark.grave else 'Note:'} {markdown_safe(remark.text)}" for remark in section.remarks]
        for block in section.blocks:
            lines += _markdown_block(block.title, block.text, [item for item in block.items if isinstance(item, Table)])
        if section.missing:
            lines += ["", "### What is missing", "", *(f"- {markdown_safe(str(gap))}" for gap in section.missing)]
    for block in document.shared:
        lines += ["", f"## {markdown_safe(block.title)}", "", markdown_safe(block.text)]
        for table in (item for item in block.items if isinstance(item, Table)):
            lines += ["", f"#### {markdown_safe(table.title)}", *_markdown_table(table)]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines).rstrip()) + "\n"


def _markdown_block(title: str, text: str, tables: Sequence[Table]) -> list[str]:
    if not tables:
        return []
    lines = ["", f"### {markdown_safe(title)}", "", markdown_safe(text)]
    for index, table in enumerate(tables):
        lines += ["", f"#### {markdown_safe(table.title)}"] if index or table.collapsed else []
        lines += _markdown_table(table)
    return lines


def _markdown_table(table: Table) -> list[str]:
    """The table between what must be known before it and where its numbers come from."""
    caution = ["", f"**Warning:** {markdown_safe(table.caution)}"] if table.caution else []
    return [*caution, "", *markdown_table(table), "", markdown_safe(_below(table))]


def _below(table: Table) -> str:
    return "; ".join(part for part in (table.legend, table.origin) if part) + "."


def markdown_table(table: Table) -> list[str]:
    """Header, rule and rows."""
    header = [markdown_safe(_heading(column.title, column.small)) for column in table.columns]
    rules = ["---" if column.text or index == 0 else "---:" for index, column in enumerate(table.columns)]
    rows = [[markdown_safe(entry.text) for entry in row.entries] for row in table.rows]
    return [f"| {' | '.join(cells)} |" for cells in (header, rules, *rows)]


def _heading(title: str, small: str) -> str:
    """The second line of a heading counts where it tells columns apart, as depths and units of time do."""
    return f"{title} {small}" if small and re.search(r"\d", small) else title


def markdown_safe(text: object) -> str:
    """Text that Markdown shows as it is."""
    string = printable(text).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    string = re.sub(r"([\\`*\[\]|#~])", r"\\\1", string)
    # Within a word an underscore is plain text, and task names are full of them.
    return re.sub(r"(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])", r"\\_", string)


def latex(document: Document) -> str:
    """Every table as a LaTeX ``table`` with ``booktabs`` rules, ready to be cut out."""
    head = "% \\usepackage{booktabs}, \\usepackage{longtable}; compile with a Unicode-aware engine or with \\usepackage[utf8]{inputenc}"
    return "\n\n".join([head, *(latex_table(table) for table in document.tables)]) + "\n"


def latex_table(table: Table) -> str:
    """One table; ``longtable``, since it may not fit a page."""
    columns = "".join("l" if column.text or index == 0 else "r" for index, column in enumerate(table.columns))
    header = _latex_row([_heading(column.title, column.small) for column in table.columns])
    caption = " ".join(part for part in (f"{table.title}. {table.origin}.", table.caution) if part)
    lines = [f"\\begin{{longtable}}{{{columns}}}", f"\\caption{{{latex_safe(caption)}}}"]
    lines += [f"\\label{{tab:{re.sub(r'[^A-Za-z0-9-]', '-', table.name)}}}\\\\", "\\toprule", f"{header} \\\\", "\\midrule", "\\endhead"]
    lines += [_latex_row([entry.text for entry in row.entries]) + " \\\\" for row in table.rows]
    return "\n".join([*lines, "\\bottomrule", "\\end{longtable}"])


def _latex_row(texts: Sequence[str]) -> str:
    row = " & ".join(map(latex_safe, texts)).lstrip()
    # After the end of a row or a rule, LaTeX takes a bracket for the space to leave and a star for a page that must not break.
    return f"{{{row[0]}}}{row[1:]}" if row.startswith(("[", "*")) else row


def latex_safe(text: object) -> str:
    """Text that LaTeX sets as it is."""
    return "".join(_LATEX.get(character, character) for character in printable(text))


class Folder:
    """An output folder that is written file by file; :meth:`finish` removes what an earlier report left there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._written: dict[str, str] = {}
        self._before = _earlier(path)
        path.mkdir(parents=True, exist_ok=True)
        # First, so that a report that is cut off can be made anew: without a list its files pass for somebody else's.
        self._list(self._before)

    def write(self, name: str, content: str | bytes) -> Path:
        """Write one file, ``name`` relative to the folder."""
        return self.fill(name, lambda path: path.write_bytes(content.encode() if isinstance(content, str) else content))

    def fill(self, name: str, write: Callable[[Path], object]) -> Path:
        """Let ``write`` make the file."""
        file = self.path / name
        file.parent.mkdir(parents=True, exist_ok=True)
        write(file)
        self._written[name] = hashlib.sha256(file.read_bytes()).hexdigest()
        return file

    def fill_all(self, name: str, writers: Sequence[Callable[[Path], object]]) -> Path:
        """Let several write one CSV file: the rows of each below those of the one before, under one header that has every column."""
        if len(writers) == 1:
            return self.fill(name, writers[0])

        def write(path: Path) -> None:
            with tempfile.TemporaryDirectory() as folder, path.open("wb") as target:
                parts = [Path(folder) / f"{index}.csv" for index in range(len(writers))]
                for writer, part in zip(writers, parts, strict=True):
                    writer(part)
                # A run without rows may have no columns either.
                parts = [part for part in parts if _header(part).strip()] or parts[:1]
                if len({_header(part) for part in parts}) > 1:
                    target.write(_joined(parts))
                    return
                target.write(_header(parts[0]))
                for part in parts:
                    with part.open("rb") as source:
                        source.readline()
                        target.writelines(source)

        return self.fill(name, write)

    def finish(self) -> Path:
        """Write the list, and remove files of an earlier report that were not written again and that nobody changed since."""
        for name, digest in self._before.items():
            file = self.path / name
            if name not in self._written and file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == digest:
                file.unlink()
                if not any(file.parent.iterdir()):
                    file.parent.rmdir()
        return self._list(self._written)

    def _list(self, files: Mapping[str, str]) -> Path:
        listed = self.path / LIST
        listed.write_text(json.dumps({"report": files}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        return listed


def _header(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.readline()


def _joined(parts: Sequence[Path]) -> bytes:
    """CSV files with other columns as one, every value as it is written."""
    import pandas as pd

    frames = [pd.read_csv(part, dtype=str, keep_default_na=False, na_filter=False, lineterminator="\n") for part in parts]
    return str(pd.concat(frames, ignore_index=True).fillna("").to_csv(index=False, lineterminator="\n")).encode()


def _earlier(path: Path) -> dict[str, str]:
    """What the list in the folder names; nothing where it is missing, damaged, or leads out of the folder."""
    try:
        listed = json.loads((path / LIST).read_bytes())["report"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return {}
    if not isinstance(listed, dict):
        return {}
    return {
        name: digest
        for name, digest in listed.items()
        if isinstance(digest, str) and not PurePosixPath(name).is_absolute() and ".." not in PurePosixPath(name).parts
    }
