"""Conversations of the OpenHands V1 SDK: ``{conversation_id, repo, events: [{kind, source, …}]}``.

Messages are made as ``events_to_messages`` of the SDK makes them: actions of one response are one message, observations are shown through
``to_llm_content``. Observations of before version 1.0 (``ExecuteBashObservation``, ``StrReplaceEditorObservation``) hold their text in
``output`` and ``error``, later ones in a list of parts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from fathom_eval.sessions.readers.builder import RecordedCall, StepBuilder, counted
from fathom_eval.sessions.readers.condensation import Condensation, Summary, condensed_view
from fathom_eval.sessions.readers.fields import (
    UnusableRowError,
    arguments_text,
    command_output,
    first_text,
    images_in,
    mappings,
    text_of,
    tool_schemas,
)
from fathom_eval.sessions.steps import FormatName, Trajectory

NAME: FormatName = "openhands-v1"
KEYS = "events with a kind"

MAX_COMMAND_OUTPUT = 30_000
"""Characters of a command's output that the SDK shows (``MAX_CMD_OUTPUT_SIZE``)."""
_CLIPPED = "<response clipped><NOTE>Due to the max output limit, only part of the full response has been shown to you.</NOTE>"
_ERROR_HEADER = "[An error occurred during execution.]\n"
_OLD_COMMAND_ERROR_HEADER = "[There was an error during command execution.]\n"
_COMMANDS = ("ExecuteBashObservation", "TerminalObservation")
_RESULTS = ("ObservationEvent", "UserRejectObservation", "AgentErrorEvent")
_SHOWN = ("SystemPromptEvent", "MessageEvent", "ActionEvent", *_RESULTS)


def matches(row: Mapping[str, Any]) -> bool:
    """Whether the row looks like one of this format."""
    return any("kind" in event for event in mappings(row.get("events"))[:1])


def read(row: Mapping[str, Any], source: str, *, condensed: bool) -> Trajectory:
    """The row's trajectory.

    Args:
        row: the conversation.
        source: file and line.
        condensed: leave out what condensations took from the model's sight, and show their last summary. Otherwise all events are shown.

    Raises:
        UnusableRowError: it has no events.
    """
    events = mappings(row.get("events"))
    if not events:
        raise UnusableRowError("a conversation without events")
    identifier = first_text(row, ("conversation_id", "id"))
    builder = StepBuilder(identifier or source, event_log=True)
    condensations = _condensations(events)
    shown = [position for position, event in enumerate(events) if event.get("kind") in _SHOWN]
    view: Sequence[int | Summary] = shown
    boundary = -1
    if condensed and condensations:
        view = condensed_view([text_of(event.get("id")) for event in events], shown, condensations)
        boundary = condensations[-1].position
    tools: tuple[Mapping[str, Any], ...] = ()
    unknown_tools = 0
    for place, entry in enumerate(view):
        if isinstance(entry, Summary):
            builder.user(entry.text, entry.position)
            continue
        event = events[entry]
        if event.get("kind") == "SystemPromptEvent":
            tools, unknown_tools = tool_schemas(event.get("tools"))
        _add(builder, events, view, place)
    if unknown_tools:
        builder.notes["tool definitions of an unknown shape left out"] += unknown_tools
    _count_left_out(builder, events)
    if condensations:
        state = "applied: steps that they took from the model's sight are left out" if condensed else "not applied: all steps are shown"
        builder.notes[f"condensations {state}"] += len(condensations)
    steps = builder.finish()
    return Trajectory(
        id=identifier,
        repo=first_text(row, ("repo", "repository")),
        tools=tools,
        steps=steps,
        format=NAME,
        resolved=None,
        source=source,
        notes=counted(builder.notes),
        first_target=next((position for position, step in enumerate(steps) if step.index > boundary), len(steps)) if boundary >= 0 else 0,
    )


def _add(builder: StepBuilder, events: Sequence[Mapping[str, Any]], view: Sequence[int | Summary], place: int) -> None:
    """Add the message that the event at ``place`` of the view makes."""
    position = view[place]
    assert isinstance(position, int)
    event = events[position]
    kind = event.get("kind")
    if kind == "SystemPromptEvent":
        parts = (text_of(event.get("system_prompt")), text_of(event.get("dynamic_context")))
        builder.system("\n".join(part for part in parts if part), position)
    elif kind == "MessageEvent":
        _add_message(builder, event, position)
    elif kind == "ActionEvent":
        response = event.get("llm_response_id")
        if place and _is_action_of(events, view[place - 1], response):
            return  # a further call of the response before
        batch = takewhile(lambda entry: _is_action_of(events, entry, response), view[place + 1 :])
        actions = [event, *(events[entry] for entry in batch if isinstance(entry, int))]
        calls = [_call(action) for action in actions]
        builder.assistant(text_of(event.get("thought")), calls, position, text_of(event.get("reasoning_content")))
    else:
        builder.result(text_of(event.get("tool_call_id")), _shown_result(event), text_of(event.get("tool_name")), position)


def _is_action_of(events: Sequence[Mapping[str, Any]], entry: int | Summary, response: Any) -> bool:
    event = events[entry] if isinstance(entry, int) else {}
    return event.get("kind") == "ActionEvent" and bool(response) and event.get("llm_response_id") == response


def _call(action: Mapping[str, Any]) -> RecordedCall:
    call = action.get("tool_call")
    call = call if isinstance(call, Mapping) else {}
    function = call.get("function", call)
    function = function if isinstance(function, Mapping) else {}
    name = text_of(function.get("name")) or text_of(action.get("tool_name"))
    return RecordedCall(text_of(action.get("tool_call_id")), name, arguments_text(function.get("arguments")))


def _add_message(builder: StepBuilder, event: Mapping[str, Any], position: int) -> None:
    message = event.get("llm_message")
    message = message if isinstance(message, Mapping) else {}
    parts = [text_of(message.get("content")), text_of(event.get("extended_content"))]
    if images := images_in(message.get("content")):
        builder.notes["images left out"] += images
    content = "\n".join(part for part in parts if part)
    if message.get("role", event.get("source")) in ("assistant", "agent"):
        builder.assistant(content, (), position, text_of(message.get("reasoning_content")))
    else:
        builder.user(content, position)


def _shown_result(event: Mapping[str, Any]) -> str:
    """What the model saw of an observation, a rejection or an error."""
    if event.get("kind") == "AgentErrorEvent":
        return text_of(event.get("error"))
    if event.get("kind") == "UserRejectObservation":
        return f"Action rejected: {text_of(event.get('rejection_reason'))}"
    observation = event.get("observation")
    observation = observation if isinstance(observation, Mapping) else {}
    if observation.get("kind") in _COMMANDS:
        shown = _command(observation)
    elif "is_error" in observation:
        shown = _with_header(text_of(observation.get("content")), observation)
    else:
        # Before 1.0: an error stands in place of the output.
        fields = (observation.get(key) for key in ("error", "output", "content", "message"))
        shown = next((text for text in map(text_of, fields) if text), "")
    extended = text_of(event.get("extended_content"))
    return f"{shown}\n{extended}" if extended else shown


def _command(observation: Mapping[str, Any]) -> str:
    old = "output" in observation
    shown = command_output(text_of(observation.get("output" if old else "content")), observation.get("metadata"))
    if old and observation.get("error") is True:
        shown = f"{_OLD_COMMAND_ERROR_HEADER}{shown}"
    shown = clip(shown)
    return shown if old else _with_header(shown, observation)


def _with_header(shown: str, observation: Mapping[str, Any]) -> str:
    # The header is a part of its own, and parts are joined by line breaks.
    return f"{_ERROR_HEADER}\n{shown}" if observation.get("is_error") is True else shown


def clip(text: str, limit: int = MAX_COMMAND_OUTPUT) -> str:
    """The text, or its head and tail around a notice (``maybe_truncate`` of the SDK)."""
    if len(text) <= limit:
        return text
    room = limit - len(_CLIPPED)
    tail = room // 2
    return f"{text[: room - tail]}{_CLIPPED}{text[-tail:]}"


def _condensations(events: Sequence[Mapping[str, Any]]) -> list[Condensation]:
    """The condensations before the last response of the model; a later one changed nothing that it saw."""
    responses = [position for position, event in enumerate(events) if event.get("kind") == "ActionEvent" or _is_agent_message(event)]
    last = responses[-1] if responses else -1
    found = []
    for position, event in enumerate(events[: last + 1]):
        if event.get("kind") == "Condensation":
            ids = event.get("forgotten_event_ids")
            forgotten = {text_of(identifier) for identifier in ids} if isinstance(ids, list) else set()
            summary, offset = event.get("summary"), event.get("summary_offset")
            known = isinstance(summary, str) and isinstance(offset, int)
            found.append(
                Condensation(position, _whole_responses(events, forgotten), text_of(summary) if known else None, offset if known else None)
            )
    return found


def _is_agent_message(event: Mapping[str, Any]) -> bool:
    return event.get("kind") == "MessageEvent" and event.get("source") == "agent"


def _whole_responses(events: Sequence[Mapping[str, Any]], forgotten: set[str]) -> frozenset[str]:
    """Also all other actions of a response of which one action is forgotten."""
    responses = {event.get("llm_response_id") for event in events if text_of(event.get("id")) in forgotten} - {None}
    of_them = {text_of(event.get("id")) for event in events if event.get("llm_response_id") in responses}
    return frozenset(forgotten | of_them)


def _count_left_out(builder: StepBuilder, events: Sequence[Mapping[str, Any]]) -> None:
    for event in events:
        kind = event.get("kind")
        if kind not in _SHOWN and kind != "Condensation":
            builder.notes[f"events of kind {text_of(kind)[:40] or 'unknown'} left out"] += 1
