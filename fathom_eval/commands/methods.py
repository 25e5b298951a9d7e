"""``fathom-eval methods``: every method with its bits, source and options; of one that is named, what it does and takes."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import inspect
import json
import re
import sys
import textwrap
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from fathom_eval.console import Console, printable

if TYPE_CHECKING:
    from fathom_eval.methods import MethodSpec

HELP = "List every method with its scan bits, source and options, or show one with all of them."
EXAMPLE = "fathom-eval methods fathom --head-dim 64"

_WIDTH = 110
_ATTRIBUTE = re.compile(r"^ {4}(\w+): (.*(?:\n {8}.*)*)", re.MULTILINE)
_ROLE = re.compile(r":\w+:`~?(?:[\w.]*\.)?(\w+)`")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="show this method; with options, as in sparq:r=D/4, with their bits")
    parser.add_argument("--head-dim", type=int, default=128, metavar="D", help="head_dim that the bits are given for (default: 128)")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Print the list, or the one method."""
    from fathom_eval.errors import UserError
    from fathom_eval.methods import EVERY, PAPER, parse_method, plug_ins, registry
    from fathom_eval.selection import Policy

    if args.head_dim < 1:
        raise UserError(f"--head-dim {args.head_dim} must be at least 1")
    if args.name is not None and ("," in args.name or args.name in ("paper", "all")):
        raise UserError(f"'{args.name}' is a list of methods: name one of them, or none to see all")
    if args.name is not None:
        return _show(parse_method(args.name), args)
    entries: list[dict[str, Any]] = []
    for name in registry():
        try:
            entries.append(_entry(parse_method(name), args.head_dim))
        except UserError as error:
            print(f"warning: {error}; it is left out", file=sys.stderr)
    common, names = _options(Policy()), {entry["name"] for entry in entries}
    every = [*EVERY, *(name for name in plug_ins() if name in names)]
    if args.json:
        lists = {"paper": list(PAPER), "all": every}
        print(json.dumps({"head_dim": args.head_dim, "methods": entries, "common_options": common, **lists}, indent=2))
        return 0
    print(f"scan bits per token, KV head and layer at head_dim {args.head_dim}, with default options")
    for entry in entries:
        print(f"\n{entry['name']:16} {entry['bits']}\n    {entry['source']}")
        if entry["options"]:
            print(f"    options: {_listed(entry['options'])}")
        for line in _notes(entry):
            print(f"    {line}")
    print("\noptions of every method: " + _listed(common))
    print("name a method with options as name:option=value:option=value, for example sparq:r=D/4:rerank=2")
    print("'--methods paper' (the default) stands for:\n    " + "\n    ".join(PAPER))
    further = [item for item in every if item not in PAPER]
    print("'--methods all' adds to them, where they can run:\n    " + "\n    ".join(further))
    return 0


def _entry(spec: MethodSpec, head_dim: int) -> dict[str, Any]:
    from fathom_eval.errors import UserError
    from fathom_eval.methods import asked

    method, kind = spec.method, type(spec.method)
    try:
        bits = asked(method, "typical_bits", functools.partial(method.typical_bits, head_dim))
    except UserError as error:
        bits = f"not at head_dim {head_dim}: {error}"
    return {
        "name": kind.name,
        "bits": bits,
        "source": asked(method, "source", functools.partial(getattr, kind, "source")),
        "options": _options(method),
        "control": kind.control,
        "published": kind.published,
        "policy": {option: _written(value) for option, value in method.policy_defaults().items()},
        "ranks_all": kind.ranks_all,
        "capped": kind.capped,
    }


def _show(spec: MethodSpec, args: argparse.Namespace) -> int:
    """Print one method: what it is, its bits, and every option with what it does, what it takes and what it is here."""
    entry = _entry(spec, args.head_dim)
    about = _plain((type(spec.method).__doc__ or "").partition("Attributes:")[0])
    own = _described(spec.method, {})
    common = _described(spec.policy, spec.method.policy_defaults())
    if args.json:
        print(json.dumps({"head_dim": args.head_dim, **entry, "about": about, "options": own, "common_options": common}, indent=2))
        return 0
    lines = [spec.label, *_wrapped(about, ""), "", f"source: {entry['source']}"]
    lines += [f"scan bits per token, KV head and layer at head_dim {args.head_dim}: {entry['bits']}", *_notes(entry)]
    for title, options in (("options", own), ("options of every method", common)):
        lines += ["", title] if options else []
        for name, option in options.items():
            here = "" if option["value"] == option["default"] else f"; here {option['value']}"
            lines.append(f"    {name}: {option['type']} (default: {option['default'] or 'empty'}{here})")
            lines += _wrapped(option["meaning"], " " * 8)
    console = Console()
    for line in lines:
        console.say(line)
    return 0


def _described(part: Any, defaults: Mapping[str, Any]) -> dict[str, dict[str, str]]:
    """Every option of a method or policy: what it does, what can be given, what it is unless given, and what it is here."""
    types, meanings = typing.get_type_hints(type(part)), _meanings(type(part))
    described = {}
    for field in dataclasses.fields(part):
        value = _written(getattr(part, field.name))
        default = defaults.get(field.name, field.default)
        described[field.name] = {
            "type": _type_words(types[field.name]),
            "default": "none, it must be given" if default is dataclasses.MISSING else _written(default),
            "value": value,
            "meaning": meanings.get(field.name, ""),
        }
    return described


def _meanings(kind: type) -> dict[str, str]:
    """What the docstrings of a class and of those that it builds on say of its options."""
    found = {}
    for base in reversed(kind.__mro__):
        for name, text in _ATTRIBUTE.findall(inspect.cleandoc(base.__doc__ or "").partition("Attributes:")[2]):
            found[name] = _plain(text)
    return found


def _plain(text: str) -> str:
    """Text of a docstring without its markup, in one line."""
    return printable(" ".join(_ROLE.sub(r"\1", text).replace("``", "").split()))


def _wrapped(text: str, indent: str) -> list[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False)


def _type_words(kind: Any) -> str:
    if typing.get_origin(kind) is Literal:
        return ", ".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) is tuple:
        return "whole numbers, as in 0+1, or none"
    return {bool: "true or false", int: "a whole number", float: "a number"}.get(kind, "text")


def _notes(entry: dict[str, Any]) -> list[str]:
    notes = []
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
