"""``fathom-eval bench equal-error``: step times beside the errors of a fidelity run."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from fathom_eval.commands.arguments import words
from fathom_eval.errors import UserError

if TYPE_CHECKING:
    import argparse

    from fathom_eval.console import Console
    from fathom_eval.reports.loading import Loaded

REFERENCE = "double_sparsity c=D/4"


def run_equal_error(args: argparse.Namespace) -> int:
    """Write the table beside the steps, and say where it is."""
    from fathom_eval.console import Console
    from fathom_eval.offload.bench.equal_error import equal_error, table_name, write_table
    from fathom_eval.reports.facts import haystack_of, model_of
    from fathom_eval.reports.loading import TIMING

    if args.errors is None or args.output is None:
        raise UserError("equal-error needs --errors, a fidelity run, and --output, a run of 'bench step'")
    console = Console(quiet=args.quiet, json=args.json)
    references = [label for text in args.reference or [REFERENCE] for label in words(text, "--reference")]
    with contextlib.ExitStack() as stack:
        errors, steps = (_loaded(Path(path), stack, console) for path in (args.errors, args.output))
        if errors.kind != "fidelity":
            raise UserError(f"--errors {args.errors} is {_kind_of(errors)}, not a fidelity run")
        # Scripts that time whole models print lines of kind "step" too, without a scan.
        timed = (record for record in steps.records.iter_records() if record.get("kind") == "step" and "scan_bits" in record)
        if steps.kind != TIMING or next(timed, None) is None:
            raise UserError(f"--output {args.output} is {_kind_of(steps)}, not a run of 'bench step'")
        if not steps.path.is_dir():
            raise UserError(f"--output {args.output} is a file: equal-error needs the folder of the run, and writes its table there")
        rows = equal_error(errors.records.iter_records(), steps.records.iter_records(), references, console.warn)
        manifest = errors.records.manifest
        model, text = model_of(manifest), haystack_of(manifest)
        rows = [dataclasses.replace(row, errors_run=errors.name, errors_model=model, errors_text=text) for row in rows]
    for row in rows:
        console.say(
            f"{row.step_context}, index {row.step_index}, k={row.step_k}: {row.label} (error {row.error:.4f}, at {row.error_context} "
            f"tokens) as {row.step_label} of {row.step_model}: {row.step_ms:.2f} ms, {row.ratio:.2f}x the speed "
            f"of {row.reference} (error {row.reference_error:.4f}){'' if row.same_round else ', timed in another round'}"
        )
    path = steps.path / table_name(errors.name)
    write_table(path, rows)
    console.document({"table": str(path), "rows": [vars(row) for row in rows]})
    console.result(path, "table")
    return 0


def _loaded(path: Path, stack: contextlib.ExitStack, console: Console) -> Loaded:
    """A run to read, also one whose records are packed."""
    from fathom_eval.reports.loading import load_runs

    ((run,), _) = load_runs([path], stack)
    for problem in run.records.problems:
        console.warn(problem)
    return run


def _kind_of(run: Loaded) -> str:
    """What a run is, in words."""
    from fathom_eval.reports.loading import TIMING

    if run.kind != TIMING:
        return f"a {run.kind} run"
    benchmark = run.records.manifest.get("identity", {}).get("benchmark")
    return "a run of other timings" if benchmark is None else f"a run of 'bench {benchmark}'"
