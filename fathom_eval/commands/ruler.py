"""``fathom-eval ruler``: RULER-style tasks, all methods branched from one dense prefill a sample."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathom_eval.commands.arguments import (
    add_model_arguments,
    add_output_arguments,
    at_least_one,
    check_model_arguments,
    device_name,
    numbers,
    words,
)
from fathom_eval.commands.failures import add_retry_argument, warn_of_failures, warn_without_result
from fathom_eval.commands.resuming import deciding_arguments, defer_defaults, take_over
from fathom_eval.commands.spreading import (
    add_runtime_argument,
    add_worker_arguments,
    check_runtime_argument,
    check_workers,
    copies_here,
    model_request,
    release_weights,
    spread_units,
    wants_workers,
    write_prompt,
)
from fathom_eval.errors import UserError
from fathom_eval.run import Run, default_run_path
from fathom_eval.run_files import check_free_space

if TYPE_CHECKING:
    from fathom_eval.console import Console
    from fathom_eval.models import LoadedModel, ModelFacts
    from fathom_eval.ruler import RulerWork, Unit
    from fathom_eval.tasks.samples import SampleBuilder

HELP = "Run RULER-style tasks: every method decodes from one dense prefill a sample."
EXAMPLE = "fathom-eval ruler --context 2048 --k 64,128 --tasks niah_single,vt --limit 8"
ALL_TASKS = "niah_single,niah_multikey,niah_multivalue,niah_multiquery,vt,fwe"
# A record with its generation takes about 1 KB; the report's figures and tables a few MB.
_BYTES_A_RECORD, _BYTES_OF_REPORT = 4096, 20 * 2**20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.usage = f"{parser.prog} [options]"
    add = parser.add_argument
    add("--model", default="smollm2", help="hub id, local folder, GGUF file, or smollm2 (default)")
    add("--tasks", default=ALL_TASKS, metavar="A,B", help="default: all six (niah_single … fwe)")
    add("--methods", default="paper", metavar="A,B", help="names with options, sparq:r=D/4; default: paper (see 'methods')")
    add("--context", default="2048", metavar="N,N", help="prompt tokens (default: 2048)")
    add("--k", default="128", metavar="K,K", help="keys a query head attends to (default: 128)")
    add("--limit", type=int, default=8, metavar="N", help="samples of each task and context (default: 8)")
    add("--seed", type=int, default=0, metavar="S", help="of the samples: any whole number (default: 0)")
    add("--haystack", default="auto", metavar="H", help="wikitext, python-docs, a text file, or auto (default)")
    add("--decoys", type=int, default=7, metavar="N", help="of niah_multikey (default: 7)")
    add("--chat-template", action="store_true", help="use the model's chat template")
    add("--batch-size", type=int, default=64, metavar="N", help="branches decoded in one batch (default: 64)")
    add("--log-samples", action="store_true", help="keep the prompts under DIR/samples")
    add("--batch_size", dest="batch_size", type=int, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add("--log_samples", dest="log_samples", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    add_runtime_argument(parser)
    add_worker_arguments(parser)
    add_model_arguments(parser)
    add_retry_argument(parser)
    add_output_arguments(parser, "ruler")
    defer_defaults(parser)


def run(args: argparse.Namespace) -> int:
    """Check everything cheap, load the model, measure what is missing, report."""
    from fathom_eval.calibration_file import calibration_warnings
    from fathom_eval.checkpoints import check_spec
    from fathom_eval.console import Console
    from fathom_eval.methods import MethodSpec, parse_methods
    from fathom_eval.methods.possible import Possible, check_options
    from fathom_eval.tasks.haystack import load_haystack
    from fathom_eval.tasks.samples import find_task

    console = Console(quiet=args.quiet, json=args.json)
    take_over(args, "ruler", console.say)
    specs = parse_methods(args.methods)
    specs += [spec for spec in parse_methods("dense,exact") if spec not in specs]  # the references beside every cell
    tasks = [find_task(name).name for name in dict.fromkeys(words(args.tasks, "--tasks"))]
    contexts, k_values = numbers(args.context, "--context"), numbers(args.k, "--k")
    at_least_one(args.limit, "--limit")
    at_least_one(args.batch_size, "--batch-size")
    check_workers(args)
    check_runtime_argument(args)
    check_model_arguments(args)
    possible = Possible(specs)
    possible.keep(k_values, MethodSpec.check_k, console.say)
    possible.keep(k_values, check_options, console.say)
    if args.decoys < 0:
        raise UserError(f"--decoys {args.decoys} must be at least 0")
    check_spec(args.model)  # before a text is waited for
    haystack = load_haystack(args.haystack, offline=args.offline, say=console.say)

    from fathom_eval.offload.branches import check_runtime, describe_split
    from fathom_eval.ruler import RulerWork, all_branches, missing_units, run_identity, versions

    work = RulerWork(model_request(args), haystack, args.seed, args.decoys, args.chat_template, args.batch_size, args.runtime)
    loaded = work.model.load(console.say)
    facts = loaded.facts
    if args.runtime is not None:
        check_runtime(loaded, args.runtime)
    possible.keep(k_values, lambda spec, at: spec.check(facts, at), console.say)
    specs = possible.specs
    for line in calibration_warnings([spec.method for spec in specs], contexts, text_sha256=haystack.sha256):
        console.warn(line)
    builder = work.builder(loaded)
    builder.check(tasks, contexts, facts.max_positions, samples=args.limit)
    branches = all_branches(specs, k_values, facts)
    identity = run_identity(facts, builder, args.runtime)
    path = Path(args.output) if args.output is not None else default_run_path("ruler", facts.name, identity)
    check_free_space(path, len(branches) * args.limit * len(tasks) * len(contexts) * _BYTES_A_RECORD + _BYTES_OF_REPORT)
    details: dict[str, Any] = {
        "kind": "ruler",
        "model": facts.name,
        "device": device_name(facts.place),
        "dtype": facts.dtype,
        "haystack": {"name": haystack.title, "origin": haystack.origin},
        "versions": dict(versions()),
        "settings": {
            "tasks": tasks,
            "context": contexts,
            "k": k_values,
            **possible.settings,
            "limit": args.limit,
            "seed": args.seed,
            "decoys": args.decoys,
            "chat_template": args.chat_template,
            **({} if args.runtime is None else {"runtime": args.runtime}),
        },
        "arguments": deciding_arguments(args),
    }
    with Run.open(path, identity=identity, details=details) as opened:
        for problem in opened.problems:
            console.warn(problem)
        if args.log_samples:
            _log_samples(opened.path, builder, tasks, contexts, args.limit)
        units = missing_units(opened, tasks, contexts, args.limit, branches, retry_failed=args.retry_failed)
        everything = [k for k in k_values if k >= min(contexts)]
        if everything:
            console.warn(f"k={everything[0]} selects every token of {min(contexts)}: all methods equal dense there")
        _say_plan(console, opened, len(units), len(branches), loaded, details["haystack"]["name"])
        if args.runtime is not None:
            console.say(describe_split(specs, facts, args.runtime, k_values))
            _check_pinned(console, facts, units, args)
        _measure(console, loaded, builder, opened, units, work, args)
        return _report(console, opened)


def _check_pinned(console: Console, facts: ModelFacts, units: list[Unit], args: argparse.Namespace) -> None:
    """Raise UserError where decoding after the longest prompt pins more host memory than is free here.

    Every worker pins its own. The machines of a cluster are not asked.
    """
    from fathom_eval.memory import check_pinned, gib
    from fathom_eval.offload.branches import estimate_split
    from fathom_eval.tasks.samples import find_task

    if not units or args.ray not in (None, "local"):
        return
    longest, copies = max(unit.context for unit in units), copies_here(args, facts)
    at_longest = [unit for unit in units if unit.context == longest]
    branches = list(dict.fromkeys(branch for unit in at_longest for branch in unit.branches))
    most = max(find_task(unit.task).max_new_tokens for unit in at_longest)
    pinned = copies * estimate_split(facts, branches, longest, most, args.batch_size, args.runtime).pinned
    if pinned:
        what = f"a prompt of {longest:,} tokens" + (f" in each of {copies} workers" if copies > 1 else "")
        console.say(f"pinned host memory: about {gib(pinned)} for {what}")
        instead = ["a shorter --context", *["fewer --workers"] * (copies > 1), *["--runtime hbm"] * (args.runtime == "host")]
        check_pinned(pinned, what, ", ".join(instead))


def _measure(
    console: Console,
    loaded: LoadedModel,
    builder: SampleBuilder,
    opened: Run,
    units: list[Any],
    work: RulerWork,
    args: argparse.Namespace,
) -> None:
    from fathom_eval.ruler import evaluate, failed_records

    if not units:
        return
    with console.progress(len(units), "samples") as progress:
        if wants_workers(args):
            release_weights(loaded)
            failed = partial(failed_records, loaded, builder, args.runtime)
            for _, measured in spread_units(args, console, work, loaded.facts, units, failed):
                opened.append(measured.records)
                for note in measured.notes:
                    console.warn(note)
                progress.advance()
            return
        progress.advance(0, note=f"{units[0].task} {units[0].context}")
        for records in evaluate(loaded, builder, units, args.batch_size, runtime=args.runtime, say=console.warn, progress=progress.tell):
            opened.append(records)
            following = units[progress.done + 1 : progress.done + 2]
            progress.advance(note=f"{following[0].task} {following[0].context}" if following else "")


def _report(console: Console, opened: Run) -> int:
    import pandas

    from fathom_eval.reports.build import build_report
    from fathom_eval.reports.tables import summary_table

    records = opened.records()
    files = build_report([opened.path], opened.path / "report")
    failures = warn_of_failures(console, records, "sample")
    table = summary_table(records)
    console.table(table, title="score of each method (bits: scan bits per token, KV head and layer)")
    rows = json.loads(pandas.read_csv(files.csv).to_json(orient="records"))
    console.document({"run": str(opened.path), "html": str(files.html), "csv": str(files.csv), "results": rows})
    console.result(opened.path, "run")
    console.result(files.csv, "csv")
    console.result(files.html, "html")
    warn_without_result(console, failures)
    return 0


def _say_plan(console: Console, opened: Run, units: int, branches: int, loaded: LoadedModel, haystack: str) -> None:
    facts = loaded.facts
    done = len(opened)
    kept = f"; {done} records are there already" if done else ""
    console.say(
        f"{facts.name} ({facts.dtype}, {facts.place}), haystack {haystack}: {units} samples to do, up to {branches} branches each{kept}"
    )


def _log_samples(path: Path, builder: SampleBuilder, tasks: list[str], contexts: list[int], limit: int) -> None:
    for context in contexts:
        for task in tasks:
            for index in range(limit):
                write_prompt(path / "samples", f"{task}-{context}-{index}.txt", builder.build(task, context, index).prompt)
