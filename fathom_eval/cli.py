"""The command line: ``fathom-eval COMMAND …``."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import IO, Any

from fathom_eval import __version__
from fathom_eval.console import printable
from fathom_eval.errors import UserError, did_you_mean, nearest

COMMANDS = ("ruler", "fidelity", "sessions", "calibrate", "bench", "report", "lm-eval", "methods", "models", "doctor")


_OPTION = re.compile(r"--?[A-Za-z]\S*")
_MACHINE_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the machine lacks, whichever file it was met at."""


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors in the project's own form. Each names the help that answers it and, if there is one, the right word."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message} (see '{self.prog} --help')")

    def exit(self, status: int = 0, message: str | None = None) -> None:  # type: ignore[override]
        sys.stdout.flush()  # here, since what fails when the interpreter ends is no error of the command
        super().exit(status, message)

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stdout).write(message)  # argparse's own says nothing of a full disk

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse's, but nothing is left over: a command refuses what it does not know itself, so that its own help is named."""
        self._check_options(sys.argv[1:] if args is None else list(args))
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"nothing is expected after what was given, but there is '{rest[0]}'")
        return found, rest

    def _check_options(self, words: list[str]) -> None:
        """Refuse an unknown option, before what follows it is taken for something else. Those of an action are the action's to check."""
        actions = [name for action in self._actions if isinstance(action, argparse._SubParsersAction) for name in action.choices]
        for word in words:
            if word == "--" or word in actions:
                return
            name = word.partition("=")[0]
            joined = not name.startswith("--") and name[:2] in self._option_string_actions  # -hV
            if name in self._option_string_actions or joined or not _OPTION.fullmatch(name):
                continue
            shown = (action.option_strings for action in self._actions if action.help != argparse.SUPPRESS)
            options = {option.lstrip("-"): option for strings in shown for option in strings}  # dashes are no likeness
            near = nearest(name.lstrip("-"), options)
            self.error(f"unknown option '{name}'" + (f"; did you mean '{options[near]}'?" if near else ""))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        suggestion = did_you_mean(str(value), map(str, action.choices))
        if isinstance(action, argparse._SubParsersAction):
            self.error(f"unknown {action.dest} '{value}' of '{self.prog.partition(' ')[2]}'; {suggestion}")
        self.error(f"{'/'.join(action.option_strings)}: unknown value '{value}'; {suggestion}")


class _EndedError(KeyboardInterrupt):
    """SIGTERM, as a scheduler sends it before it kills: what Ctrl-C tidies up, this does too."""


@contextlib.contextmanager
def _ending_like_an_interrupt() -> Iterator[None]:
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set a handler
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise _EndedError

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before if before is not None else signal.SIG_DFL)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands. It imports no command's heavy dependencies."""
    parser = _Parser(
        prog="fathom-eval",
        description="Measure key scans for sparse attention: many methods branched from one dense prefill.",
        epilog="example: fathom-eval ruler --model smollm2 --context 2048 --k 128 --limit 4 --output runs/first",
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"fathom-eval {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    for name in COMMANDS:
        module = importlib.import_module(f"fathom_eval.commands.{name.replace('-', '_')}")
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.HELP,
            epilog=f"example: {module.EXAMPLE}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
            add_help=False,
        )
        # Who reads it has found it, and it would take a line of the screen.
        command.add_argument("-h", "--help", action="help", help=argparse.SUPPRESS)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 bad input, 130 interrupted and 143 ended (the run can be resumed).

    Of a command's own, 1 is for what it was asked to find out (``doctor``), 141 for a reader of its output that has left.
    """
    try:
        _check_streams()
        return _run(list(sys.argv[1:] if argv is None else argv))
    except BrokenPipeError:  # `… | head`
        _abandon(sys.stdout)
        return 141
    except UserError as error:
        _say(f"error: {error}")
        return 2
    except (OSError, RuntimeError) as error:
        message = _file_error(error)
        if message is None:
            raise
        _say(f"error: {message}")
        return 2
    except KeyboardInterrupt as error:
        ended = isinstance(error, _EndedError)
        what = "ended by a signal" if ended else "interrupted"
        _say(f"{what}; finished work is kept, run the same command again to go on")
        return 143 if ended else 130


def _run(arguments: list[str]) -> int:
    parser = build_parser()
    if not arguments:
        parser.print_help()
        code = 0
    else:
        if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
            raise UserError(f"unknown command '{arguments[0]}'; {did_you_mean(arguments[0], COMMANDS)}")
        args = parser.parse_args(arguments)
        with _ending_like_an_interrupt():
            code = int(args.run(args))
    sys.stdout.flush()
    return code


def _check_streams() -> None:
    """Refuse a closed standard output and do without standard error.

    A file that is opened would take the number of the closed stream, and what a library prints there would be written into it.
    """
    if sys.stderr is None:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        if descriptor != 2:
            os.dup2(descriptor, 2)
            os.close(descriptor)
        os.set_inheritable(2, True)
        sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is None:
        raise UserError("standard output is closed: send it to a file, or to /dev/null")


def _file_error(error: BaseException | None) -> str | None:
    """A failure of the file system that no command has met with words of its own; None for any other, which is a defect of the program."""
    if isinstance(error, RuntimeError):  # of pathlib before Python 3.13, for a link that leads to itself
        error = error.__context__
    if not isinstance(error, OSError) or error.errno is None:
        return None
    if isinstance(error.filename, (str, bytes)):
        return f"cannot read or write {os.fsdecode(error.filename)}: {error.strerror}"
    if error.errno not in _MACHINE_ERRORS:
        return None
    try:
        sys.stdout.flush()
    except OSError:  # it still holds what it could not write
        _abandon(sys.stdout)
        return f"cannot write to standard output: {error.strerror}"
    return f"cannot write: {error.strerror}"


def _say(line: str) -> None:
    """One line on standard error, whatever a name in it holds, if there is room for it; and no other at the interpreter's end."""
    try:
        print(printable(line), file=sys.stderr, flush=True)
    except OSError:
        _abandon(sys.stderr)
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _abandon(sys.stdout)


def _abandon(stream: IO[str]) -> None:
    """What Python still holds for the stream must not raise when the interpreter ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
