"""``fathom-eval fidelity``: the error of every method's attention outputs, against dense attention and against exact top-k."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from fathom_eval.commands.arguments import (
    add_model_arguments,
    add_output_arguments,
    at_least_one,
    check_model_arguments,
    device_name,
)
from fathom_eval.commands.failures import add_retry_argument, warn_of_failures, warn_without_result
from fathom_eval.commands.resuming import deciding_arguments, defer_defaults, take_over
from fathom_eval.commands.spreading import (
    add_worker_arguments,
    check_workers,
    model_request,
    release_weights,
    spread_units,
    wants_workers,
)
from fathom_eval.commands.suite_arguments import Choice, add_suite_arguments, choose, report_suite
from fathom_eval.errors import UserError

if TYPE_CHECKING:
    from fathom_eval.console import Console
    from fathom_eval.fidelity import FidelityWork, Unit
    from fathom_eval.fidelity_windows import WindowSource
    from fathom_eval.models import LoadedModel
    from fathom_eval.run import Run
    from fathom_eval.session_data import SourceSettings
    from fathom_eval.tasks.haystack import Haystack

HELP = "Measure the error of attention outputs over the bits that scans read."
EXAMPLE = "fathom-eval fidelity --context 2048 --k 64,128 --windows 8 --output runs/error"
# A record with its layers' means takes about 5 KB; tables and the figure less than a MB.
_BYTES_A_RECORD, _BYTES_OF_REPORT = 16384, 4 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.usage = f"{parser.prog} [options]"
    add = parser.add_argument
    add("--model", default="smollm2", help="hub id, local folder, GGUF file, or smollm2 (default)")
    add("--methods", metavar="A,B", help="names with options, sparq:r=D/4; default: paper (see 'methods')")
    add("--context", metavar="N,N", help="tokens of a window (default: 2048)")
    add("--k", metavar="K,K", help="keys a query head attends to (default: 128)")
    add_suite_arguments(parser)
    add("--windows", type=int, default=8, metavar="W", help="disjoint windows of the text (default: 8)")
    add("--positions", type=int, default=128, metavar="P", help="last positions of a window that are evaluated (default: 128)")
    add("--full-window", action="store_true", help="statistics and sealed blocks of the whole window, not of each position's past")
    add("--haystack", metavar="H", help="wikitext, python-docs, a text file, or auto (default)")
    add("--trajectories", metavar="SET", help="windows of agent sessions instead: file, folder, hub id, or builtin")
    add("--trajectories-revision", metavar="R", help="branch, tag or commit of a hub set")
    add("--default-repo", default="", metavar="REPO", help="repository of trajectories that name none")
    add("--seed", type=int, default=0, metavar="S", help="of the windows: any whole number (default: 0)")
    add_worker_arguments(parser)
    add_model_arguments(parser)
    add_retry_argument(parser)
    add_output_arguments(parser, "fidelity")
    defer_defaults(parser)


def run(args: argparse.Namespace) -> int:
    """Check everything cheap, load the model, measure what is missing, report."""
    from fathom_eval.calibration_file import calibration_warnings
    from fathom_eval.checkpoints import check_spec
    from fathom_eval.console import Console
    from fathom_eval.methods import MethodSpec
    from fathom_eval.methods.possible import Possible, check_options
    from fathom_eval.reports.wording import count, join
    from fathom_eval.run import Run, default_run_path
    from fathom_eval.run_files import check_free_space
    from fathom_eval.tasks.haystack import Haystack

    console = Console(quiet=args.quiet, json=args.json)
    if args.list_suites:
        return _list_suites(console)
    take_over(args, "fidelity", console.say)
    choice = choose(args, console)
    specs, contexts, k_values = choice.specs, choice.contexts, choice.k_values
    at_least_one(args.windows, "--windows")
    at_least_one(args.positions, "--positions")
    check_workers(args)
    check_model_arguments(args)
    for k in k_values:
        if short := [f"{context:,}" for context in contexts if context <= k]:
            console.warn(f"k={k} selects every key of a context of {join(short)}: what a method would select makes no difference there")
    possible = Possible(specs)
    possible.keep(k_values, MethodSpec.check_k, console.say)
    possible.keep(k_values, check_options, console.say)
    if args.trajectories is not None and args.haystack is not None:
        raise UserError("windows come from --haystack or from --trajectories: give one of them")
    check_spec(args.model)  # before a text is waited for
    text = _text(args, console)

    from fathom_eval.fidelity import FidelityWork, check_positions, missing_units, run_identity
    from fathom_eval.ruler import all_branches, versions

    check_positions(args.positions, contexts)
    work = FidelityWork(model_request(args), text, args.seed, args.positions, args.full_window)
    loaded = work.model.load(console.say)
    facts = loaded.facts
    check_positions(args.positions, contexts, facts)
    possible.keep(k_values, lambda spec, at: spec.check(facts, at), console.say)
    specs = possible.specs
    known, title = (text.sha256, text.title) if isinstance(text, Haystack) else (None, text.name)
    for line in calibration_warnings([spec.method for spec in specs], contexts, text_sha256=known):
        console.warn(line)
    windows = work.windows(loaded, console.say)
    for context in contexts:
        windows.check(context, args.windows)
    branches = all_branches(specs, k_values, facts)
    identity = run_identity(facts, windows, positions=args.positions, full_window=args.full_window)
    path = Path(args.output) if args.output is not None else default_run_path("fidelity", facts.name, identity)
    check_free_space(path, len(branches) * args.windows * len(contexts) * _BYTES_A_RECORD + _BYTES_OF_REPORT)
    details = {
        "kind": "fidelity",
        "model": facts.name,
        "device": device_name(facts.place),
        "dtype": facts.dtype,
        "haystack": {"name": title, "origin": text.origin if isinstance(text, Haystack) else "agent sessions"},
        "versions": dict(versions()),
        "settings": {
            "context": contexts,
            "k": k_values,
            **possible.settings,
            "windows": args.windows,
            "positions": args.positions,
            "full_window": args.full_window,
            "seed": args.seed,
            "rope_scaling": args.rope_scaling,
            **choice.settings,
        },
        "arguments": deciding_arguments(args),
    }
    with Run.open(path, identity=identity, details=details) as opened:
        for problem in opened.problems:
            console.warn(problem)
        units = missing_units(opened, contexts, args.windows, branches, retry_failed=args.retry_failed)
        kept = f"; {count(len(opened), 'record')} there already" if len(opened) else ""
        console.say(
            f"{facts.name} ({facts.dtype}, {facts.place}), {title}: {count(len(units), 'window')} to do, "
            f"the last {count(args.positions, 'position')} of each, {len(branches)} branches{kept}"
        )
        _measure(console, loaded, windows, opened, units, work, args)
        return _report(console, opened, choice)


def _measure(
    console: Console,
    loaded: LoadedModel,
    windows: WindowSource,
    opened: Run,
    units: list[Unit],
    work: FidelityWork,
    args: argparse.Namespace,
) -> None:
    from fathom_eval.fidelity import evaluate

    if not units:
        return
    with console.progress(len(units), "windows") as progress:
        if wants_workers(args):
            release_weights(loaded)
            failed = partial(work.failed_records, loaded.facts, windows)
            for _, result in spread_units(args, console, work, loaded.facts, units, failed):
                opened.append(result.records)
                progress.advance()
            return
        measured = evaluate(
            loaded,
            windows,
            units,
            positions=args.positions,
            full_window=args.full_window,
            progress=progress.tell,
        )
        for records in measured:
            opened.append(records)
            progress.advance()


def _text(args: argparse.Namespace, console: Console) -> Haystack | SourceSettings:
    """The text, or the trajectories whose sessions are the windows; the lengths of those are the contexts."""
    from fathom_eval.session_data import SourceSettings
    from fathom_eval.tasks.haystack import load_haystack

    if args.trajectories is None:
        return load_haystack(args.haystack or "auto", offline=args.offline, say=console.say)
    return SourceSettings(
        trajectories=None if args.trajectories == "builtin" else args.trajectories,
        rendering="auto",
        sessions=1,
        low=1,
        high=1,
        seed=args.seed,
        default_repo=args.default_repo,
        revision=args.trajectories_revision,
    )


def _list_suites(console: Console) -> int:
    from fathom_eval.suites import SUITES, list_suites

    for line in list_suites():
        console.say(line)
    console.document({"suites": [vars(suite) for suite in SUITES]})
    return 0


def _report(console: Console, opened: Run, choice: Choice) -> int:
    from fathom_eval.reports.build import build_report
    from fathom_eval.reports.fidelity import fidelity_frame, fidelity_results, fidelity_table

    files = build_report([opened.path], opened.path / "report")
    frame = fidelity_frame(opened.iter_records())
    failures = warn_of_failures(console, opened.iter_records(), "window")
    table = fidelity_table(frame)
    console.table(table, title="error of each method's attention outputs (bits: scan bits per token, KV head and layer)")
    suite = report_suite(console, opened, choice) if choice.suite is not None else {}
    console.document(
        {
            **suite,
            "run": str(opened.path),
            "html": str(files.html),
            "csv": str(files.csv),
            "pairs": str(files.csv.with_name("pairs.csv")),
            "figures": [str(path) for path in files.figures],
            "table": fidelity_results(frame),
        }
    )
    console.result(opened.path, "run")
    console.result(files.csv, "csv")
    console.result(files.html, "html")
    warn_without_result(console, failures)
    return 0
