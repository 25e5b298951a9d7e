"""What a command prints: what it did and found on standard output, progress and warnings on standard error.

Rich bars and tables where a person watches; where output goes to a file, plain lines, and few of them. Text that a model, a plug-in or a
file produced passes through :func:`printable` before it reaches a terminal, a table or a page.
"""

from __future__ import annotations

import contextlib
import json as json_module
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterator
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas
    from rich.live import Live

PLAIN_INTERVAL_SECONDS, PLAIN_WORK_SECONDS = 10.0, 30.0
"""In a file, a line of progress follows another after so long at the earliest: when work is finished, and while it is under way."""
_REFRESHES_PER_SECOND = 1.0
_COLUMN_GAP = 3
# CSI sequences, terminated OSC/DCS/APC/PM strings, and two-character escapes; with ESC or the 8-bit form of the introducer.
_TERMINAL_ESCAPE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c\n]*(?:\x07|\x1b\\|\x9c)"
    r"|\x1b[ -/]*[0-Z\\^-~]"
)
# Joiners that scripts and emoji need; every other format character is shown by its number, since it can reorder or hide text.
_HARMLESS_FORMAT = frozenset("\u200c\u200d\u00ad")


def printable(text: object, *, newline: str = "\\n") -> str:
    r"""The text with nothing left that acts on a terminal or reorders what is read.

    Terminal escapes and control characters go; bidirectional marks and other invisible format characters show as ``[U+202E]``; lone
    surrogates become U+FFFD; a tab becomes a space and a line break ``newline`` (a visible ``\n`` unless told otherwise).
    """
    string = str(text)
    if string.isprintable():
        return string
    string = _TERMINAL_ESCAPE.sub("", string).replace("\r\n", "\n").replace("\t", " ")
    return "".join(_shown(character, newline) for character in string)


def _shown(character: str, newline: str) -> str:
    if character == "\n":
        return newline
    category = unicodedata.category(character)
    if category == "Cc":
        return ""
    if category == "Cs" or character in "\ufffe\uffff":
        return "\ufffd"
    if category in ("Zl", "Zp") or (category == "Cf" and character not in _HARMLESS_FORMAT):
        return f"[U+{ord(character):04X}]"
    return character


def csv_safe(text: object) -> str:
    """Printable text that no spreadsheet takes for a formula: a leading ``=``, ``+``, ``-`` or ``@`` is put behind an apostrophe."""
    string = printable(text)
    return f"'{string}" if string.lstrip()[:1] in tuple("=+-@\uff1d\uff0b\uff0d\uff20") else string


def shorten(text: object, limit: int) -> str:
    """Printable text of at most ``limit`` characters."""
    string = printable(str(text)[: 4 * limit])
    return string if len(string) <= limit else string[: limit - 1] + "…"


class Progress:
    """Count of finished work, and a note of what is under way. ``advance`` and ``tell`` take them; the console shows them.

    Args:
        show: Called after each change, with the seconds that a line in a file has to wait for after the last one.
    """

    def __init__(self, total: int, label: str, show: Callable[[Progress, float], None], clock: Callable[[], float]) -> None:
        self.total = total
        self.label = printable(label)
        self.done = 0
        self.note = ""
        self._show = show
        self._clock = clock
        self._start = self._advanced = clock()

    def advance(self, count: int = 1, note: str = "") -> None:
        """``count`` more units are done; ``note`` names what is at work."""
        if count:
            self.done += count
            self._advanced = self._clock()
        self.note = printable(note)
        self._show(self, PLAIN_INTERVAL_SECONDS)

    def tell(self, note: str) -> None:
        """What is under way within a unit. As often as is known: it is shown about once a second, in a file rarely."""
        self.note = printable(note)
        self._show(self, PLAIN_WORK_SECONDS)

    def status(self) -> str:
        """Rate and remaining time, as far as they are known: from what is finished, whatever is under way."""
        elapsed = self._advanced - self._start
        if self.done == 0 or elapsed <= 0:
            return ""
        rate = self.done / elapsed
        speed = f"{rate:.1f}/s" if rate >= 1 else f"{1 / rate:.1f} s each"
        if self.done >= self.total:
            return f"{speed}, {duration(elapsed)} in all"
        left = (self.total - self.done) / rate - (self._clock() - self._advanced)
        return f"{speed}, {duration(left)} left" if left > 0 else speed

    def line(self) -> str:
        """One plain line: label, count, rate, remaining time."""
        percent = f" ({100 * self.done // self.total} %)" if self.total else ""
        parts = (f"{self.label}: {self.done}/{self.total}{percent}", self.status(), self.note)
        return ", ".join(part for part in parts if part)


class Console:
    """Terminal output of one command.

    Args:
        quiet: print only result paths (:meth:`result`) and errors.
        json: print one JSON document (:meth:`document`) on standard output and everything else on standard error.
        clock: seconds, for the rate of progress.
    """

    def __init__(self, quiet: bool = False, json: bool = False, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.quiet = quiet
        self.json = json
        self._clock = clock
        self._live: Live | None = None

    def say(self, line: str) -> None:
        """A line for the reader; not under ``quiet``."""
        if not self.quiet:
            self._write(self._out(), line)

    def warn(self, line: str) -> None:
        """A warning, one line on standard error; not under ``quiet``."""
        if not self.quiet:
            self._write(sys.stderr, f"warning: {printable(line)}")

    def result(self, path: object, label: str = "") -> None:
        """The path of something written. Under ``quiet`` the path alone."""
        self._write(self._out(), f"{path}" if self.quiet or not label else f"{label}: {path}")

    def document(self, value: object) -> None:
        """The JSON document of the command; printed only under ``json``."""
        if self.json:
            print(json_module.dumps(value, indent=2, ensure_ascii=True), file=sys.stdout, flush=True)

    @contextlib.contextmanager
    def progress(self, total: int, label: str) -> Iterator[Progress]:
        """Show progress over ``total`` units: a bar on a terminal, with what is under way below it; else a few lines and one at the end.

        Lines come at most every 10 s, and every 30 s as long as no unit is finished.
        """
        if self.quiet:
            yield Progress(total, label, lambda progress, seconds: None, self._clock)
        elif sys.stderr.isatty():
            with self._bar(total, label) as progress:
                yield progress
        else:
            with self._lines(total, label) as progress:
                yield progress

    def table(self, frame: pandas.DataFrame, *, title: str = "", note: str = "") -> None:
        """A table: ruled on a terminal, aligned plain text elsewhere. Columns of numbers stand to the right.

        ``note`` goes below it; without one, ``frame.attrs["note"]`` does.
        """
        if self.quiet:
            return
        out = self._out()
        columns = [printable(column) for column in frame.columns]
        rows = [["" if value is None or value != value else printable(value) for value in row] for row in frame.itertuples(index=False)]
        right = [_all_numbers([row[index] for row in rows]) for index in range(len(columns))]
        if out.isatty():
            self._ruled(out, columns, rows, right, title)
        else:
            if title:
                self._write(out, title)
            widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)]
            for line in (columns, *rows):
                cells = zip(line, widths, right, strict=True)
                text = "  ".join(cell.rjust(width) if number else cell.ljust(width) for cell, width, number in cells)
                self._write(out, text.rstrip())
        note = note or str(frame.attrs.get("note", ""))
        if note:
            self._write(out, note)

    def _out(self) -> IO[str]:
        return sys.stderr if self.json else sys.stdout

    def _write(self, stream: IO[str], text: str) -> None:
        clean = printable(text, newline="\n")
        # A terminal or a pipe in another encoding than UTF-8 must not end the program over one character.
        encoding = getattr(stream, "encoding", None) or "utf-8"
        clean = clean.encode(encoding, errors="replace").decode(encoding)
        if self._live is not None and stream.isatty():
            from rich.text import Text

            self._live.console.print(Text(clean))
        else:
            print(clean, file=stream, flush=True)

    @contextlib.contextmanager
    def _lines(self, total: int, label: str) -> Iterator[Progress]:
        shown_at, shown = self._clock(), -1

        def show(progress: Progress, seconds: float) -> None:
            nonlocal shown_at, shown
            now = self._clock()
            if now - shown_at >= seconds:
                shown_at, shown = now, progress.done
                self._write(sys.stderr, progress.line())

        progress = Progress(total, label, show, self._clock)
        try:
            yield progress
        finally:
            if progress.done != shown:
                progress.note = ""
                self._write(sys.stderr, progress.line())

    @contextlib.contextmanager
    def _bar(self, total: int, label: str) -> Iterator[Progress]:
        from rich.console import Console as RichConsole
        from rich.console import Group
        from rich.live import Live
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress
        from rich.text import Text

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[status]}", markup=False),
        )
        progress = Progress(total, label, lambda progress, seconds: None, self._clock)
        console = RichConsole(file=sys.stderr, highlight=False)
        bar = RichProgress(*columns, console=console, get_time=self._clock)
        task = bar.add_task(progress.label, total=total, status="")

        def draw() -> Group:
            bar.update(task, completed=progress.done, status=progress.status())
            # The note has a line of its own: beside the bar, 80 columns would cut it.
            below = [Text(f"  {progress.note}", no_wrap=True, overflow="ellipsis")] if progress.note else []
            return Group(bar.get_renderable(), *below)

        # Drawn when the display is refreshed, so that what reports its steps waits for no terminal. Standard output stays what the caller
        # made it: a pipe must not lose its lines to the bar's terminal.
        with Live(get_renderable=draw, console=console, refresh_per_second=_REFRESHES_PER_SECOND, redirect_stdout=False) as live:
            live.refresh()
            self._live = live
            try:
                yield progress
            finally:
                self._live = None
                progress.note = ""

    def _ruled(self, out: IO[str], columns: list[str], rows: list[list[str]], right: list[bool], title: str) -> None:
        from rich.box import SIMPLE_HEAD
        from rich.console import Console as RichConsole
        from rich.table import Table
        from rich.text import Text

        console = RichConsole(file=out, highlight=False)
        for index, part in enumerate(_fitting(columns, rows, console.width)):
            heading = Text(printable(title), style="bold") if title and index == 0 else None
            table = Table(title=heading, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
            for column in part:
                table.add_column(Text(columns[column]), justify="right" if right[column] else "left", overflow="fold")
            for row in rows:
                table.add_row(*(Text(row[column]) for column in part))
            console.print(table)


def duration(seconds: float) -> str:
    """A time for people: ``8 s``, ``2 min 05 s``, ``3 h 10 min``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def _fitting(columns: list[str], rows: list[list[str]], width: int) -> list[list[int]]:
    """The columns in groups that fit the width, each led by the columns up to ``method``, which name its rows: no cell is broken."""
    from rich.cells import cell_len

    need = [max(map(cell_len, cells)) + _COLUMN_GAP for cells in zip(columns, *rows, strict=True)]
    names = list(range(columns.index("method") + 1)) if "method" in columns else [0]
    groups: list[list[int]] = []
    for index in range(len(names), len(columns)):
        if groups and sum(need[other] for other in (*groups[-1], index)) <= width:
            groups[-1].append(index)
        else:
            groups.append([*names, index])
    return groups or [names]


def _all_numbers(cells: list[Any]) -> bool:
    return all(re.match(r"[-+−]?[\d.]", cell) or cell in ("", "–") for cell in cells)
