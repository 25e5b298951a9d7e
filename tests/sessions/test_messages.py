"""What readers of recorded messages must survive, each with a small hand-made input: ids, endings, odd contents."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fathom_eval.sessions.steps import Assistant, ToolResult
from tests.sessions.rows import (
    TOOL,
    chat_call,
    chat_messages,
    flat_row,
    gym_row,
    message,
    read_all,
    read_row,
    rebench_row,
    shape,
    v0_call,
    v0_head,
    v0_row,
    v1_call,
    v1_head,
    v1_row,
    write_jsonl,
)


def test_repeated_call_ids_are_namespaced(tmp_path: Path) -> None:
    rows = [rebench_row(trajectory_id="t1"), rebench_row(trajectory_id="t2")]
    trajectories, _ = read_all(write_jsonl(tmp_path / "rows.jsonl", rows))
    ids = [call.id for trajectory in trajectories for step in trajectory.steps if isinstance(step, Assistant) for call in step.tool_calls]
    assert len(ids) == 4
    assert len(set(ids)) == 4
    for trajectory in trajectories:
        results = [step.call_id for step in trajectory.steps if isinstance(step, ToolResult)]
        calls = [call.id for step in trajectory.steps if isinstance(step, Assistant) for call in step.tool_calls]
        assert results == calls


def test_call_id_used_twice_in_one_trajectory(tmp_path: Path) -> None:
    turn = [message("assistant", "Go.", tool_calls=[chat_call("x")]), message("tool", "out", tool_call_id="x")]
    steps = read_row(tmp_path, rebench_row([message("user", "Task"), *turn, *turn])).steps
    first, second = (step for step in steps if isinstance(step, Assistant))
    assert first.tool_calls[0].id != second.tool_calls[0].id
    assert [step.call_id for step in steps if isinstance(step, ToolResult)] == [first.tool_calls[0].id, second.tool_calls[0].id]


def test_consecutive_user_messages_and_user_after_tool(tmp_path: Path) -> None:
    messages = [*chat_messages(1), message("user", "Go on."), message("user", "Really."), message("assistant", "Yes.")]
    assert shape(read_row(tmp_path, rebench_row(messages)))[3:] == [
        ("ToolResult", "file0.py"),
        ("User", "Go on."),
        ("User", "Really."),
        ("Assistant", "Yes."),
    ]


def test_endings(tmp_path: Path) -> None:
    start = chat_messages(1)
    finish = message("assistant", "Done.", tool_calls=[chat_call("f", '{"message": "ok"}', "finish")])
    unanswered = message("assistant", "Once more.", tool_calls=[chat_call("z")])
    endings = {
        "finish": [*start, finish],
        "open call": [*start, unanswered],
        "text": [*start, message("assistant", "That is all.")],
        "tool result": start,
    }
    for ending, messages in endings.items():
        trajectory = read_row(tmp_path, rebench_row(messages))
        assert trajectory.ending == ending
        assert len(trajectory.steps) == len(messages)
    # An event log keeps the last response, though nothing answers it.
    assert read_row(tmp_path, v0_row([*v0_head(), v0_call(2)])).ending == "open call"
    assert read_row(tmp_path, v1_row([*v1_head(), v1_call("a1")])).ending == "open call"


def test_empty_contents_and_thinking_blocks(tmp_path: Path) -> None:
    calls = {"tool_calls": [chat_call()]}
    contents = [None, "", "  \n", "<think></think>", "<think>\n\n</think>\n\nLook.", "<think>hidden plan</think>Go."]
    messages = [message("user", "Task"), *(message("assistant", content, **calls) for content in contents)]
    trajectory = read_row(tmp_path, rebench_row(messages))
    assert [step.content for step in trajectory.steps[1:]] == ["", "", "  \n", "", "Look.", "Go."]
    assert [step.reasoning for step in trajectory.steps if isinstance(step, Assistant)] == ["", "", "", "", "", "hidden plan"]
    assert trajectory.targets == (5, 6)


@pytest.mark.parametrize("arguments", ['{"command": "ls', "", "ls -la", '["ls"]', '{"command": "\\ud800"}', None, {"command": "ls"}])
def test_arguments_of_any_kind(tmp_path: Path, arguments: object) -> None:
    call = {"function": {"arguments": arguments, "name": "execute_bash"}, "id": "x"}
    trajectory = read_row(tmp_path, rebench_row([message("user", "Task"), message("assistant", "Go.", tool_calls=[call])]))
    step = trajectory.steps[1]
    assert isinstance(step, Assistant)
    recorded = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    assert step.tool_calls[0].arguments == recorded
    assert (step.tool_calls[0].parsed() is None) == (arguments in ('{"command": "ls', "", "ls -la", '["ls"]'))


def test_null_padded_tool_schemas(tmp_path: Path) -> None:
    properties = {"command": {"type": "string", "enum": None}, "path": None, "thought": None}
    padded = {
        "name": "execute_bash",
        "description": "run",
        "parameters": {"additionalProperties": None, "type": "object", "properties": properties},
    }
    tools = [{"type": "function", "function": padded}, {"type": "function", "function": {"name": "finish", "parameters": None}}]
    assert read_row(tmp_path, rebench_row(tools=tools)).tools == (
        {
            "type": "function",
            "function": {
                "name": "execute_bash",
                "description": "run",
                "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
            },
        },
        {"type": "function", "function": {"name": "finish", "parameters": {"type": "object", "properties": {}}}},
    )


def test_line_separators_inside_strings(tmp_path: Path) -> None:
    text = "a\r\nb\u2028c\u2029d\x85e\x0bf\x0c🙂 é"
    row = rebench_row([message("user", text), message("assistant", "Ok.")])
    # Written raw, as other writers do: only \n ends a record.
    (tmp_path / "raw.jsonl").write_bytes((json.dumps(row, ensure_ascii=False) + "\n").encode() * 2)
    trajectories, report = read_all(tmp_path / "raw.jsonl")
    assert [trajectory.steps[0].content for trajectory in trajectories] == [text, text]
    assert not report.broken


def test_lone_surrogates_become_replacement_characters(tmp_path: Path) -> None:
    (tmp_path / "row.jsonl").write_text(
        '{"messages": [{"role": "user", "content": "a\\ud800b"}, {"role": "assistant", "content": "Ok."}]}\n'
    )
    [trajectory], _ = read_all(tmp_path / "row.jsonl")
    assert trajectory.steps[0].content == "a\ufffdb"


def test_gym_rows(tmp_path: Path) -> None:
    trajectory = read_row(tmp_path, gym_row(resolved=True))
    assert (trajectory.format, trajectory.repo, trajectory.id, trajectory.resolved) == (
        "swe-gym",
        "owner/project",
        "owner__project-1/r1",
        True,
    )
    old = [
        message("user", "T"),
        message("assistant", "Go.", function_call={"name": "ls", "arguments": "{}"}),
        message("function", "out", name="ls"),
    ]
    steps = read_row(tmp_path, gym_row(old)).steps
    assert isinstance(steps[1], Assistant)
    assert isinstance(steps[2], ToolResult)
    assert steps[1].tool_calls[0].id == steps[2].call_id


def test_flat_form_reads_as_text(tmp_path: Path) -> None:
    trajectory = read_row(tmp_path, flat_row())
    assert (trajectory.format, trajectory.repo, trajectory.id) == ("openhands-2024", "owner/project", "owner/project#7")
    assert shape(trajectory) == [
        ("User", "Fix the bug."),
        ("Assistant", "Look.\n<execute_bash>\nls\n</execute_bash>"),
        ("User", "OBSERVATION:\na.py\n[Command -1 finished with exit code 0]"),
        ("Assistant", "Done."),
    ]
    history = flat_row()["history"]
    paired = [
        [history[0], {"observation": "null", "content": ""}],
        [history[1], history[2]],
        [history[3], {"observation": "null", "content": ""}],
    ]
    assert shape(read_row(tmp_path, flat_row(paired))) == shape(trajectory)


def test_rebench_row(tmp_path: Path) -> None:
    trajectory = read_row(tmp_path, rebench_row())
    assert (trajectory.format, trajectory.repo, trajectory.id, trajectory.resolved) == ("swe-rebench", "owner/project", "t1", True)
    assert trajectory.tools == (TOOL,)
    assert [step.index for step in trajectory.steps] == [0, 1, 2, 3, 4, 5]
