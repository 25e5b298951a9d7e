"""``fathom-eval fidelity``: the error of every method's attention outputs, against dense attention and against exact top-k."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fathom_eval.commands.arguments import add_model_arguments, add_output_arguments, at_least_one, device_name, numbers

if TYPE_CHECKING:
    from fathom_eval.console import Console
    from fathom_eval.run import Run

HELP = "Measure the error of attention outputs over the bits that scans read."
EXAMPLE = "fathom-eval fidelity --context 2048 --k 64,128 --windows 8 --output runs/error"
# A record with its layers' means takes about 5 KB; tables and the figure less than a MB.
_BYTES_A_RECORD, _BYTES_OF_REPORT = 16384, 4 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add = parser.add_argument
    add("--model", default="smollm2", help="hub id, local folder, GGUF file, or smollm2 (default)")
    add("--methods", default="paper", metavar="A,B", help="names with options, sparq:r=D/4; default: paper (see 'methods')")
    add("--context", default="2048", metavar="N,N", help="tokens of a window (default: 2048)")
    add("--k", default="128", metavar="K,K", help="keys a query head attends to (default: 128)")
    add("--windows", type=int, default=8, metavar="W", help="disjoint windows of the text (default: 8)")
    add("--positions", type=int, default=128, metavar="P", help="last positions of a window that are evaluated (default: 128)")
    add("--full-window", action="store_true", help="statistics and sealed blocks of the whole window, not of each position's past")
    add("--haystack", default="auto", metavar="H", help="wikitext, python-docs, a text file, or auto (default)")
    add("--seed", type=int, default=0, metavar="S", help="of the windows (default: 0)")
    add_model_arguments(parser)
    add_output_arguments(parser, "fidelity")


def run(args: argparse.Namespace) -> int:
    """Check everything cheap, load the model, measure what is missing, report."""
    from fathom_eval.console import Console
    from fathom_eval.methods import parse_methods
    from fathom_eval.run import Run, check_free_space, default_run_path
    from fathom_eval.tasks.haystack import load_haystack

    console = Console(quiet=args.quiet, json=args.json)
    specs = parse_methods(args.methods)
    contexts, k_values = numbers(args.context, "--context"), numbers(args.k, "--k")
    at_least_one(args.windows, "--windows")
    at_least_one(args.positions, "--positions")
    for spec in specs:
        if not spec.method.control or spec.method.name == "exact":
            for k in k_values:
                spec.policy.check(k, spec.label)
    if args.output is not None:
        Run.check(Path(args.output))
    haystack = load_haystack(args.haystack, offline=args.offline, say=console.say)

    from fathom_eval.fidelity import Windows, check_positions, evaluate, missing_units, run_identity
    from fathom_eval.models import load_model
    from fathom_eval.ruler import all_branches, versions

    check_positions(args.positions, contexts)
    loaded = load_model(
        args.model,
        dtype=args.dtype,
        device=args.device,
        offline=args.offline,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        rope_scaling=args.rope_scaling,
        say=console.say,
    )
    facts = loaded.facts
    check_positions(args.positions, contexts, facts)
    for spec in specs:
        spec.check(facts, k_values)
    windows = Windows(loaded.tokenizer, haystack, args.seed)
    for context in contexts:
        windows.check(context, args.windows)
    branches = all_branches(specs, k_values, facts)
    identity = run_identity(facts, windows, positions=args.positions, full_window=args.full_window)
    path = Path(args.output) if args.output is not None else default_run_path("fidelity", facts.name, identity)
    check_free_space(path, len(branches) * args.windows * len(contexts) * _BYTES_A_RECORD + _BYTES_OF_REPORT)
    details = {
        "kind": "fidelity",
        "model": facts.name,
        "device": device_name(facts.device),
        "dtype": facts.dtype,
        "haystack": {"name": haystack.name, "origin": haystack.origin},
        "versions": dict(versions()),
        "settings": {
            "context": contexts,
            "k": k_values,
            "methods": [spec.label for spec in specs],
            "windows": args.windows,
            "positions": args.positions,
            "full_window": args.full_window,
            "seed": args.seed,
            "rope_scaling": args.rope_scaling,
        },
    }
    with Run.open(path, identity=identity, details=details) as opened:
        for problem in opened.problems:
            console.warn(problem)
        units = missing_units(opened, contexts, args.windows, branches)
        kept = f"; {len(opened)} records are there already" if len(opened) else ""
        console.say(
            f"{facts.name} ({facts.dtype}, {facts.device}), haystack {haystack.name}: {len(units)} windows to do, "
            f"the last {args.positions} positions of each, {len(branches)} branches{kept}"
        )
        if units:
            with console.progress(len(units), "windows") as progress:
                progress.advance(0, note="prefill")
                measured = evaluate(
                    loaded,
                    windows,
                    units,
                    positions=args.positions,
                    full_window=args.full_window,
                    progress=lambda note: progress.advance(0, note=note),
                )
                for records in measured:
                    opened.append(records)
                    progress.advance()
        return _report(console, opened)


def _report(console: Console, opened: Run) -> int:
    from fathom_eval.reports.fidelity import build_fidelity_report, fidelity_frame, fidelity_table

    files = build_fidelity_report(opened.path, opened.path / "report")
    frame = fidelity_frame(opened.iter_records())
    for row in frame[frame["failures"] > 0].to_dict(orient="records"):
        at = "" if row["k"] != row["k"] else f" at k={int(row['k'])}"
        console.warn(f"{row['method']}{at} failed in {row['failures']} windows: {row['failure']}")
    table = fidelity_table(frame)
    console.table(table, title="error of each method's attention outputs (bits: scan bits per token, KV head and layer)")
    console.document(
        {
            "run": str(opened.path),
            "csv": str(files.csv),
            "pairs": str(files.pairs_csv),
            "figures": [str(path) for path in files.figures],
            "table": table.to_dict(orient="records"),
        }
    )
    console.result(opened.path, "run")
    console.result(files.csv, "csv")
    for figure in files.figures:
        console.result(figure, "figure")
    return 0
