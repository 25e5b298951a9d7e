"""Rows gathered by the CPU: the thread and its mailboxes without a GPU, whose part the torch references play."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.kernels import handover
from fathom_eval.kernels.handover import DONE, FAILED, LINE, REQUEST, TOTAL, await_rows, list_rows, take_rows
from fathom_eval.kernels.rows import GroupRows, fetch_rows
from fathom_eval.kernels.segments import SegmentTable
from fathom_eval.offload import gatherer as module
from fathom_eval.offload.arena import Arena, SegmentShape
from fathom_eval.offload.bench.checks import StepCheck
from fathom_eval.offload.bench.steps import _traffic
from fathom_eval.offload.cache import lanes_of
from fathom_eval.offload.gatherer import Box, RowGatherer, check_gathered
from fathom_eval.offload.step import DecodeStep
from tests.offload.made_steps import run_alike, steps_by

CPU = torch.device("cpu")
SHAPE = SegmentShape(2, 16, 2, torch.float32, ())
TOKENS = 128


@pytest.fixture(scope="module")
def arena() -> Iterator[Arena]:
    with Arena(SHAPE, CPU) as made:
        for segment in made.grow(3):
            segment.tensors["rows"].normal_()
        yield made


def table_of(arena: Arena, rows: int) -> SegmentTable:
    return SegmentTable.of([segment.tensors["rows"] for segment in arena.segments], CPU, rows=rows)


def union_of(lists: list[list[list[int]]]) -> GroupRows:
    """Lists ``[R][H]`` of tokens."""
    capacity = max(len(one) for row in lists for one in row) + 3
    union = GroupRows.allocate(len(lists), len(lists[0]), 1, capacity, 0, 0, 1, CPU)
    union.rows.fill_(10**6)
    for row, heads in enumerate(lists):
        for head, tokens in enumerate(heads):
            union.rows[row, head, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
            union.counts[row, head] = len(tokens)
    return union


def handed_over(gatherer: RowGatherer, table: SegmentTable, union: GroupRows) -> tuple[Box, Tensor]:
    box = gatherer.box(union.rows.numel(), 2, SHAPE.head_dim, SHAPE.dtype)
    out = torch.full((2, *union.rows.shape, SHAPE.head_dim), torch.nan)
    list_rows(table, union, box.mailbox)
    await_rows(box.mailbox)
    take_rows(box.mailbox, union, out)
    return box, out


def asked(box: Box, ticket: int, total: int) -> None:
    box.flags[TOTAL * LINE] = total
    box.flags[REQUEST * LINE] = ticket


def until(holds: object, seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.001)


TOKEN_LISTS = st.lists(st.integers(0, 3 * TOKENS - 1), max_size=40, unique=True).map(sorted)


@settings(max_examples=30, deadline=None)
@given(lists=st.integers(1, 3).flatmap(lambda rows: st.lists(st.lists(TOKEN_LISTS, min_size=2, max_size=2), min_size=rows, max_size=rows)))
def test_gathered_rows_are_the_fetched_ones(arena: Arena, lists: list[list[list[int]]]) -> None:
    """Ragged and empty lists included; places behind a count stay as they were."""
    union, table = union_of(lists), table_of(arena, len(lists))
    expected = torch.full((2, *union.rows.shape, SHAPE.head_dim), torch.nan)
    fetch_rows(table, union, expected)
    with RowGatherer(CPU, 1) as gatherer:
        _, found = handed_over(gatherer, table, union)
        gatherer.check()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


def test_rows_at_the_edges_of_segments(arena: Arena) -> None:
    tokens = [0, TOKENS - 1, TOKENS, 2 * TOKENS - 1, 2 * TOKENS, 3 * TOKENS - 1]
    with RowGatherer(CPU, 2) as gatherer:
        _, found = handed_over(gatherer, table_of(arena, 1), union_of([[tokens, tokens[:1]]]))
    for slot, token in enumerate(tokens):
        stored = arena.segments[token // TOKENS].tensors["rows"][0, token % TOKENS]
        assert torch.equal(found[:, 0, 0, slot], stored)
    assert torch.equal(found[:, 0, 1, 0], arena.segments[0].tensors["rows"][1, 0])


def test_a_box_is_used_again_and_several_take_turns(arena: Arena) -> None:
    table, unions = table_of(arena, 1), [union_of([[[number], [number, number + 1]]]) for number in range(20)]
    with RowGatherer(CPU, 1) as gatherer:
        boxes = [gatherer.box(16, 2, SHAPE.head_dim, SHAPE.dtype) for _ in range(3)]
        for number, union in enumerate(unions):
            for box in boxes:
                out = torch.zeros(2, *union.rows.shape, SHAPE.head_dim)
                list_rows(table, union, box.mailbox)
                await_rows(box.mailbox)
                take_rows(box.mailbox, union, out)
                assert int(box.mailbox.ticket) == box.flags[DONE * LINE] == number + 1
                assert torch.equal(out[:, 0, 1, 1], arena.segments[0].tensors["rows"][1, number + 1])
        gatherer.check()


def test_a_list_without_room_ends_the_thread_and_every_wait(arena: Arena) -> None:
    with RowGatherer(CPU, 1) as gatherer:
        wrong, other = (gatherer.box(8, 2, SHAPE.head_dim, SHAPE.dtype) for _ in range(2))
        asked(wrong, 1, 9)
        until(lambda: wrong.flags[DONE * LINE] < 0 and other.flags[DONE * LINE] < 0)
        late = gatherer.box(8, 2, SHAPE.head_dim, SHAPE.dtype)
        started = time.monotonic()
        for box in (other, late):
            await_rows(box.mailbox)
            assert int(box.mailbox.given_up) == box.flags[FAILED * LINE] == 1
        assert time.monotonic() - started < 0.5
        with pytest.raises(UserError, match="the CPU could not gather rows: a list of 9 rows where 8 have room") as caught:
            gatherer.check()
        assert isinstance(caught.value.__cause__, RuntimeError)


def test_nobody_waits_for_a_gatherer_that_does_not_run(arena: Arena) -> None:
    gatherer = RowGatherer(CPU, 1)
    table, union = table_of(arena, 1), union_of([[[1], [2]]])
    before, _ = handed_over(gatherer, table, union)
    assert before.gave_up
    with pytest.raises(UserError, match="waited in vain"):
        gatherer.check()
    gatherer.drop([before])
    gatherer.check()
    with gatherer:
        box, _ = handed_over(gatherer, table, union)
        gatherer.check()
    await_rows(box.mailbox)
    assert box.gave_up


def test_patience_ends_and_is_not_lost_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the thread lives and does not answer: one long wait, and none after it."""
    monkeypatch.setattr(handover, "PATIENCE", 200)
    box = Box.allocate(4, 2, 16, torch.float32, CPU)
    box.answer(from_now_on=True)
    await_rows(box.mailbox)
    assert (int(box.mailbox.given_up), box.flags[FAILED * LINE]) == (1, 1)
    monkeypatch.setattr(handover, "PATIENCE", 10**9)
    await_rows(box.mailbox)
    assert int(box.mailbox.ticket) == 2


def test_nothing_is_read_by_numbers_of_a_device_that_has_given_up() -> None:
    """It lists anew without waiting: a total can be there before its numbers, and a number that was never written is no address."""
    box = Box.allocate(4, 2, 16, torch.float32, CPU)
    box.answer(from_now_on=True)
    asked(box, 3, 4)
    box.flags[FAILED * LINE] = 2
    box.gather()
    assert box.flags[DONE * LINE] == 3
    assert not box.rows.any()


def test_a_box_that_is_dropped_while_it_is_served_is_waited_for_no_more(monkeypatch: pytest.MonkeyPatch, arena: Arena) -> None:
    serving, dropped = threading.Event(), threading.Event()
    plain = torch.index_select

    def slow(*args: object, **kwargs: object) -> Tensor:
        serving.set()
        assert dropped.wait(5)
        return plain(*args, **kwargs)  # type: ignore[call-overload, no-any-return]

    with RowGatherer(CPU, 1) as gatherer:
        box = gatherer.box(8, 2, SHAPE.head_dim, SHAPE.dtype)
        list_rows(table_of(arena, 1), union_of([[[1], [2]]]), box.mailbox)
        monkeypatch.setattr(torch, "index_select", slow)
        asked(box, 1, 2)
        assert serving.wait(5)
        gatherer.drop([box])
        dropped.set()
        until(lambda: box.answered == 1)
        until(lambda: box.flags[DONE * LINE] < 0)
        gatherer.check()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_thread_ends_on_every_way_out(error: type[BaseException]) -> None:
    gatherer = RowGatherer(CPU, 1)

    def use() -> None:
        with gatherer:
            raise error

    with pytest.raises(error):
        use()
    assert all(thread.name != "row gatherer" for thread in threading.enumerate())


def test_threads_are_those_of_the_gatherer_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    before, seen = torch.get_num_threads(), []
    monkeypatch.setattr(RowGatherer, "_look_around", lambda self: seen.append((self._stopping.wait(5), torch.get_num_threads())))
    with RowGatherer(CPU, before + 2):
        assert torch.get_num_threads() == before
    assert seen == [(True, before + 2)]
    assert torch.get_num_threads() == before


def test_a_quiet_gatherer_sleeps(monkeypatch: pytest.MonkeyPatch, arena: Arena) -> None:
    monkeypatch.setattr(module, "RESTLESS", 3)
    monkeypatch.setattr(module, "PAUSE", 0.02)
    with RowGatherer(CPU, 1) as gatherer:
        gatherer.box(8, 2, SHAPE.head_dim, SHAPE.dtype)
        started = time.process_time()
        time.sleep(0.2)
        assert time.process_time() - started < 0.1
        _, found = handed_over(gatherer, table_of(arena, 1), union_of([[[5], [6]]]))
    assert torch.equal(found[:, 0, 0, 0], arena.segments[0].tensors["rows"][0, 5])


@pytest.mark.parametrize(
    ("rows_by", "changes", "message"),
    [
        ("host", {}, "gpu, cpu, both, not by 'host'"),
        ("both", {"lanes": 1}, "or more lanes"),
        ("cpu", {"head_dim": 96}, "rows of 768 bytes are not gathered"),
    ],
)
def test_what_cannot_be_gathered_is_refused(rows_by: str, changes: dict[str, float], message: str) -> None:
    shape = SegmentShape(2, int(changes.get("head_dim", 16)), 2, torch.float32, ())
    with pytest.raises(UserError, match=message):
        check_gathered(rows_by, shape, int(changes.get("lanes", 2)))
    check_gathered("gpu", shape, 1)


def test_somebody_must_gather() -> None:
    with pytest.raises(UserError, match="at least one thread"):
        RowGatherer(CPU, 0)


@pytest.mark.parametrize(
    ("rows", "count", "last", "sizes"),
    [(1, 4, 1, [3, 2, 2, 1]), (1, 2, 2, [6, 2]), (1, 2, 7, [1, 7]), (2, 4, 1, [7, 1, 7, 1]), (1, 8, 1, [1] * 8)],
)
def test_the_last_lane_can_be_smaller(rows: int, count: int, last: int, sizes: list[int]) -> None:
    lanes = lanes_of(rows, 8, count, last)
    assert [lane.head_count for lane in lanes] == sizes
    assert [lane.heads.start for lane in lanes[:: count // rows]] == [0] * rows
    for one in [(1, 1, 1), (2, 3, 1), (1, 2, 8), (1, 8, 2)]:
        with pytest.raises(UserError, match="the last one of"):
            lanes_of(one[0], 8, *one[1:])


def test_a_host_whose_memory_is_not_in_order_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(UserError, match="this one is aarch64: let the GPU fetch them"), RowGatherer(torch.device("cpu"), 1):
        pass


@pytest.mark.parametrize("text", ["fathom:rerank=2", "sparq:r=D/8:rerank=1.5:attend=union"])
def test_candidates_that_the_cpu_brings_are_reranked_like_those_of_the_gpu(text: str) -> None:
    """Bit for bit, over a block that is sealed and a segment that did not exist before."""
    ways = [("gpu", 1, None), ("gpu", 2, None), ("cpu", 1, None), ("cpu", 2, None), ("both", 2, None)]
    with steps_by(ways, text, device="cpu", tokens=590, head_dim=16) as steps:
        before = len(steps[0].cache.arena.segments)
        run_alike(steps, 70)
        assert len(steps[0].cache.arena.segments) > before
        boxes = [[work.box is not None for work in step._work] for step in steps]
        assert boxes == [[False], [False, False], [True], [True, True], [True, False]]
        # Tickets: one handover a layer and step, not one for keys and one for values.
        assert [int(work.box.mailbox.ticket) for work in steps[-1]._work if work.box is not None] == [70 * steps[-1].layers]


def test_what_the_cpu_brings_for_a_step_that_reranks() -> None:
    """Counted where it arrives: keys and values of all candidates by the CPU, values of the winners alone by the GPU."""
    row = 16 * 4
    with steps_by(
        [("gpu", 2, None), ("both", 2, None), ("cpu", 2, None)], "fathom:rerank=2", device="cpu", tokens=300, head_dim=16
    ) as steps:
        found = []
        for step in steps:
            check = StepCheck(step, "fathom")
            step.observer = check.observe
            step.run()
            found.append(_traffic(step, check))
            candidates = step.union_counts.sum((0, 1)).tolist()
            kept = check.kept_rows.sum(0).tolist()
            assert all(0 < attended < wanted for attended, wanted in zip(kept, candidates, strict=True))
            parts = [
                2 * wanted if step.gathered(lane) else wanted + kept[at]
                for at, (lane, wanted) in enumerate(zip(step.cache.lanes, candidates, strict=True))
            ]
            assert found[-1]["fetched_bytes"] == row * sum(parts)
            assert found[-1]["link_bytes"] == found[-1]["scan_bytes"] + found[-1]["fetched_bytes"]
    assert found[0]["fetched_bytes"] < found[1]["fetched_bytes"] < found[2]["fetched_bytes"]
    others = ("rows_bytes", "union_rows", "candidate_rows", "scan_bytes")
    assert len({tuple(one[name] for name in others) for one in found}) == 1


@pytest.mark.parametrize(
    ("rows_by", "kept", "fetched"),
    [
        # Lanes of two heads and of one; 30 candidates each, 12 and 9 of which are attended to; rows of 64 bytes a part.
        ("gpu", (12, 9), (30 + 12 + 30 + 9) * 64),
        ("both", (12, 9), (30 + 30 + 30 + 9) * 64),
        ("cpu", (12, 9), (30 + 30 + 30 + 30) * 64),
        # Without rerank all candidates are.
        ("gpu", (30, 30), 120 * 64),
        ("both", (30, 30), 120 * 64),
        ("cpu", (30, 30), 120 * 64),
    ],
)
def test_bytes_of_a_step_by_hand(rows_by: str, kept: tuple[int, int], fetched: int) -> None:
    cache = SimpleNamespace(
        arena=SimpleNamespace(shape=SHAPE, index="host"),
        tail=torch.zeros(1),
        blocks=torch.tensor([2]),
        lanes=lanes_of(1, 3, 2, 1),
        layers=[SimpleNamespace(basis=None)],
    )
    step: Any = SimpleNamespace(
        cache=cache,
        weights=SimpleNamespace(bytes_read=1000),
        scan=SimpleNamespace(bits=lambda: torch.full((1, 1, 3), 4.0), channels=lambda: torch.full((1, 1, 3), 8.0)),
        union_counts=torch.tensor([[[10, 20, 30]]]),
        rows_by=rows_by,
    )
    step.gathered = lambda lane: DecodeStep.gathered(step, lane)
    found = _traffic(step, SimpleNamespace(kept_rows=torch.tensor([kept], dtype=torch.float64)))  # type: ignore[arg-type]
    scan = 3 * 128 * 4 // 8
    assert found == {
        "scan_bits": 4,
        "active_channels": 8,
        "scan_bytes": scan,
        "union_rows": sum(kept) / 3,
        "candidate_rows": 20,
        "rows_bytes": 2 * sum(kept) * 64,
        "fetched_bytes": fetched,
        "link_bytes": fetched + scan,
        "weight_bytes": 1000,
    }
