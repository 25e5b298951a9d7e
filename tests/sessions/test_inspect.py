"""``fathom-eval sessions inspect``."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.commands import sessions
from fathom_eval.errors import UserError
from tests.sessions.rows import chat_messages, rebench_row, v0_row, v1_call, v1_head, v1_result, v1_row, write_jsonl
from tests.sessions.templates import WITH_TOOLS, tokenizer_with


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))


def run(*arguments: object) -> int:
    parser = argparse.ArgumentParser()
    sessions.add_arguments(parser)
    return sessions.run(parser.parse_args([str(argument) for argument in arguments]))


def tokenizer_folder(folder: Path, template: str | None = None) -> Path:
    tokenizer_with(template).save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def some_rows(folder: Path) -> Path:
    rows: list[Any] = [rebench_row(chat_messages(6, words=number), trajectory_id=f"t{number}") for number in range(2, 8)]
    return write_jsonl(
        folder / "rows.jsonl", [*rows, {"x": 1}, v0_row(), v1_row([*v1_head(), v1_call("a1", thought="Begin."), v1_result("o1")])]
    )


def test_words_without_a_tokenizer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("inspect", some_rows(tmp_path)) == 0
    out, _ = capsys.readouterr()
    assert "8 trajectories in 9 records; format swe-rebench (6), openhands-v0 (1), openhands-v1 (1)" in out
    assert "counted: words of the plain rendering; give --model or --tokenizer" in out
    header, owner, project = out.splitlines()[3:6]
    assert header.split() == ["repository", "trajectories", "steps", "targets", "words", "longest", "sessions"]
    assert owner.split()[:4] == ["owner/project", "7", "88", "37"]
    assert project.split()[-1] == "–"
    assert "skipped (1):\n  rows.jsonl, line 7: no known format (keys: x)" in out
    assert "tokens" not in out.splitlines()[3]


@pytest.mark.parametrize(
    ("template", "how"), [(None, "plain rendering: the tokenizer has no chat template"), (WITH_TOOLS, "the tokenizer's chat template")]
)
def test_tokens_and_sessions(tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str | None, how: str) -> None:
    arguments = (
        "inspect",
        some_rows(tmp_path),
        "--tokenizer",
        tokenizer_folder(tmp_path, template),
        "--session-tokens",
        "2000:3000",
        "--json",
    )
    assert run(*arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["unit"] == "tokens"
    assert document["counted"].endswith(how)
    owner = document["repositories"]["owner/project"]
    assert owner["tokens"] > 2_000
    assert document["sessions"] == owner["sessions"] > 0
    assert document["repositories"]["project"]["sessions"] == 0
    assert document["problems"] == {"rows of no known format": 1}
    assert any("a session needs" in line for line in document["unused"])


def test_counts_of_one_and_of_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = rebench_row(chat_messages(40, words=10))
    path = write_jsonl(tmp_path / "one.jsonl", [row])
    arguments = ("inspect", path, "--tokenizer", tokenizer_folder(tmp_path))
    assert run(*arguments, "--session-tokens", "2000:3000") == 0
    out = capsys.readouterr().out
    assert "1 trajectory in 1 record; format swe-rebench (1)" in out
    assert "sessions of 2000:3000 tokens: 1 of 1 repository\n" in out
    assert run(*arguments) == 0
    assert "sessions of 80000:100000 tokens: none\n" in capsys.readouterr().out


def test_repository_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trajectory is of repository 'owner/projct'; did you mean 'owner/project'"):
        run("inspect", some_rows(tmp_path), "--tokenizer", tokenizer_folder(tmp_path), "--repo", "owner/projct")


def test_repository_that_is_not_there_is_refused_where_words_are_counted_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = some_rows(tmp_path)
    with pytest.raises(UserError, match="no trajectory is of repository 'owner/projct'; did you mean 'owner/project'"):
        run("inspect", path, "--repo", "owner/projct")
    assert capsys.readouterr().out == ""
    assert run("inspect", path, "--repo", "owner/project") == 0


def test_a_tokenizer_that_is_not_at_hand(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError, match=r"the tokenizer of 'smollm2' is not in the cache: .*; without --model words are counted"):
        run("inspect", some_rows(tmp_path), "--model", "smollm2")
    assert capsys.readouterr().out == ""


def test_template_insisted_on(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="sessions cannot use the chat template: the tokenizer has no chat template"):
        run("inspect", some_rows(tmp_path), "--tokenizer", tokenizer_folder(tmp_path), "--chat-template")


def test_hostile_text_reaches_no_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;owned\x07\x1b[2J\u202e\r\nx"
    rows = [
        rebench_row(trajectory_id=evil, repo=evil),
        rebench_row(trajectory=None, instance_id=evil, **{evil: 1}),
        {evil: evil},
        v1_row([{"kind": evil}, *v1_row()["events"]], conversation_id=evil, repo=evil * 2),
        v0_row(error=evil, instance_id=evil),
        v0_row(history=[], error=evil),
        v0_row([{"action": "x", "args": {}, "source": "user"}], error=evil),
    ]
    write_jsonl(tmp_path / f"rows{evil[:4]}.jsonl", rows)
    for more in ((), ("--tokenizer", tokenizer_folder(tmp_path)), ("--json",)):
        assert run("inspect", tmp_path / f"rows{evil[:4]}.jsonl", *more) == 0
        out, err = capsys.readouterr()
        assert all(character.isprintable() or character == "\n" for character in out + err)
    run("inspect", tmp_path / f"rows{evil[:4]}.jsonl")
    out, _ = capsys.readouterr()
    assert r"\x1b]0;owned\x07\x1b[2J\u202e\r\nx" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--session-tokens", "9:1"), "the form is LOW:HIGH"),
        (("--format", "openhand-v0"), "did you mean 'openhands-v0'"),
        (("--condensation", "none"), "unknown condensation 'none'"),
        (("--tokenizer", "/no/such/folder"), "there is no tokenizer '/no/such/folder'.*; without --tokenizer words are counted"),
        (("--model", "nope"), "there is no tokenizer 'nope'"),
    ],
)
def test_wrong_options(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    path = some_rows(tmp_path)
    with pytest.raises(UserError, match=message):
        run("inspect", path, *arguments)
