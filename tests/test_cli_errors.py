"""What the command line says of a wrong word, a file system that fails and a standard stream that is full or closed: one line each."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fathom_eval.cli import main
from fathom_eval.console import Console
from fathom_eval.errors import UserError, did_you_mean, nearest
from tests.test_cli import error_line

HELP_OF = "(see 'fathom-eval {} --help')"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("ruler --taks vt", f"unknown option '--taks'; did you mean '--tasks'? {HELP_OF.format('ruler')}"),
        ("ruler --meth=sparq", f"unknown option '--meth'; did you mean '--methods'? {HELP_OF.format('ruler')}"),
        ("ruler --batch_siz 3", f"unknown option '--batch_siz'; did you mean '--batch-size'? {HELP_OF.format('ruler')}"),
        ("ruler -k 64", f"unknown option '-k'; did you mean '--k'? {HELP_OF.format('ruler')}"),
        ("ruler --zzz", f"unknown option '--zzz' {HELP_OF.format('ruler')}"),
        ("ruler --limit", f"argument --limit: expected one argument {HELP_OF.format('ruler')}"),
        ("ruler vt", f"nothing is expected after what was given, but there is 'vt' {HELP_OF.format('ruler')}"),
        ("sessions --taks vt", f"unknown option '--taks' {HELP_OF.format('sessions')}"),
        ("sessions --sesions 3", f"unknown option '--sesions'; did you mean '--sessions'? {HELP_OF.format('sessions')}"),
        ("sessions inspekt FILE", f"unknown action 'inspekt' of 'sessions'; did you mean 'inspect'? {HELP_OF.format('sessions')}"),
        ("sessions inspect --toknizer x", f"unknown option '--toknizer'; did you mean '--tokenizer'? {HELP_OF.format('sessions inspect')}"),
        ("sessions inspect", f"the following arguments are required: FILE {HELP_OF.format('sessions inspect')}"),
        ("bench step --host-pages hug", f"--host-pages: unknown value 'hug'; did you mean 'huge'? {HELP_OF.format('bench')}"),
        ("--vers", "unknown option '--vers'; did you mean '--version'? (see 'fathom-eval --help')"),
    ],
)
def test_a_wrong_word_names_the_help_of_its_command_and_the_nearest(
    arguments: str, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments.split()) == 2
    assert error_line(capsys) == f"error: {expected}"


def test_an_option_is_no_value_and_a_negative_number_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("fathom_eval.commands.ruler.run", lambda args: seen.append(args.seed) or 0)
    assert main(["ruler", "--seed", "-1"]) == 0
    assert seen == [-1]


def test_the_nearest_is_what_a_word_abbreviates() -> None:
    names = ["streaming_llm", "retroinfer", "retrieval_attention", "sparq"]
    assert nearest("str", names) == "streaming_llm"
    assert nearest("retr", names) is None, "two begin like this"
    assert nearest("retroinfr", names) == "retroinfer"
    assert did_you_mean("str", names) == "did you mean 'streaming_llm'?"


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr("fathom_eval.commands.methods.run", fail)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), f"cannot read or write {'x' * 300}: File name too long"),
        (PermissionError(errno.EACCES, "Permission denied", b"/a/b"), "cannot read or write /a/b: Permission denied"),
        (OSError(errno.EMFILE, "Too many open files"), "cannot write: Too many open files"),
        (OSError(errno.EACCES, "Permission denied", "two\nlines"), r"cannot read or write two\nlines: Permission denied"),
        (UserError("no such file: a\nb\x1b[2J"), r"no such file: a\nb"),
    ],
    ids=["path", "bytes", "no path", "newline", "newline of a command's own"],
)
def test_a_failure_that_no_command_has_met_is_one_line(
    error: BaseException, expected: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, error)
    assert main(["methods"]) == 2
    assert error_line(capsys) == f"error: {expected}"


@pytest.mark.parametrize(
    "error",
    [OSError(errno.EBADF, "Bad file descriptor"), ConnectionError("the library says so"), RuntimeError("maximum recursion depth")],
    ids=["descriptor", "no number", "runtime"],
)
def test_what_is_no_failure_of_the_file_system_stays_a_defect(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, error)
    with pytest.raises(type(error)):
        main(["methods"])


@pytest.mark.parametrize(
    "arguments",
    [["report", "{long}"], ["ruler", "--output", "{long}"], ["ruler", "--haystack", "{long}"], ["report", "{loop}"]],
    ids=lambda arguments: " ".join(arguments),
)
def test_paths_that_no_file_system_takes(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "loop").symlink_to("loop")
    assert main([word.format(long="x" * 300, loop="loop") for word in arguments]) == 2
    [line] = [line for line in capsys.readouterr().err.splitlines() if not line.startswith("haystack")]
    assert line.startswith("error: ")
    assert "too long" in line or "Too many levels" in line


def test_a_warning_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    Console().warn("runs/a\nb is damaged")
    assert capsys.readouterr().err == "warning: runs/a\\nb is damaged\n"


def shell(command: str, *, unbuffered: bool = False) -> subprocess.CompletedProcess[str]:
    """The command line in a shell, which opens and closes its streams."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    if unbuffered:
        environment["PYTHONUNBUFFERED"] = "1"
    command = command.replace("fathom-eval", f"{sys.executable} -m fathom_eval")
    return subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False, env=environment)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
@pytest.mark.parametrize("arguments", ["--help", "", "--version", "ruler --help", "lm-eval path"])
@pytest.mark.parametrize("unbuffered", [False, True])
def test_a_full_standard_output_is_an_error(arguments: str, unbuffered: bool) -> None:
    done = shell(f"fathom-eval {arguments} >/dev/full", unbuffered=unbuffered)
    assert done.returncode == 2
    where = "" if unbuffered else " to standard output"
    assert done.stderr == f"error: cannot write{where}: No space left on device\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_an_error_after_output_that_a_full_disk_has_not_taken_is_still_one_line() -> None:
    program = (
        "import sys; from fathom_eval import cli, errors; from fathom_eval.commands import methods\n"
        "def run(args):\n    print('begun')\n    raise errors.UserError('no')\n"
        "methods.run = run; sys.exit(cli.main(['methods']))"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False, env=environment
        )
    assert (done.returncode, done.stderr) == (2, "error: no\n")


def test_a_closed_standard_output_is_an_error() -> None:
    done = shell("fathom-eval lm-eval path >&-")
    assert (done.returncode, done.stderr) == (2, "error: standard output is closed: send it to a file, or to /dev/null\n")


def test_a_closed_standard_error_costs_nothing_but_what_goes_there() -> None:
    done = shell("fathom-eval lm-eval path 2>&-")
    assert (done.returncode, done.stderr) == (0, "")
    assert Path(done.stdout.strip()).is_dir()
    done = shell("fathom-eval no-such-command 2>&-")
    assert (done.returncode, done.stdout) == (2, ""), "an error does not go to standard output instead"
    assert shell("fathom-eval no-such-command >&- 2>&-").returncode == 2


def test_a_file_does_not_take_the_number_of_a_closed_standard_error(tmp_path: Path) -> None:
    file = tmp_path / "file"
    program = (
        f"import os, sys, fathom_eval.cli as cli; cli._check_streams(); f = open({str(file)!r}, 'w'); os.write(2, b'noise'); f.close()"
    )
    done = subprocess.run(["sh", "-c", f'{sys.executable} -c "$0" 2>&-', program], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, file.read_text(encoding="utf-8")) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_standard_error_changes_no_exit_code() -> None:
    assert shell("fathom-eval no-such-command 2>/dev/full").returncode == 2


def test_a_reader_that_leaves_before_the_help_ends_is_no_error() -> None:
    done = shell("(fathom-eval ruler --help; echo $? >&2) | true")
    assert done.stderr in ("141\n", "0\n")
