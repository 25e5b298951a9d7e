"""Terminal output: what goes where, how often, and that no text acts on the terminal or on a spreadsheet."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fathom_eval.console as console_module
from fathom_eval.console import PLAIN_INTERVAL_SECONDS, PLAIN_WORK_SECONDS, Console, csv_safe, duration, printable, shorten


class Clock:
    """A clock that a test turns."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("plain text, é, 漢字, 🙂", "plain text, é, 漢字, 🙂"),
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x9b31mred", "red"),
        ("\x1b]0;title\x07after", "after"),
        ("\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]0;never ended", "]0;never ended"),
        ("\x1bcreset", "reset"),
        ("a\x00b\x07c\x7fd\x85e", "abcde"),
        ("back\rover", "backover"),
        ("one\r\ntwo\tthree", "one\\ntwo three"),
        ("abc\u202egpj.exe", "abc[U+202E]gpj.exe"),
        ("\u2066\u200b\ufeff", "[U+2066][U+200B][U+FEFF]"),
        ("\U000e0041", "[U+E0041]"),
        ("line\u2028end", "line[U+2028]end"),
        ("lone \ud800", "lone \ufffd"),
        ("👩\u200d🚀", "👩\u200d🚀"),
    ],
)
def test_printable(hostile: str, shown: str) -> None:
    assert printable(hostile) == shown


@given(st.text())
def test_printable_leaves_nothing_that_acts(text: str) -> None:
    shown = printable(text)
    assert not any(ord(character) < 32 or 127 <= ord(character) < 160 for character in shown)
    assert not set(shown) & set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
    shown.encode()
    assert printable(shown) == shown


@pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "  =1", "\t=1", "\r=1", "\x1b[0m=1", "＝1"])
def test_csv_safe_disarms_formulas(text: str) -> None:
    assert csv_safe(text).startswith("'")


def test_csv_safe_leaves_plain_text() -> None:
    assert csv_safe("fathom budget=48") == "fathom budget=48"


def test_shorten() -> None:
    assert shorten("abcdef", 6) == "abcdef"
    assert shorten("abcdefg", 6) == "abcde…"
    assert len(shorten("\u202e" * 100, 20)) == 20
    assert len(shorten("x" * 10_000_000, 20)) == 20


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.4, "0 s"), (59.4, "59 s"), (59.6, "1 min 00 s"), (125, "2 min 05 s"), (11_400, "3 h 10 min")]
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def speak(console: Console) -> None:
    console.say("hello")
    console.warn("careful")
    console.table(pd.DataFrame({"method": ["a"], "score": [0.5]}), note="a note")
    with console.progress(1, "work") as progress:
        progress.advance()
    console.document({"answer": 42})
    console.result("out/report.html", "page")


def test_plain_output(capsys: pytest.CaptureFixture[str]) -> None:
    speak(Console())
    out, error = capsys.readouterr()
    assert out == "hello\nmethod  score\na         0.5\na note\npage: out/report.html\n"
    assert error.startswith("warning: careful\nwork: 1/1 (100 %)")


def test_quiet_prints_only_results(capsys: pytest.CaptureFixture[str]) -> None:
    speak(Console(quiet=True))
    assert capsys.readouterr() == ("out/report.html\n", "")


def test_json_prints_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    speak(Console(json=True))
    out, error = capsys.readouterr()
    assert json.loads(out) == {"answer": 42}
    assert "hello" in error
    assert "score" in error


def test_plain_progress_is_sparse(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Console(clock=clock).progress(400, "decoding") as progress:
        for _ in range(400):
            clock.now += 0.25
            progress.advance(note="niah_single")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 400 * 0.25 // PLAIN_INTERVAL_SECONDS
    assert lines[0] == "decoding: 40/400 (10 %), 4.0/s, 1 min 30 s left, niah_single"
    assert lines[-1] == "decoding: 400/400 (100 %), 4.0/s, 1 min 40 s in all, niah_single"


def test_plain_progress_ends_with_a_line_when_interrupted(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()

    def work() -> None:
        with Console(clock=clock).progress(10, "decoding") as progress:
            clock.now += 8
            progress.advance(2)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        work()
    assert capsys.readouterr().err == "decoding: 2/10 (20 %), 4.0 s each, 32 s left\n"


def test_plain_progress_within_a_unit_is_sparser_still(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    with Console(clock=clock).progress(2, "sessions") as progress:
        for step in range(400):
            clock.now += 0.25
            progress.tell(f"step {step}\x1b[31m")
        clock.now += PLAIN_INTERVAL_SECONDS
        progress.advance()
        progress.tell("step 0")
        progress.advance()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 100 // PLAIN_WORK_SECONDS + 2
    assert lines[0] == "sessions: 0/2 (0 %), step 119"
    assert lines[-2:] == ["sessions: 1/2 (50 %), 110.0 s each, 1 min 50 s left", "sessions: 2/2 (100 %), 55.0 s each, 1 min 50 s in all"]


def test_remaining_time_falls_within_a_unit_and_the_rate_stays() -> None:
    clock = Clock()
    with Console(quiet=True, clock=clock).progress(3, "sessions") as progress:
        clock.now += 100
        progress.advance()
        clock.now += 30
        progress.tell("step 1")
        assert progress.line() == "sessions: 1/3 (33 %), 100.0 s each, 2 min 50 s left, step 1"
        clock.now += 170
        assert progress.status() == "100.0 s each", "nobody knows how much is left of what takes longer than expected"


def test_progress_without_work_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Console().progress(0, "decoding"):
        pass
    assert capsys.readouterr().err == "decoding: 0/0\n"


def test_terminal_shows_a_bar_and_keeps_standard_output_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", pipe)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    console = Console()
    with console.progress(2, "decoding [bold]\x1b[31m") as progress:
        progress.advance(note="[red]vt\u202e")
        console.say("to the pipe")
        console.warn("to the terminal [red]")
        progress.advance()
    assert pipe.getvalue() == "to the pipe\n"
    shown = terminal.getvalue()
    assert "decoding [bold]" in shown
    assert "\x1b[31mdecoding" not in shown
    assert "2/2" in shown
    assert "warning: to the terminal [red]" in shown
    assert "\u202e" not in shown


def test_terminal_shows_what_is_under_way_but_not_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(console_module, "_REFRESHES_PER_SECOND", 20.0)
    note = "session 0: decoding branches 65-128 of 140, {} of 256 steps, 40 running"
    with Console().progress(2, "sessions") as progress:
        progress.advance()
        for step in range(5000):
            progress.tell(note.format(step))
        drawn = re.findall(r"\d+ of 256", terminal.getvalue())
        assert len(drawn) < 500
        progress.tell(f"[red]\x1b[31m{note.format(256)}")
        give_up = time.monotonic() + 20
        while "256 of 256" not in terminal.getvalue() and time.monotonic() < give_up:
            time.sleep(0.01)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.getvalue())
    assert f"  [red]{note.format(256)}" in plain, "whole, in 80 columns"
    assert "1/2" in plain
    assert "of 256" not in plain[plain.rindex("sessions") :], "what was under way is gone when all is done"


def test_terminal_table_is_ruled_and_shows_markup_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    Console().table(pd.DataFrame({"method": ["[red]x[/red]", "\x1b[2Jy"], "score": ["0.5 ± 0.1", ""]}), title="Scores")
    shown = terminal.getvalue()
    assert "[red]x[/red]" in shown
    assert "\x1b[2J" not in shown
    assert "─" in shown
    assert "Scores" in shown


def test_stream_in_another_encoding_is_survived() -> None:
    code = "from fathom_eval.console import Console; Console().say('0.5 ± 0.1 ▼')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, check=True, env={"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"}
    )
    assert done.stdout == b"0.5 ? 0.1 ?\n"


def test_console_is_light() -> None:
    code = "import sys, fathom_eval.console; print(sorted({'rich', 'pandas', 'torch'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_a_wide_table_is_split_by_columns_and_no_cell_is_broken(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    out = Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setenv("COLUMNS", str(width))
    frame = pd.DataFrame(
        {"k": ["64"] * 2, "method": ["fathom budget=48 basis=raw", "漢字"]} | {f"task {i}": ["0.625 ± 0.101 ▼"] * 2 for i in range(8)}
    )
    Console().table(frame, title="scores")
    text = re.sub(r"\x1b\[[0-9;]*m", "", out.getvalue())
    assert text.count("0.625 ± 0.101 ▼") == 16
    assert all(f"task {i}" in text for i in range(8))
    # Every part names its rows.
    assert text.count("method") == text.count("漢字") == text.count("fathom budget=48 basis=raw")
    assert max(len(line.rstrip()) for line in text.splitlines()) <= width
    assert text.count("scores") == 1
