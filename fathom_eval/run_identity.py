"""Why a folder that holds a run cannot take what another start would add: in the words of the options that differ."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fathom_eval.console import shorten
from fathom_eval.errors import UserError

_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        "chat_template",
        "condensation",
        "decoys",
        "device",
        "dtype",
        "full_window",
        "max_new_tokens",
        "positions",
        "repo",
        "runtime",
        "seed",
        "session_tokens",
    )
}
"""Fields of an identity that hold what an option says."""
_CONTENTS = {"model": "model", "haystack": "haystack", "trajectories_sha256": "trajectories"}
"""Fields that hold a hash of what an option names, and that option."""
_KINDS = ("ruler", "sessions", "fidelity")
"""Whose identities have these fields."""
_FOLLOWS = {"tokenizer": "model", "end_tokens": "model", "runtime_scores": "runtime"}
"""Fields that differ because another one does."""
_ABSENT = object()


def refuse_other_kind(path: Path, manifest: Mapping[str, Any], kind: str) -> None:
    """Raise :class:`UserError` where the manifest is of a run of another command."""
    theirs = manifest.get("kind")
    if theirs != kind:
        what = f"is a {shorten(theirs, 40)} run" if isinstance(theirs, str) and theirs else "holds a run of an unknown kind"
        raise UserError(f"{path} {what}; give {kind} another folder")


def refuse_other_identity(path: Path, manifest: Mapping[str, Any], kind: str, identity: Mapping[str, Any]) -> None:
    """Raise :class:`UserError` where the manifest is of a run of another kind or identity; every difference is named.

    Args:
        identity: As it comes back from JSON.
    """
    refuse_other_kind(path, manifest, kind)
    theirs: Mapping[str, Any] = manifest["identity"]
    differing = [name for name in {**theirs, **identity} if theirs.get(name, _ABSENT) != identity.get(name, _ABSENT)]
    told = [
        _difference(name, theirs.get(name, _ABSENT), identity.get(name, _ABSENT), manifest if kind in _KINDS else None)
        for name in differing
        if _FOLLOWS.get(name) not in differing
    ]
    if told:
        raise UserError(f"{path} holds another run: {'; '.join(told)}; give another folder, or the same settings to resume")


def _difference(name: str, theirs: object, ours: object, manifest: Mapping[str, Any] | None) -> str:
    """Without a manifest the fields are not those of options."""
    if name in _CONTENTS and manifest is not None:
        option = f"--{_CONTENTS[name]}"
        known = _name_of(manifest.get(_CONTENTS[name])) if theirs is not _ABSENT else ""
        if theirs is _ABSENT:
            return f"no {option} there, one now"
        if ours is _ABSENT:
            return f"{option}{known and f' {known}'} there, none now"
        return f"another {option}{known and f' ({known} there)'}"
    if name in _OPTIONS and manifest is not None:
        return f"{_given(_OPTIONS[name], theirs)} there, {_given(_OPTIONS[name], ours)} now"
    return f"{name} is {_shown(theirs)} there and {_shown(ours)} now"


def _name_of(recorded: object) -> str:
    name = recorded.get("name") if isinstance(recorded, Mapping) else recorded
    return shorten(name, 60) if isinstance(name, str) else ""


def _given(option: str, value: object) -> str:
    if value is _ABSENT or value is None or value is False:
        return f"no {option}"
    if value is True:
        return option
    return f"{option} {':'.join(map(str, value)) if isinstance(value, list) else shorten(value, 60)}"


def _shown(value: object) -> str:
    return "absent" if value is _ABSENT else shorten(json.dumps(value), 80)
