"""What the sessions command refuses or leaves out, in one line and before any prefill."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import fathom_eval.agent_sessions as sessions_module
from fathom_eval.cli import main
from fathom_eval.run import RECORDS
from tests.agent_sessions.conftest import Arguments
from tests.sessions.rows import chat_messages, rebench_row, some_rows, write_jsonl


def test_a_lack_of_memory_is_seen_before_the_prefill(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions_module, "prefill", lambda *_: pytest.fail("a prefill was started"))
    monkeypatch.setattr("fathom_eval.memory.free_bytes", lambda device: 1000)
    assert main(arguments()) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: session 0 (owner/project, ")
    assert "are free on cpu: give shorter sessions" in error
    assert not (tmp_path / "run" / RECORDS).exists()


BAD: list[tuple[dict[str, Any], str]] = [
    ({"methods": "fathm"}, "unknown method 'fathm'; did you mean 'fathom'"),
    ({"k": "36"}, "k=36 leaves nothing to select"),
    ({"k": "64,500"}, "k=500 is no selection from sessions of 500 to 700 tokens"),
    ({"sessions": "0"}, "--sessions 0 must be at least 1"),
    ({"max_new_tokens": "0"}, "--max-new-tokens 0 must be at least 1"),
    ({"session_tokens": "9:1"}, "the form is LOW:HIGH"),
    ({"session_tokens": "3000:4000"}, "holds 2,048; give --session-tokens up to 2,024 or --rope-scaling yarn:2"),
    ({"session_tokens": None, "max_new_tokens": 1900}, "too few for a session"),
    ({"session_tokens": "1999:2000", "repo": "owner/project"}, "no repository of rows.jsonl gives a session of 1,999 to 2,000 tokens"),
    ({"trajectories": "/no/such/file.jsonl"}, "there is no file or folder '/no/such/file.jsonl'"),
    ({"trajectories": "no-such/set"}, "--offline forbids"),
    ({"format": "openhand-v0"}, "did you mean 'openhands-v0'"),
    ({"format": "openhands-v0"}, "holds no trajectory of format openhands-v0"),
    ({"condensation": "none"}, "unknown condensation 'none'"),
    ({"repo": "owner/projekt"}, "no trajectory is of repository 'owner/projekt'; did you mean 'owner/project'"),
    ({"baseline": "loki"}, "the baseline 'loki' is not measured"),
    ({"trajectories": None, "trajectories_revision": "main"}, "--trajectories-revision goes with"),
    ({"rope_scaling": "linear:4"}, "unknown rope scaling"),
    ({"runtime": "gpu"}, "--runtime gpu: the index lies in 'host' or in 'hbm'"),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_one_line_and_exit_code_2_before_any_prefill(
    arguments: Arguments,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    message: str,
) -> None:
    monkeypatch.setattr(sessions_module, "prefill", lambda *_: pytest.fail("a prefill was started"))
    assert main(arguments(**changes)) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error:")]
    assert len(lines) == 1
    assert message in lines[0]
    assert not (tmp_path / "run").exists(), "a run that could not start leaves no folder"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b'{"x": 1}\n', "has no known format"),
        (b'{"instance_id": "a__b-1", "trajectory": []}\n', "holds no usable trajectory"),
    ],
)
def test_files_without_trajectories(
    arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    (tmp_path / "file.jsonl").write_bytes(content)
    assert main(arguments(trajectories=tmp_path / "file.jsonl", model="/nowhere")) == 2
    assert message in capsys.readouterr().err


def test_a_broken_line_is_named_and_the_rest_is_used(arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(path.read_text(encoding="utf-8") + '{"broken": \n', encoding="utf-8")
    assert main(arguments(methods="dense", sessions=1, max_new_tokens=2)) == 0
    assert "rows.jsonl, line 7" in capsys.readouterr().out


def late_row(number: int, turns: int) -> dict[str, Any]:
    """A long task before the first step that could be a target."""
    messages = chat_messages(turns)
    messages[1]["content"] = " ".join(f"Fault {number} is seen at line {line}." for line in range(60))
    return rebench_row(messages, trajectory_id=f"late{number}", repo="owner/project")


def test_a_refusal_names_its_cause_after_what_was_skipped(arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_jsonl(tmp_path / "late.jsonl", [late_row(number, 4) for number in range(3)])
    path.write_text(path.read_text(encoding="utf-8") + '{"broken": \n', encoding="utf-8")
    assert main(arguments(trajectories=path)) == 2
    out, err = capsys.readouterr()
    assert "skipped (1):\n  late.jsonl, line 4: broken JSON" in out
    cause = (
        r"text is not lacking \(owner/project has [\d,]+ tokens\), but all its trajectories are longer and without a usable target in the"
    )
    found = re.search(cause + r" first 700 tokens; the earliest comes after ([\d,]+): give longer --session-tokens", err)
    assert found
    enough = int(found[1].replace(",", ""))
    assert enough > 700
    fits = {"methods": "dense", "sessions": 1, "max_new_tokens": 2, "session_tokens": f"{enough}:{enough}"}
    assert main(arguments(trajectories=path, **fits)) == 0, "what the refusal says is enough"

    mixed = write_jsonl(
        tmp_path / "mixed.jsonl", [*(late_row(number, 4) for number in range(2)), rebench_row(chat_messages(1), repo="owner/project")]
    )
    assert main(arguments(trajectories=mixed)) == 2
    assert "but no choice of trajectories ends before a usable target at that length; 2 of 3 are longer" in capsys.readouterr().err


def test_an_unrendered_repository_needs_a_name(arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [dict(row, repo=None, instance_id=None) for row in some_rows()]
    path = write_jsonl(tmp_path / "nameless.jsonl", rows)
    assert main(arguments(trajectories=path)) == 2
    assert "names a repository: name it with --default-repo" in capsys.readouterr().err
    assert main(arguments(trajectories=path, default_repo="x/y", methods="dense", sessions=1, max_new_tokens=2)) == 0


def test_hostile_text_reaches_no_terminal(arguments: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\u202e<script>"
    rows = some_rows(repo=f"owner/{evil}")
    for row in rows:
        row["trajectory_id"] += evil
        row["trajectory"][2]["content"] = evil * 3
    path = write_jsonl(tmp_path / "evil.jsonl", rows)
    assert main(arguments(trajectories=path, sessions=1)) == 0
    out, err = capsys.readouterr()
    assert all(character.isprintable() or character == "\n" for character in out + err)
    page = (tmp_path / "run" / "report" / "report.html").read_text(encoding="utf-8")
    assert not re.search("(owned|owner/).{0,40}<script", page, re.DOTALL)  # the page has a script of its own
    assert "\x1b" not in page
    assert "\u202e" not in page
