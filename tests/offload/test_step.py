"""The capture of steps as far as it shows without a GPU: the streams that their graphs are made on."""

from __future__ import annotations

import contextlib
import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fathom_eval import captures
from fathom_eval.captures import STREAMS, CaptureError
from fathom_eval.offload import step as module
from fathom_eval.offload.step import DecodeStep, launch_together
from tests.offload.made_steps import steps_by


class Graph:
    """What a captured step replays, and on which stream."""

    replayed: list[tuple[Graph, object]] = []  # noqa: RUF012 - emptied by every test
    captured: list[tuple[Any, Any, Any]] = []  # noqa: RUF012 - emptied by every test
    ended: list[str] = []  # noqa: RUF012 - emptied by every test
    fails = False

    def capture_begin(self, pool: object, capture_error_mode: str) -> None:
        self.captured.append((passes[-1], Stream.current, self))

    def capture_end(self) -> None:
        self.ended.append("graph")
        if self.fails:
            raise RuntimeError("operation failed due to a previous error during capture")

    def replay(self) -> None:
        self.replayed.append((self, Stream.current))


passes: list[Any] = []
"""The streams that steps were computed on."""


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
    try:
        yield
    finally:
        Stream.current = before


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, Any]]:
    """A CUDA of the CPU. Of every capture: the stream of the pass before, that of the graph, and the graph."""
    made: list[tuple[Any, Any, Any]] = []
    passes.clear()
    monkeypatch.setattr(Stream, "numbers", itertools.count())
    monkeypatch.setattr(Graph, "replayed", [])
    monkeypatch.setattr(Graph, "captured", made)
    monkeypatch.setattr(Graph, "ended", [])
    monkeypatch.setattr(DecodeStep, "_forward", lambda self: passes.append(Stream.current))
    monkeypatch.setattr(module, "current", contextlib.nullcontext)
    monkeypatch.setattr(captures, "_FREE", [])
    default = Stream("cpu")
    for name, value in {"Stream": Stream, "stream": on, "CUDAGraph": Graph}.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream.current or default)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: Graph.ended.append("device"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda device, pool, name=name: Graph.ended.append(name), raising=False)
    return made


def captured(step: DecodeStep) -> None:
    """Capture a step of the CPU as if it were one of a GPU."""
    step.weights = SimpleNamespace(device=SimpleNamespace(type="cuda", index=0))  # type: ignore[assignment]
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
        captured(steps[0])
        assert graphs[-1][1] is freed


def test_one_step_after_the_other_takes_one_stream(graphs: list[tuple[Any, Any, Any]]) -> None:
    """A workspace stays with a stream, so that many branches must not go through many."""
    with steps_by([("gpu", 1, None)] * 5, device="cpu", tokens=130, head_dim=16) as steps:
        for step in steps:
            captured(step)
            step.release()
    assert len({id(stream) for _, stream, _ in graphs}) == 1


def test_a_graph_that_may_be_running_is_waited_for(graphs: list[tuple[Any, Any, Any]]) -> None:
    with steps_by([("gpu", 1, None)], device="cpu", tokens=130, head_dim=16) as (step,):
        captured(step)
        for waits in (True, False):
            Graph.ended.clear()
            step.release()
            assert Graph.ended == (["device"] if waits else [])


@pytest.mark.parametrize("ends", [True, False])
def test_a_capture_that_fails_leaves_everything_as_it_was(
    graphs: list[tuple[Any, Any, Any]], monkeypatch: pytest.MonkeyPatch, ends: bool
) -> None:
    def fail_while_recording(step: DecodeStep) -> None:
        step.token_ids.add_(1)
        step.cache.tokens.add_(1)
        if graphs:
            raise RuntimeError("operation not permitted when stream is capturing")
        passes.append(Stream.current)

    monkeypatch.setattr(Graph, "fails", not ends)
    monkeypatch.setattr(DecodeStep, "_forward", fail_while_recording)
    with steps_by([("gpu", 1, None)], device="cpu", tokens=130, head_dim=16) as (step,):
        before = step.token_ids.tolist(), step.cache.tokens.tolist()
        with pytest.raises(CaptureError, match="the step could not be recorded: RuntimeError: operation not permitted") as caught:
            captured(step)
        assert isinstance(caught.value.__context__, RuntimeError)
        assert (step.token_ids.tolist(), step.cache.tokens.tolist()) == before
        assert Stream.current is None
        assert step._graph is None
        assert Graph.ended[1:] == ["graph", *([] if ends else ["_cuda_endAllocateToPool", "_cuda_releasePool"])]
        assert [graphs[0][1]] == captures._FREE


def test_where_there_are_too_many_steps_the_last_ones_still_differ(
    graphs: list[tuple[Any, Any, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "STREAMS", 3)
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
