"""What the tasks read from lm-eval's metadata: the arguments of ``--metadata``, over those of ``--model_args``."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fathom_eval.errors import UserError, did_you_mean

Metadata = Mapping[str, Any]

RULER_KEYS = ("max_seq_lengths", "samples", "haystack", "seed", "decoys", "chat_template", "tokenizer")
SESSION_KEYS = (
    "sessions",
    "session_tokens",
    "trajectories",
    "trajectories_revision",
    "format",
    "repo",
    "default_repo",
    "condensation",
    "rendering",
    "seed",
    "reference",
    "tokenizer",
)
_ALL_KEYS = frozenset((*RULER_KEYS, *SESSION_KEYS))
_NEAR = 0.81  # "max_seq_length" is near to "max_seq_lengths", the model argument "max_length" is not


def check_keys(metadata: Metadata, keys: tuple[str, ...]) -> None:
    """Raise ``UserError`` for a key that looks like a misspelt one of ``keys``.

    The arguments of the model stand in the same mapping, so a key that looks like none of them is not ours to judge.
    """
    for given in metadata:
        near = difflib.get_close_matches(given, keys, n=1, cutoff=_NEAR)
        if near and given not in _ALL_KEYS and near[0] not in metadata:
            raise UserError(f"metadata has no '{given}'; did you mean '{near[0]}'?")


def tokenizer_name(metadata: Metadata) -> str:
    """The tokenizer that lengths are measured with: ``tokenizer``, else the model (``pretrained`` or ``model``).

    Raises:
        UserError: None of them is a name.
    """
    for key in ("tokenizer", "pretrained", "model"):
        value = metadata.get(key)
        if isinstance(value, (str, Path)) and str(value):
            return str(value)
        if value:
            raise UserError(f"the {key} in metadata is a {type(value).__name__}, but the tasks need the name or folder of a tokenizer")
    raise UserError(
        """the tasks measure lengths in tokens and no tokenizer is named; give --metadata '{"tokenizer": "NAME_OR_FOLDER", …}'"""
    )


def lengths(metadata: Metadata) -> tuple[int, ...]:
    """The prompt lengths in tokens. There is no default: a run at another length than the one that was meant looks like any other."""
    given = metadata.get("max_seq_lengths")
    if given is None:
        raise UserError("""the prompt length is not given; give --metadata '{"max_seq_lengths": [2048], …}'""")
    parts = given.split(",") if isinstance(given, str) else given if isinstance(given, (list, tuple)) else [given]
    found = dict.fromkeys(_whole(part, "max_seq_lengths", 1) for part in parts)
    if not found:
        raise UserError("max_seq_lengths in metadata is empty")
    return tuple(found)


def whole_number(metadata: Metadata, key: str, default: int, least: int = 0) -> int:
    """A whole number, or the default where metadata has none."""
    return _whole(metadata.get(key, default), key, least)


def _whole(value: Any, key: str, least: int) -> int:
    number = int(value) if isinstance(value, str) and value.strip().isdecimal() else value
    if isinstance(number, bool) or not isinstance(number, int) or number < least:
        raise UserError(f"{key} in metadata: '{value}' is not a whole number of at least {least}")
    return number


def switch(metadata: Metadata, key: str) -> bool:
    """True or false; false where metadata has none."""
    value = metadata.get(key, False)
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise UserError(f"{key} in metadata: '{value}' is not true or false")
    return value


def text(metadata: Metadata, key: str) -> str | None:
    """A string, or None where metadata has none."""
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise UserError(f"{key} in metadata: '{value}' is not a string")
    return value


def choice(metadata: Metadata, key: str, choices: tuple[str, ...]) -> str:
    """One of ``choices``, the first where metadata has none."""
    value = text(metadata, key) or choices[0]
    if value not in choices:
        raise UserError(f"unknown {key} '{value}' in metadata; {did_you_mean(value, choices)}")
    return value


def position_limit(metadata: Metadata) -> int | None:
    """Tokens of prompt and generation that the model takes, as far as its arguments tell; None where they do not.

    lm-eval cuts the beginning off a longer prompt, and the needle with it.
    """
    for key in ("max_length", "max_model_len"):
        if metadata.get(key):
            return _whole(metadata[key], key, 1)
    pretrained = metadata.get("pretrained")
    if not isinstance(pretrained, str):
        return None
    from transformers import AutoConfig

    from fathom_eval import model_support
    from fathom_eval.bundled import BUNDLED
    from fathom_eval.models import apply_yarn, parse_rope_scaling

    folder = BUNDLED[pretrained].cached() if pretrained in BUNDLED else Path(pretrained).expanduser()
    place, revision = (folder, None) if folder is not None and folder.is_dir() else (pretrained, metadata.get("revision"))
    try:
        config = AutoConfig.from_pretrained(place, **({"revision": str(revision)} if revision else {}))
        if metadata.get("rope_scaling"):
            apply_yarn(config, parse_rope_scaling(str(metadata["rope_scaling"])))
        return model_support.position_limit(config.get_text_config(decoder=True))
    # No configuration, one of another library, or a model without a limit: what is wrong with the model, the model says when it is loaded.
    except Exception:
        return None
