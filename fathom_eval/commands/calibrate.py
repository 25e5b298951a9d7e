"""``fathom-eval calibrate``: statistics of keys and queries, and per-layer plans, saved under a name that methods take."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from fathom_eval.commands.arguments import add_model_arguments, at_least_one, check_model_arguments, numbers, words
from fathom_eval.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from fathom_eval.calibrate import TokenSource
    from fathom_eval.console import Console
    from fathom_eval.models import LoadedModel
    from fathom_eval.tasks.haystack import Haystack

HELP = "Take statistics and per-layer plans from text or transcripts, for methods to use by name."
EXAMPLE = "fathom-eval calibrate --text wikitext --context 8192 --plan 48,64 --name wiki"
_BASES = ("auto", "raw", "klt")
_FEW_TOKENS_A_CHANNEL = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.usage = f"{parser.prog} [options]"
    parser.formatter_class = _HelpFormatter
    add = parser.add_argument
    add("--model", default="smollm2", help="hub id, local folder, GGUF file, or smollm2 (default)")
    add("--text", metavar="T", help="wikitext (validation split), python-docs, a file, or auto (default)")
    add("--trajectories", metavar="SET", help="instead of text: file, folder, hub id, or builtin")
    add("--trajectories-revision", metavar="R", help="branch, tag or commit of a hub set")
    add("--format", metavar="FORMAT", help="read every row as this format instead of finding it out")
    add("--repo", metavar="REPO", help="only trajectories of this repository")
    add("--exclude-repo", metavar="A,B", help="no trajectories of these repositories")
    add("--default-repo", default="", metavar="REPO", help="repository of trajectories that name none")
    add("--tokens", type=int, default=16384, metavar="N", help="taken statistics of, in whole windows (default: 16384)")
    add("--context", type=int, default=2048, metavar="N", help="tokens of a window (default: 2048)")
    add("--plan", metavar="B,B", help="also per-layer budgets with these means, for example 48,64")
    add("--plan-context", type=int, metavar="N", help="tokens of the plans' window (default: --context)")
    add("--plan-k", type=int, default=128, metavar="K", help="keys a query head attends to there (default: 128)")
    add("--plan-positions", type=int, default=64, metavar="P", help="last positions that are measured there (default: 64)")
    add("--plan-basis", default="auto", metavar="B", help="raw, klt, or auto: as fathom chooses (default)")
    add("--name", help="what methods call it (default: from model, text and context)")
    add("--output", metavar="FILE", help="write this file instead of one in the cache")
    add("--overwrite", action="store_true", help="replace a calibration of the same name")
    add("--list", action="store_true", help="show the calibrations in the cache and end")
    add_model_arguments(parser)
    add("--offline", action="store_true", help="never use the network")
    add("--json", action="store_true", help="print the summary as JSON")
    add("--quiet", action="store_true", help="print only where the file is")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Room for the longest option beside its explanation."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=30)


def run(args: argparse.Namespace) -> int:
    """Check everything cheap, load the model, measure, save."""
    from fathom_eval.checkpoints import check_spec
    from fathom_eval.console import Console
    from fathom_eval.tasks.haystack import SOURCES

    console = Console(quiet=args.quiet, json=args.json)
    if args.list:
        return _list(console)
    means = numbers(args.plan, "--plan") if args.plan is not None else []
    windows = _check_lengths(args, planned=bool(means))
    if args.plan_basis not in _BASES:
        raise UserError(f"unknown --plan-basis '{args.plan_basis}'; {did_you_mean(args.plan_basis, _BASES)}")
    if args.text is not None and args.trajectories is not None:
        raise UserError("statistics come from --text or from --trajectories: give one of them")
    if args.trajectories is None and (args.repo is not None or args.exclude_repo is not None):
        raise UserError("--repo and --exclude-repo go with --trajectories")
    path = _path(args)
    check_spec(args.model)
    haystack = _haystack(args, console) if args.trajectories is None and (args.text or "auto") not in SOURCES else None

    check_model_arguments(args)  # imports torch, as what follows does
    from fathom_eval.layer_plan import check_means
    from fathom_eval.models import load_model
    from fathom_eval.reports.wording import count
    from fathom_eval.selection import Policy

    check_means(means)
    if means:
        Policy().check(args.plan_k, "--plan-k")
    if haystack is None and args.trajectories is None:
        haystack = _haystack(args, console)
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
    plan_context = args.plan_context or args.context
    for flag, context in (("--context", args.context), ("--plan-context", plan_context if means else 0)):
        if context > facts.max_positions:
            raise UserError(f"{flag} {context} exceeds the {facts.max_positions} positions of {facts.name}; --rope-scaling lengthens them")
    lengths = [args.context] * windows + ([plan_context] if means else [])
    source = _source(args, console, loaded, haystack, sum(lengths))
    cut = source.windows(lengths)
    path = path or _default_path(args, loaded, source)
    if args.tokens < _FEW_TOKENS_A_CHANNEL * facts.head_dim:
        console.warn(f"{args.tokens} tokens are few for a covariance of {facts.head_dim} channels: a basis from them is noise in part")
    console.say(
        f"{facts.name} ({facts.dtype}, {facts.place}), {source.title or source.name}: {count(windows, 'window')} of {args.context} tokens"
    )
    return _measure(args, console, loaded, source, cut, windows, means, path)


def _check_lengths(args: argparse.Namespace, *, planned: bool) -> int:
    """How many windows there are."""
    for value, flag in (
        (args.tokens, "--tokens"),
        (args.context, "--context"),
        (args.plan_context if args.plan_context is not None else 1, "--plan-context"),
        (args.plan_positions, "--plan-positions"),
    ):
        at_least_one(value, flag)
    if args.context < 16:
        raise UserError(f"--context {args.context} must be at least 16")
    if args.tokens < args.context:
        raise UserError(f"--tokens {args.tokens} is less than a window of --context {args.context}")
    plan_context = args.plan_context or args.context
    if planned and args.plan_positions > plan_context // 2:
        raise UserError(f"--plan-positions {args.plan_positions} must be at most half of the window of {plan_context} tokens")
    if planned and args.plan_k >= plan_context:
        raise UserError(
            f"--plan-k {args.plan_k} is no selection from {plan_context} tokens: give a smaller one, or a longer --plan-context"
        )
    return int(args.tokens // args.context)


def _path(args: argparse.Namespace) -> Path | None:
    """Where the file goes, if that is known without the model."""
    from fathom_eval.calibration_names import SUFFIX, calibration_path

    if args.name is not None and args.output is not None:
        raise UserError("give --name or --output: a file outside the cache is named by its path")
    if args.output is not None:
        path = Path(args.output).expanduser()
        if path.suffix != SUFFIX:
            raise UserError(f"--output {args.output} must end in {SUFFIX}")
    elif args.name is not None:
        path = calibration_path(args.name)
    else:
        return None
    _refuse_existing(path, overwrite=args.overwrite)
    return path


def _default_path(args: argparse.Namespace, loaded: LoadedModel, source: TokenSource) -> Path:
    import re

    from fathom_eval.calibration_names import calibration_path

    parts = (Path(loaded.facts.name).name, Path(source.name).stem, args.context)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(map(str, parts))).strip("-._")[:100] or "calibration"
    path = calibration_path(name)
    _refuse_existing(path, overwrite=args.overwrite)
    return path


def _refuse_existing(path: Path, *, overwrite: bool) -> None:
    if path.exists() and not overwrite:
        raise UserError(f"{path} exists: give another --name or --output, or --overwrite")


def _haystack(args: argparse.Namespace, console: Console) -> Haystack:
    from fathom_eval.tasks.haystack import load_haystack

    # Evaluations read the test split.
    return load_haystack(args.text or "auto", offline=args.offline, say=console.say, split="validation")


def _source(args: argparse.Namespace, console: Console, loaded: LoadedModel, haystack: Haystack | None, tokens: int) -> TokenSource:
    from fathom_eval.calibrate import text_source, trajectory_source
    from fathom_eval.session_data import SourceSettings
    from fathom_eval.sessions import builtin

    if haystack is not None:
        return text_source(loaded.tokenizer, haystack)
    own = args.trajectories == "builtin"
    if args.offline and not own and not Path(args.trajectories).expanduser().exists():
        raise UserError(f"there is no file or folder '{args.trajectories}', and --offline forbids to look for a set of the hub")
    settings = SourceSettings(None if own else args.trajectories, "auto", 1, 1, 1, revision=args.trajectories_revision)
    return trajectory_source(
        loaded.tokenizer,
        str(builtin.PATH) if own else args.trajectories,
        tokens,
        name=settings.name,
        repo=args.repo,
        exclude=words(args.exclude_repo, "--exclude-repo") if args.exclude_repo is not None else (),
        format_name=args.format,
        revision=args.trajectories_revision,
        default_repo=args.default_repo,
        say=console.say,
    )


def _measure(
    args: argparse.Namespace,
    console: Console,
    loaded: LoadedModel,
    source: TokenSource,
    cut: list[list[int]],
    windows: int,
    means: list[int],
    path: Path,
) -> int:
    import dataclasses

    import torch

    from fathom_eval.calibrate import describe, measure_statistics, plan_basis
    from fathom_eval.calibration_file import PlanSettings, save_calibration
    from fathom_eval.layer_plan import BUDGETS, greedy_plan, layer_errors
    from fathom_eval.run import identity_sha256

    provenance = describe(loaded, source, tokens=windows * args.context, context=args.context)
    with console.progress(windows + (1 if means else 0), "windows") as progress:
        tensors = measure_statistics(loaded, cut[:windows], done=lambda window: progress.advance())
        if means:
            basis = plan_basis(args.plan_basis, loaded)
            errors = layer_errors(
                loaded,
                cut[windows],
                basis=basis,
                k=args.plan_k,
                positions=args.plan_positions,
                progress=progress.tell,
            )
            progress.advance()
            window = identity_sha256({"ids": cut[windows]})
            plan = PlanSettings(basis, len(cut[windows]), args.plan_k, args.plan_positions, tuple(means), window)
            provenance = dataclasses.replace(provenance, plan=plan)
            tensors["plan_budgets"] = torch.tensor(BUDGETS)
            tensors["plan_errors"] = torch.tensor(errors, dtype=torch.float64)
            for mean in means:
                tensors[f"plan_{mean}"] = torch.tensor(greedy_plan(errors, mean))
    saved = save_calibration(path, tensors, provenance, text=source.title)
    for mean, budgets in saved.plans.items():
        console.say(f"plan of mean {mean}: {' '.join(map(str, budgets))}")
    use = saved.name if args.output is None else str(path)
    console.say(
        f"{saved.reference}; use it as fathom:statistics={use}" + (f" or fathom:layer_plan={use}:budget={means[0]}" if means else "")
    )
    document = {"file": str(path), "name": saved.name, "sha256": saved.sha256, "provenance": dataclasses.asdict(provenance)}
    console.document({**document, "plans": saved.plans})
    console.result(path, "file")
    return 0


def _list(console: Console) -> int:
    import dataclasses

    import pandas as pd

    from fathom_eval.calibration_file import load_calibration
    from fathom_eval.calibration_names import calibration_path, calibrations_folder, stored_names

    rows, documents, unreadable = [], [], []
    for name in stored_names():
        try:
            found = load_calibration(calibration_path(name))
        except UserError as error:
            console.warn(str(error))
            unreadable.append({"name": name, "problem": str(error)})
            rows.append({"name": name, "model": "unreadable", **dict.fromkeys(("dtype", "text", "tokens", "context", "plans"), "")})
            continue
        made = found.provenance
        plans = ", ".join(map(str, made.plan.means)) if made.plan else ""
        documents.append({"name": name, "sha256": found.sha256, "provenance": dataclasses.asdict(made)})
        rows.append(
            {
                "name": found.reference,
                "model": made.model,
                "dtype": made.dtype,
                "text": found.text,
                "tokens": f"{made.tokens:,}",
                "context": f"{made.context:,}",
                "plans": plans,
            }
        )
    if rows:
        console.table(pd.DataFrame(rows), title=f"calibrations in {calibrations_folder()}")
    else:
        console.say(f"there are no calibrations in {calibrations_folder()}")
    console.document({"folder": str(calibrations_folder()), "calibrations": documents, "unreadable": unreadable})
    return 0
