"""Rows that hold a list of chat messages: ``trajectory`` (nebius/SWE-rebench-openhands-trajectories) or ``messages`` (SWE-Gym).

Such a list is what the model saw, so nothing of it is left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fathom_eval.sessions.readers.builder import RecordedCall, StepBuilder, counted
from fathom_eval.sessions.readers.fields import (
    UnusableRowError,
    arguments_text,
    first_text,
    images_in,
    mappings,
    repo_of_instance,
    text_of,
    tool_schemas,
    truth,
)
from fathom_eval.sessions.steps import FormatName, Trajectory


def read_messages(row: Mapping[str, Any], source: str, *, key: str, format_name: FormatName) -> Trajectory:
    """The trajectory of a row whose messages stand under ``key``. Raises UnusableRowError for a row without messages."""
    messages = mappings(row.get(key))
    if not messages:
        raise UnusableRowError(f"a row without {key}")
    identifier = first_text(row, ("trajectory_id", "run_id", "instance_id", "id"))
    instance = first_text(row, ("instance_id",))
    if not first_text(row, ("trajectory_id",)) and instance and identifier != instance:
        identifier = f"{instance}/{identifier}"
    builder = StepBuilder(identifier or source, event_log=False)
    for index, message in enumerate(messages):
        _add(builder, message, index)
    tools, unknown = tool_schemas(row.get("tools"))
    if unknown:
        builder.notes["tool definitions of an unknown shape left out"] += unknown
    return Trajectory(
        id=identifier,
        repo=first_text(row, ("repo",)) or repo_of_instance(row.get("instance_id")),
        tools=tools,
        steps=builder.finish(),
        format=format_name,
        resolved=truth(row.get("resolved")),
        source=source,
        notes=counted(builder.notes),
    )


def _add(builder: StepBuilder, message: Mapping[str, Any], index: int) -> None:
    content = text_of(message.get("content"))
    if images := images_in(message.get("content")):
        builder.notes["images left out"] += images
    match message.get("role"):
        case "system" | "developer":
            builder.system(content, index)
        case "user":
            builder.user(content, index)
        case "assistant":
            builder.assistant(content, _calls(message), index, text_of(message.get("reasoning_content")))
        case "tool" | "function":
            builder.result(text_of(message.get("tool_call_id")), content, text_of(message.get("name")), index)
        case _:
            builder.notes["messages of an unknown role left out"] += 1


def _calls(message: Mapping[str, Any]) -> list[RecordedCall]:
    calls = []
    for call in mappings(message.get("tool_calls")):
        function = call.get("function")
        if isinstance(function, Mapping):
            calls.append(RecordedCall(text_of(call.get("id")), text_of(function.get("name")), arguments_text(function.get("arguments"))))
    old = message.get("function_call")
    if not calls and isinstance(old, Mapping) and old.get("name"):
        calls.append(RecordedCall("", text_of(old.get("name")), arguments_text(old.get("arguments"))))
    return calls


def holds_messages(value: Any) -> bool:
    """Whether a value is a list of chat messages."""
    return any("role" in message for message in mappings(value)[:1])
