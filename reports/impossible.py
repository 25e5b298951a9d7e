"""What a run was asked for and cannot do: methods that cannot run with a model, or at some k."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from fathom_eval.console import printable


def impossible_cells(settings: Mapping[str, Any]) -> set[tuple[str, int | None]]:
    """Label and k of everything that the settings of a start call impossible."""
    return {(label, k) for label, k, _ in _entries(settings)}


def impossible_notes(settings: Mapping[str, Any]) -> list[str]:
    """A sentence for each of them, without its full stop."""
    return [f"Left out{'' if k is None else f' at k={k}'}: {printable(reason)}" for _, k, reason in _entries(settings)]


def _entries(settings: Mapping[str, Any]) -> Iterator[tuple[str, int | None, str]]:
    found = settings.get("impossible")
    for one in found if isinstance(found, list) else ():
        if isinstance(one, Mapping):
            k = one.get("k")
            yield str(one.get("method")), k if isinstance(k, int) else None, str(one.get("reason"))
