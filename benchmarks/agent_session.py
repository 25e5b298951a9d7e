"""What one agent session costs from end to end on the device there is, several times in one process, with the spread.

Every turn is one session as ``fathom-eval sessions`` measures it, by the functions that the command calls: a prefill of its own, the
stores, the steps of all branches in lock-step, the noise floor (dense attention and exact top-k once more, each in a batch of its own), and
the records in a new run directory. The report is not part of it. Dense attention of the noise floor is the one branch that the lock-step
is compared with: the same prefix, the same number of steps, the same turn.

So that every branch takes all its steps, the model has no end tokens here, and each stop string is replaced by as many zero bytes: the
branches are watched for it as they would be, at the same cost, and do not write it. A branch that ended early or failed all the same, or
branches that were not decoded in one batch, make the exit code 1.

Stores are made in the first step of the lock-step; what its decoding took beyond the mean of the other steps for every step is given as
the stores'. The first turn compiles kernels; it counts, and is told apart as well.

    python3 -P benchmarks/agent_session.py --model qwen.gguf --rope-scaling yarn:4 --trajectories conversations.jsonl.gz --json
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import statistics
import sys
import tempfile
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# At the end, so that the folder `kernels` of the repository passes for no installed package.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from fathom_eval.commands.arguments import add_model_arguments, at_least_one, device_name, numbers
from fathom_eval.commands.sessions_inspect import add_reading_arguments, add_rendering_arguments, source_settings
from fathom_eval.commands.spreading import model_request
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_methods
from fathom_eval.sessions.safe_text import visible

if TYPE_CHECKING:
    from fathom_eval.agent_sessions import DecodeSettings, StepBranch
    from fathom_eval.models import LoadedModel
    from fathom_eval.session_data import SessionData

METHODS = (
    "dense,exact,fathom:budget=48:basis=klt,fathom:budget=40:basis=klt,fathom:budget=64:basis=klt,fathom:budget=48:basis=klt:rerank=2,"
    "fathom:budget=48:basis=raw,sparq:r=D/8,sparq:r=D/4,double_sparsity:c=D/4,loki:r=D/4,landmark"
)
"""Twelve, at one k as many branches."""


class NotMeasuredError(Exception):
    """What was timed is not what was asked for."""


class Steps:
    """When every step of every decoding begins: a hook of the model, before each of its passes.

    A decoding waits for the device once a step, so the steps begin as far apart as they last.

    Attributes:
        decodings: Branches, and the moments in seconds.
    """

    def __init__(self) -> None:
        self.decodings: list[tuple[int, list[float]]] = []
        self._batch: weakref.ref[Any] | None = None

    def __call__(self, model: Any, args: Any, arguments: dict[str, Any]) -> None:
        batch = arguments.get("branches")
        if batch is None:  # the prefill
            return
        if self._batch is None or self._batch() is not batch:
            self._batch = weakref.ref(batch)
            self.decodings.append((len(batch.branches), []))
        self.decodings[-1][1].append(time.perf_counter())


def never_ending(loaded: LoadedModel, data: SessionData) -> tuple[LoadedModel, SessionData]:
    """The same without end tokens, and with stop strings that are watched for and do not come."""
    renderer = copy.copy(data.renderer)
    renderer.stop_strings = tuple("\0" * len(string.encode()) for string in renderer.stop_strings)
    facts = dataclasses.replace(loaded.facts, eos_token_ids=())
    return dataclasses.replace(loaded, facts=facts), dataclasses.replace(data, renderer=renderer)


def prepare(args: argparse.Namespace) -> tuple[LoadedModel, SessionData, list[StepBranch], dict[str, Any]]:
    """Load the model and assemble one session, and say how long both took."""
    from fathom_eval.agent_sessions import step_branches, with_controls
    from fathom_eval.models import parse_rope_scaling
    from fathom_eval.session_data import check_k, choose_bounds, prepare_sessions

    specs, k_values = with_controls(parse_methods(args.methods)), numbers(args.k, "--k")
    for spec in specs:
        spec.check_k(k_values)
    scaling = parse_rope_scaling(args.rope_scaling) if args.rope_scaling else 1
    began = time.perf_counter()
    loaded = model_request(args).load(say)
    ready, facts = time.perf_counter(), loaded.facts
    low, high, _ = choose_bounds(args.session_tokens, facts, args.max_new_tokens, is_builtin=args.trajectories is None, scaling=scaling)
    check_k(k_values, low, high, facts)
    for spec in specs:
        spec.check(facts, k_values)
    data = prepare_sessions(loaded, source_settings(args, 1, low, high), say=say)
    assembled = time.perf_counter()
    branches = list(step_branches(specs, k_values, facts))
    [session] = data.sessions
    described = {
        "model": facts.name,
        "dtype": facts.dtype,
        "device": device_name(facts.place),
        "rope_scaling": args.rope_scaling,
        "session": session.id,
        "repository": visible(session.repo, 60),
        "prompt_tokens": len(session.prompt_ids),
        "rendering": data.rendering,
        "k": k_values,
        "methods": [spec.label for spec in specs],
        "branches": sum(not branch.alone for branch in branches),
        "branches_of_the_noise_floor": sum(branch.alone for branch in branches),
        "new_tokens": args.max_new_tokens,
        "loading_seconds": round(ready - began, 2),
        "assembling_seconds": round(assembled - ready, 2),
    }
    return *never_ending(loaded, data), branches, described


def measure(
    loaded: LoadedModel, data: SessionData, branches: Sequence[StepBranch], settings: DecodeSettings, steps: Steps, folder: Path
) -> dict[str, float | None]:
    """One session, from its prefill to its records in a new run directory.

    Raises:
        NotMeasuredError: See :func:`check`.
    """
    import torch

    from fathom_eval.agent_sessions import ALONE, evaluate, missing_units, run_identity
    from fathom_eval.run import Run

    steps.decodings.clear()
    records: list[dict[str, Any]] = []
    began = time.perf_counter()
    with Run.open(folder, identity=run_identity(loaded.facts, data, settings.max_new_tokens), details={"kind": "sessions"}) as run:
        for _, found in evaluate(loaded, data, missing_units(run, data, branches), settings, say=say):
            run.append(found)
            records += found
    seconds = time.perf_counter() - began
    together = [record for record in records if record["options"].get("batch") != ALONE]
    alone = [record for record in records if record["options"].get("batch") == ALONE]
    check(records, steps, [len(together), *(1 for _ in alone)], settings.max_new_tokens, len(branches))

    # In the order in which they were decoded: the lock-step, then dense attention, which comes first of the noise floor.
    means = [_mean_step(moments) for _, moments in steps.decodings]
    assert alone[0]["method"] == "dense"
    lockstep, dense, floor = sum(one["seconds"] for one in together), alone[0]["seconds"], sum(one["seconds"] for one in alone)
    prefill, decode = together[0]["prefill_seconds"], means[0] * settings.max_new_tokens
    gpus = [device for device in loaded.facts.devices if device.startswith("cuda")]
    return {
        "seconds": seconds,
        "without_noise_floor_seconds": seconds - floor,
        "prefill_seconds": prefill,
        "stores_seconds": lockstep - decode,
        "decode_seconds": decode,
        "noise_floor_seconds": floor,
        "other_seconds": seconds - prefill - lockstep - floor,
        "lockstep_ms_a_step": 1000 * means[0],
        "dense_ms_a_step": 1000 * means[1],
        "ratio": means[0] / means[1],
        "dense_decoding_seconds": dense,
        "ratio_with_stores": lockstep / dense,
        "peak_gpu_gib": sum(torch.cuda.max_memory_allocated(gpu) for gpu in gpus) / 2**30 if gpus else None,
    }


def _mean_step(moments: Sequence[float]) -> float:
    """Seconds of a step without the first, which makes stores, and the last, of which only the beginning is known."""
    return (moments[-1] - moments[1]) / (len(moments) - 2)


def check(records: Sequence[dict[str, Any]], steps: Steps, rows: Sequence[int], new_tokens: int, branches: int) -> None:
    """Raise NotMeasuredError unless every branch took all its steps, those of the lock-step in one batch."""
    for record in records:
        if record["error"] is not None:
            raise NotMeasuredError(f"{record['label']} at k {record['k']} failed: {record['error']}")
        if record["new_tokens"] != new_tokens:
            raise NotMeasuredError(
                f"{record['label']} at k {record['k']} ended after {record['new_tokens']} of {new_tokens} tokens ({record['finish']})"
            )
    if len(records) != branches:
        raise NotMeasuredError(f"{len(records)} of {branches} branches gave a record")
    decoded = [(count, len(moments)) for count, moments in steps.decodings]
    if decoded != [(count, new_tokens) for count in rows]:
        raise NotMeasuredError(f"branches and steps of the decodings are {decoded}: the branches were not decoded in one batch")


def spread(turns: Sequence[dict[str, float | None]]) -> dict[str, dict[str, float]] | None:
    """Median, least and most of everything that was measured; None of no turn."""
    if not turns:
        return None
    found = {name: [value for turn in turns if (value := turn[name]) is not None] for name in turns[0]}
    return {
        name: {"median": round(statistics.median(values), 4), "low": round(min(values), 4), "high": round(max(values), 4)}
        for name, values in found.items()
        if values
    }


def say(line: str) -> None:
    """Tell of progress."""
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Print what was measured; 1 if it is not what was asked for, 2 for bad arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="smollm2", help="hub id, local folder, GGUF file, or smollm2 (default)")
    add("--methods", default=METHODS, metavar="A,B", help="names with options (default: twelve)")
    add("--k", default="512", metavar="K,K", help="keys a query head attends to (default: 512)")
    add("--trajectories", metavar="PATH|HUB_ID", help="default: a small built-in set of a scripted agent")
    add("--session-tokens", default="85000:95000", metavar="LOW:HIGH", help="default: 85000:95000")
    add("--max-new-tokens", type=int, default=256, metavar="N", help="of every branch, at least 3 (default: 256)")
    add("--seed", type=int, default=0, metavar="S", help="of the session (default: 0)")
    add("--repeats", type=int, default=5, metavar="N", help="turns (default: 5)")
    add("--offline", action="store_true", help="never use the network")
    add("--json", action="store_true", help="print JSON")
    add_reading_arguments(parser)
    add_rendering_arguments(parser, "the model's chat template")
    add_model_arguments(parser)
    args = parser.parse_args(argv)
    try:
        at_least_one(args.repeats, "--repeats")
        if not 3 <= args.max_new_tokens <= 999_999_999:
            raise UserError(f"--max-new-tokens {args.max_new_tokens} must be at least 3: the first step and the last are not told apart")
        return _run(args)
    except UserError as error:
        say(f"error: {error}")
        return 2
    except NotMeasuredError as error:
        say(f"not measured: {error}")
        return 1


def _run(args: argparse.Namespace) -> int:
    loaded, data, branches, described = prepare(args)
    import torch

    from fathom_eval.agent_sessions import DecodeSettings

    settings, steps, turns = DecodeSettings(args.max_new_tokens, max(64, len(branches))), Steps(), []
    say(f"{described['device']}: {described['prompt_tokens']:,} tokens, {described['branches']} branches, {args.max_new_tokens} new tokens")
    hook = loaded.model.register_forward_pre_hook(steps, with_kwargs=True)
    try:
        with tempfile.TemporaryDirectory(prefix="fathom-eval-agent-session-") as folder:
            for number in range(1, args.repeats + 1):
                turns.append(turn := measure(loaded, data, branches, settings, steps, Path(folder, str(number))))
                say(f"turn {number} of {args.repeats}: {_turn_in_words(turn)}")
    finally:
        hook.remove()
    result = {
        **described,
        "torch": torch.__version__,
        "turns": [{name: None if value is None else round(value, 4) for name, value in turn.items()} for turn in turns],
        "all": spread(turns),
        "after_the_first": spread(turns[1:]),
    }
    print(json.dumps(result, indent=2) if args.json else _in_words(result), flush=True)
    return 0


def _turn_in_words(turn: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {turn[f'{name}_seconds']:.1f}" for name in ("prefill", "stores", "decode"))
    steps = f"{turn['lockstep_ms_a_step']:.2f} ms a step in lock-step, {turn['dense_ms_a_step']:.2f} ms dense alone"
    whole = f"{turn['seconds']:.1f} s, {turn['without_noise_floor_seconds']:.1f} s without the noise floor ({parts})"
    return f"{whole}; {steps}, ratio {turn['ratio']:.2f}"


_ROWS = (
    ("seconds", "whole session, s"),
    ("without_noise_floor_seconds", "  without the noise floor"),
    ("prefill_seconds", "  prefill"),
    ("stores_seconds", "  stores"),
    ("decode_seconds", "  decode in lock-step"),
    ("noise_floor_seconds", "  noise floor"),
    ("other_seconds", "  records and the rest"),
    ("lockstep_ms_a_step", "step in lock-step, ms"),
    ("dense_ms_a_step", "step of dense alone, ms"),
    ("ratio", "ratio of these"),
    ("ratio_with_stores", "ratio, stores included"),
    ("peak_gpu_gib", "peak GPU memory, GiB"),
)


def _in_words(result: dict[str, Any]) -> str:
    device, model = f"{result['device']}, torch {result['torch']}", f"{result['model']} ({result['dtype']})"
    branches = f"{result['branches']} branches at k {', '.join(map(str, result['k']))}, {result['new_tokens']} new tokens each"
    seconds = f"loading {result['loading_seconds']} s, assembling {result['assembling_seconds']} s, {len(result['turns'])} turns"
    lines = [
        f"{device}: {model}, a session of {result['repository']} with {result['prompt_tokens']:,} prompt tokens, {branches}",
        f"{seconds}; median (low to high) of all turns, and of those after the first",
    ]
    for name, title in _ROWS:
        cells = [f"{one['median']:.2f} ({one['low']:.2f} to {one['high']:.2f})" if one else "" for one in _of(result, name)]
        if any(cells):
            lines.append(f"{title:26} {cells[0]:26} {cells[1]}".rstrip())
    return "\n".join(lines)


def _of(result: dict[str, Any], name: str) -> list[dict[str, float] | None]:
    return [(result[which] or {}).get(name) for which in ("all", "after_the_first")]


if __name__ == "__main__":
    sys.exit(main())
