"""The options of ``fathom-eval bench``: which of them each action takes, and their defaults."""

from __future__ import annotations

import argparse
import math
from typing import Any

from fathom_eval.commands.arguments import add_model_arguments, add_output_arguments, at_least_one, numbers, words
from fathom_eval.errors import UserError, did_you_mean

_OF_A_MODEL = ("dtype", "revision", "rope_scaling", "trust_remote_code")
_OF_A_SHAPE = ("spread", "host_memory")
_OF_A_STEP = ("methods", "k", "batch", "sessions", "lanes", "last_lane", "rows", "gather_threads", "rerank", "index", "host_pages", "model")
_TAKES = {
    "link": ("device", "repeats"),
    "kernels": ("device", "contexts", "repeats", "spread"),
    "step": (*_OF_A_STEP, "contexts", "repeats", "device", *_OF_A_MODEL, *_OF_A_SHAPE),
    "equal-error": ("errors", "reference"),
}
"""By action; where a run is written and what is printed is for every one."""
ACTIONS = tuple(_TAKES)
_DEFAULTS: dict[str, Any] = {
    "model": "qwen3-8b-shape",
    "contexts": "131072",
    "k": 512,
    "batch": "1",
    "sessions": "1",
    "lanes": "auto",
    "rows": "gpu",
    "rerank": "1",
    "index": "host",
    "spread": 1.0,
    "host_pages": "auto",
}
_WORDS = {"rows": ("gpu", "cpu", "both"), "index": ("host", "hbm")}
# Of the options that other commands share with this one; all others have none before they are taken.
_NOT_GIVEN = {"dtype": "auto", "device": "auto", "trust_remote_code": False}


def add_bench_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of all actions. Those of this command have no defaults yet: see :func:`take_options`."""
    parser.usage = f"{parser.prog} {'|'.join(ACTIONS)} [options]"
    add = parser.add_argument
    add("what", metavar="|".join(ACTIONS), help="what to time, or to make of it")
    add("--model", help="step: qwen3-8b-shape, tiny-shape (random weights), or a model")
    add("--contexts", metavar="N,N", help="kernels, step: tokens (default: 131072)")
    add(
        "--methods",
        metavar="A,B",
        help="step: default: Fathom 40, 48, 64 and the scans of the paper's Table 2, at its shares of D",
    )
    add("--k", type=int, metavar="K", help="step: keys a query head attends to (default: 512)")
    add("--batch", metavar="R,R", help="step: sessions a step decodes together")
    add("--sessions", metavar="S,S", help="step: steps that run side by side")
    add("--lanes", metavar="L,L", help="step: parts of a step that are pipelined, or auto (default)")
    add("--last-lane", type=int, metavar="H", help="step: KV heads of the last lane (auto: 1 when long)")
    add("--rows", metavar="BY,BY", help="step: who brings K/V rows: gpu (default), cpu or both")
    add("--gather-threads", type=int, metavar="N", help="step: threads of the CPU that gather rows (default: half the cores, to 8)")
    add("--rerank", metavar="F,F", help="step: candidates over k that are rescored")
    add("--index", metavar="host,hbm", help="step: where the scan index lies (default: host)")
    add("--repeats", type=int, metavar="N", help="link, kernels, step: timed turns (default: 5 of a step, else 20)")
    add("--spread", type=float, metavar="S", help="kernels, step: log scale of synthetic channels")
    add("--host-pages", choices=("auto", "huge", "small"), metavar="KIND", help="step: pinned pages: auto, huge or small")
    add("--host-memory", type=float, metavar="GIB", help="step: at most so much is pinned")
    add("--errors", metavar="RUN", help="equal-error: a fidelity run; --output is the run of steps")
    add(
        "--reference",
        action="append",
        metavar="L,L",
        help="equal-error: whose errors to reach (default: double_sparsity:c=D/4)",
    )
    add_model_arguments(parser)
    add_output_arguments(parser, "bench")


def take_options(args: argparse.Namespace) -> None:
    """See that the action is one and takes every option that was given, and set the defaults of what it takes.

    Values that no action could take are found before torch is imported.

    Raises:
        UserError: No such action; options that it has no use for, with the actions that take them; or values that none could take.
    """
    what = args.what
    if what not in _TAKES:
        raise UserError(f"bench cannot time '{what}'; {did_you_mean(what, ACTIONS)}")
    if foreign := [name for name in _options() if name not in _TAKES[what] and _is_given(args, name)]:
        raise UserError(f"{_flags(foreign)}: no meaning in '{what}'; {_whose(foreign)}")
    _check_values(args)
    if what == "step" and (args.model or any(_is_given(args, name) for name in _OF_A_MODEL)):
        _check_model_options(args)
    for name, default in _DEFAULTS.items():
        if name in _TAKES[what] and getattr(args, name) is None:
            setattr(args, name, default)


def options_taken(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments without the options of other actions."""
    return {name: value for name, value in vars(args).items() if name in _TAKES[args.what] or name not in _options()}


def factors(text: str) -> list[float]:
    """Of ``--rerank``, sorted, each once. Raises UserError unless all are numbers of at least 1."""
    try:
        found = sorted({float(word) for word in words(text, "--rerank")})
    except ValueError:
        found = []
    if not found or not all(1 <= factor < math.inf for factor in found):
        raise UserError(f"--rerank: '{text}' is not a list of numbers of at least 1")
    return found


def _check_values(args: argparse.Namespace) -> None:
    """Refuse numbers and words that no action could take, of the options that were given."""
    for name in ("contexts", "batch", "sessions", "lanes"):
        given = getattr(args, name)
        if given is not None and (name, given) != ("lanes", "auto"):
            numbers(given, _flags([name]))
    for name in ("k", "repeats", "last_lane", "gather_threads"):
        if getattr(args, name) is not None:
            at_least_one(getattr(args, name), _flags([name]))
    for name, known in _WORDS.items():
        for word in words(getattr(args, name), _flags([name])) if getattr(args, name) is not None else ():
            if word not in known:
                raise UserError(f"{_flags([name])}: no '{word}'; {did_you_mean(word, known)}")
    if args.rerank is not None:
        factors(args.rerank)
    if args.spread is not None and not 0 <= args.spread < math.inf:
        raise UserError(f"--spread {args.spread:g} must be at least 0 and finite: it is a standard deviation")
    if args.host_memory is not None and not 0 < args.host_memory < math.inf:
        raise UserError(f"--host-memory {args.host_memory:g} must be above 0 and finite: it is in GiB")


def _options() -> list[str]:
    return list(dict.fromkeys(name for taken in _TAKES.values() for name in taken))


def _is_given(args: argparse.Namespace, name: str) -> bool:
    value = getattr(args, name)
    return value is not None and value != _NOT_GIVEN.get(name)


def _check_model_options(args: argparse.Namespace) -> None:
    """Random weights of a shape are loaded from nowhere, and the keys of a model are not drawn."""
    from fathom_eval.offload.weights import SHAPES

    model = args.model or _DEFAULTS["model"]
    others, kind = (_OF_A_MODEL, "random weights of a shape") if model in SHAPES else (_OF_A_SHAPE, "a model with keys of its own")
    if foreign := [name for name in others if _is_given(args, name)]:
        raise UserError(f"{_flags(foreign)}: no meaning in a step of {model}, {kind}")


def _flags(names: list[str]) -> str:
    return ", ".join(f"--{name.replace('_', '-')}" for name in names)


def _whose(names: list[str]) -> str:
    """Which actions take the options; those with the same takers together."""
    from fathom_eval.reports.wording import join

    takers: dict[str, list[str]] = {}
    for name in names:
        takers.setdefault(join([f"'bench {action}'" for action, taken in _TAKES.items() if name in taken]), []).append(name)
    return ", ".join(f"{_flags(own)} {'is' if len(own) == 1 else 'are'} of {actions}" for actions, own in takers.items())
