"""Text of trajectories for the eyes of people. It comes from models, repositories and shells, and is hostile until shown otherwise."""

from __future__ import annotations


def visible(text: object, limit: int | None = None) -> str:
    r"""The text on one line, with every control, format and other unprintable character written out: ``\x1b``, ``\n``, ``\u202e``.

    Nothing of it acts on a terminal. With ``limit``, at most so many characters, the last of them ``…`` where some are missing.
    """
    string = str(text)
    if limit is not None:
        string = string[: limit + 1]
    if not string.isprintable():
        string = "".join(character if character.isprintable() else _escaped(character) for character in string)
    return string if limit is None or len(string) <= limit else string[: limit - 1] + "…"


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode("ascii")
