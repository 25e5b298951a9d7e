"""A start that goes on with a run: what decides what is measured, and is not given, is as the run's last start had it."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from fathom_eval.commands.arguments import at_least_one, numbers, words
from fathom_eval.commands.spreading import INDEX_PLACES
from fathom_eval.console import printable
from fathom_eval.errors import UserError
from fathom_eval.run import Run

_SOURCE = ("trajectories", "trajectories_revision", "format", "repo", "default_repo", "condensation")
_DECIDING = (
    *("model", "revision", "rope_scaling", "dtype", "device", "runtime"),
    *("tasks", "suite", "calibration", "methods", "baseline", "context", "k"),
    *("limit", "windows", "positions", "full_window", "sessions", "session_tokens", "max_new_tokens"),
    *("haystack", *_SOURCE, "decoys", "chat_template", "plain", "seed", "no_recorded_text", "no_text"),
)
"""Options that decide what a run measures and keeps. Leave to run a model's own code is of one start: ``trust_remote_code`` is not here."""
_INSTEAD: Mapping[str, Collection[str]] = {
    "suite": ("methods", "context", "k"),
    "methods": ("suite", "calibration", "baseline"),
    "haystack": _SOURCE,
    "trajectories": ("haystack",),
    "chat_template": ("plain",),
    "plain": ("chat_template",),
}
"""An option that is given, and what is not taken from the run beside it."""


def defer_defaults(parser: argparse.ArgumentParser) -> None:
    """Take the defaults of the options that a run may give out of the parser: see :func:`take_over`. Call it after all are declared."""
    defaults = {name: value for name, value in vars(parser.parse_args([])).items() if name in _DECIDING}
    parser.set_defaults(**dict.fromkeys(defaults), defaults=defaults)


def take_over(args: argparse.Namespace, kind: str, say: Callable[[str], None]) -> None:
    """Set the options that are not given: as in the run that ``--output`` holds, otherwise to their defaults.

    What a manifest holds that is no value of its option is passed over, as are options that this version does not have.

    Args:
        kind: Of the run.
        say: Takes one line on what the run gave, unless it gave the defaults.

    Raises:
        UserError: A run cannot be at ``--output``, or another kind of run is there.
    """
    given = {name for name in args.defaults if getattr(args, name) is not None and (name, getattr(args, name)) != ("haystack", "auto")}
    manifest = None
    if args.output is not None:
        if not args.output:
            raise UserError("--output is empty: name a folder for the run, such as runs/first")
        manifest = Run.check(Path(args.output), kind)
    found = _recorded(manifest, args, given) if manifest is not None else {}
    shown = []
    for name, default in args.defaults.items():
        if name not in given:
            setattr(args, name, found.get(name, default))
            if found.get(name, default) != default:
                shown += _as_given(name, found[name])
    if shown:
        say(printable(f"as in {args.output}: {' '.join(shown)}"))


def deciding_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """What the next start takes over, for the manifest."""
    return {name: getattr(args, name) for name in args.defaults}


def _recorded(manifest: Mapping[str, Any], args: argparse.Namespace, given: Collection[str]) -> dict[str, Any]:
    """What the last start of a run had, of the options that are not given and do not contradict one that is."""
    starts = manifest.get("invocations")
    started = [start for start in starts if isinstance(start, Mapping)] if isinstance(starts, list) else []
    last = started[-1] if started else manifest
    own, settings = _mapping(last.get("arguments")), _of_settings(_mapping(last.get("settings")))
    contradicted = {name for option in given for name in _INSTEAD.get(option, ())}
    if "suite" in given and own.get("suite", settings.get("suite")) != args.suite:
        contradicted.add("calibration")
    wanted = [name for name in args.defaults if name not in given and name not in contradicted]

    def valid(recorded: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
        values = {name: _valid(name, recorded.get(name), args.defaults[name]) for name in names}
        return {name: value for name, value in values.items() if value is not None}

    # Earlier versions recorded settings alone. A suite's context and k, which no option gave, are the run's where the suite is not.
    found = valid(own, wanted) if own else valid(settings, wanted)
    if own and "suite" not in found:
        found = {**valid(settings, [name for name in wanted if name in ("context", "k")]), **found}
    if "suite" in found:
        found.pop("methods", None)
    if "haystack" in wanted and "trajectories" not in given and not found.get("trajectories") and found.get("haystack", "auto") == "auto":
        found.update(valid({"haystack": _automatic_haystack(manifest)}, ["haystack"]))
    return found


def _automatic_haystack(manifest: Mapping[str, Any]) -> str | None:
    """What ``auto`` was, so that a network that came or went does not make it another run."""
    name = _mapping(manifest.get("haystack")).get("name")
    return str(name) if name in ("wikitext", "python-docs") else None


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _of_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a manifest as values of options."""
    found = dict(settings)
    for name in ("tasks", "context", "k"):
        if isinstance(found.get(name), list):
            found[name] = ",".join(map(str, found[name]))
    if isinstance(found.get("methods"), list):
        found["methods"] = ",".join(_method(label) for label in found["methods"] if isinstance(label, str))
    if isinstance(found.get("baseline"), str):
        found["baseline"] = _method(found["baseline"])
    found["calibration"] = [f"{role}={name}" for role, name in _mapping(found.get("calibrations")).items()]
    return found


def _method(label: str) -> str:
    """What names the method of a label on a command line, for most labels."""
    from fathom_eval.methods import EVERY, parse_method

    usual = {parse_method(text).label: text for text in EVERY}
    return usual.get(label, label.replace(" ", ":"))


def _valid(name: str, value: Any, default: Any) -> Any:
    """The value as its option takes it; None where it takes no such value."""
    kind = str if default is None else type(default)
    if type(value) is not kind or value == "":
        return None
    if name in ("methods", "tasks"):  # those that are not known here any more are passed over alone
        value = ",".join(word for word in value.split(",") if _is_taken(name, word))
    return value if value != "" and _is_taken(name, value) else None


def _is_taken(name: str, value: Any) -> bool:
    try:
        _check(name, value)
    except (UserError, ValueError, TypeError, AttributeError):
        return False
    return True


def _check(name: str, value: Any) -> None:
    """Raise what the option's own check raises. Files and models are looked for later."""
    from fathom_eval.methods import parse_method, parse_methods
    from fathom_eval.models import DTYPES, parse_rope_scaling
    from fathom_eval.sessions.assembly import parse_session_tokens
    from fathom_eval.suites import find_suite, parse_calibrations
    from fathom_eval.tasks.samples import find_task

    if name in ("limit", "windows", "positions", "sessions", "max_new_tokens"):
        at_least_one(value, name)
    elif name in ("context", "k"):
        numbers(value, name)
    elif name == "tasks":
        for word in words(value, name):
            find_task(word)
    elif (name == "decoys" and value < 0) or (name == "runtime" and value not in INDEX_PLACES) or (name == "dtype" and value not in DTYPES):
        raise ValueError(value)
    else:
        checks: dict[str, Callable[[Any], object]] = {
            "methods": parse_methods,
            "baseline": parse_method,
            "suite": find_suite,
            "calibration": parse_calibrations,
            "session_tokens": parse_session_tokens,
            "rope_scaling": parse_rope_scaling,
        }
        checks.get(name, str)(value)


def _as_given(name: str, value: Any) -> list[str]:
    """The option as it would be given."""
    flag = f"--{name.replace('_', '-')}"
    if value is True:
        return [flag]
    return [f"{flag} {shlex.quote(str(one))}" for one in (value if isinstance(value, list) else [value])]
