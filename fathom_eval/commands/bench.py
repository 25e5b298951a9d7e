"""``fathom-eval bench``: what the link, the kernels and whole decode steps of the host-resident runtime take on this machine."""

from __future__ import annotations

import argparse
import difflib
import itertools
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fathom_eval.commands.arguments import check_model_arguments, device_name, numbers, words
from fathom_eval.commands.bench_arguments import add_bench_arguments, factors, options_taken, take_options
from fathom_eval.commands.bench_equal_error import run_equal_error
from fathom_eval.errors import UserError

if TYPE_CHECKING:
    import torch

    from fathom_eval.console import Console
    from fathom_eval.methods import MethodSpec
    from fathom_eval.models import LoadedModel
    from fathom_eval.offload.bench.steps import Variant
    from fathom_eval.run import Run
    from fathom_eval.tasks.haystack import Haystack

HELP = "Time the host-resident runtime: link, kernels or decode steps; compare steps at equal error."
EXAMPLE = "fathom-eval bench step --contexts 32768,131072,524288,1048576 --output runs/step"

_BYTES_A_RECORD = 8192


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    add_bench_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Check everything cheap, measure what the run lacks, and say where it is."""
    from fathom_eval.console import Console

    take_options(args)
    if args.what == "equal-error":
        return run_equal_error(args)
    if args.repeats is None:
        args.repeats = 5 if args.what == "step" else 20
    if args.output is not None:
        from fathom_eval.run import Run

        Run.check(Path(args.output))
    console = Console(quiet=args.quiet, json=args.json)
    import torch

    from fathom_eval.devices import current, resolve_device

    device = resolve_device(args.device)
    with torch.inference_mode(), current(device):
        return {"link": _link, "kernels": _kernels, "step": _step}[args.what](args, console, device)


def _link(args: argparse.Namespace, console: Console, device: torch.device) -> int:
    from fathom_eval.offload.bench import link

    with _open(args, console, device, {}) as opened:
        if device.type != "cuda":
            console.say("no CUDA device: the link and the GPU's memory cannot be timed; the host's memory and cores are recorded")
            opened.append([_plain("link", {"measure": "host", "name": "host memory", "context": 0, **link.host_facts()}, device)])
        else:
            for record in link.measure(device, args.repeats):
                opened.append([_plain("link", record, device)])
                console.say(_line(record))
        return _finish(console, opened, report=device.type == "cuda")


def _kernels(args: argparse.Namespace, console: Console, device: torch.device) -> int:
    if device.type != "cuda":
        raise UserError(
            "no CUDA device: kernels cannot be timed; 'pytest tests/kernels' checks them in Triton's interpreter on any machine"
        )
    from fathom_eval.offload.bench import kernels

    contexts = numbers(args.contexts, "--contexts")
    with _open(args, console, device, {"spread": args.spread}) as opened:
        for record in kernels.measure(contexts, args.spread, args.repeats):
            opened.append([_plain("kernel", record, device)])
            console.say(_line(record))
        return _finish(console, opened)


def _step(args: argparse.Namespace, console: Console, device: torch.device) -> int:
    from fathom_eval.methods import parse_methods
    from fathom_eval.offload.bench.steps import Variant, with_rerank
    from fathom_eval.offload.cache import default_lanes
    from fathom_eval.offload.gatherer import check_gathered
    from fathom_eval.offload.weights import SHAPES

    contexts, rerank = numbers(args.contexts, "--contexts"), factors(args.rerank)
    by_default, known = args.methods is None, SHAPES[args.model].head_dim if args.model in SHAPES else None
    if by_default:
        args.methods = default_methods(known)
    asked = parse_methods(args.methods)
    for spec in with_rerank(asked, rerank):
        spec.check_k([args.k])
    batches, sessions = numbers(args.batch, "--batch"), numbers(args.sessions, "--sessions")
    lanes = None if args.lanes == "auto" else numbers(args.lanes, "--lanes")
    rows = list(dict.fromkeys(words(args.rows, "--rows")))
    if device.type != "cuda":
        if args.model == "qwen3-8b-shape":
            raise UserError(
                "no CUDA device: steps of qwen3-8b-shape cannot be timed; --model tiny-shape or smollm2 checks a step and times its "
                "torch references"
            )
        console.say(
            "no CUDA device: there is no link, no graph and no GPU time; the step runs the torch references themselves, and they are timed"
        )
    indexes = list(dict.fromkeys(words(args.index, "--index")))
    _say_odd(console, asked, rerank, args.k, contexts)
    if args.model in SHAPES:
        specs = with_rerank(asked, rerank)
        sources = _shape_sources(args, console, device, specs, contexts, max(batches) * max(sessions), indexes)
    else:
        loaded, haystack = _loaded(args, console)
        if by_default:
            args.methods = default_methods(loaded.facts.head_dim)
            asked = parse_methods(args.methods)
        specs = with_rerank(asked, rerank)
        sources = _model_sources(args, loaded, haystack, specs, contexts, indexes)
    facts, shape = sources[0].facts, sources[0].segment_shape()

    def variants(context: int, index: str) -> list[Variant]:
        found = []
        for batch in batches:
            auto, last = default_lanes(batch, facts.kv_heads, context, index)
            for count, parts, by, spec in itertools.product(sessions, lanes or [auto], rows, specs):
                who = "gpu" if parts == 1 and by == "both" else by  # no rows come behind another lane's scan
                heads = args.last_lane if lanes or args.last_lane else last
                check_gathered(who, shape, parts)
                _check_lanes(batch, facts.kv_heads, parts, heads)
                found.append(Variant(spec, args.k, batch, count, parts, who, heads))
        return list(dict.fromkeys(found))

    # Made before anything is opened or pinned: what cannot be shared or gathered is refused here.
    tables = [{context: variants(context, source.index) for context in contexts} for source in sources]
    identity = {"spread": args.spread, "model": facts.model_fingerprint, "host_pages": args.host_pages}
    with _open(args, console, device, identity) as opened:
        for source, table in zip(sources, tables, strict=True):
            _time_steps(args, console, device, opened, source, table)
        return _finish(console, opened)


def default_methods(head_dim: int | None) -> str:
    """The scans of the paper's Table 2, and four bits of all channels: SparQ and Double Sparsity read an eighth and a quarter of them.

    Numbers where head_dim is known: at 128, the paper's, 16 and 32, which are in labels and keys of records.
    """
    r, c = ("D/8", "D/4") if head_dim is None else (max(1, head_dim // 8), max(1, head_dim // 4))
    fathom = ",".join(f"fathom:budget={budget}:basis=raw" for budget in (40, 48, 64))
    return f"{fathom},sparq:r={r},double_sparsity:c={c},full,landmark,thumbnail"


def _say_odd(console: Console, asked: list[MethodSpec], rerank: list[float], k: int, contexts: list[int]) -> None:
    """Warn of a rerank that a method does not take, and of contexts that leave nothing to select."""
    own = [spec.label for spec in asked if spec.policy.rerank != 1 and rerank not in ([1], [spec.policy.rerank])]
    if own:
        console.warn(f"--rerank {','.join(f'{factor:g}' for factor in rerank)} is not for what names a rerank itself: {', '.join(own)}")
    short = [context for context in contexts if context <= k]
    if short:
        console.warn(f"k={k} selects every token of {', '.join(map(str, short))}: a step brings all rows there, whatever the method")


def _time_steps(
    args: argparse.Namespace, console: Console, device: torch.device, opened: Run, source: Any, variants: dict[int, list[Variant]]
) -> None:
    """Time what the run lacks with one place of the index; every record is on the disk before the next step is profiled."""
    import time

    from fathom_eval.offload.bench import link
    from fathom_eval.offload.bench.duration import table_seconds
    from fathom_eval.offload.bench.sources import closing
    from fathom_eval.offload.bench.steps import fit_source, measure
    from fathom_eval.run import record_key

    done = opened.keys()
    missing = {
        context: [one for one in wanted if record_key(one.key(source.facts.name, context, source.index)) not in done]
        for context, wanted in variants.items()
    }
    missing = {context: wanted for context, wanted in missing.items() if wanted}
    total = sum(map(len, variants.values()))
    left = sum(map(len, missing.values()))
    if not left:
        return
    text = f"index {source.index}: {left} of {total} steps to time"
    if device.type == "cuda" and source.synthetic:
        text += f", about {_duration(table_seconds(source, missing, args.repeats))}"
    console.say(f"{text}; the run keeps what it has, and the same command goes on")
    started = time.monotonic()
    with closing(source):
        source.build()
        rates = link.quick_rates(device) if device.type == "cuda" else {}
        common: dict[str, Any] = {"device": device_name(str(device)), "spread": args.spread if source.synthetic else None}
        for context, wanted in missing.items():
            source.open(context)
            fitted = fit_source(source, args.k, variants[context][0].spec, console.say) if source.synthetic else {}
            facts = {**common, **fitted}
            for record in measure(
                source,
                context,
                wanted,
                rates,
                index=source.index,
                repeats=args.repeats,
                common=facts,
                say=console.say,
                gather_threads=args.gather_threads,
            ):
                opened.append([record])
                console.say(_step_line(record))
    console.say(f"index {source.index}: {left} steps timed in {_duration(time.monotonic() - started)}")


def _duration(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.1f} min"


def _shape_sources(
    args: argparse.Namespace, console: Console, device: torch.device, specs: Any, contexts: list[int], most: int, indexes: list[str]
) -> list[Any]:
    """Of random weights: one source a place of the index, all of them checked and none built."""
    from fathom_eval.offload.bench.sources import SyntheticSource
    from fathom_eval.offload.weights import SHAPES

    return [
        SyntheticSource(
            SHAPES[args.model],
            specs,
            contexts,
            most,
            device=device,
            index=index,
            spread=args.spread,
            host_limit=None if args.host_memory is None else int(args.host_memory * 2**30),
            host_pages=args.host_pages,
            say=console.say,
        )
        for index in indexes
    ]


def _loaded(args: argparse.Namespace, console: Console) -> tuple[LoadedModel, Haystack]:
    """A model with keys of its own, and the text that it prefills."""
    from fathom_eval.checkpoints import check_spec
    from fathom_eval.models import load_model
    from fathom_eval.offload.weights import SHAPES
    from fathom_eval.tasks.haystack import load_haystack

    near = difflib.get_close_matches(args.model, SHAPES, n=1, cutoff=0.8)
    if near and not Path(args.model).exists():
        raise UserError(f"unknown model '{args.model}'; did you mean '{near[0]}'?")
    check_spec(args.model)
    check_model_arguments(args)  # before a text is waited for
    haystack = load_haystack("auto", offline=args.offline, say=console.say)
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
    return loaded, haystack


def _model_sources(
    args: argparse.Namespace, loaded: LoadedModel, haystack: Haystack, specs: Any, contexts: list[int], indexes: list[str]
) -> list[Any]:
    """Of a model: one source a place of the index, all of them checked and nothing prefilled."""
    from fathom_eval.fidelity_windows import Windows
    from fathom_eval.offload.bench.sources import PrefixSource
    from fathom_eval.offload.scans import check_spec
    from fathom_eval.prefill import prefill

    for spec in specs:
        check_spec(spec, loaded.facts)
    windows = Windows(loaded.tokenizer, haystack, 0)
    for context in contexts:
        windows.check(context, 1)
        if context > loaded.facts.max_positions:
            raise UserError(f"context {context} exceeds the {loaded.facts.max_positions} positions of {loaded.facts.name}")
    return [
        PrefixSource(loaded, lambda context: prefill(loaded, windows.token_ids(context, 0)), index, args.host_pages) for index in indexes
    ]


def _check_lanes(batch: int, heads: int, lanes: int, last: int | None) -> None:
    """Raise where a batch cannot be shared among lanes, with the flags that ask for it."""
    from fathom_eval.offload.cache import lanes_of

    try:
        lanes_of(batch, heads, lanes, last)
    except UserError as error:
        raise UserError(f"--lanes {lanes} --batch {batch}{'' if last is None else f' --last-lane {last}'}: {error}") from None


def _open(args: argparse.Namespace, console: Console, device: torch.device, identity: dict[str, Any]) -> Run:
    from fathom_eval.ruler import versions
    from fathom_eval.run import Run, default_run_path
    from fathom_eval.run_files import check_free_space

    whole = {"benchmark": args.what, "device": device_name(str(device)), **identity}
    name = args.model if args.what == "step" else device.type
    path = Path(args.output) if args.output is not None else default_run_path(f"bench-{args.what}", name, whole)
    check_free_space(path, 256 * _BYTES_A_RECORD)
    settings = {key: value for key, value in options_taken(args).items() if isinstance(value, (str, int, float, type(None)))}
    details = {"kind": "bench", "model": name, "device": device_name(str(device)), "versions": dict(versions()), "settings": settings}
    opened = Run.open(path, identity=whole, details=details)
    for problem in opened.problems:
        console.warn(problem)
    return opened


def _plain(kind: str, record: dict[str, Any], device: torch.device) -> dict[str, Any]:
    """A record of the link or of a kernel: its name is the method, what it belongs to the task."""
    key = {"kind": kind, "task": record["measure"], "context": record["context"], "sample": 0, "k": None, "method": record["name"]}
    return {**key, "options": {}, "method_version": 1, **record, "device": device_name(str(device))}


def _line(record: dict[str, Any]) -> str:
    hidden = ("measure", "name", "context")
    rest = ", ".join(
        f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}" for key, value in record.items() if key not in hidden
    )
    return f"{record['measure']} {record['context'] or ''} {record['name']}: {rest}"


def _step_line(record: dict[str, Any]) -> str:
    words = [f"{record['context']} {record['label']} batch {record['batch']} sessions {record['sessions']} lanes {record['lanes']}"]
    words[0] += "".join(f" {name} {record[key]}" for name, key in (("last", "last_lane"), ("rows", "rows_by")) if record[key]) + ":"
    if record["gpu_ms"] is not None:
        parts = " ".join(f"{part} {value:.2f}" for part, value in record["parts_ms"].items() if value >= 0.005)
        words.append(f"GPU {record['gpu_ms']:.2f} ms (event {record['event_ms']:.2f}; {parts}),")
    words.append(f"wall {record['wall_ms']:.2f} ms [{record['wall_ms_p10']:.2f}, {record['wall_ms_p90']:.2f}],")
    if record["floor_ratio"] is not None:
        words.append(f"{record['floor_ratio']:.3f} of the floor {record['floor_ms']:.2f} ms,")
    if record["scan_of_link"] is not None:
        words.append(f"scan {record['scan_of_link']:.3f} of the link,")
    if record["ahead_ms"] is not None:
        words.append(f"ahead {record['ahead_ms']:.2f} ms,")
    words.append(f"{record['scan_bits']:.1f} bits, {record['active_channels']:.1f} channels, rows {record['rows_bytes'] / 1e6:.1f} MB,")
    words.append(f"layers apart {record['distinct_layers']}" + (f", VOID: {record['void_reason']}" if record["void"] else ""))
    return " ".join(words)


def _finish(console: Console, opened: Run, *, report: bool = True) -> int:
    if report:
        console.say(f"its tables and figures: fathom-eval report {shlex.quote(str(opened.path))}")
    console.document({"run": str(opened.path), "records": opened.records()})
    console.result(opened.path, "run")
    return 0
