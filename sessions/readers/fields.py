"""Small parts that the readers share: text of recorded content, tool schemas, repository names, the output of a command."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

_SURROGATE = re.compile("[\ud800-\udfff]")
_INSTANCE = re.compile(r"(?P<owner>[A-Za-z0-9][\w.-]*?)__(?P<name>[\w.-]+)-\d+")
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)


class UnusableRowError(Exception):
    """A row that holds no trajectory. The message says why; it may quote the row, so it is not safe for a terminal."""


def clean(text: str) -> str:
    """The text with lone surrogates, which no encoding takes, as U+FFFD. Line ends and everything else stay as recorded."""
    return _SURROGATE.sub("\ufffd", text)


def text_of(content: Any) -> str:
    """Text of a message's content: a string, null, or a list of parts whose texts are joined by line breaks (images are left out)."""
    match content:
        case None:
            return ""
        case str():
            return clean(content)
        case {"text": str(text)}:
            return clean(text)
        case list():
            return "\n".join(text_of(part) for part in content if _has_text(part))
        case Mapping():
            return ""
        case _:
            return clean(str(content))


def _has_text(part: Any) -> bool:
    return isinstance(part, str) or (isinstance(part, Mapping) and isinstance(part.get("text"), str))


def images_in(content: Any) -> int:
    """How many parts of a message's content are no text."""
    return sum(1 for part in content if not _has_text(part)) if isinstance(content, list) else 0


def split_thinking(content: str) -> tuple[str, str]:
    """Thinking of a leading ``<think>`` block, and the rest. An empty block is taken off as well."""
    match = _THINK.match(content)
    return (match.group(1).strip(), content[match.end() :]) if match else ("", content)


def mappings(value: Any) -> list[Mapping[str, Any]]:
    """The items of a list that are objects; of a list that is stored as a JSON string, too. Anything else is an empty list."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            return []
    return [item for item in value if isinstance(item, Mapping)] if isinstance(value, list) else []


def tool_schemas(tools: Any) -> tuple[tuple[Mapping[str, Any], ...], int]:
    """Tool definitions in the form of the chat-completions API, and how many were of no known shape.

    Columnar files pad every schema with the keys of all others; those null keys go. ``parameters: null`` is a tool without parameters.
    """
    found: list[Mapping[str, Any]] = []
    recorded = mappings(tools)
    for tool in recorded:
        function = tool.get("function", tool)
        if isinstance(function, Mapping) and isinstance(function.get("name"), str) and ("function" in tool or "parameters" in tool):
            parameters = _without_nulls(function.get("parameters")) or {"type": "object", "properties": {}}
            kept = {key: clean(function[key]) for key in ("name", "description") if isinstance(function.get(key), str)}
            found.append({"type": "function", "function": {**kept, "parameters": parameters}})
    return tuple(found), len(recorded) - len(found)


def _without_nulls(value: Any) -> Any:
    match value:
        case Mapping():
            return {clean(str(key)): _without_nulls(item) for key, item in value.items() if item is not None}
        case list():
            return [_without_nulls(item) for item in value]
        case str():
            return clean(value)
        case _:
            return value


def arguments_text(arguments: Any) -> str:
    """Arguments of a call as JSON text: what is a string stays as recorded, broken or not."""
    if isinstance(arguments, str):
        return clean(arguments)
    return clean(json.dumps({} if arguments is None else arguments, ensure_ascii=False))


def repo_of_instance(instance_id: Any) -> str:
    """``owner/name`` of an id of the form ``owner__name-123``, or an empty string."""
    match = _INSTANCE.fullmatch(instance_id) if isinstance(instance_id, str) else None
    return f"{match['owner']}/{match['name']}" if match else ""


def first_text(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    """The first of these keys that holds text, or a number, as text."""
    for key in keys:
        value = row.get(key)
        if isinstance(value, (str, int)) and not isinstance(value, bool) and str(value).strip():
            return clean(str(value)).strip()
    return ""


def truth(value: Any) -> bool | None:
    """A recorded verdict: true, false, 1, 0, or unknown."""
    return bool(value) if isinstance(value, (bool, int, float)) else None


def command_output(content: str, metadata: Any) -> str:
    """The output of a command as OpenHands showed it to the model: prefix, content, suffix, then folder, interpreter and exit code.

    The exit code is shown only if it is not −1 (still running). Both generations of OpenHands have the same layout
    (``CmdOutputObservation.to_agent_observation``, ``TerminalObservation.to_llm_content``).
    """
    known: Mapping[str, Any] = metadata if isinstance(metadata, Mapping) else {}
    shown = f"{text_of(known.get('prefix'))}{content}{text_of(known.get('suffix'))}"
    if folder := text_of(known.get("working_dir")):
        shown += f"\n[Current working directory: {folder}]"
    if interpreter := text_of(known.get("py_interpreter_path")):
        shown += f"\n[Python interpreter: {interpreter}]"
    exit_code = known.get("exit_code", -1)
    if isinstance(exit_code, int) and exit_code != -1:
        shown += f"\n[Command finished with exit code {exit_code}]"
    return shown
