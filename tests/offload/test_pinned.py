"""Pinned memory of every kind, with the driver's part played where there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fathom_eval.errors import UserError
from fathom_eval.kernels.segments import SegmentTable
from fathom_eval.offload import arena as arenas
from fathom_eval.offload import pinned
from fathom_eval.offload.arena import Arena, SegmentShape
from fathom_eval.offload.cache import default_lanes, lanes_of

PAGE = 2**21
SHAPE = SegmentShape(2, 64, 512, torch.float16, ("planes",))


class FakeBlock:
    """Host memory that is not pinned."""

    def __init__(self, size: int) -> None:
        self.memory, self.open = torch.zeros(size, dtype=torch.uint8), True

    def close(self) -> None:
        self.open = False


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An arena on a device that is not there, with views that are the tensors themselves."""
    state: dict[str, Any] = {"asked": [], "blocks": [], "offered": True, "most": 99}

    def block(size: int) -> FakeBlock:
        state["asked"].append(size)
        if len(state["blocks"]) >= state["most"]:
            raise RuntimeError("the system has no memory for it")
        state["blocks"].append(FakeBlock(size))
        return state["blocks"][-1]

    monkeypatch.setattr(arenas, "HugeBlock", block)
    monkeypatch.setattr(arenas, "huge_pages_offered", lambda: state["offered"])
    monkeypatch.setattr(arenas, "device_view", lambda tensor, device: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(arenas, "release_pinned", lambda: None)
    real = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory=False, **options: real(*size, **options))
    return state


@pytest.mark.parametrize("asked", ["huge", "auto"])
def test_segments_lie_apart_in_their_blocks(asked: str, fake: dict[str, Any]) -> None:
    with Arena(SHAPE, torch.device("cuda"), host_pages=asked) as arena:
        assert arena.host_pages == "huge"
        segments = arena.grow(3)
        assert len(fake["blocks"]) == 3
        assert sum(fake["asked"]) == arena.estimate(3)[0]
        for number, segment in enumerate(segments):
            for place, tensor in enumerate(segment.tensors.values()):
                tensor.fill_(10 * number + place)
        for number, segment in enumerate(segments):
            for place, tensor in enumerate(segment.tensors.values()):
                assert (tensor == 10 * number + place).all()
    assert not any(block.open for block in fake["blocks"])
    assert arena.segments == []


def test_auto_turns_to_small_pages_only_before_the_first_block(fake: dict[str, Any]) -> None:
    with Arena(SHAPE, torch.device("cuda")) as arena:
        arena.grow(1)
        fake["most"] = 1
        with pytest.raises(UserError, match="could not be had: the system has no memory for it"):
            arena.grow(1)
        assert len(arena.segments) == 1
    assert not fake["blocks"][0].open
    fake["most"] = 0
    with Arena(SHAPE, torch.device("cuda")) as arena:
        arena.grow(2)
        assert arena.host_pages == "small"
        assert len(arena.segments) == 2
    with Arena(SHAPE, torch.device("cuda"), host_pages="huge") as arena, pytest.raises(UserError, match="could not be had"):
        arena.grow(1)


def test_pages_that_were_asked_for_and_cannot_be_had(fake: dict[str, Any]) -> None:
    fake["offered"] = False
    assert Arena(SHAPE, torch.device("cuda")).host_pages == "small"
    with pytest.raises(UserError, match="no huge pages"):
        Arena(SHAPE, torch.device("cuda"), host_pages="huge")
    with pytest.raises(UserError, match="host pages are auto"):
        Arena(SHAPE, torch.device("cpu"), host_pages="large")


def test_small_segments_are_not_rounded_up_to_huge_pages(fake: dict[str, Any]) -> None:
    shape = SegmentShape(2, 16, 2, torch.float16, ("planes",))
    assert Arena(shape, torch.device("cuda")).host_pages == "small"
    assert Arena(shape, torch.device("cuda"), host_pages="huge").host_pages == "huge"


def test_tables_refuse_memory_that_the_device_cannot_read() -> None:
    with pytest.raises(ValueError, match="must be pinned"):
        SegmentTable(1, 2, "meta").append(0, torch.zeros(4, 4))


def test_carved_tensors_fill_their_block() -> None:
    parts = {"one": ((3,), torch.int8), "two": ((2, 5), torch.float16)}
    assert pinned.carved_bytes(parts) == PAGE
    tensors = pinned.carve(torch.zeros(PAGE, dtype=torch.uint8), parts)
    assert tensors["two"].data_ptr() - tensors["one"].data_ptr() == 256
    assert tensors["two"].shape == (2, 5)


@pytest.mark.parametrize(("count", "sizes"), [(1, [8]), (2, [4, 4]), (3, [3, 3, 2]), (4, [2] * 4), (5, [2, 2, 1, 2, 1])])
def test_lanes_share_all_heads(count: int, sizes: list[int]) -> None:
    lanes = lanes_of(1, 8, count)
    assert sorted((lane.head_count for lane in lanes), reverse=True) == sorted(sizes, reverse=True)
    assert lanes[-1].head_count == min(sizes)
    assert [lane.heads.start for lane in lanes[1:]] == [lane.heads.stop for lane in lanes[:-1]]
    assert (lanes[0].heads.start, lanes[-1].heads.stop) == (0, 8)


@pytest.mark.parametrize(
    ("rows", "heads", "context", "index", "count", "last"),
    [
        (1, 8, 2**20, "host", 3, 1),
        (1, 8, 2**19, "host", 3, 1),
        (1, 8, 2**18, "host", 2, None),
        (1, 8, 2**20, "hbm", 2, None),
        (2, 8, 2**20, "host", 4, None),
        (4, 3, 2**20, "host", 4, None),
        (4, 8, 2**17, "host", 4, None),
        (4, 8, 2**17, "hbm", 2, None),
        (4, 8, 2**20, "hbm", 2, None),
        (2, 8, 2**17, "host", 2, None),
        (1, 3, 2**20, "host", 3, 1),
        (1, 2, 2**20, "host", 2, None),
        (3, 8, 2**20, "host", 1, None),
        (1, 3, 2**17, "host", 1, None),
    ],
)
def test_more_lanes_where_the_scan_is_long(rows: int, heads: int, context: int, index: str, count: int, last: int | None) -> None:
    assert default_lanes(rows, heads, context, index) == (count, last)
    assert len(lanes_of(rows, heads, count, last)) == count
