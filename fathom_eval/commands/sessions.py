"""``fathom-eval sessions``: the next step of agent sessions, all methods from one dense prefill; and what a file of trajectories holds."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathom_eval.commands.arguments import (
    add_model_arguments,
    add_output_arguments,
    at_least_one,
    check_model_arguments,
    device_name,
    numbers,
)
from fathom_eval.commands.failures import add_retry_argument, warn_of_failures, warn_without_result
from fathom_eval.commands.resuming import deciding_arguments, defer_defaults, take_over
from fathom_eval.commands.sessions_inspect import (
    add_inspect_arguments,
    add_reading_arguments,
    add_rendering_arguments,
    inspect,
    print_list,
    source_settings,
)
from fathom_eval.commands.spreading import (
    add_runtime_argument,
    add_worker_arguments,
    check_runtime_argument,
    check_workers,
    model_request,
    release_weights,
    spread_units,
    wants_workers,
    write_prompt,
)
from fathom_eval.errors import UserError

if TYPE_CHECKING:
    from fathom_eval.agent_sessions import SessionUnit, SessionWork, Unit
    from fathom_eval.console import Console
    from fathom_eval.methods import MethodSpec
    from fathom_eval.models import LoadedModel
    from fathom_eval.run import Run
    from fathom_eval.session_data import PreparedSession, SessionData

HELP = "The next step of recorded agent sessions, decoded by every method from one dense prefill."
EXAMPLE = "fathom-eval sessions --k 512,2048 --trajectories nebius/SWE-rebench-openhands-trajectories"

# A record with its step and tokens takes some KB; the report's figures and tables a few MB.
_BYTES_A_RECORD, _BYTES_OF_REPORT = 16384, 30 * 2**20
_BASELINE = "sparq:r=D/8"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's arguments."""
    parser.usage = f"{parser.prog} [options]  |  {parser.prog} inspect FILE [options]"
    parser.description = "The next step of agent sessions, by every method from one prefill; inspect FILE: what a file holds."
    parser.formatter_class = _HelpFormatter
    add = parser.add_argument
    add("--model", default="smollm2", help="hub id, local folder, GGUF file, or smollm2 (default)")
    add("--methods", default="paper", metavar="A,B", help="names with options; default: paper (see 'methods')")
    add("--k", default="2048", metavar="K,K", help="keys a query head attends to (default: 2048)")
    add("--trajectories", metavar="PATH|HUB_ID", help="default: a small built-in set of a scripted agent")
    add("--trajectories-revision", metavar="R", help="branch, tag or commit of a hub set")
    add_reading_arguments(parser)
    add("--sessions", type=int, default=8, metavar="N", help="at most so many (default: 8)")
    add("--session-tokens", metavar="LOW:HIGH", help="default: 80000:100000, or what model and set can hold")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="limit of a step (default: 256)")
    add_rendering_arguments(parser, "the model's chat template")
    add("--seed", type=int, default=0, metavar="S", help="of the sessions: any whole number (default: 0)")
    add("--baseline", metavar="METHOD", help=f"what the others are compared with (default: {_BASELINE})")
    add("--no-recorded-text", action="store_true", help="keep no recorded step: what was generated, scores and ids")
    add("--no-text", action="store_true", help="keep no generated step either; its token ids stay")
    add("--log-samples", action="store_true", help="keep the prompts under DIR/samples")
    add("--batch-size", type=int, default=64, metavar="N", help="branches decoded in one batch (default: 64)")
    add_runtime_argument(parser)
    add_worker_arguments(parser)
    add_model_arguments(parser)
    add_retry_argument(parser)
    add_output_arguments(parser, "sessions")
    hidden: dict[str, Any] = {"default": argparse.SUPPRESS, "help": argparse.SUPPRESS}
    add("--log_samples", dest="log_samples", action="store_true", **hidden)
    add("--batch_size", dest="batch_size", type=int, **hidden)
    defer_defaults(parser)
    actions = parser.add_subparsers(dest="action", help=argparse.SUPPRESS, prog=f"{parser.prog}")
    text = "What a file holds: format, trajectories, repositories, tokens, sessions it can give, what was skipped and why."
    action = actions.add_parser(
        "inspect",
        description=text,
        epilog="example: fathom-eval sessions inspect trajectories.jsonl.gz --model smollm2",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_inspect_arguments(action)


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Room for the longest option beside its explanation."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def run(args: argparse.Namespace) -> int:
    """Inspect a file; or check everything cheap, load the model, measure what is missing, report."""
    if args.action == "inspect":
        return inspect(args)
    from fathom_eval.calibration_file import calibration_warnings
    from fathom_eval.console import Console
    from fathom_eval.methods import MethodSpec, parse_methods
    from fathom_eval.methods.possible import Possible, check_options
    from fathom_eval.run import Run

    console = Console(quiet=args.quiet, json=args.json)
    take_over(args, "sessions", console.say)
    specs, k_values = parse_methods(args.methods), numbers(args.k, "--k")
    for value, flag in ((args.sessions, "--sessions"), (args.max_new_tokens, "--max-new-tokens"), (args.batch_size, "--batch-size")):
        at_least_one(value, flag)
    check_workers(args)
    check_runtime_argument(args)
    check_model_arguments(args)
    if args.no_recorded_text and args.log_samples:
        raise UserError("--log-samples keeps prompts, which are recorded text: leave it out or --no-recorded-text")
    if args.trajectories_revision is not None and args.trajectories is None:
        raise UserError("--trajectories-revision goes with the hub id that --trajectories names")
    possible = Possible(specs)
    possible.keep(k_values, MethodSpec.check_k, console.say)
    possible.keep(k_values, check_options, console.say)
    baseline = _baseline(args.baseline, possible.specs)
    _check_source(args)

    from fathom_eval.agent_sessions import DecodeSettings, SessionWork, missing_units, run_identity, step_branches, with_controls
    from fathom_eval.models import parse_rope_scaling
    from fathom_eval.offload.branches import check_runtime, describe_split
    from fathom_eval.ruler import versions
    from fathom_eval.run import default_run_path
    from fathom_eval.run_files import check_free_space
    from fathom_eval.session_data import check_k, choose_bounds, prepare_sessions
    from fathom_eval.sessions.report import ReadReport

    request = model_request(args)
    loaded = request.load(console.say)
    facts = loaded.facts
    if args.runtime is not None:
        check_runtime(loaded, args.runtime)
    scaling = parse_rope_scaling(args.rope_scaling) if args.rope_scaling else 1
    low, high, why = choose_bounds(args.session_tokens, facts, args.max_new_tokens, is_builtin=args.trajectories is None, scaling=scaling)
    check_k(k_values, low, high, facts)
    possible.specs = with_controls(possible.specs)
    possible.keep(k_values, lambda spec, at: spec.check(facts, at), console.say)
    specs = possible.specs
    console.say(f"sessions of {low:,} to {high:,} tokens, {why}")
    source = source_settings(args, args.sessions, low, high, args.trajectories_revision)
    report = ReadReport()
    try:
        data = prepare_sessions(loaded, source, report=report, say=console.say)
    finally:  # a refusal is understood only with what was left out
        print_list(console, "skipped", report.lines(), sum(report.reasons.values()))
    repositories = [session.repo for session in data.sessions]
    for note in (*data.notes, *calibration_warnings([spec.method for spec in specs], [high], repositories=repositories)):
        console.warn(note)
    branches = step_branches(specs, k_values, facts)
    identity = run_identity(facts, data, args.max_new_tokens, args.runtime)
    path = Path(args.output) if args.output is not None else default_run_path("sessions", facts.name, identity)
    check_free_space(path, len(branches) * len(data.sessions) * _BYTES_A_RECORD + _BYTES_OF_REPORT)
    details = {
        "kind": "sessions",
        "model": facts.name,
        "device": device_name(facts.place),
        "dtype": facts.dtype,
        "trajectories": {"name": source.name, "scripted": args.trajectories is None},
        "versions": dict(versions()),
        "settings": {
            "sessions": len(data.sessions),
            "session_tokens": f"{low}:{high}",
            "k": k_values,
            **possible.settings,
            "baseline": baseline,
            "max_new_tokens": args.max_new_tokens,
            "rendering": data.rendering,
            "rope_scaling": args.rope_scaling,
            "seed": args.seed,
            **({} if args.runtime is None else {"runtime": args.runtime}),
        },
        "arguments": deciding_arguments(args),
    }
    with Run.open(path, identity=identity, details=details) as opened:
        for problem in opened.problems:
            console.warn(problem)
        units = missing_units(opened, data, branches, retry_failed=args.retry_failed)
        kept = f"; {len(opened)} records are there already" if len(opened) else ""
        console.say(
            f"{facts.name} ({facts.dtype}, {facts.place}), trajectories: {source.name}; {data.rendering}: "
            f"{len(units)} of {len(data.sessions)} sessions to do, {len(branches)} branches each{kept}"
        )
        if args.runtime is not None:
            console.say(describe_split(specs, facts, args.runtime, k_values))
        keep = (not args.no_text, not (args.no_text or args.no_recorded_text))
        settings = DecodeSettings(args.max_new_tokens, args.batch_size, *keep, runtime=args.runtime)
        work = SessionWork(request, dataclasses.replace(data, sessions=[]), settings)
        _measure(console, loaded, data, opened, units, work, args)
        return _report(console, opened)


def _measure(
    console: Console,
    loaded: LoadedModel,
    data: SessionData,
    opened: Run,
    units: list[Unit],
    work: SessionWork,
    args: argparse.Namespace,
) -> None:
    from fathom_eval.memory import gib

    if not units:
        return
    with console.progress(len(units), "sessions") as progress:
        for session, records in _results(console, loaded, data, opened, units, work, args, progress.tell):
            opened.append(records)
            memory = records[0]["memory"]
            peak = "" if memory["peak_bytes"] is None else f", at most {gib(memory['peak_bytes'])} at once"
            held = f"prefix and stores took {gib(memory['held_bytes'])} of {gib(memory['estimated_held_bytes'])} estimated{peak}"
            console.say(f"session {records[0]['sample']}: {held}; prefill {records[0]['prefill_seconds']:.1f} s")
            if args.log_samples:
                prompt = loaded.tokenizer.decode(session.prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
                write_prompt(opened.path / "samples", f"session-{records[0]['sample']}.txt", prompt)
            progress.advance()


def _results(
    console: Console,
    loaded: LoadedModel,
    data: SessionData,
    opened: Run,
    units: list[Unit],
    work: SessionWork,
    args: argparse.Namespace,
    tell: Callable[[str], None],
) -> Iterator[tuple[PreparedSession, list[dict[str, Any]]]]:
    """Each session with its records, measured here, with ``tell`` for what is at work, or by workers."""
    from fathom_eval.agent_sessions import SessionUnit, evaluate, failed_records, stored_references

    references = stored_references(opened.iter_records(), loaded, data)
    if not wants_workers(args):
        yield from evaluate(loaded, data, units, work.settings, references=references, say=console.say, progress=tell)
        return
    release_weights(loaded)
    tasks = [
        SessionUnit(unit, data.sessions[unit.index], {key: step for key, step in references.items() if key[0] == unit.index})
        for unit in units
    ]

    def failed(task: SessionUnit, reason: str) -> list[dict[str, Any]]:
        return failed_records(loaded, data, task, work.settings, reason)

    for task, measured in spread_units(args, console, work, loaded.facts, tasks, failed):
        for note in measured.notes:
            console.say(note)
        yield task.session, measured.records


def _report(console: Console, opened: Run) -> int:
    from fathom_eval.reports.build import build_report
    from fathom_eval.reports.sessions import session_results, summary_table

    files = build_report([opened.path], opened.path / "report")
    failures = warn_of_failures(console, opened.iter_records(), "session")
    table = summary_table(opened)
    console.table(table, title="agreement of each step with that of exact top-k at the same k")
    console.document({"run": str(opened.path), "html": str(files.html), "csv": str(files.csv), "table": session_results(opened)})
    console.result(opened.path, "run")
    console.result(files.csv, "csv")
    console.result(files.html, "html")
    warn_without_result(console, failures)
    return 0


def _baseline(asked: str | None, specs: list[MethodSpec]) -> str | None:
    """Label of the method that the others are compared with: as asked, else SparQ D/8, else the first that is no control."""
    from fathom_eval.methods import parse_method

    if asked is not None:
        spec = parse_method(asked)
        if spec not in specs:
            raise UserError(f"the baseline '{asked}' is not measured: add it to --methods, or take one of them")
        return spec.label
    usual = parse_method(_BASELINE)
    scans = [spec for spec in specs if not spec.method.control]
    return usual.label if usual in scans else scans[0].label if scans else None


def _check_source(args: argparse.Namespace) -> None:
    """See that there is a first trajectory, and that the range of tokens is one, before a model is loaded."""
    from fathom_eval.sessions.assembly import parse_session_tokens
    from fathom_eval.sessions.reading import read_trajectories
    from fathom_eval.sessions.report import ReadReport
    from fathom_eval.sessions.safe_text import visible

    if args.session_tokens is not None:
        parse_session_tokens(args.session_tokens)
    if args.trajectories is None:
        return
    if args.offline and not Path(args.trajectories).expanduser().exists():
        raise UserError(
            f"there is no file or folder '{visible(args.trajectories, 200)}', and --offline forbids to look for a set of the hub"
        )
    next(
        read_trajectories(
            args.trajectories,
            ReadReport(),
            format_name=args.format,
            revision=args.trajectories_revision,
            condensation=args.condensation,
        )
    )
