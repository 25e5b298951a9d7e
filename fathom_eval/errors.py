"""Errors that a user can act on."""

from __future__ import annotations

import difflib
import sys
import traceback
from collections.abc import Iterable
from pathlib import PurePath


class UserError(Exception):
    """Something the user gave or has is wrong. The message is one line: what is wrong, where, and what would be right.

    The command line prints it as ``error: …`` and exits with code 2.
    """


METHOD_ERRORS = (Exception, SystemExit)
"""What a method may raise that is its own failure: a plug-in that calls ``sys.exit`` ends no run, while an interrupt still does."""

_NOT_THE_METHODS = frozenset({"fathom_eval", "torch"}) | sys.stdlib_module_names


def raised_at(error: BaseException) -> str:
    """Where in a plug-in's code an error came up, as text that follows the error's own: `` (file.py, line 12)``.

    It is the innermost frame that is not of this package, torch or the standard library, without its folder; empty where there is none.
    """
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        if str(frame.f_globals.get("__name__", "")).partition(".")[0] not in _NOT_THE_METHODS:
            return f" ({PurePath(frame.f_code.co_filename).name}, line {line})"
    return ""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that a word was meant to be: the only one that it abbreviates, else the most similar one; None if none is similar."""
    names = sorted(choices)
    longer = [name for name in names if name.startswith(word)]
    near = longer if len(longer) == 1 else difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return near[0] if near else None


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A suggestion to end an error message with: the :func:`nearest` choice if there is one, otherwise all of them."""
    names = sorted(choices)
    near = nearest(word, names)
    return f"did you mean '{near}'?" if near else f"choose from {', '.join(names)}"
