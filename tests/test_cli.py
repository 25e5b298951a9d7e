"""The command line: exit codes, one-line errors, help that fits a screen, a quick start."""

from __future__ import annotations

import importlib
import re
import resource
import shlex
import subprocess
import sys

import pytest

from fathom_eval import __version__
from fathom_eval.cli import COMMANDS, main
from fathom_eval.errors import UserError, did_you_mean

HEAVY = ("datasets", "gguf", "jinja2", "lm_eval", "matplotlib", "numpy", "pandas", "rich", "torch", "transformers", "triton")


def error_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What was printed to standard error, which must be one line, and nothing to standard output."""
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.endswith("\n")
    assert output.err.count("\n") == 1
    return output.err.removesuffix("\n")


def help_text(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"fathom-eval {__version__}\n"
    assert re.fullmatch(r"\d+\.\d+\.\d+", __version__)


def test_without_arguments_the_help_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("usage: fathom-eval")


@pytest.mark.parametrize("command", [None, *COMMANDS])
def test_help_fits_a_screen_and_has_an_example(
    command: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    lines = help_text([command] if command else [], capsys).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100
    example = f"fathom-eval {command}" if command else "fathom-eval "
    assert any(line.strip().removeprefix("example: ").startswith(example) for line in lines)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_example_of_every_command_is_one_that_its_parser_takes(command: str) -> None:
    from fathom_eval.cli import build_parser

    module = importlib.import_module(f"fathom_eval.commands.{command.replace('-', '_')}")
    program, *arguments = shlex.split(module.EXAMPLE)
    assert (program, arguments[0]) == ("fathom-eval", command)
    assert build_parser().parse_args(arguments).command == command


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    text = help_text([], capsys)
    for command in COMMANDS:
        assert re.search(rf"^ +{command} +\S", text, re.MULTILINE), command


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("rular", "error: unknown command 'rular'; did you mean 'ruler'?"),
        ("method", "error: unknown command 'method'; did you mean 'methods'?"),
        ("xyz", f"error: unknown command 'xyz'; choose from {', '.join(sorted(COMMANDS))}"),
    ],
)
def test_unknown_command_is_one_line_and_exit_code_2(given: str, expected: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([given]) == 2
    assert error_line(capsys) == expected


@pytest.mark.parametrize("command", COMMANDS)
def test_unknown_option_is_one_line_and_exit_code_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--no-such-option"]) == 2
    assert error_line(capsys).startswith("error: ")


def test_options_are_not_abbreviated(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--vers"]) == 2
    assert error_line(capsys).startswith("error: ")


def test_user_error_of_a_command_is_one_line_and_exit_code_2(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def fail(_: object) -> int:
        raise UserError("the haystack is empty")

    monkeypatch.setattr("fathom_eval.commands.methods.run", fail)
    assert main(["methods"]) == 2
    assert error_line(capsys) == "error: the haystack is empty"


def test_interrupt_is_one_line_and_exit_code_130(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("fathom_eval.commands.methods.run", interrupt)
    assert main(["methods"]) == 130
    assert "run the same command again" in error_line(capsys)


def test_a_defect_is_not_hidden_as_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def break_down(_: object) -> int:
        raise ZeroDivisionError

    monkeypatch.setattr("fathom_eval.commands.methods.run", break_down)
    with pytest.raises(ZeroDivisionError):
        main(["methods"])


def test_did_you_mean_names_the_nearest_or_all() -> None:
    assert did_you_mean("fathm", ["sparq", "fathom"]) == "did you mean 'fathom'?"
    assert did_you_mean("zzz", ["sparq", "fathom"]) == "choose from fathom, sparq"


def loaded_modules(statement: str) -> set[str]:
    """Names of the top-level modules that a fresh interpreter has loaded after a statement."""
    program = f"import contextlib, io, sys\nwith contextlib.redirect_stdout(io.StringIO()):\n    {statement}\n"
    program += "print(*{name.partition('.')[0] for name in sys.modules})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "statement",
    ["import fathom_eval", "from fathom_eval.cli import build_parser; build_parser().format_help()"],
    ids=["import", "help"],
)
def test_start_up_loads_no_heavy_library(statement: str) -> None:
    loaded = loaded_modules(statement)
    assert "fathom_eval" in loaded
    assert not loaded.intersection(HEAVY)


def test_start_up_is_quick() -> None:
    """Processor time, so that a busy machine does not fail the test; of five runs the quickest counts."""
    times = []
    for _ in range(5):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "fathom_eval", "--help"], capture_output=True, check=True, timeout=60)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime)
    assert min(times) < 0.3
