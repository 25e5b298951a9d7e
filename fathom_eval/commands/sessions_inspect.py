"""``fathom-eval sessions inspect``: what a file of trajectories holds."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from fathom_eval.errors import UserError

if TYPE_CHECKING:
    from fathom_eval.console import Console
    from fathom_eval.session_data import SourceSettings
    from fathom_eval.sessions.encoding import TrajectoryEncoder
    from fathom_eval.sessions.inspection import Inspection

_SHOWN_LINES = 12


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the action's arguments."""
    add_source_arguments(parser)
    counting = parser.add_mutually_exclusive_group()
    counting.add_argument("--model", metavar="MODEL", help="count tokens as this model does (bundled name, folder or hub id)")
    counting.add_argument("--tokenizer", metavar="TOKENIZER", help="count tokens with this tokenizer (folder or hub id)")
    add_rendering_arguments(parser, "the tokenizer's chat template")
    parser.add_argument("--session-tokens", default="80000:100000", metavar="LOW:HIGH", help="tokens of a session (default: 80000:100000)")
    parser.add_argument("--seed", type=int, default=0, help="of the sessions: any whole number (default: 0)")
    parser.add_argument("--offline", action="store_true", help="never touch the network")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def add_source_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that say which trajectories are read, and how."""
    parser.add_argument("file", metavar="FILE", help="jsonl, json, parquet, gzip of these, a folder of files or event files, or a hub id")
    parser.add_argument("--revision", metavar="REV", help="branch, tag or commit of a hub set")
    add_reading_arguments(parser)


def add_reading_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments that say how trajectories are read."""
    parser.add_argument("--format", metavar="FORMAT", help="read every row as this format instead of finding it out")
    parser.add_argument("--repo", metavar="REPO", help="only sessions of this repository")
    parser.add_argument("--default-repo", default="", metavar="REPO", help="repository of trajectories that name none")
    parser.add_argument(
        "--condensation",
        default="full",
        metavar="HOW",
        help="full: all events (default); condensed: what the model still saw",
    )


def source_settings(args: argparse.Namespace, sessions: int, low: int, high: int, revision: str | None = None) -> SourceSettings:
    """Where sessions come from, by the arguments of :func:`add_reading_arguments` and :func:`add_rendering_arguments`.

    Args:
        sessions: The most that are taken.
        low, high: Tokens of a session.
        revision: Of a hub set.
    """
    from fathom_eval.session_data import SourceSettings

    return SourceSettings(
        trajectories=args.trajectories,
        rendering=rendering_choice(args),
        sessions=sessions,
        low=low,
        high=high,
        seed=args.seed,
        format_name=args.format,
        repo=args.repo,
        default_repo=args.default_repo,
        condensation=args.condensation,
        revision=revision,
    )


def inspect(args: argparse.Namespace) -> int:
    """Print what a file holds."""
    from fathom_eval.console import Console
    from fathom_eval.sessions.assembly import parse_session_tokens
    from fathom_eval.sessions.inspection import inspect_trajectories
    from fathom_eval.sessions.reading import read_trajectories
    from fathom_eval.sessions.report import ReadReport

    low, high = parse_session_tokens(args.session_tokens)
    console = Console(json=args.json)
    encoder, counted_with = _encoder(args, console)
    report = ReadReport()
    trajectories = read_trajectories(
        args.file,
        report,
        format_name=args.format,
        revision=args.revision,
        condensation=args.condensation,
        default_repo=args.default_repo,
    )
    inspection = inspect_trajectories(trajectories, report, encoder=encoder, low=low, high=high, seed=args.seed, repo=args.repo)
    console.document(_document(args, inspection, counted_with))
    if not args.json:
        _print(console, args, inspection, counted_with)
    return 0


def _encoder(args: argparse.Namespace, console: Console) -> tuple[TrajectoryEncoder | None, str]:
    """The encoder that counts tokens, or None, and what counts."""
    spec = args.model or args.tokenizer
    if spec is None:
        return None, "words of the plain rendering; give --model or --tokenizer to count tokens and to see how many sessions there are"
    from fathom_eval.sessions.encoded_cache import EncodedCache
    from fathom_eval.sessions.encoding import TrajectoryEncoder
    from fathom_eval.sessions.rendering import choose_renderer
    from fathom_eval.sessions.tokenizers import load_tokenizer

    try:
        tokenizer = load_tokenizer(spec, offline=args.offline)
    except UserError as error:
        raise UserError(f"{error}; without {'--model' if args.model else '--tokenizer'} words are counted") from None
    renderer, why = choose_renderer(tokenizer, rendering_choice(args))
    cache = EncodedCache()
    if cache.temporary:
        console.warn("the cache folder cannot be written: tokens are counted anew every time")
    return TrajectoryEncoder(tokenizer, renderer, cache), f"tokens of {spec}, {why}"


def _print(console: Console, args: argparse.Namespace, inspection: Inspection, counted_with: str) -> None:
    import pandas

    from fathom_eval.reports.wording import count
    from fathom_eval.sessions.safe_text import visible

    report = inspection.report
    formats = ", ".join(f"{name} ({times})" for name, times in report.formats.most_common())
    amounts = f"{count(report.trajectories, 'trajectory')} in {count(report.records, 'record')}"
    console.say(f"{visible(args.file, 200)}: {amounts}; format {formats}")
    console.say(f"counted: {visible(counted_with, 200)}")
    console.say(
        f"condensation: {args.condensation}; endings: " + ", ".join(f"{name} {times}" for name, times in inspection.endings.most_common())
    )
    rows = [
        {
            "repository": visible(name or "(none named)", 60),
            "trajectories": counts.trajectories,
            "steps": counts.steps,
            "targets": counts.targets,
            inspection.unit: f"{counts.size:,}",
            "longest": f"{counts.longest:,}",
            "sessions": "–" if counts.sessions is None else counts.sessions,
        }
        for name, counts in sorted(inspection.repositories.items())
    ]
    console.table(pandas.DataFrame(rows))
    if inspection.plan is not None:
        total = len(inspection.plan.packs)
        where = sum(1 for summary in inspection.plan.repositories if summary.sessions)
        found = f"{total} of {count(where, 'repository')}" if total else "none"
        console.say(f"sessions of {args.session_tokens} tokens: {found}")
    print_list(console, "left out or changed", [f"{times} × {what}" for what, times in inspection.notes.most_common()])
    if inspection.refused:
        console.say(f"targets not used, since their prompt is no prefix of the trajectory's own tokens: {inspection.refused}")
    print_list(console, "skipped", report.lines(), sum(report.reasons.values()))
    if inspection.plan is not None:
        unused = [f"{visible(name, 80)}: {why}" for summary in inspection.plan.repositories for name, why in summary.unused]
        print_list(console, "trajectories in no session", [*inspection.plan.notes, *unused])


def print_list(console: Console, title: str, lines: list[str], total: int | None = None) -> None:
    """Print the first lines of a list, and how many more there are."""
    total = len(lines) if total is None else total
    if total:
        console.say(f"{title} ({total}):")
        for line in lines[:_SHOWN_LINES]:
            console.say(f"  {line}")
        if total > _SHOWN_LINES:
            console.say(f"  and {total - min(_SHOWN_LINES, len(lines))} more (--json lists more)")


def _document(args: argparse.Namespace, inspection: Inspection, counted_with: str) -> dict[str, Any]:
    report, plan = inspection.report, inspection.plan
    return {
        "file": args.file,
        "formats": dict(report.formats),
        "records": report.records,
        "trajectories": report.trajectories,
        "condensation": args.condensation,
        "unit": inspection.unit,
        "counted": counted_with,
        "session_tokens": args.session_tokens,
        "sessions": None if plan is None else len(plan.packs),
        "repositories": {
            name: {
                "trajectories": counts.trajectories,
                "steps": counts.steps,
                "targets": counts.targets,
                inspection.unit: counts.size,
                "longest": counts.longest,
                "sessions": counts.sessions,
            }
            for name, counts in sorted(inspection.repositories.items())
        },
        "endings": dict(inspection.endings),
        "notes": dict(inspection.notes),
        "refused_targets": inspection.refused,
        "problems": dict(report.reasons),
        "skipped": report.lines(),
        "unused": []
        if plan is None
        else [*plan.notes, *(f"{name}: {why}" for summary in plan.repositories for name, why in summary.unused)],
    }


def rendering_choice(args: argparse.Namespace) -> str:
    """What the rendering arguments say, for :func:`fathom_eval.sessions.rendering.choose_renderer`."""
    return "template" if args.chat_template else "plain" if args.plain else "auto"


def add_rendering_arguments(parser: argparse.ArgumentParser, what: str) -> None:
    """Arguments that choose between the chat template and the plain rendering."""
    rendering = parser.add_mutually_exclusive_group()
    rendering.add_argument("--chat-template", action="store_true", help=f"insist on {what}")
    rendering.add_argument("--plain", action="store_true", help="render plainly even if the chat template takes tools")
