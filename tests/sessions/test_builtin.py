"""The built-in trajectories: what they hold, that they are labelled, and that recording them again gives the same."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest

from fathom_eval.session_data import SourceSettings, choose_bounds, prepare_sessions
from fathom_eval.sessions import builtin
from fathom_eval.sessions.rendering import PlainRenderer
from fathom_eval.sessions.steps import Assistant, System, ToolResult
from tests.sessions.rows import read_all

if TYPE_CHECKING:
    from fathom_eval.models import LoadedModel

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "record_builtin_trajectories.py"


def rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in gzip.decompress(builtin.PATH.read_bytes()).decode().splitlines()]


def test_what_is_there() -> None:
    assert builtin.PATH.stat().st_size < 200_000
    trajectories, report = read_all(builtin.PATH)
    assert report.lines() == []
    assert set(report.formats) == {"swe-rebench"}
    assert len(trajectories) == 12
    assert len({trajectory.repo for trajectory in trajectories}) == 3
    assert len({trajectory.content_hash for trajectory in trajectories}) == 12
    for trajectory in trajectories:
        assert trajectory.id.startswith("scripted-")
        assert isinstance(trajectory.steps[0], System)
        assert trajectory.ending == "finish"
        assert len(trajectory.targets) >= 10
        known = {tool["function"]["name"] for tool in trajectory.tools}
        calls = [call for step in trajectory.steps if isinstance(step, Assistant) for call in step.tool_calls]
        assert {call.name for call in calls} <= known
        assert all(call.parsed() is not None for call in calls)
        results = [step for step in trajectory.steps if isinstance(step, ToolResult)]
        assert len(results) == len(calls) - 1, "every call but finish has its result"
        assert PlainRenderer().render(trajectory).refused == 0


def test_rows_are_labelled_and_name_no_machine() -> None:
    for row in rows():
        assert row["agent"] == "scripted; no model wrote these steps"
        assert {"trajectory_id", "instance_id", "repo", "trajectory", "tools", "model_patch", "exit_status", "resolved"} <= row.keys()
        text = json.dumps(row)
        assert not re.search(r"/tmp/trajectory|/home/|/root|/Users/|site-packages|\.venv|/workspace/\w+/workspace", text)
        # Test runs take what they take; the recording says the same number for all.
        assert set(re.findall(r"Ran \d+ tests? in ([\d.]+)s", text)) <= {"0.005"}


def recorder() -> ModuleType:
    if not SCRIPT.is_file() or not shutil.which("git") or not shutil.which("bash"):
        pytest.skip("needs the repository's scripts, git and bash")
    spec = importlib.util.spec_from_file_location("record_builtin_trajectories", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[spec.name]
    return module


def test_recording_again_gives_the_same() -> None:
    module = recorder()
    names = [(name, task) for name in module.names() for task in module.read_tasks(name)]
    assert [f"scripted-{name}-{task.name}" for name, task in names] == [row["trajectory_id"] for row in rows()]
    name, task = next((name, task) for name, task in names if task.name == "month-order")
    first, second = module.record(name, task), module.record(name, task)
    assert first == second
    # Another Python or git may print a traceback or a diff in another way; what the agent says and does is the script's.
    kept = next(row for row in rows() if row["trajectory_id"] == first["trajectory_id"])
    said = [message for message in kept["trajectory"] if message["role"] != "tool"]
    assert [message for message in first["trajectory"] if message["role"] != "tool"] == said
    assert kept["model_patch"] == first["model_patch"]


def test_commands_run_in_the_sandbox(tmp_path: Path) -> None:
    module = recorder()
    sandbox = module.Sandbox("demo", {"a.txt": "one\ntwo\n"}, tmp_path)
    assert sandbox.bash("pwd; cat a.txt; exit 3") == ("/workspace/demo\none\ntwo\n", 3)
    output, code = sandbox.bash("echo kept > /tmp/b.txt && ls /tmp && git log --oneline | wc -l")
    assert (output.split(), code) == (["b.txt", "1"], 0)
    assert (tmp_path / "tmp" / "b.txt").exists(), "the agent's /tmp lies in the sandbox"
    edit = {"command": "str_replace", "path": "/workspace/demo/a.txt", "old_str": "two", "new_str": "three"}
    assert "2\tthree" in module.perform(sandbox, module.Action("", "str_replace_editor", edit))
    assert sandbox.bash("git diff --stat")[0].strip().endswith("1 insertion(+), 1 deletion(-)")
    with pytest.raises(SystemExit, match="occurs 0 times"):
        module.perform(sandbox, module.Action("", "str_replace_editor", edit))


@pytest.mark.model
def test_sessions_for_the_bundled_model(smollm2: LoadedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path))
    low, high, _ = choose_bounds(None, smollm2.facts, 256, is_builtin=True)
    assert (low, high) == (6000, 7500)
    data = prepare_sessions(smollm2, SourceSettings(None, "auto", sessions=99, low=low, high=high))
    assert len(data.sessions) >= 8
    assert len({session.repo for session in data.sessions}) == 3
    assert {session.recorded_tool_call for session in data.sessions} == {"valid"}
    assert {source["trajectory"][:9] for session in data.sessions for source in session.sources} == {"scripted-"}
