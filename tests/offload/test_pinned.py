"""Pinned memory of every kind, with the driver's library played where there is none."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from fathom_eval.errors import UserError
from fathom_eval.kernels.segments import SegmentTable
from fathom_eval.offload import arena as arenas
from fathom_eval.offload import driver, pinned
from fathom_eval.offload.arena import Arena, SegmentShape
from fathom_eval.offload.cache import lanes_of

PAGE = 2**21


class Library:
    """Functions of the driver that note their calls; one of them may fail."""

    def __init__(self, failing: str = "", code: int = 2, location: int = 0) -> None:
        self.calls: list[str] = []
        self.failing, self.code, self.location = failing, code, location
        self._memory = ctypes.create_string_buffer(4 * PAGE)

    def __getattr__(self, name: str) -> Any:
        def function(*arguments: Any) -> int:
            self.calls.append(name)
            if name == "cuMemCreate" and self.location and arguments[2]._obj.location.kind == self.location:
                return 801
            if name == self.failing:
                return self.code
            if name in ("cuMemAddressReserve", "cuMemHostAlloc"):
                start = ctypes.addressof(self._memory)
                arguments[0]._obj.value = start + -start % PAGE
            if name == "cuMemGetAllocationGranularity":
                arguments[0]._obj.value = 65536
            if name == "cuDeviceGetAttribute":
                arguments[0]._obj.value = {134: -1, 141: 1, 145: 1}[arguments[1].value]
            return 0

        return function

    def cuGetErrorString(self, code: int, text: Any) -> int:  # noqa: N802 - the driver's own name
        text._obj.value = {2: b"out of memory", 801: b"operation not supported"}[code]
        return 0


def play(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> Library:
    made = Library(*arguments)
    monkeypatch.setattr(driver, "library", lambda: made)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    return made


def test_structures_have_the_layout_of_the_header() -> None:
    """Sizes and offsets as a C compiler gives them for cuda.h of CUDA 13."""
    properties, access = driver.AllocationProperties, driver.AccessDescription
    assert (ctypes.sizeof(properties), ctypes.sizeof(access), ctypes.sizeof(driver.Location)) == (32, 12, 8)
    assert (properties.location.offset, properties.security.offset, properties.flags.offset, access.access.offset) == (8, 16, 24, 8)


def test_a_block_is_mapped_and_given_back_once(monkeypatch: pytest.MonkeyPatch) -> None:
    played = play(monkeypatch)
    block = driver.DriverBlock(PAGE + 1, 0)
    assert block.memory.nbytes == 2 * PAGE
    assert block.memory.data_ptr() % PAGE == 0
    block.memory.fill_(7)
    made = ["cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemRelease", "cuMemSetAccess"]
    assert played.calls[-5:] == made
    block.close()
    block.close()
    assert played.calls[-7:] == [*made, "cuMemUnmap", "cuMemAddressFree"]


@pytest.mark.parametrize(
    ("failing", "undone"),
    [
        ("cuMemAddressReserve", []),
        ("cuMemCreate", ["cuMemAddressFree"]),
        ("cuMemMap", ["cuMemRelease", "cuMemAddressFree"]),
        ("cuMemSetAccess", ["cuMemUnmap", "cuMemAddressFree"]),
    ],
)
def test_what_was_taken_before_a_failure_is_given_back(failing: str, undone: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    played = play(monkeypatch, failing)
    with pytest.raises(RuntimeError, match=f"{failing}: out of memory"):
        driver.DriverBlock(PAGE, 0)
    after = played.calls[len(played.calls) - played.calls[::-1].index(failing) :]
    assert after == undone


def test_the_host_as_a_whole_stands_in_for_its_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    played = play(monkeypatch, "", 0, 3)
    driver.DriverBlock(PAGE, 0).close()
    assert played.calls.count("cuMemCreate") == 2
    assert played.calls.count("cuMemAddressFree") == 2


def test_one_allocation_for_all_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    played = play(monkeypatch)
    block = driver.SingleBlock(3 * PAGE)
    assert block.memory.nbytes == 3 * PAGE
    block.close()
    block.close()
    assert played.calls == ["cuMemHostAlloc", "cuMemFreeHost"]


class FakeBlock:
    """Host memory that is not pinned."""

    def __init__(self, size: int) -> None:
        self.memory, self.open = torch.zeros(size, dtype=torch.uint8), True

    def close(self) -> None:
        self.open = False


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """An arena on a device that is not there, with views that are the tensors themselves."""
    state: dict[str, Any] = {"asked": [], "blocks": [], "refused": (), "most": 99}

    def block(pages: str, size: int, device: torch.device) -> FakeBlock:
        state["asked"].append((pages, size))
        if pages in state["refused"] or len(state["blocks"]) >= state["most"]:
            raise RuntimeError("cuMemCreate: out of memory (CUDA error 2)")
        state["blocks"].append(FakeBlock(size))
        return state["blocks"][-1]

    monkeypatch.setattr(arenas, "host_block", block)
    monkeypatch.setattr(arenas, "offered", lambda pages, device: pages not in state["refused"] or pages == "huge")
    for name in ("device_view", "mapped_view"):
        monkeypatch.setattr(arenas, name, lambda tensor, device: tensor)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    monkeypatch.setattr(arenas, "release_pinned", lambda: None)
    return state


SHAPE = SegmentShape(2, 64, 512, torch.float16, ("planes",))


@pytest.mark.parametrize(("asked", "blocks"), [("driver", 3), ("huge", 3), ("single", 1), ("auto", 3)])
def test_segments_lie_apart_in_their_blocks(asked: str, blocks: int, fake: dict[str, Any]) -> None:
    with Arena(SHAPE, torch.device("cuda"), host_pages=asked) as arena:
        assert arena.host_pages == ("driver" if asked == "auto" else asked)
        segments = arena.grow(3)
        assert len(fake["blocks"]) == blocks
        assert sum(size for _, size in fake["asked"]) == arena.estimate(3)[0]
        for number, segment in enumerate(segments):
            for place, tensor in enumerate(segment.tensors.values()):
                tensor.fill_(10 * number + place)
        for number, segment in enumerate(segments):
            for place, tensor in enumerate(segment.tensors.values()):
                assert (tensor == 10 * number + place).all()
    assert not any(block.open for block in fake["blocks"])
    assert arena.segments == []


def test_auto_moves_on_only_before_the_first_block(fake: dict[str, Any]) -> None:
    fake["refused"] = ("driver",)
    with Arena(SHAPE, torch.device("cuda")) as arena:
        assert arena.grow(1)
        assert arena.host_pages == "huge"
        fake["most"] = 1
        with pytest.raises(UserError, match=r"could not be had: cuMemCreate: out of memory"):
            arena.grow(1)
        assert len(arena.segments) == 1
    assert not fake["blocks"][0].open


def test_pages_that_were_asked_for_and_cannot_be_had(fake: dict[str, Any]) -> None:
    fake["refused"] = ("driver",)
    with pytest.raises(UserError, match="no virtual memory for the host"):
        Arena(SHAPE, torch.device("cuda"), host_pages="driver")
    with pytest.raises(UserError, match="host pages are auto"):
        Arena(SHAPE, torch.device("cpu"), host_pages="large")


def test_tables_take_memory_that_the_arena_vouches_for() -> None:
    table, segment = SegmentTable(1, 2, "meta"), torch.zeros(4, 4)
    with pytest.raises(ValueError, match="must be pinned"):
        table.append(0, segment)
    table.append(0, segment, mapped=True)
    assert table.example is segment


def test_a_view_has_the_address_of_its_memory() -> None:
    memory = torch.arange(12, dtype=torch.int16).view(3, 4)
    view = driver.mapped_view(memory, torch.device("cpu"))
    view[1] = 5
    assert memory[1].tolist() == [5, 5, 5, 5]
    assert view.shape == memory.shape


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
