"""The command line: ``fathom-eval COMMAND …``."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from types import FrameType

from fathom_eval import __version__
from fathom_eval.errors import UserError, did_you_mean

COMMANDS = ("ruler", "fidelity", "sessions", "calibrate", "bench", "report", "lm-eval", "methods", "models", "doctor")


class _Parser(argparse.ArgumentParser):
    """argparse with one-line errors in the project's own form."""

    def error(self, message: str) -> None:  # type: ignore[override]
        raise UserError(f"{message} (see '{self.prog} --help')")


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
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 2 bad input, 130 interrupted and 143 ended (the run can be resumed)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        parser = build_parser()
        if not arguments:
            parser.print_help()
            return 0
        if not arguments[0].startswith("-") and arguments[0] not in COMMANDS:
            raise UserError(f"unknown command '{arguments[0]}'; {did_you_mean(arguments[0], COMMANDS)}")
        args = parser.parse_args(arguments)
        with _ending_like_an_interrupt():
            code = int(args.run(args))
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of the pipe has left (`… | head`); what Python still holds for it must not raise at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as error:
        ended = isinstance(error, _EndedError)
        what = "ended by a signal" if ended else "interrupted"
        print(f"{what}; finished work is kept, run the same command again to go on", file=sys.stderr)
        return 143 if ended else 130
