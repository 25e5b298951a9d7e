"""Methods that failed, as a command names them at its end."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fathom_eval.console import printable
from fathom_eval.reports.wording import count, join
from fathom_eval.run import canonical_json

Branch = tuple[str, int | None]


@dataclass(frozen=True)
class Failures:
    """What failed in a run.

    Attributes:
        lines: One for every method and k that failed anywhere, with the first reason.
        without_result: One sentence on the methods that failed in all that they were measured on; empty where there is none.
    """

    lines: tuple[str, ...] = ()
    without_result: str = ""


def find_failures(records: Iterable[Mapping[str, Any]], noun: str) -> Failures:
    """The failures among the records of the newest version of each method: what older versions did counts in no table.

    Args:
        noun: What one record is of, such as ``sample``.
    """
    newest: dict[tuple[str, str], int] = {}
    totals: dict[tuple[str, str], dict[Branch, dict[int, int]]] = {}
    found: dict[tuple[str, str], dict[tuple[Branch, int], list[str]]] = {}
    for record in records:
        method, version = (record["method"], canonical_json(record["options"])), record["method_version"]
        branch = (printable(record.get("label") or record["method"]), record["k"])
        newest[method] = max(version, newest.get(method, version))
        versions = totals.setdefault(method, {}).setdefault(branch, {})
        versions[version] = versions.get(version, 0) + 1
        if record.get("finish") == "error":
            found.setdefault(method, {}).setdefault((branch, version), []).append(str(record.get("error") or "no reason recorded"))
    lines, wholly = [], []
    for method, branches in found.items():
        for (branch, version), reasons in branches.items():
            if version != newest[method]:
                continue
            name = branch[0] if branch[1] is None else f"{branch[0]} at k={branch[1]}"
            lines.append(f"{name} failed in {count(len(reasons), noun)}: {printable(' '.join(reasons[0].split()))}")
            if len(reasons) == totals[method][branch][version]:
                wholly.append(name)
    without = f"no result of {join(wholly)}: every {noun} of {'it' if len(wholly) == 1 else 'them'} failed" if wholly else ""
    return Failures(tuple(lines), without)
