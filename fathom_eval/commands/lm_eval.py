"""``fathom-eval lm-eval``: where lm-eval finds this package's tasks."""

from __future__ import annotations

import argparse

from fathom_eval.errors import UserError, did_you_mean

HELP = "Print the folder of tasks for lm-eval's --include_path."
EXAMPLE = "fathom-eval lm-eval path"
_ACTIONS = ("path",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.add_argument("action", metavar="path", help="print the folder; the methods as a model: python -m fathom_eval.lm_eval --help")


def run(args: argparse.Namespace) -> int:
    """Print the folder."""
    from fathom_eval.tasks.lm_eval import PATH

    if args.action not in _ACTIONS:
        raise UserError(f"unknown action '{args.action}' of 'lm-eval'; {did_you_mean(args.action, _ACTIONS)}")
    print(PATH)
    return 0
