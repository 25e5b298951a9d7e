"""Errors that a user can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """Something the user gave or has is wrong. The message is one line: what is wrong, where, and what would be right.

    The command line prints it as ``error: …`` and exits with code 2.
    """


METHOD_ERRORS = (Exception, SystemExit)
"""What a method may raise that is its own failure: a plug-in that calls ``sys.exit`` ends no run, while an interrupt still does."""


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A suggestion to end an error message with: the nearest choice if there is one, otherwise all of them."""
    names = sorted(choices)
    near = difflib.get_close_matches(word, names, n=1, cutoff=0.6)
    return f"did you mean '{near[0]}'?" if near else f"choose from {', '.join(names)}"
