"""Recordings that fail without a GPU: the stream, the allocator and the pool are as they were."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch

from fathom_eval import captures
from fathom_eval.captures import give_stream, recording, take_stream

DEVICE, POOL = torch.device("cuda", 1), (0, 7)
SPOILED = "operation failed due to a previous error during capture"


class Stream:
    """A stream of a device."""

    def __init__(self, device: torch.device = DEVICE) -> None:
        self.device = device


class Graph:
    """A graph whose recording ends as it is told to."""

    def __init__(self, calls: list[Any], begins: bool = True, ends: bool = True) -> None:
        self.calls, self.begins, self.ends = calls, begins, ends

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.calls.append(("begin", pool, capture_error_mode))
        if not self.begins:
            raise RuntimeError("another thread is recording")

    def capture_end(self) -> None:
        if not self.ends or not self.begins:
            raise RuntimeError(SPOILED)
        self.calls.append("end")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What is asked of CUDA."""
    made: list[Any] = []

    @contextlib.contextmanager
    def on(stream: Any) -> Any:
        made.append("enter")
        try:
            yield
        finally:
            made.append("leave")

    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: made.append(("stop", *args)), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", lambda *args: made.append(("release", *args)), raising=False)
    return made


def record(graph: Graph, work: Any = lambda: None) -> None:
    stream: Any = Stream()
    with recording(graph, stream, POOL):  # type: ignore[arg-type]
        work()


BEGUN = ["enter", ("begin", POOL, "global")]
GIVEN_UP = [("stop", 1, POOL), ("release", 1, POOL)]


def test_a_recording_that_goes_well_is_ended_once(calls: list[Any]) -> None:
    record(Graph(calls), lambda: calls.append("work"))
    assert calls == [*BEGUN, "work", "end", "leave"]


def test_one_that_fails_leaves_the_stream_the_allocator_and_the_pool(calls: list[Any]) -> None:
    with pytest.raises(RuntimeError, match=SPOILED):
        record(Graph(calls, ends=False))
    assert calls == [*BEGUN, *GIVEN_UP, "leave"]


def test_the_works_own_error_says_more(calls: list[Any]) -> None:
    for graph, then in ((Graph(calls), ["end"]), (Graph(calls, ends=False), GIVEN_UP)):
        calls.clear()
        with pytest.raises(ZeroDivisionError):
            record(graph, lambda: 1 / 0)
        assert calls == [*BEGUN, *then, "leave"]


def test_one_that_cannot_begin_is_an_error_of_its_own(calls: list[Any]) -> None:
    with pytest.raises(RuntimeError, match="another thread is recording"):
        record(Graph(calls, begins=False))
    assert calls == [*BEGUN, *GIVEN_UP, "leave"]


def test_an_allocator_that_left_by_itself_keeps_its_pool(calls: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It is its graph's to give back."""

    def refuse(*_: Any) -> None:
        raise RuntimeError("not currently recording to mempool_id")

    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", refuse)
    with pytest.raises(RuntimeError, match=SPOILED):
        record(Graph(calls, ends=False))
    assert calls == [*BEGUN, "leave"]


def test_streams_that_were_given_back_are_taken_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(captures, "_FREE", [])
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    first, second = take_stream(DEVICE, ()), take_stream(DEVICE, ())
    assert first is not second
    for stream in (first, second, first):
        give_stream(stream)
    assert take_stream(torch.device("cuda", 0), ()) not in (first, second)
    assert take_stream(DEVICE, {first}) is second
    assert take_stream(DEVICE, ()) not in (first, second)
