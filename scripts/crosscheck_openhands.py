"""Compare the readers of OpenHands logs with OpenHands' own code, and write the result down.

Run it in an environment of Python 3.12 with ``openhands-ai==1.6.0`` (the last release with the event memory of V0; it brings the V1 SDK):

    PYTHONPATH=. python scripts/crosscheck_openhands.py FOLDER --output docs/crosscheck-openhands.md

``FOLDER`` holds ``v0_output_*.jsonl.gz`` and ``v1_conversations.jsonl.gz``. Exit code 1 if a difference has no explanation.
"""

from __future__ import annotations

import argparse
import functools
import gzip
import importlib.metadata
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fathom_eval.sessions.reading import read_trajectories
from fathom_eval.sessions.report import ReadReport
from fathom_eval.sessions.steps import Assistant, System, ToolResult, Trajectory, User

SYSTEM_ADDED = "system prompt added"
FINISH_AS_TEXT = "finish as text"
EXPLANATIONS = {
    SYSTEM_ADDED: (
        "the file records no system prompt. OpenHands puts the one of its own release there; the reader adds nothing that was not recorded."
    ),
    FINISH_AS_TEXT: (
        "the last response calls `finish`. OpenHands shows a finished conversation with the thought alone, for a next turn that never\n"
        "  came; the reader keeps the call, since it is what the model wrote."
    ),
}
NOTES = """\
- V0: events go through `event_from_dict` and `ConversationMemory.process_events` with the recorded `max_message_chars` and without prompt
  extensions, as in OpenHands' own evaluations.
- V1: the file is older than release 1.0 of the SDK, whose event classes no longer load it. Each event is put into the class of today that
  took its place: outputs of commands into `TerminalObservation` with the recorded metadata, other results into a plain observation with the
  recorded text (of an edit that failed, its error). Then `View.from_events` and `events_to_messages` make the messages.
- V1 condensed: the SDK of then showed the last summary only, today's keeps an earlier one unless it is among the forgotten events. The
  earlier summaries are therefore listed as forgotten before `View.from_events` is called, and condensations after the last response are
  left out on both sides.
"""

HEAD = """\
# Readers against OpenHands' own code

Written by `scripts/crosscheck_openhands.py` with {versions}. Every message (role, text, calls with
arguments, tool name) that the readers give is compared with the message that OpenHands makes of the same record.

| file | trajectories | messages | equal | explained | unexplained |
| --- | ---: | ---: | ---: | --- | ---: |"""

Message = tuple[str, str, tuple[tuple[str, str], ...], str]
"""Role, text, calls as name and arguments, name of the tool."""


@dataclass
class Result:
    """Counts of one file."""

    file: str
    trajectories: int = 0
    messages: int = 0
    equal: int = 0
    explained: Counter[str] = field(default_factory=Counter)
    unexplained: list[str] = field(default_factory=list)


def our_messages(trajectory: Trajectory) -> list[Message]:
    """The messages of a trajectory as the readers give them."""
    messages: list[Message] = []
    for step in trajectory.steps:
        match step:
            case System():
                messages.append(("system", step.content, (), ""))
            case User():
                messages.append(("user", step.content, (), ""))
            case Assistant():
                messages.append(("assistant", step.content, tuple((call.name, call.arguments) for call in step.tool_calls), ""))
            case ToolResult():
                messages.append(("tool", step.content, (), step.name))
    return messages


def their_message(message: Any, calls: Any) -> Message:
    """A message of OpenHands, of either generation."""
    text = "\n".join(part.text for part in message.content if hasattr(part, "text"))
    return (message.role, text, calls, message.name or "" if message.role == "tool" else "")


def v0_messages(row: Mapping[str, Any]) -> list[Message]:
    """The messages that OpenHands V0 makes of a row."""
    import openhands.agenthub.codeact_agent as agent
    from openhands.core.config import AgentConfig
    from openhands.events.action import MessageAction
    from openhands.events.serialization.event import event_from_dict
    from openhands.memory.conversation_memory import ConversationMemory
    from openhands.utils.prompt import PromptManager

    events = [event_from_dict(dict(event)) for event in row["history"]]
    task = next(event for event in events if isinstance(event, MessageAction) and event.source == "user")
    prompts = PromptManager(prompt_dir=str(Path(agent.__file__).parent / "prompts"))
    memory = ConversationMemory(AgentConfig(enable_prompt_extensions=False), prompts)
    limit = row["metadata"]["llm_config"]["max_message_chars"]
    made = memory.process_events(events, task, max_message_chars=limit)
    return [
        their_message(message, tuple((call.function.name, call.function.arguments) for call in message.tool_calls or ()))
        for message in made
    ]


def v1_messages(row: Mapping[str, Any], *, condensed: bool) -> list[Message]:
    """The messages that the V1 SDK makes of a conversation."""
    from openhands.sdk.context.view import View
    from openhands.sdk.event import Condensation, LLMConvertibleEvent

    events = [event for event in row["events"] if condensed or event["kind"] != "Condensation"]
    last = max(position for position, event in enumerate(events) if event["kind"] == "ActionEvent")
    converted = []
    summaries: list[str] = []
    for position, event in enumerate(events):
        if event["kind"] != "Condensation":
            converted.append(_v1_event(event))
        elif position < last:
            fields = {key: event[key] for key in ("id", "summary", "summary_offset")}
            forgotten = {*event["forgotten_event_ids"], *summaries}
            converted.append(Condensation(**fields, forgotten_event_ids=forgotten, llm_response_id="unknown"))
            summaries.append(f"{event['id']}-summary")
    made = LLMConvertibleEvent.events_to_messages(View.from_events(converted).events)
    return [their_message(message, tuple((call.name, call.arguments) for call in message.tool_calls or ())) for message in made]


def _v1_event(event: Mapping[str, Any]) -> Any:
    """The event of today's SDK for an event of before 1.0."""
    from openhands.sdk.event import ActionEvent, MessageEvent, ObservationEvent, SystemPromptEvent
    from openhands.sdk.llm import Message as SdkMessage
    from openhands.sdk.llm import MessageToolCall, TextContent
    from openhands.sdk.tool.schema import Observation
    from openhands.tools.terminal.definition import TerminalObservation
    from openhands.tools.terminal.metadata import CmdOutputMetadata

    common = {"id": event["id"], "source": event["source"]}
    match event["kind"]:
        case "SystemPromptEvent":
            return SystemPromptEvent(**common, system_prompt=TextContent(text=event["system_prompt"]["text"]), tools=[])
        case "MessageEvent":
            content = [TextContent(text=part["text"]) for part in event["llm_message"]["content"]]
            return MessageEvent(**common, llm_message=SdkMessage(role=event["llm_message"]["role"], content=content))
        case "ActionEvent":
            function = event["tool_call"]["function"]
            call = MessageToolCall(id=event["tool_call"]["id"], name=function["name"], arguments=function["arguments"], origin="completion")
            thought = [TextContent(text=part["text"]) for part in event["thought"]]
            names = {key: event[key] for key in ("tool_name", "tool_call_id", "llm_response_id")}
            return ActionEvent(**common, **names, thought=thought, action=None, tool_call=call)
        case "ObservationEvent":
            recorded = event["observation"]
            names = {key: event[key] for key in ("tool_name", "tool_call_id", "action_id")}
            if recorded["kind"] == "ExecuteBashObservation":
                observation: Observation = TerminalObservation(
                    command=recorded["command"],
                    content=[TextContent(text=recorded["output"])],
                    metadata=CmdOutputMetadata(**recorded["metadata"]),
                )
            else:
                text = recorded.get("error") or recorded.get("output") or recorded.get("content") or recorded.get("message") or ""
                observation = _plain_observation()(content=[TextContent(text=text)])
            return ObservationEvent(**common, **names, observation=observation)
        case kind:
            raise ValueError(f"no event of today stands for {kind}")


@functools.cache
def _plain_observation() -> Any:
    """The class of an observation that is shown as its text. Made once: the SDK keeps a register of such classes."""
    from openhands.sdk.tool.schema import Observation
    from pydantic import create_model

    return create_model("RecordedObservation", __base__=Observation)


def compare(name: str, ours: list[Message], theirs: list[Message], result: Result) -> None:
    """Count equal messages, explained differences and others."""
    if theirs and theirs[0][0] == "system" and (not ours or ours[0][0] != "system"):
        result.explained[SYSTEM_ADDED] += 1
        theirs = theirs[1:]
    result.trajectories += 1
    result.messages += max(len(ours), len(theirs))
    for position in range(max(len(ours), len(theirs))):
        our = ours[position] if position < len(ours) else None
        their = theirs[position] if position < len(theirs) else None
        if our == their:
            result.equal += 1
        elif our and their and position == len(ours) - 1 and _is_finish_as_text(our, their):
            result.explained[FINISH_AS_TEXT] += 1
        else:
            result.unexplained.append(f"{name}, message {position}: {_shown(our)} against {_shown(their)}")


def _is_finish_as_text(our: Message, their: Message) -> bool:
    return our[0] == their[0] == "assistant" and [name for name, _ in our[2]] == ["finish"] and their[2] == () and our[1] == their[1]


def _shown(message: Message | None) -> str:
    return (
        "nothing"
        if message is None
        else ascii((message[0], len(message[1]), message[1][:60], message[1][-60:], message[2][:1], message[3]))
    )


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Rows of a gzip file."""
    with gzip.open(path, "rb") as lines:
        for line in lines:
            yield json.loads(line)


def check(folder: Path) -> list[Result]:
    """Compare all files of the folder."""
    results = []
    for path in sorted(folder.glob("v0_output_*.jsonl.gz")):
        result = Result(path.name)
        for trajectory, row in zip(read_trajectories(str(path), ReadReport()), rows_of(path), strict=True):
            compare(trajectory.id, our_messages(trajectory), v0_messages(row), result)
        results.append(result)
    path = folder / "v1_conversations.jsonl.gz"
    for condensation in ("full", "condensed"):
        result = Result(f"{path.name}, {condensation}")
        trajectories = read_trajectories(str(path), ReadReport(), condensation=condensation)
        for trajectory, row in zip(trajectories, rows_of(path), strict=True):
            compare(trajectory.id, our_messages(trajectory), v1_messages(row, condensed=condensation == "condensed"), result)
        results.append(result)
    return results


def page(results: list[Result]) -> str:
    """The result as Markdown."""
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("openhands-ai", "openhands-sdk", "openhands-tools"))
    lines = [HEAD.format(versions=versions)]
    for result in results:
        explained = ", ".join(f"{name} {count}" for name, count in sorted(result.explained.items())) or "–"
        numbers = f"{result.trajectories} | {result.messages:,} | {result.equal:,} | {explained} | {len(result.unexplained)}"
        lines.append(f"| {result.file} | {numbers} |")
    lines += ["", "Explained differences:", ""]
    used = {name for result in results for name in result.explained}
    lines += [f"- **{name}**: {text}" for name, text in EXPLANATIONS.items() if name in used]
    lines += ["", "How the comparison is made:", "", NOTES.rstrip()]
    if unexplained := [line for result in results for line in result.unexplained]:
        lines += ["", "Unexplained:", "", *(f"- `{line}`" for line in unexplained[:50])]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Compare, write the page, and say whether everything is explained."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    args = parser.parse_args()
    logging.disable(logging.WARNING)  # the SDK tells of every event that it drops
    results = check(args.folder)
    args.output.write_text(page(results), encoding="utf-8")
    unexplained = sum(len(result.unexplained) for result in results)
    print(
        f"{sum(result.messages for result in results):,} messages compared, {unexplained} differences without an explanation",
        file=sys.stderr,
    )
    return int(unexplained > 0)


if __name__ == "__main__":
    sys.exit(main())
