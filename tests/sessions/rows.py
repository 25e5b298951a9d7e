"""Small hand-made rows of every format, and ways to read them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fathom_eval.sessions.reading import read_trajectories
from fathom_eval.sessions.report import ReadReport
from fathom_eval.sessions.steps import Trajectory

TOOL = {
    "type": "function",
    "function": {
        "name": "execute_bash",
        "description": "run",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


def chat_call(identifier: str | None = "toolu_01", arguments: str = '{"command": "ls"}', name: str = "execute_bash") -> dict[str, Any]:
    return {"function": {"arguments": arguments, "name": name}, "id": identifier, "index": None, "type": "function"}


def message(role: str, content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": role, "content": content, "name": None, "tool_call_id": None, "tool_calls": None, "function_call": None, **fields}


def chat_messages(turns: int = 2, words: int = 3) -> list[dict[str, Any]]:
    """System, task, then ``turns`` of thought with a call and its result."""
    messages = [message("system", "You are an agent."), message("user", "Fix the bug.")]
    for turn in range(turns):
        thought = " ".join(f"thought{turn}" for _ in range(words))
        messages.append(message("assistant", thought, tool_calls=[chat_call(f"toolu_{turn:02d}")]))
        messages.append(message("tool", f"file{turn}.py", tool_call_id=f"toolu_{turn:02d}", name="execute_bash"))
    return messages


def rebench_row(messages: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    row = {"trajectory_id": "t1", "instance_id": "owner__project-1", "repo": "owner/project", "tools": [TOOL], "resolved": 1}
    return {**row, "trajectory": chat_messages() if messages is None else messages, **fields}


TOKENS = "500:700"
"""Bounds, as ``--session-tokens`` has them, of sessions that some rows are enough for."""


def some_rows(count: int = 6, repo: str = "owner/project") -> list[dict[str, Any]]:
    """Rows of one repository, no two alike."""
    rows = []
    for number in range(count):
        messages = chat_messages(6, words=3 + number % 3)
        messages[1]["content"] = f"Fix the bug of number {number}."
        rows.append(rebench_row(messages, trajectory_id=f"t{number}", repo=repo))
    return rows


def gym_row(messages: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    row = {"instance_id": "owner__project-1", "run_id": "r1", "resolved": False, "tools": None, "test_result": {}}
    return {**row, "messages": chat_messages() if messages is None else messages, **fields}


def v0_call(
    identifier: int, call_id: str = "toolu_01", content: str | None = "Look.", response: str | None = None, **fields: Any
) -> dict[str, Any]:
    """A ``run`` action with its metadata."""
    function = {"name": "execute_bash", "arguments": '{"command": "ls"}'}
    reply = {"role": "assistant", "content": content, "tool_calls": [{"id": call_id, "type": "function", "function": function}]}
    metadata = {
        "function_name": "execute_bash",
        "tool_call_id": call_id,
        "total_calls_in_response": 1,
        "model_response": {"id": response or f"response-{identifier}", "choices": [{"message": reply}]},
    }
    arguments = {"command": "ls", "thought": content, "blocking": False}
    return {"id": identifier, "source": "agent", "action": "run", "args": arguments, "tool_call_metadata": metadata, **fields}


def v0_result(identifier: int, call: dict[str, Any], content: str = "a.py", exit_code: int = 0, **metadata: Any) -> dict[str, Any]:
    """The result of a ``run`` action. Like the real ones it repeats the model's response."""
    return {
        "id": identifier,
        "source": "agent",
        "observation": "run",
        "cause": call["id"],
        "content": content,
        "extras": {"command": "ls", "metadata": {"exit_code": exit_code, "prefix": "", "suffix": "", **metadata}},
        "tool_call_metadata": call["tool_call_metadata"],
    }


def v0_head(task: str = "Fix the bug.") -> list[dict[str, Any]]:
    return [
        {"id": 0, "source": "agent", "action": "system", "args": {"content": "You are an agent.", "tools": [TOOL]}},
        {"id": 1, "source": "user", "action": "message", "args": {"content": task}},
    ]


def v0_row(history: list[dict[str, Any]] | None = None, limit: int | None = None, **fields: Any) -> dict[str, Any]:
    if history is None:
        call = v0_call(2)
        history = [*v0_head(), call, v0_result(3, call)]
    metadata = {"llm_config": {"max_message_chars": limit}}
    return {"instance_id": "owner__project-1", "instruction": "Fix.", "metadata": metadata, "history": history, "error": None, **fields}


def v1_text(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text, "cache_prompt": False}]


def v1_call(identifier: str, call_id: str = "toolu_01", thought: str = "Look.", response: str | None = None) -> dict[str, Any]:
    function = {"name": "execute_bash", "arguments": '{"command": "ls"}'}
    return {
        "kind": "ActionEvent",
        "source": "agent",
        "id": identifier,
        "thought": v1_text(thought) if thought else [],
        "action": {"kind": "ExecuteBashAction", "command": "ls"},
        "tool_name": "execute_bash",
        "tool_call_id": call_id,
        "tool_call": {"id": call_id, "type": "function", "function": function},
        "llm_response_id": response or f"response-{identifier}",
    }


def v1_result(identifier: str, call_id: str = "toolu_01", output: str = "a.py", **metadata: Any) -> dict[str, Any]:
    observation = {
        "kind": "ExecuteBashObservation",
        "output": output,
        "error": False,
        "metadata": {"exit_code": 0, "prefix": "", "suffix": "", **metadata},
    }
    event = {"kind": "ObservationEvent", "source": "environment", "id": identifier, "tool_name": "execute_bash", "tool_call_id": call_id}
    return {**event, "observation": observation}


def v1_head() -> list[dict[str, Any]]:
    user = {"role": "user", "content": v1_text("Fix the bug.")}
    return [
        {"kind": "SystemPromptEvent", "source": "agent", "id": "s", "system_prompt": v1_text("You are an agent.")[0], "tools": [TOOL]},
        {"kind": "MessageEvent", "source": "user", "id": "u", "llm_message": user, "extended_content": []},
    ]


def v1_row(events: list[dict[str, Any]] | None = None, **fields: Any) -> dict[str, Any]:
    events = [*v1_head(), v1_call("a1"), v1_result("o1")] if events is None else events
    return {"conversation_id": "c1", "repo": "project", "events": events, **fields}


def flat_row(history: list[Any] | None = None, **fields: Any) -> dict[str, Any]:
    if history is None:
        history = [
            {"action": "message", "content": "Fix the bug.", "wait_for_response": False},
            {"action": "run", "command": "ls", "thought": "Look."},
            {"observation": "run", "content": "a.py", "command": "ls", "command_id": -1, "exit_code": 0},
            {"action": "finish", "outputs": {}, "thought": "Done."},
        ]
    return {"issue": {"owner": "owner", "repo": "project", "number": 7}, "instruction": "Fix.", "history": history, "error": None, **fields}


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8", newline="")
    return path


def read_all(path: Path | str, **options: Any) -> tuple[list[Trajectory], ReadReport]:
    report = ReadReport()
    return list(read_trajectories(str(path), report, **options)), report


def read_row(folder: Path, row: dict[str, Any], **options: Any) -> Trajectory:
    """The one trajectory of a row, through a file."""
    [trajectory], _ = read_all(write_jsonl(folder / "row.jsonl", [row]), **options)
    return trajectory


def shape(trajectory: Trajectory) -> list[tuple[str, str]]:
    """Kind and content of every step."""
    return [(type(step).__name__, step.content) for step in trajectory.steps]
