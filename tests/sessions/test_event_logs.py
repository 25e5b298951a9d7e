"""What readers of event logs must survive, each with a small hand-made input: calls, results, errors and condensations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fathom_eval.errors import UserError
from fathom_eval.sessions.steps import Assistant, System, ToolResult, User
from tests.sessions.rows import (
    chat_call,
    message,
    read_all,
    read_row,
    rebench_row,
    shape,
    v0_call,
    v0_head,
    v0_result,
    v0_row,
    v1_call,
    v1_head,
    v1_result,
    v1_row,
    write_jsonl,
)


def test_v0_sets_consecutive_user_messages_apart(tmp_path: Path) -> None:
    call = v0_call(3)
    more = {"id": 2, "source": "user", "action": "message", "args": {"content": "And hurry."}}
    steps = read_row(tmp_path, v0_row([*v0_head(), more, call, v0_result(4, call)])).steps
    assert [step.content for step in steps if isinstance(step, User)] == ["Fix the bug.", "\n\nAnd hurry."]


def test_rejected_call_is_a_user_message(tmp_path: Path) -> None:
    error = {"id": 4, "source": "agent", "observation": "error", "content": "Bad parameter.", "extras": {"error_id": ""}}
    first, second = v0_call(2, "a"), v0_call(5, "b")
    steps = read_row(tmp_path, v0_row([*v0_head(), first, v0_result(3, first), error, second, v0_result(6, second)])).steps
    assert steps[4] == User("Bad parameter.\n[Error occurred in processing last action]", 4)


def test_error_of_a_known_call_is_its_result(tmp_path: Path) -> None:
    call = v0_call(2)
    error = {
        "id": 3,
        "source": "agent",
        "observation": "error",
        "content": "No.",
        "extras": {},
        "tool_call_metadata": call["tool_call_metadata"],
    }
    assert shape(read_row(tmp_path, v0_row([*v0_head(), call, error])))[-1] == (
        "ToolResult",
        "No.\n[Error occurred in processing last action]",
    )


def test_only_responses_with_content_are_targets(tmp_path: Path) -> None:
    call = v0_call(5)
    silent = [
        {"id": 2, "source": "user", "action": "recall", "args": {"query": "Fix"}},
        {"id": 3, "source": "environment", "observation": "recall", "content": "Added workspace context", "extras": {}},
        {"id": 4, "source": "environment", "observation": "agent_state_changed", "content": "", "extras": {"agent_state": "running"}},
    ]
    rest = [
        v0_result(6, call),
        {"id": 7, "source": "environment", "observation": "null", "content": "", "extras": {}},
        {"id": 8, "source": "agent", "observation": "error", "content": "Bad.", "extras": {}},
    ]
    trajectory = read_row(tmp_path, v0_row([*v0_head(), *silent, call, *rest]))
    assert [type(step) for step in trajectory.steps] == [System, User, Assistant, ToolResult, User]
    assert trajectory.targets == (2,)
    condensation = {
        "kind": "Condensation",
        "source": "environment",
        "id": "k",
        "forgotten_event_ids": [],
        "summary": "S",
        "summary_offset": 0,
    }
    v1 = read_row(tmp_path, v1_row([*v1_head(), v1_call("a1"), v1_result("o1"), condensation, v1_call("a2", "b"), v1_result("o2", "b")]))
    assert v1.targets == (2, 4)
    assert all(step.content != "S" for step in v1.steps)


@pytest.mark.parametrize(
    ("exit_code", "ending"), [(0, "\n[Command finished with exit code 0]"), (-1, ""), (130, "\n[Command finished with exit code 130]")]
)
def test_command_output_as_the_model_saw_it(tmp_path: Path, exit_code: int, ending: str) -> None:
    seen = (
        f"[Below is the output]\na.py\n[The command completed]\n[Current working directory: /w]\n[Python interpreter: /bin/python]{ending}"
    )
    metadata = {
        "prefix": "[Below is the output]\n",
        "suffix": "\n[The command completed]",
        "working_dir": "/w",
        "py_interpreter_path": "/bin/python",
    }
    call = v0_call(2)
    assert read_row(tmp_path, v0_row([*v0_head(), call, v0_result(3, call, "a.py", exit_code, **metadata)])).steps[-1].content == seen
    result = v1_result("o1", **{**metadata, "exit_code": exit_code})
    assert read_row(tmp_path, v1_row([*v1_head(), v1_call("a1"), result])).steps[-1].content == seen


def test_command_output_without_folder_and_interpreter(tmp_path: Path) -> None:
    call = v0_call(2)
    content = read_row(tmp_path, v0_row([*v0_head(), call, v0_result(3, call, working_dir="", py_interpreter_path=None)])).steps[-1].content
    assert content == "a.py\n[Command finished with exit code 0]"


def test_long_output_is_cut_as_recorded(tmp_path: Path) -> None:
    call = v0_call(2)
    history = [*v0_head(), call, v0_result(3, call, "x" * 500 + "y" * 500, -1)]
    assert read_row(tmp_path, v0_row(history, limit=100)).steps[-1].content == (
        "x" * 50 + "\n[... Observation truncated due to length ...]\n" + "y" * 50
    )
    assert read_row(tmp_path, v0_row(history, limit=None)).steps[-1].content == "x" * 500 + "y" * 500
    notice = "<response clipped><NOTE>Due to the max output limit, only part of the full response has been shown to you.</NOTE>"
    shown = read_row(tmp_path, v1_row([*v1_head(), v1_call("a1"), v1_result("o1", output="x" * 40_000, exit_code=-1)])).steps[-1].content
    assert len(shown) == 30_000
    assert shown.count(notice) == 1
    assert set(shown.replace(notice, "")) == {"x"}


def test_duplicates_do_not_count(tmp_path: Path) -> None:
    call = v0_call(2)
    edit = v0_result(3, call, "The file was edited.")
    edit["observation"] = "edit"
    edit["extras"] = {"path": "/a.py", "old_content": "OLD", "new_content": "NEW", "diff": "DIFF", "_diff_cache": "CACHE"}
    trajectory = read_row(tmp_path, v0_row([*v0_head(), call, edit, dict(edit)]))
    # The response is recorded with the action and with its result, and the result stands twice in the file.
    assert [type(step) for step in trajectory.steps] == [System, User, Assistant, ToolResult]
    text = json.dumps([step.content for step in trajectory.steps])
    assert not any(word in text for word in ("OLD", "NEW", "DIFF", "CACHE"))
    observation = v1_result("o1")
    observation["observation"] = {
        "kind": "StrReplaceEditorObservation",
        "command": "str_replace",
        "output": "The file was edited.",
        "old_content": "OLD",
        "new_content": "NEW",
    }
    assert shape(read_row(tmp_path, v1_row([*v1_head(), v1_call("a1"), observation])))[-1] == ("ToolResult", "The file was edited.")


def test_one_response_with_two_calls_is_one_step(tmp_path: Path) -> None:
    first, second = v0_call(2, "a", response="r"), v0_call(3, "b", response="r")
    both = [call["tool_call_metadata"]["model_response"]["choices"][0]["message"]["tool_calls"][0] for call in (first, second)]
    for call in (first, second):
        call["tool_call_metadata"]["model_response"]["choices"][0]["message"]["tool_calls"] = both
    v0 = read_row(tmp_path, v0_row([*v0_head(), first, second, v0_result(4, first, "A"), v0_result(5, second, "B")]))
    events = [v1_call("a1", "a", response="r"), v1_call("a2", "b", "", response="r"), v1_result("o1", "a", "A"), v1_result("o2", "b", "B")]
    v1 = read_row(tmp_path, v1_row([*v1_head(), *events]))
    for trajectory in (v0, v1):
        [step] = [step for step in trajectory.steps if isinstance(step, Assistant)]
        results = [step for step in trajectory.steps if isinstance(step, ToolResult)]
        assert [call.id for call in step.tool_calls] == [result.call_id for result in results]
        assert step.content == "Look."


def test_event_caches_are_not_read(tmp_path: Path) -> None:
    conversation = tmp_path / "run-1"
    for folder in ("events", "event_cache"):
        (conversation / folder).mkdir(parents=True)
    call = v0_call(2)
    history = [*v0_head(), call, v0_result(3, call)]
    for event in history:
        (conversation / "events" / f"{event['id']}.json").write_text(json.dumps(event))
    (conversation / "event_cache" / "0-25.json").write_text(json.dumps(history))
    [trajectory], _ = read_all(tmp_path)
    assert trajectory.id == "run-1"
    assert len(trajectory.steps) == 4


def test_rows_that_ended_in_an_error(tmp_path: Path) -> None:
    recall = [
        {"id": 2, "source": "user", "action": "recall", "args": {}},
        {"id": 3, "source": "environment", "observation": "recall", "content": "", "extras": {}},
    ]
    rows = [
        v0_row([*v0_head(), *recall], error="AuthenticationError: \x1b[31mbad key"),
        v0_row(error="RuntimeError: Agent reached maximum iteration", instance_id="owner__project-2"),
    ]
    [trajectory], report = read_all(write_jsonl(tmp_path / "rows.jsonl", rows))
    assert trajectory.id == "owner__project-2"
    assert any("maximum iteration" in note for note in trajectory.notes)
    assert report.reasons == {"trajectories without a response": 1}
    assert report.skipped[0].startswith("rows.jsonl, line 1: no response of the model")
    assert "AuthenticationError" in report.skipped[0]
    assert "\x1b" not in report.skipped[0]


def condensed_events() -> list[dict[str, object]]:
    """A log of four calls; after the third the first two are forgotten, all but the head and the last."""
    turns = [
        event
        for number in range(1, 4)
        for event in (v1_call(f"a{number}", f"t{number}", f"Thought {number}."), v1_result(f"o{number}", f"t{number}"))
    ]
    condensation = {
        "kind": "Condensation",
        "source": "environment",
        "id": "k",
        "forgotten_event_ids": ["a1", "o1", "a2", "o2"],
        "summary": "Two calls were made.",
        "summary_offset": 2,
    }
    return [*v1_head(), *turns, condensation, v1_call("a4", "t4", "Thought 4."), v1_result("o4", "t4")]


def test_condensation_full_and_condensed(tmp_path: Path) -> None:
    full = read_row(tmp_path, v1_row(condensed_events()), condensation="full")
    thoughts = [step.content for step in full.steps if isinstance(step, Assistant)]
    assert thoughts == ["Thought 1.", "Thought 2.", "Thought 3.", "Thought 4."]
    assert full.notes == ("1 × condensations not applied: all steps are shown",)
    condensed = read_row(tmp_path, v1_row(condensed_events()), condensation="condensed")
    assert [content for _, content in shape(condensed)] == [
        "You are an agent.",
        "Fix the bug.",
        "Two calls were made.",
        "Thought 3.",
        "a.py\n[Command finished with exit code 0]",
        "Thought 4.",
        "a.py\n[Command finished with exit code 0]",
    ]
    # Thought 3 was written before the condensation, so its context was another one.
    assert condensed.targets == (5,)
    assert full.content_hash != condensed.content_hash
    assert "applied" in condensed.notes[0]
    with pytest.raises(UserError, match="did you mean 'condensed'"):
        read_row(tmp_path, v1_row(), condensation="condense")


def test_condensation_after_the_last_response_changes_nothing(tmp_path: Path) -> None:
    late = [event for event in condensed_events() if event["id"] not in ("a4", "o4")]
    assert shape(read_row(tmp_path, v1_row(late), condensation="condensed")) == shape(read_row(tmp_path, v1_row(late)))


def test_v0_condensation(tmp_path: Path) -> None:
    first, second = v0_call(2, "a", "First."), v0_call(5, "b", "Second.")
    condensation = {
        "id": 4,
        "source": "agent",
        "action": "condensation",
        "args": {"forgotten_events_start_id": 2, "forgotten_events_end_id": 3, "summary": "One call.", "summary_offset": 2},
    }
    row = v0_row([*v0_head(), first, v0_result(3, first), condensation, second, v0_result(6, second)])
    contents = [content for _, content in shape(read_row(tmp_path, row, condensation="condensed"))]
    assert contents[2:4] == ["\n\nOne call.", "Second."]
    assert "First." in [content for _, content in shape(read_row(tmp_path, row))]


def test_missing_event_ids_and_orphan_observations(tmp_path: Path) -> None:
    call, lost = v0_call(4, "a"), v0_call(7, "lost")
    trajectory = read_row(tmp_path, v0_row([*v0_head(), call, v0_result(6, call), v0_result(9, lost, "from nowhere")]))
    assert [content for _, content in shape(trajectory)][-1] == "a.py\n[Command finished with exit code 0]"
    assert "1 × results without a call left out" in trajectory.notes
    v1 = read_row(tmp_path, v1_row([*v1_head(), v1_call("a1"), v1_result("o1"), v1_result("o2", "lost")]))
    assert len(v1.steps) == 4
    assert "1 × results without a call left out" in v1.notes


def test_call_that_was_never_answered_in_the_middle(tmp_path: Path) -> None:
    lost, call = v0_call(2, "lost", "Lost."), v0_call(3, "a", "Kept.")
    trajectory = read_row(tmp_path, v0_row([*v0_head(), lost, call, v0_result(4, call)]))
    assert [step.content for step in trajectory.steps if isinstance(step, Assistant)] == ["Kept."]
    # A list of messages is what the model saw: nothing of it is left out.
    messages = [message("user", "T"), message("assistant", "Lost.", tool_calls=[chat_call("l")]), message("assistant", "Kept.")]
    assert len(read_row(tmp_path, rebench_row(messages)).steps) == 3


def test_v1_results_of_every_generation(tmp_path: Path) -> None:
    def shown(event: dict[str, object]) -> str:
        return (
            read_row(
                tmp_path, v1_row([*v1_head(), v1_call("a1"), {"source": "environment", "id": "o", "tool_call_id": "toolu_01", **event}])
            )
            .steps[-1]
            .content
        )

    new = {
        "kind": "TerminalObservation",
        "content": [{"type": "text", "text": "out"}],
        "is_error": True,
        "metadata": {"exit_code": 1, "working_dir": "/w"},
    }
    assert shown({"kind": "ObservationEvent", "observation": new}) == (
        "[An error occurred during execution.]\n\nout\n[Current working directory: /w]\n[Command finished with exit code 1]"
    )
    failed = {"kind": "StrReplaceEditorObservation", "output": "", "error": "No replacement."}
    assert shown({"kind": "ObservationEvent", "observation": failed}) == "No replacement."
    assert shown({"kind": "AgentErrorEvent", "error": "no such tool"}) == "no such tool"
    assert shown({"kind": "UserRejectObservation", "rejection_reason": "no"}) == "Action rejected: no"
