"""What several commands read from their arguments and say in their manifests."""

from __future__ import annotations

import argparse

from fathom_eval.errors import UserError


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """How a model is loaded, apart from ``--model`` itself."""
    add = parser.add_argument
    add("--dtype", default="auto", help="auto, float32, bfloat16 or float16")
    add("--device", default="auto", help="auto, cpu, cuda, cuda:N, or cuda:0+cuda:1 for one model on both")
    add("--revision", help="of a hub model")
    add("--rope-scaling", metavar="TYPE:F", help="for example yarn:4")
    add("--trust-remote-code", action="store_true", help="run code that comes with a model")


def check_model_arguments(args: argparse.Namespace) -> None:
    """Raise :class:`UserError` for a dtype, a device or a rope scaling that is none, before anything is waited for."""
    from fathom_eval.devices import resolve_devices
    from fathom_eval.models import check_dtype, parse_rope_scaling

    check_dtype(args.dtype)
    if args.rope_scaling is not None:
        parse_rope_scaling(args.rope_scaling)
    resolve_devices(args.device)


def add_output_arguments(parser: argparse.ArgumentParser, kind: str) -> None:
    """Where a run is written and what is printed."""
    add = parser.add_argument
    add("--output", metavar="DIR", help=f"run directory (default: runs/{kind}-…); it resumes")
    add("--output-path", "--output_path", dest="output", default=argparse.SUPPRESS, help=argparse.SUPPRESS)  # as lm-eval spells it
    add("--offline", action="store_true", help="never use the network")
    add("--json", action="store_true", help="print the summary as JSON")
    add("--quiet", action="store_true", help="print only where the results are")


def words(text: str, flag: str) -> list[str]:
    """A comma-separated list that is not empty."""
    found = [word.strip() for word in text.split(",") if word.strip()]
    if not found:
        raise UserError(f"{flag} is empty")
    return found


def numbers(text: str, flag: str) -> list[int]:
    """A comma-separated list of whole numbers of at least 1, sorted, each once."""
    found = set()
    for word in words(text, flag):
        if not word.isdecimal() or len(word) > 9 or int(word) < 1:
            raise UserError(f"{flag}: '{word[:20]}' is not a whole number from 1 to 999,999,999")
        found.add(int(word))
    return sorted(found)


def at_least_one(value: int, flag: str) -> None:
    """Raise :class:`UserError` unless the number is at least 1."""
    if not 1 <= value <= 999_999_999:
        raise UserError(f"{flag} {value} must be at least 1 and at most 999,999,999")


def device_name(device: str) -> str:
    """The device, or several joined by ``+``, in words: the card, or the CPU with its threads."""
    import os
    import platform

    import torch

    if device.startswith("cuda"):
        names = [torch.cuda.get_device_name(one) for one in device.split("+")]
        return ", ".join(f"{names.count(name)} × {name}" if names.count(name) > 1 else name for name in dict.fromkeys(names))
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads of {os.cpu_count()}"
