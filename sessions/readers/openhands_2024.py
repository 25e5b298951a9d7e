"""The flat form of 2024: ``history`` of events whose fields stand beside ``action`` or ``observation``, without ids and call metadata.

Agents of that time wrote calls as tags in their text and got results as user messages that begin with ``OBSERVATION:``, so that is how
the steps read: no step of this form is a tool call or a tool result. Some files hold pairs of action and observation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fathom_eval.sessions.readers.builder import StepBuilder, counted
from fathom_eval.sessions.readers.fields import UnusableRowError, first_text, mappings, repo_of_instance, text_of
from fathom_eval.sessions.steps import FormatName, Trajectory

NAME: FormatName = "openhands-2024"
KEYS = "history of flat events"

RESULT_HEADER = "OBSERVATION:\n"
ERROR_SUFFIX = "\n[Error occurred in processing last action]"
_INLINE_IMAGE = "![image](data:image/png;base64,"
_SHOWN_IMAGE = "![image](data:image/png;base64, ...) already displayed to user"


def flat_history(row: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The events of a row; pairs are taken apart."""
    history = row.get("history")
    if isinstance(history, list) and any(isinstance(item, list) for item in history):
        history = [event for item in history for event in (item if isinstance(item, list) else [item])]
    return mappings(history)


def matches(row: Mapping[str, Any]) -> bool:
    """Whether the row looks like one of this format."""
    events = flat_history(row)
    return any("action" in event or "observation" in event for event in events) and not any(
        "args" in event or "extras" in event for event in events
    )


def read(row: Mapping[str, Any], source: str, *, condensed: bool) -> Trajectory:
    """The row's trajectory. Raises UnusableRowError where it has no events. There is nothing to condense."""
    events = flat_history(row)
    if not events:
        raise UnusableRowError("a row without history")
    issue = row.get("issue")
    issue = issue if isinstance(issue, Mapping) else {}
    owner, name, number = (first_text(issue, (key,)) for key in ("owner", "repo", "number"))
    identifier = first_text(row, ("instance_id",)) or (f"{owner}/{name}#{number}" if owner and name else "")
    builder = StepBuilder(identifier or source, event_log=True)
    for index, event in enumerate(events):
        add_as_text(builder, event, event, index)
    return Trajectory(
        id=identifier,
        repo=repo_of_instance(row.get("instance_id")) or (f"{owner}/{name}" if owner and name else ""),
        tools=(),
        steps=builder.finish(),
        format=NAME,
        resolved=None,
        source=source,
        notes=counted(builder.notes),
    )


def add_as_text(builder: StepBuilder, event: Mapping[str, Any], fields: Mapping[str, Any], index: int) -> None:
    """Add one event the way agents without function calls saw it.

    Args:
        builder: collects the steps.
        event: holds ``action`` or ``observation``, ``source`` and, for observations, ``content``.
        fields: holds the other fields: the event itself, or its ``args`` or ``extras``.
        index: its position.
    """
    if action := text_of(event.get("action")):
        _add_action(builder, action, event, fields, index)
    else:
        _add_observation(builder, text_of(event.get("observation")), event, fields, index)


def _add_action(builder: StepBuilder, action: str, event: Mapping[str, Any], fields: Mapping[str, Any], index: int) -> None:
    thought = text_of(fields.get("thought"))
    match action:
        case "message":
            # The flat form names no source: the first message is the task, and every later one is the agent's.
            is_user = event.get("source", "user" if builder.last is None else "agent") == "user"
            content = text_of(fields.get("content"))
            if is_user:
                builder.user(content, index)
            else:
                builder.assistant(content, (), index)
        case "run" if event.get("source") == "user":
            builder.user(f"User executed the command:\n{text_of(fields.get('command'))}", index)
        case "run":
            builder.assistant(f"{thought}\n<execute_bash>\n{text_of(fields.get('command'))}\n</execute_bash>", (), index)
        case "run_ipython":
            builder.assistant(f"{thought}\n<execute_ipython>\n{text_of(fields.get('code'))}\n</execute_ipython>", (), index)
        case "browse_interactive":
            builder.assistant(f"{thought}\n<execute_browse>\n{text_of(fields.get('browser_actions'))}\n</execute_browse>", (), index)
        case "finish":
            builder.assistant(thought, (), index)
        case _:
            builder.notes[f"'{action[:40]}' actions left out"] += 1


def _add_observation(builder: StepBuilder, kind: str, event: Mapping[str, Any], fields: Mapping[str, Any], index: int) -> None:
    content = text_of(event.get("content"))
    match kind:
        case "run":
            exit_code = fields.get("exit_code")
            ending = f"\n[Command {fields.get('command_id', -1)} finished with exit code {exit_code}]" if exit_code is not None else ""
            builder.user(f"{RESULT_HEADER}{content}{ending}", index)
        case "run_ipython":
            lines = [_SHOWN_IMAGE if _INLINE_IMAGE in line else line for line in content.split("\n")]
            builder.user(RESULT_HEADER + "\n".join(lines), index)
        case "error":
            builder.user(f"{RESULT_HEADER}{content}{ERROR_SUFFIX}", index)
        case "browse" | "delegate":
            builder.user(f"{RESULT_HEADER}{content}", index)
        case _:
            builder.notes[f"'{kind[:40]}' observations left out"] += 1
