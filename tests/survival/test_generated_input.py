"""Generated input: hypothesis feeds the targets of ``scripts/fuzz.py``, which takes many more inputs and a coverage-guided engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom_eval.errors import UserError
from fathom_eval.sessions.reading import read_trajectories
from fathom_eval.sessions.report import ReadReport
from tests.survival.fuzz_targets import TARGETS, valid_rows
from tests.survival.fuzzing import fuzz_randomly, scratch


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with scratch() as made:
        yield made


@pytest.mark.parametrize("name", [name for name in TARGETS if name != "command_line"])
def test_any_bytes(name: str, folder: Path) -> None:
    @settings(max_examples=150, deadline=2000)
    @given(st.binary(max_size=300))
    def check(data: bytes) -> None:
        TARGETS[name][0](data, folder)

    check()


def test_any_command_line(folder: Path) -> None:
    assert fuzz_randomly("command_line", 30, 1, folder)["inputs"] == 30


def test_a_finding_can_be_repeated_from_its_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(data: bytes, at: Path) -> None:
        if len(data) > 100:
            raise ZeroDivisionError

    monkeypatch.setitem(TARGETS, "calls", (fails, 1))
    with pytest.raises(AssertionError, match=r"calls fails on bytes\.fromhex\('[0-9a-f]{202,}'\): ZeroDivisionError"):
        fuzz_randomly("calls", 100, 0, folder)


def test_a_link_in_a_folder_of_trajectories_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.jsonl"
    secret.write_text(valid_rows()[0] + "\n")
    rows = tmp_path / "rows"
    rows.mkdir()
    (rows / "linked.jsonl").symlink_to(secret)
    with pytest.raises(UserError):
        next(read_trajectories(str(rows), ReadReport()))


@pytest.mark.parametrize("name", ["../../outside", "/etc/passwd", "a/../../b", "..\\..\\c"])
def test_an_id_is_no_path(name: str, tmp_path: Path) -> None:
    import json

    row = json.loads(valid_rows()[0])
    row["trajectory_id"] = row["instance_id"] = row["repo"] = name
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    before = sorted(tmp_path.parent.rglob("*"))
    [trajectory] = read_trajectories(str(tmp_path / "rows.jsonl"), ReadReport())
    assert trajectory.id == name
    assert sorted(tmp_path.parent.rglob("*")) == before
