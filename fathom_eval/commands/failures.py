"""What failed in a run: ``--retry-failed`` measures it again, and the end of a command says so."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fathom_eval.console import Console
    from fathom_eval.reports.failed import Failures

RETRY = "--retry-failed"


def add_retry_argument(parser: argparse.ArgumentParser) -> None:
    """Measure again what failed."""
    parser.add_argument(RETRY, action="store_true", help="measure again what failed in an earlier start")


def warn_of_failures(console: Console, records: Iterable[Mapping[str, Any]], noun: str) -> Failures:
    """Warn of every method and k that failed, and name the way out.

    Args:
        noun: What one record is of, such as ``sample``.
    """
    from fathom_eval.reports.failed import find_failures

    failures = find_failures(records, noun)
    for line in failures.lines:
        console.warn(line)
    if failures.lines:
        console.warn(f"what failed is in no mean; once the cause is mended, the same command with {RETRY} measures it again")
    return failures


def warn_without_result(console: Console, failures: Failures) -> None:
    """The last line of a command of which methods have no result at all."""
    if failures.without_result:
        console.warn(f"{failures.without_result}; see {RETRY}")
