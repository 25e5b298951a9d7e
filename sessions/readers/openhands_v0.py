"""Rows of OpenHands V0 evaluations (``output.jsonl``): ``history`` of events with ``args`` or ``extras`` and ``tool_call_metadata``.

Messages are made as OpenHands' ``ConversationMemory`` made them: a response comes from the recorded model response, which every event of
the response carries and which counts once; results are shown cut to the recorded ``max_message_chars``. Fields that repeat a file's text
(``old_content``, ``new_content``, ``diff``) were never shown.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fathom_eval.sessions.readers.builder import RecordedCall, StepBuilder, counted
from fathom_eval.sessions.readers.condensation import Condensation, Summary, condensed_view
from fathom_eval.sessions.readers.fields import (
    UnusableRowError,
    arguments_text,
    command_output,
    first_text,
    mappings,
    repo_of_instance,
    text_of,
    tool_schemas,
    truth,
)
from fathom_eval.sessions.readers.openhands_2024 import ERROR_SUFFIX, add_as_text, flat_history
from fathom_eval.sessions.steps import FormatName, Trajectory, User

NAME: FormatName = "openhands-v0"
KEYS = "history of events with args and extras"

_CUT = "\n[... Observation truncated due to length ...]\n"
# Never shown to the model. Recall is shown only under prompt extensions, which evaluations switch off.
_SILENT_ACTIONS = ("recall", "change_agent_state", "null", "condensation", "condensation_request")
_SILENT_OBSERVATIONS = ("recall", "agent_state_changed", "null", "loop_detection")
# Fields of an action that are no arguments of the call.
_INTERNAL = frozenset(
    {"thought", "blocking", "hidden", "confirmation_state", "is_static", "cwd", "impl_source", "security_risk", "start", "end"}
)


def matches(row: Mapping[str, Any]) -> bool:
    """Whether the row looks like one of this format."""
    return any("args" in event or "extras" in event for event in flat_history(row))


def read(row: Mapping[str, Any], source: str, *, condensed: bool) -> Trajectory:
    """The row's trajectory.

    Args:
        row: the row.
        source: file and line.
        condensed: leave out what condensations took from the model's sight, and show their last summary. Otherwise all events are shown.

    Raises:
        UnusableRowError: it has no events.
    """
    events = _without_repeats(flat_history(row))
    error = text_of(row.get("error"))
    if not events:
        raise UnusableRowError(f"a row without history{f', which ended in: {error}' if error else ''}")
    identifier = first_text(row, ("instance_id",))
    builder = StepBuilder(identifier or source, event_log=True)
    if error:
        builder.notes[f"error: {error}"] += 1
    reader = _EventReader(builder, events, _message_limit(row))
    condensations = _condensations(events)
    view: Sequence[int | Summary] = range(len(events))
    boundary = -1
    if condensed and condensations:
        shown = [position for position, event in enumerate(events) if not _is_silent(event)]
        view = condensed_view([text_of(str(event.get("id"))) for event in events], shown, condensations)
        boundary = condensations[-1].position
    task = text_of(row.get("instruction"))
    if task and not any(_is_user_message(event) for event in events):
        reader.task = task
    for entry in view:
        reader.add(entry)
    if condensations:
        state = "applied: steps that they took from the model's sight are left out" if condensed else "not applied: all steps are shown"
        builder.notes[f"condensations {state}"] += len(condensations)
    tools, unknown = tool_schemas(reader.tools)
    if unknown:
        builder.notes["tool definitions of an unknown shape left out"] += unknown
    steps = builder.finish()
    instance = row.get("instance")
    recorded_repo = first_text(instance, ("repo",)) if isinstance(instance, Mapping) else ""
    return Trajectory(
        id=identifier,
        repo=repo_of_instance(row.get("instance_id")) or recorded_repo or first_text(row, ("repo",)),
        tools=tools,
        steps=steps,
        format=NAME,
        resolved=_resolved(row),
        source=source,
        notes=counted(builder.notes),
        first_target=next((position for position, step in enumerate(steps) if step.index > boundary), len(steps)) if boundary >= 0 else 0,
    )


class _EventReader:
    """Turns events into steps, one after another."""

    def __init__(self, builder: StepBuilder, events: Sequence[Mapping[str, Any]], limit: int | None) -> None:
        self.tools: Any = None
        self.task = ""
        self._builder = builder
        self._events = events
        self._limit = limit
        self._response = ""
        self._calls: set[str] = set()

    def add(self, entry: int | Summary) -> None:
        if isinstance(entry, Summary):
            self._user(self._cut(entry.text), entry.position)
            return
        event = self._events[entry]
        if event.get("action") == "system":
            arguments = _fields(event, "args")
            self.tools = arguments.get("tools")
            self._builder.system(text_of(arguments.get("content")), entry)
            return
        if self.task:
            self._user(self.task, entry)
            self.task = ""
        if event.get("action"):
            self._action(event, text_of(event.get("action")), entry)
        else:
            self._observation(event, text_of(event.get("observation")), entry)

    def _user(self, content: str, position: int) -> None:
        # OpenHands puts an empty line between user messages that follow each other.
        self._builder.user(f"\n\n{content}" if isinstance(self._builder.last, User) else content, position)

    def _action(self, event: Mapping[str, Any], action: str, position: int) -> None:
        metadata = event.get("tool_call_metadata")
        fields = _fields(event, "args")
        if action in _SILENT_ACTIONS:
            self._builder.notes[f"'{action}' actions left out"] += 1
        elif action == "message" and event.get("source") == "user":
            self._user(text_of(fields.get("content")), position)
        elif not isinstance(metadata, Mapping):
            add_as_text(self._builder, event, fields, position)
        else:
            self._response_of(metadata, action, fields, position)

    def _response_of(self, metadata: Mapping[str, Any], action: str, fields: Mapping[str, Any], position: int) -> None:
        """Add the response that an action belongs to, unless an action before it did."""
        call_id = text_of(metadata.get("tool_call_id"))
        response = _fields(metadata, "model_response")
        response_id = text_of(response.get("id"))
        if response_id and response_id == self._response and call_id in self._calls:
            return
        choices = mappings(response.get("choices"))
        message = _fields(choices[0], "message") if choices else {}
        calls = [
            RecordedCall(
                text_of(call.get("id")),
                text_of(_fields(call, "function").get("name")),
                arguments_text(_fields(call, "function").get("arguments")),
            )
            for call in mappings(message.get("tool_calls"))
        ]
        content = text_of(message.get("content"))
        if not calls:
            # The file was stripped of responses: the action says what was called.
            content = content or text_of(fields.get("thought"))
            calls = [RecordedCall(call_id, text_of(metadata.get("function_name")), _rebuilt_arguments(action, fields))]
            self._builder.notes["calls rebuilt from their events, since the response is not recorded"] += 1
        self._response = response_id
        self._calls = {call.id for call in calls}
        self._builder.assistant(content, calls, position, text_of(message.get("reasoning_content")))

    def _observation(self, event: Mapping[str, Any], kind: str, position: int) -> None:
        metadata = event.get("tool_call_metadata")
        fields = _fields(event, "extras")
        if kind in _SILENT_OBSERVATIONS:
            self._builder.notes[f"'{kind}' observations left out"] += 1
            return
        shown = self._shown(event, kind, fields)
        if isinstance(metadata, Mapping):
            self._builder.result(text_of(metadata.get("tool_call_id")), shown, text_of(metadata.get("function_name")), position)
        elif kind == "run" and isinstance(fields.get("metadata"), Mapping):
            self._user(f"\nObserved result of command executed by user:\n{shown}", position)
        elif kind in ("error", "user_rejected", "condense"):
            self._user(shown, position)
        else:
            add_as_text(self._builder, event, fields, position)

    def _shown(self, event: Mapping[str, Any], kind: str, fields: Mapping[str, Any]) -> str:
        content = text_of(event.get("content"))
        match kind:
            case "run":
                return self._cut(command_output(content, fields.get("metadata")))
            case "read" | "browse":
                return content
            case "error":
                return self._cut(content) + ERROR_SUFFIX
            case "user_rejected":
                return f"OBSERVATION:\n{self._cut(content)}\n[Last action has been rejected by the user]"
            case _:
                return self._cut(content)

    def _cut(self, text: str) -> str:
        """The text cut to the recorded ``max_message_chars`` (``truncate_content`` of OpenHands)."""
        if self._limit is None or len(text) <= self._limit:
            return text
        self._builder.notes[f"results shown cut to {self._limit:,} characters, as the model saw them"] += 1
        half = self._limit // 2
        return f"{text[:half]}{_CUT}{text[-half:]}"


def _fields(event: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = event.get(key)
    return value if isinstance(value, Mapping) else {}


def _without_repeats(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Events without those whose id came before. Missing ids do not matter: the order of the file is kept."""
    seen: set[int] = set()
    kept = []
    for event in events:
        identifier = event.get("id")
        if isinstance(identifier, int) and identifier >= 0:
            if identifier in seen:
                continue
            seen.add(identifier)
        kept.append(event)
    return kept


def _is_silent(event: Mapping[str, Any]) -> bool:
    return event.get("action") in _SILENT_ACTIONS or event.get("observation") in _SILENT_OBSERVATIONS


def _is_user_message(event: Mapping[str, Any]) -> bool:
    return event.get("action") == "message" and event.get("source") == "user"


def _message_limit(row: Mapping[str, Any]) -> int | None:
    """Recorded limit of a message's characters; without one nothing is cut."""
    limit = _fields(_fields(row, "metadata"), "llm_config").get("max_message_chars")
    return limit if isinstance(limit, int) and limit > 1 else None


def _rebuilt_arguments(action: str, fields: Mapping[str, Any]) -> str:
    kept = {key: value for key, value in fields.items() if key not in _INTERNAL and value is not None and value != ""}
    if action == "read":
        kept["command"] = "view"
    return arguments_text(json.dumps(kept, ensure_ascii=False))


def _resolved(row: Mapping[str, Any]) -> bool | None:
    for holder in (_fields(row, "report"), _fields(_fields(row, "test_result"), "report"), _fields(row, "test_result"), row):
        if (verdict := truth(holder.get("resolved"))) is not None:
            return verdict
    return None


def _condensations(events: Sequence[Mapping[str, Any]]) -> list[Condensation]:
    """The condensations before the last action of the agent; a later one changed nothing that the model saw."""
    agent = [
        position
        for position, event in enumerate(events)
        if event.get("action") and event.get("source") == "agent" and event.get("action") not in _SILENT_ACTIONS
    ]
    found = []
    for position, event in enumerate(events[: agent[-1] + 1 if agent else 0]):
        if event.get("action") == "condensation":
            fields = _fields(event, "args")
            ids = fields.get("forgotten_event_ids")
            start, end = fields.get("forgotten_events_start_id"), fields.get("forgotten_events_end_id")
            if not isinstance(ids, list):
                # Of the ids that are there, so that a range of any size costs nothing.
                ids = [event["id"] for event in events if _is_between(event.get("id"), start, end)]
            summary, offset = fields.get("summary"), fields.get("summary_offset")
            known = isinstance(summary, str) and isinstance(offset, int)
            found.append(
                Condensation(
                    position,
                    frozenset(str(identifier) for identifier in ids),
                    text_of(summary) if known else None,
                    offset if known else None,
                )
            )
    return found


def _is_between(identifier: Any, start: Any, end: Any) -> bool:
    return all(isinstance(value, int) for value in (identifier, start, end)) and start <= identifier <= end
