"""``fathom-eval bench equal-error``: step times beside the errors of a fidelity run."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathom_eval.commands.arguments import words
from fathom_eval.errors import UserError

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping, Sequence

    from fathom_eval.console import Console
    from fathom_eval.offload.bench.equal_error import EqualError
    from fathom_eval.reports.loading import Loaded

REFERENCE = "double_sparsity c=D/4"
_UNION = f"{REFERENCE} attend=union"


def run_equal_error(args: argparse.Namespace) -> int:
    """Write the table beside the steps, and say where it is."""
    from fathom_eval.console import Console
    from fathom_eval.offload.bench.equal_error import equal_error, table_name, write_table
    from fathom_eval.reports.facts import haystack_of, model_of
    from fathom_eval.reports.loading import TIMING
    from fathom_eval.reports.wording import count

    if args.errors is None or args.output is None:
        raise UserError("equal-error needs --errors, a fidelity run, and --output, a run of 'bench step'")
    console = Console(quiet=args.quiet, json=args.json)
    references = None if args.reference is None else [label for text in args.reference for label in words(text, "--reference")]
    with contextlib.ExitStack() as stack:
        errors, steps = (_loaded(Path(path), stack, console) for path in (args.errors, args.output))
        if errors.kind != "fidelity":
            raise UserError(f"--errors {args.errors} is {_kind_of(errors)}, not a fidelity run")
        # Scripts that time whole models print lines of kind "step" too, without a scan.
        timed = [record for record in steps.records.iter_records() if record.get("kind") == "step" and "scan_bits" in record]
        if steps.kind != TIMING or not timed:
            raise UserError(f"--output {args.output} is {_kind_of(steps)}, not a run of 'bench step'")
        if not steps.path.is_dir():
            raise UserError(f"--output {args.output} is a file: equal-error needs the folder of the run, and writes its table there")
        measured, timed = list(errors.records.iter_records()), list(steps.records.iter_records())
        rows = _by_default(measured, timed, console) if references is None else equal_error(measured, timed, references, console.warn)
        manifest = errors.records.manifest
        model, text = model_of(manifest), haystack_of(manifest)
        rows = [dataclasses.replace(row, errors_run=errors.name, errors_model=model, errors_text=text) for row in rows]
    for row in rows:
        below = "" if row.label == row.reference else f", below in {row.windows_below} of {count(row.windows_shared, 'window')}"
        console.say(
            f"{row.step_context}, index {row.step_index}, k={row.step_k}: {row.label} (error {row.error:.4f}, at {row.error_context} "
            f"tokens) as {row.step_label} of {row.step_model}: {row.step_ms:.2f} ms, {row.ratio:.2f}x the speed "
            f"of {row.reference} (error {row.reference_error:.4f}){below}{'' if row.same_round else ', timed in another round'}"
        )
    path = steps.path / table_name(errors.name)
    _say_replaced(path, rows, console)
    write_table(path, rows)
    console.document({"table": str(path), "rows": [vars(row) for row in rows]})
    console.result(path, "table")
    return 0


def _by_default(measured: Sequence[Mapping[str, Any]], timed: Sequence[Mapping[str, Any]], console: Console) -> list[EqualError]:
    """The rows of the default reference, and of the same with ``attend=union`` where there are any."""
    from fathom_eval.offload.bench.equal_error import equal_error, labels_of

    known = labels_of(measured)
    if REFERENCE not in known:
        raise UserError(
            f"the fidelity run has no '{REFERENCE}', whose error is the one to reach unless --reference names another of its methods: "
            f"{', '.join(sorted(known)) or 'it has none whose bits are known'}"
        )
    rows = equal_error(measured, timed, REFERENCE, console.warn)
    if _UNION in known:
        with contextlib.suppress(UserError):  # no step stands for it
            rows += equal_error(measured, timed, _UNION)
    return rows


def _say_replaced(path: Path, rows: Sequence[EqualError], console: Console) -> None:
    """Say what is gone with a table that stands where this one goes."""
    from fathom_eval.offload.bench.equal_error import lost_references

    if not path.is_file():
        return
    try:
        lost = lost_references(path, rows)
    except UserError:
        console.warn(f"{path.name} is replaced; what was there is no table of this version")
        return
    if lost:
        console.warn(f"{path.name} is replaced, without lines at the error of {', '.join(lost)}: a table holds the --reference of one call")


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
