"""``--suite`` of ``fathom-eval fidelity``: what it chooses, and its table at equal bytes."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathom_eval.commands.arguments import numbers
from fathom_eval.errors import UserError

if TYPE_CHECKING:
    from fathom_eval.console import Console
    from fathom_eval.methods import MethodSpec
    from fathom_eval.run import Run
    from fathom_eval.suites import Suite

_CONTEXT, _K = "2048", "128"


def add_suite_arguments(parser: argparse.ArgumentParser) -> None:
    """Methods, contexts and k by the name of an ablation."""
    add = parser.add_argument
    add("--suite", metavar="NAME", help="methods, context and k of an ablation")
    add("--list-suites", action="store_true", help="show the suites and end")
    add("--calibration", action="append", default=[], metavar="ROLE=NAME", help="a calibration that a suite names")


@dataclass(frozen=True)
class Choice:
    """What is measured, and the suite that chose it."""

    specs: list[MethodSpec]
    contexts: list[int]
    k_values: list[int]
    suite: Suite | None
    calibrations: dict[str, str]

    @property
    def settings(self) -> dict[str, Any]:
        """For the manifest of the run."""
        return {"suite": self.suite.name, "calibrations": self.calibrations} if self.suite is not None else {}


def choose(args: argparse.Namespace, console: Console) -> Choice:
    """The methods, contexts and k that the arguments ask for."""
    from fathom_eval.methods import parse_methods
    from fathom_eval.suites import find_suite, parse_calibrations

    calibrations = parse_calibrations(args.calibration)
    if args.suite is None:
        if calibrations:
            raise UserError("--calibration goes with --suite; a method names its own, as in fathom:statistics=NAME")
        contexts, k_values = numbers(args.context or _CONTEXT, "--context"), numbers(args.k or _K, "--k")
        return Choice(parse_methods("paper" if args.methods is None else args.methods), contexts, k_values, None, {})
    suite = find_suite(args.suite)
    if args.methods is not None:
        raise UserError("a suite has its own methods: give --suite or --methods")
    contexts = numbers(args.context, "--context") if args.context is not None else [suite.context]
    if args.k is not None:
        k_values = numbers(args.k, "--k")
    elif len(contexts) > 1:
        raise UserError("a suite takes k from the context: give one context, or --k")
    else:
        k_values, left_out = suite.k_values(contexts[0])
        for line in left_out:
            console.warn(line)
    return Choice(suite.expand(calibrations), contexts, k_values, suite, calibrations)


def report_suite(console: Console, opened: Run, choice: Choice) -> dict[str, Any]:
    """Print and write the suite's methods at equal bytes; what the JSON document says of it."""
    import pandas as pd

    from fathom_eval.equal_bytes import LEGEND, compare_at_equal_bytes, comparison_rows, comparison_values
    from fathom_eval.reports.tables import results_csv
    from fathom_eval.run_files import raise_file_error

    assert choice.suite is not None
    labels = {spec.label for spec in choice.specs}
    wanted = (
        record
        for record in opened.iter_records()
        if record["label"] in labels and record["context"] in choice.contexts and record["k"] in (None, *choice.k_values)
    )
    found = compare_at_equal_bytes(wanted, choice.suite.plain_labels(choice.calibrations))
    values = comparison_values(found)
    path = Path(opened.path) / "report" / f"equal_bytes_{choice.suite.name}.csv"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(results_csv([pd.DataFrame(values)]), encoding="utf-8")
    except OSError as error:
        raise_file_error(path, "write", error)
    console.table(
        pd.DataFrame(comparison_rows(found)),
        title=f"suite {choice.suite.name}: {choice.suite.question} ({choice.suite.source})",
        note=LEGEND,
    )
    console.result(path, "suite")
    return {"suite": choice.suite.name, "equal_bytes": str(path), "equal_bytes_table": values}
