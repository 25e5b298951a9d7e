"""``fathom-eval methods``: every method with its bits, source and options."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
from typing import Any

HELP = "List every method with its scan bits, source and options."
EXAMPLE = "fathom-eval methods --head-dim 64"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="head_dim that the bits are given for (default: 128)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the list."""
    from fathom_eval.errors import UserError
    from fathom_eval.methods import EVERY, PAPER, asked, parse_method, plug_ins, registry
    from fathom_eval.selection import Policy

    if args.head_dim < 1:
        raise UserError(f"--head-dim {args.head_dim} must be at least 1")
    entries: list[dict[str, Any]] = []
    for name in registry():
        try:
            method = parse_method(name).method
            source = asked(method, "source", functools.partial(getattr, type(method), "source"))
        except UserError as error:
            print(f"warning: {error}; it is left out", file=sys.stderr)
            continue
        kind = type(method)
        try:
            bits = asked(method, "typical_bits", functools.partial(method.typical_bits, args.head_dim))
        except UserError as error:
            bits = f"not at head_dim {args.head_dim}: {error}"
        entries.append(
            {
                "name": name,
                "bits": bits,
                "source": source,
                "options": _options(method),
                "control": kind.control,
                "published": kind.published,
                "policy": {option: _written(value) for option, value in method.policy_defaults().items()},
                "ranks_all": kind.ranks_all,
                "capped": kind.capped,
            }
        )
    common, names = _options(Policy()), {entry["name"] for entry in entries}
    every = [*EVERY, *(name for name in plug_ins() if name in names)]
    if args.json:
        lists = {"paper": list(PAPER), "all": every}
        print(json.dumps({"head_dim": args.head_dim, "methods": entries, "common_options": common, **lists}, indent=2))
        return 0
    print(f"scan bits per token, KV head and layer at head_dim {args.head_dim}, with default options")
    for entry in entries:
        print(f"\n{entry['name']:16} {entry['bits']}\n    {entry['source']}")
        for line in _notes(entry):
            print(f"    {line}")
    print("\noptions of every method: " + _listed(common))
    print("name a method with options as name:option=value:option=value, for example sparq:r=D/4:rerank=2")
    print("'--methods paper' (the default) stands for:\n    " + "\n    ".join(PAPER))
    further = [item for item in every if item not in PAPER]
    print("'--methods all' adds to them, where they can run:\n    " + "\n    ".join(further))
    return 0


def _notes(entry: dict[str, Any]) -> list[str]:
    notes = ["options: " + _listed(entry["options"])] if entry["options"] else []
    if entry["policy"]:
        notes.append("by default: " + _listed(entry["policy"]))
    if entry["published"]:
        notes.append("follows its authors' code, not the paper's protocol")
    if not entry["ranks_all"]:
        notes.append("leaves tokens out: k of all tokens is not dense attention")
    if not entry["capped"]:
        notes.append("decides itself how many tokens it attends to: k is that of the exact set beside it")
    return notes


def _options(part: Any) -> dict[str, str]:
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {name: _written(value) for name, value in values.items()}


def _written(value: Any) -> str:
    return ("+".join(map(str, value)) or "none") if isinstance(value, tuple) else str(value)


def _listed(options: dict[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items())
