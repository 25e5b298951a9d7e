"""Typed steps of an agent's trajectory. Every reader gives these, whatever the file's format."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

FormatName = Literal["swe-rebench", "swe-gym", "openhands-v0", "openhands-v1", "openhands-2024"]


@dataclass(frozen=True)
class ToolCall:
    """A call as the model wrote it.

    Attributes:
        id: unique within a session: the recorded id behind a hash of the trajectory's id, since recorded ids repeat between trajectories.
        name: the tool.
        arguments: JSON as recorded, which may be broken.
    """

    id: str
    name: str
    arguments: str

    def parsed(self) -> dict[str, Any] | None:
        """The arguments as an object, or None where the recorded text is no JSON object."""
        try:
            value = json.loads(self.arguments)
        except (ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None


@dataclass(frozen=True)
class System:
    """The system prompt. ``index`` is the position of the step's (first) record in the source."""

    content: str
    index: int


@dataclass(frozen=True)
class User:
    """What a person, or the harness in a person's place, said."""

    content: str
    index: int


@dataclass(frozen=True)
class Assistant:
    """One response of the model.

    Attributes:
        content: the thought, without thinking blocks.
        tool_calls: in the order of the response.
        index: position in the source.
        reasoning: thinking that the record holds apart from the content, or in a leading ``<think>`` block. It is not rendered: harnesses
            do not show it to the model again.
    """

    content: str
    tool_calls: tuple[ToolCall, ...]
    index: int
    reasoning: str = ""


@dataclass(frozen=True)
class ToolResult:
    """What a tool gave back, as the model saw it. ``call_id`` is empty where the record names no call."""

    call_id: str
    content: str
    name: str
    index: int


Step = System | User | Assistant | ToolResult


@dataclass(frozen=True)
class Trajectory:
    """One recorded run of an agent.

    Attributes:
        id: as recorded, made unique within what was read.
        repo: repository, or an empty string where the record names none.
        tools: schemas in the form of the chat-completions API, without null-padded keys.
        steps: in the order in which the model saw them.
        format: what it was read as.
        resolved: whether the record says that the task was solved.
        source: file (or hub set) and line or row.
        notes: what was left out or changed, for people.
        first_target: index of the first step whose context is what the model saw then; earlier ones are no targets. Above 0 only in the
            condensed view.
    """

    id: str
    repo: str
    tools: tuple[Mapping[str, Any], ...]
    steps: tuple[Step, ...]
    format: FormatName
    resolved: bool | None
    source: str
    notes: tuple[str, ...] = ()
    first_target: int = 0

    @cached_property
    def content_hash(self) -> str:
        """sha256 of everything a prompt is made of: tools and steps; not of ids, which differ between copies of the same run."""
        digest = hashlib.sha256()
        digest.update(_json([dict(tool) for tool in self.tools]))
        for step in self.steps:
            match step:
                case Assistant():
                    parts: list[Any] = [step.content, step.reasoning, [[call.name, call.arguments] for call in step.tool_calls]]
                case ToolResult():
                    parts = [step.content, step.name]
                case _:
                    parts = [step.content]
            digest.update(_json([type(step).__name__, *parts]))
        digest.update(str(self.first_target).encode())
        return digest.hexdigest()

    @property
    def targets(self) -> tuple[int, ...]:
        """Indices of the steps that a session may ask for: responses of the model with content."""
        return tuple(
            position
            for position, step in enumerate(self.steps)
            if position >= self.first_target and isinstance(step, Assistant) and step.content.strip()
        )

    @property
    def ending(self) -> str:
        """How the trajectory ends: ``finish``, ``open call`` (never answered), ``text``, ``tool result`` or ``user``."""
        last = self.steps[-1] if self.steps else None
        match last:
            case Assistant(tool_calls=()):
                return "text"
            case Assistant():
                return "finish" if any(call.name == "finish" for call in last.tool_calls) else "open call"
            case ToolResult():
                return "finish" if last.name == "finish" else "tool result"
            case _:
                return "user"


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=True).encode() + b"\n"
