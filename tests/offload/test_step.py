"""The capture of steps as far as it shows without a GPU: the streams that their graphs are made on."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fathom_eval.offload import step as module
from fathom_eval.offload.step import STREAMS, DecodeStep, launch_together
from tests.offload.made_steps import steps_by


class Graph:
    """What a captured step replays, and on which stream."""

    replayed: list[tuple[Graph, object]] = []  # noqa: RUF012 - emptied by every test

    def replay(self) -> None:
        self.replayed.append((self, Stream.current))


class Stream:
    """One of the few that torch hands out in turn."""

    numbers = itertools.count()
    current: Stream | None = None

    def __init__(self, device: object) -> None:
        self.number, self.device = next(Stream.numbers) % STREAMS, device
        self.waited: list[Stream | None] = []

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.number == self.number

    def __hash__(self) -> int:
        return self.number

    def wait_stream(self, other: Stream | None) -> None:
        self.waited.append(other)


@contextlib.contextmanager
def on(stream: Stream) -> Any:
    before, Stream.current = Stream.current, stream
    yield
    Stream.current = before


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, Any]]:
    """A CUDA of the CPU. Of every capture: the stream of the pass before, that of the graph, and the graph."""
    made: list[tuple[Any, Any, Any]] = []
    passes: list[Any] = []

    @contextlib.contextmanager
    def graph(one: Any, stream: Any = None) -> Any:
        made.append((passes[-1], stream, one))
        yield

    monkeypatch.setattr(Stream, "numbers", itertools.count())
    monkeypatch.setattr(Graph, "replayed", [])
    monkeypatch.setattr(DecodeStep, "_forward", lambda self: passes.append(Stream.current))
    monkeypatch.setattr(module, "current", contextlib.nullcontext)
    default = Stream("cpu")
    for name, value in {"Stream": Stream, "graph": graph, "stream": on, "CUDAGraph": Graph}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current or default)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return made


def captured(step: DecodeStep) -> None:
    """Capture a step of the CPU as if it were one of a GPU."""
    step.weights = SimpleNamespace(device=SimpleNamespace(type="cuda"))  # type: ignore[assignment]
    step.capture()


def test_steps_are_captured_on_streams_of_their_own(graphs: list[tuple[Any, Any, Any]]) -> None:
    """A workspace of cuBLAS goes with the stream of a capture. torch hands out the same streams again, so a taken one is passed over."""
    with steps_by([("gpu", 1, None)] * 5, device="cpu", tokens=130, head_dim=16) as steps:
        for step in steps:
            captured(step)
            for _ in range(STREAMS - 1):  # the next that torch gives is the one just taken
                Stream("cpu")
        assert [before for before, _, _ in graphs] == [stream for _, stream, _ in graphs]
        assert len({stream for _, stream, _ in graphs}) == 5
        assert [step._captured_on for step in steps] == [stream for _, stream, _ in graphs]
        freed = steps[0]._captured_on
        steps[0].release()
        assert steps[0]._captured_on is None
        Stream.numbers = itertools.count(freed.number)  # type: ignore[union-attr]
        captured(steps[0])
        assert graphs[-1][1] == freed


def test_where_there_are_too_many_steps_the_last_ones_still_differ(
    graphs: list[tuple[Any, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "STREAMS", 3)
    monkeypatch.setattr(Stream, "numbers", itertools.cycle(range(3)))
    with steps_by([("gpu", 1, None)] * 6, device="cpu", tokens=130, head_dim=16) as steps:
        for step in steps:
            captured(step)
    found = [stream.number for _, stream, _ in graphs]
    assert sorted(found[:3]) == sorted(found[3:]) == [0, 1, 2]


def test_steps_side_by_side_wait_for_what_came_before_and_are_waited_for(graphs: list[tuple[Any, Any, Any]]) -> None:
    with steps_by([("gpu", 1, None)] * 2, device="cpu", tokens=130, head_dim=16) as steps:
        for step in steps:
            captured(step)
        streams: list[Any] = [Stream("cpu") for _ in steps]
        main: Any = torch.cuda.current_stream()
        main.waited.clear()
        launch_together(steps, streams)
    assert Graph.replayed == [(made, stream) for (_, _, made), stream in zip(graphs, streams, strict=True)]
    assert [stream.waited for stream in streams] == [[main], [main]]
    assert main.waited == streams
