"""Windows of agent sessions that begin alike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from fathom_eval.errors import UserError
from fathom_eval.session_data import SourceSettings
from fathom_eval.session_windows import SessionWindows


def windows(high: int) -> SessionWindows:
    found = SessionWindows(cast(Any, None), SourceSettings("agents.jsonl", "auto", 2, 4, high))
    sessions = [SimpleNamespace(id=str(last), repo="a/b", prompt_ids=[1, 2, 3, 4, last]) for last in (5, 6)]
    found._data[4] = cast(Any, SimpleNamespace(sessions=sessions, high=high, identity={"seed": 0, "session_tokens": [4, high]}))
    return found


def test_windows_that_are_alike_are_refused() -> None:
    with pytest.raises(UserError, match=r"2 windows of 4 tokens are 1 different ones, since sessions of agents.jsonl begin alike"):
        windows(high=5).check(4, 2)
    windows(high=5).check(4, 1)


def test_of_sessions_that_are_much_longer_the_ends_are_taken() -> None:
    found = windows(high=80)
    found.check(4, 2)
    assert [found.token_ids(4, index) for index in range(2)] == [[2, 3, 4, 5], [2, 3, 4, 6]]
    assert found.identity == {"seed": 0, "ends_of_longer": [4]}
    assert windows(high=5).identity == {"seed": 0}
