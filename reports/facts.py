"""Facts of a manifest as text: what was run, on what, and what changed from one start to the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fathom_eval.console import printable

_HIDDEN = ("invocations", "identity_sha256")


def fact(holder: Mapping[str, Any], *names: str) -> str:
    """A fact of a manifest as text, from its top, its settings or its identity; of a table its ``name``. Empty where unknown."""
    for part in (holder, holder.get("settings"), holder.get("identity")):
        if not isinstance(part, Mapping):
            continue
        for name in names:
            value = part.get(name)
            if isinstance(value, Mapping):
                value = value.get("name")
            if value is not None and not isinstance(value, (list, Mapping)):
                return printable(value)
    return ""


def model_of(manifest: Mapping[str, Any]) -> str:
    """The model's name."""
    return fact(manifest, "model", "model_name") or "an unnamed model"


def haystack_of(manifest: Mapping[str, Any]) -> str:
    """The name of the text; of a file that names itself no further, the file's own. Empty where unknown."""
    name, found = fact(manifest, "haystack"), manifest.get("haystack")
    origin = printable(found["origin"]) if isinstance(found, Mapping) and found.get("origin") else ""
    return origin.rstrip("/").rsplit("/", 1)[-1] if name == "file" and origin else name


def devices_of(manifest: Mapping[str, Any]) -> list[str]:
    """The devices of all starts of the run, each once."""
    starts = [manifest, *_starts(manifest)]
    return list(dict.fromkeys(device for start in starts if (device := fact(start, "device"))))


def last_settings(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the run's last start: what was asked for most recently."""
    starts = _starts(manifest) or [manifest]
    settings = starts[-1].get("settings")
    return settings if isinstance(settings, Mapping) else {}


def asked_for(manifest: Mapping[str, Any], setting: str) -> list[str]:
    """What all starts of the run listed under a setting, each once, in the order in which it was first asked for."""
    found: dict[str, None] = {}
    for start in _starts(manifest) or [manifest]:
        settings = start.get("settings")
        listed = settings.get(setting) if isinstance(settings, Mapping) else None
        found.update(dict.fromkeys(printable(one) for one in listed) if isinstance(listed, list) else {})
    return list(found)


def flatten(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every leaf of a JSON value."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from flatten(item, f"{prefix}.{printable(name)}" if prefix else printable(name))
    elif isinstance(value, list) and any(isinstance(item, (list, Mapping)) for item in value):
        for index, item in enumerate(value):
            yield from flatten(item, f"{prefix}.{index}")
    elif isinstance(value, list):
        yield prefix, ", ".join(printable(item) for item in value) or "none"
    else:
        yield prefix, "none" if value is None else printable(value)


def provenance_of(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Every fact of the manifest but its list of starts."""
    return list(flatten({name: value for name, value in manifest.items() if name != "invocations"}))


def starts_of(manifest: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Time of every start of the run, and the facts in which it differed from the one before."""
    starts, before = [], None
    for start in _starts(manifest):
        facts = dict(flatten({name: value for name, value in start.items() if name != "time"}))
        if before is None:
            changes = "first start"
        else:
            changed = [name for name in {**before, **facts} if before.get(name) != facts.get(name)]
            changes = "; ".join(f"{name}: {facts.get(name, 'absent')}" for name in changed) or "as before"
        starts.append((printable(start.get("time", "unknown time")), changes))
        before = facts
    return starts


def differing_facts(manifests: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str]]]:
    """The facts in which runs differ, one text a run: what must be known before their numbers are set side by side."""
    tables = [dict(flatten({name: value for name, value in manifest.items() if name not in _HIDDEN})) for manifest in manifests]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [table.get(name, "absent") for table in tables]) for name in names]
    return [(name, texts) for name, texts in rows if len(set(texts)) > 1]


def _starts(manifest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    starts = manifest.get("invocations")
    return [start for start in starts if isinstance(start, Mapping)] if isinstance(starts, list) else []
