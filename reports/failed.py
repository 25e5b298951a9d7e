"""Methods that failed, as a command names them at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from fathom_eval.console import printable
from fathom_eval.reports.wording import count


def failed_methods(records: Iterable[Mapping[str, Any]], noun: str) -> list[str]:
    """A line for every method and k that failed anywhere, with the first reason.

    Args:
        noun: What one record is of, such as ``sample``.
    """
    found: dict[tuple[str, int | None], list[Mapping[str, Any]]] = {}
    for record in records:
        if record.get("finish") == "error":
            found.setdefault((str(record.get("label") or record["method"]), record["k"]), []).append(record)
    lines = []
    for (label, k), members in found.items():
        at = "" if k is None else f" at k={k}"
        reason = " ".join(str(members[0].get("error") or "no reason recorded").split())
        lines.append(printable(f"{label}{at} failed in {count(len(members), noun)}: {reason}"))
    return lines
