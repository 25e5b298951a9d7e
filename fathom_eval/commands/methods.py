"""``fathom-eval methods``: every method with its bits, source and options."""

from __future__ import annotations

import argparse
import dataclasses
import json
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
    from fathom_eval.methods import PAPER, registry
    from fathom_eval.selection import Policy

    if args.head_dim < 1:
        raise UserError(f"--head-dim {args.head_dim} must be at least 1")
    entries: list[dict[str, Any]] = []
    for name, kind in registry().items():
        method = kind()
        try:
            bits = method.typical_bits(args.head_dim)
        except UserError as error:
            bits = f"not at head_dim {args.head_dim}: {error}"
        entries.append({"name": name, "bits": bits, "source": kind.source, "options": _options(method), "control": kind.control})
    common = _options(Policy())
    if args.json:
        print(json.dumps({"head_dim": args.head_dim, "methods": entries, "common_options": common, "paper": list(PAPER)}, indent=2))
        return 0
    print(f"scan bits per token, KV head and layer at head_dim {args.head_dim}, with default options")
    for entry in entries:
        print(f"\n{entry['name']:16} {entry['bits']}\n    {entry['source']}")
        if entry["options"]:
            print("    options: " + ", ".join(f"{name}={value}" for name, value in entry["options"].items()))
    print("\noptions of every method: " + ", ".join(f"{name}={value}" for name, value in common.items()))
    print("name a method with options as name:option=value:option=value, for example sparq:r=D/4:rerank=2")
    print("'--methods paper' (the default) stands for:\n    " + "\n    ".join(PAPER))
    return 0


def _options(part: Any) -> dict[str, str]:
    values = {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}
    return {name: "+".join(map(str, value)) if isinstance(value, tuple) else str(value) for name, value in values.items()}
