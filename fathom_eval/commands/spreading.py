"""``--workers`` and ``--ray``: the same units of work, measured by several copies of the model."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fathom_eval.commands.arguments import at_least_one
from fathom_eval.errors import UserError

if TYPE_CHECKING:
    from fathom_eval.console import Console
    from fathom_eval.models import LoadedModel, ModelFacts
    from fathom_eval.workers import Measured, ModelRequest, Slot, Work

UnitT = TypeVar("UnitT")
INDEX_PLACES = ("host", "hbm")
"""Where the index of ``--runtime`` can lie."""


def add_worker_arguments(parser: argparse.ArgumentParser) -> None:
    """How many copies of the model work on the run, and where."""
    add = parser.add_argument
    add("--workers", type=int, metavar="N", help="copies of the model, each in its own process (default: 1)")
    add("--ray", metavar="ADDRESS", help="spread over a Ray cluster: its address, auto, or local")


def add_runtime_argument(parser: argparse.ArgumentParser) -> None:
    """Who decodes."""
    parser.add_argument("--runtime", metavar="INDEX", help="decode by the step that 'bench step' times; its index: host or hbm")


def check_runtime_argument(args: argparse.Namespace) -> None:
    """Raise UserError for a place where no index lies."""
    if args.runtime not in (None, *INDEX_PLACES):
        raise UserError(f"--runtime {args.runtime}: the index lies in 'host' or in 'hbm'")


def check_workers(args: argparse.Namespace) -> None:
    """Raise UserError for a number of workers that is none."""
    if args.workers is not None:
        at_least_one(args.workers, "--workers")


def wants_workers(args: argparse.Namespace) -> bool:
    """Whether this process leaves the model work to others."""
    return args.ray is not None or (args.workers or 1) > 1


def copies_here(args: argparse.Namespace, facts: ModelFacts) -> int:
    """Copies of the model that work on this machine: as many as are asked for, of a local Ray cluster one a GPU where nothing is."""
    import torch

    if args.workers is None and args.ray == "local" and facts.device.startswith("cuda"):
        return max(1, torch.cuda.device_count() // len(facts.devices))
    return args.workers or 1


def model_request(args: argparse.Namespace) -> ModelRequest:
    """The model that the arguments ask for."""
    from fathom_eval.workers import ModelRequest

    return ModelRequest(
        args.model,
        dtype=args.dtype,
        device=args.device,
        offline=args.offline,
        revision=args.revision,
        trust_remote_code=args.trust_remote_code,
        rope_scaling=args.rope_scaling,
    )


def release_weights(loaded: LoadedModel) -> None:
    """Give the memory of the weights back: the workers have their own, and this process needs but the tokenizer and the facts."""
    import torch

    torch.nn.Module.to(loaded.model, "meta")  # a spread model's own method warns against moving it
    if loaded.facts.device.startswith("cuda"):
        torch.cuda.empty_cache()


def spread_units(
    args: argparse.Namespace,
    console: Console,
    work: Work[UnitT],
    facts: ModelFacts,
    units: Sequence[UnitT],
    failed: Callable[[UnitT, str], list[dict[str, Any]]],
) -> Iterator[tuple[UnitT, Measured]]:
    """See :func:`fathom_eval.workers.spread`, with the workers that the arguments ask for."""
    from fathom_eval.worker_slots import process_slots, ray_slots
    from fathom_eval.workers import spread, worker_identity

    # A GPU that is named is meant; otherwise every worker gets its own.
    device = facts.place if ":" in args.device else facts.device.split(":")[0]
    with contextlib.ExitStack() as stack:
        slots: list[Slot]
        if args.ray is not None:
            slots = stack.enter_context(ray_slots(work, args.ray, args.workers, device))
        else:
            slots = list(process_slots(work, args.workers, device))
        yield from spread(units, slots, identity=worker_identity(facts), failed=failed, say=console.say)


def write_prompt(folder: Path, name: str, prompt: str) -> None:
    """Keep a prompt. Raises UserError where it cannot be written."""
    from fathom_eval.run_files import raise_file_error

    try:
        folder.mkdir(exist_ok=True)
        (folder / name).write_text(prompt, encoding="utf-8")
    except OSError as error:
        raise_file_error(folder, "write", error)
