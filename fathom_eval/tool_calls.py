"""Whether a generated step calls a tool that the agent has, in the form of the rendering that the prompt used."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from typing import Any

STATES = ("valid", "unknown tool", "broken", "unfinished", "none")

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_PLAIN_CALL = re.compile(r"<tool_call>\s*(.*?)\s*</tool_call>", re.DOTALL)
_FUNCTION_TAG = re.compile(r"<function=([^>\s]+)>")
# What chat templates put before a call; one of them without a readable call is a broken call.
_MARKERS = ("<tool_call>", "[TOOL_CALLS]", "<function=", "<|python_tag|>", "<call>")
_BRACES_TRIED = 200


def tool_call_state(text: str, known: Collection[str], *, plain: bool, cut: bool) -> str:
    """What a step calls, one of :data:`STATES`.

    ``valid``: every call in it parses, names a known tool and gives its arguments as an object. ``unfinished``: a call was begun when the
    generation reached its limit. ``none``: there is no call.

    Args:
        text: The step, special tokens included, up to its stop string.
        known: Names of the tools.
        plain: The plain rendering's form is asked for: a JSON object with ``name`` and ``arguments`` between ``<tool_call>`` tags.
            Otherwise any JSON object with ``name`` and ``arguments`` or ``parameters`` counts, and ``<function=NAME>``: the forms that chat
            templates use.
        cut: The generation ended at its limit.
    """
    if plain:
        calls = [_parsed(body) for body in _PLAIN_CALL.findall(text)]
        open_call = text.count(_OPEN) > text.count(_CLOSE)
    else:
        calls = list(_objects_with_names(text)) or [(name, {}) for name in _FUNCTION_TAG.findall(text)]
        open_call = not calls and any(marker in text for marker in _MARKERS)
    if open_call:
        return "unfinished" if cut else "broken"
    if not calls:
        return "none"
    if any(call is None or not isinstance(call[1], dict) for call in calls):
        return "broken"
    return "valid" if all(call is not None and call[0] in known for call in calls) else "unknown tool"


def _parsed(body: str) -> tuple[str, Any] | None:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return None
    return _name_and_arguments(value)


def _name_and_arguments(value: Any) -> tuple[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments = value.get("arguments", value.get("parameters"))
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    return value["name"], arguments


def _objects_with_names(text: str) -> Iterator[tuple[str, Any]]:
    decoder = json.JSONDecoder()
    position, tried = text.find("{"), 0
    while position >= 0 and tried < _BRACES_TRIED:
        tried += 1
        step = 1
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError):
            pass
        else:
            found = _name_and_arguments(value)
            if found is not None and ("arguments" in value or "parameters" in value):
                step = end - position
                yield found
        position = text.find("{", position + step)
