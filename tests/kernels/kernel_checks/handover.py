"""Checks of rows that the host gathers: the list, the wait and the copy."""

from __future__ import annotations

import threading
import time

import torch

from fathom_eval.kernels import handover
from fathom_eval.kernels.handover import DONE, FAILED, REQUEST, TOTAL
from fathom_eval.kernels.rows import GroupRows
from fathom_eval.kernels.segments import SegmentTable
from fathom_eval.offload.arena import Arena, SegmentShape
from fathom_eval.offload.gatherer import Box, RowGatherer
from kernel_checks.registry import POISON, check, equal, poisoned, random


@check(
    [
        {"counts": [[70, 0, 33]], "head_dim": 16, "dtype": "float32", "segments": 2},
        {"counts": [[9], [127]], "head_dim": 64, "dtype": "float16", "segments": 1},
        {"counts": [[0]], "head_dim": 8, "dtype": "float16", "segments": 3},
    ],
    [
        {"counts": [[1396, 1940]], "head_dim": 128, "dtype": "bfloat16", "segments": 32},
        {"counts": [[0, 1, 8, 1023, 1024, 1025, 1940, 7]] * 4, "head_dim": 128, "dtype": "bfloat16", "segments": 3},
    ],
)
def check_handover(device: str, counts: list[list[int]], head_dim: int, dtype: str, segments: int) -> None:
    from fathom_eval.kernels.handover import triton as kernel
    from fathom_eval.kernels.rows import triton as rows_kernel

    rows, heads, capacity, where = len(counts), len(counts[0]), max(map(max, counts)) + 5, torch.device(device)
    shape = SegmentShape(heads, head_dim, 512 if device == "cuda" else 2, getattr(torch, dtype), ())
    tokens = 64 * shape.blocks
    with Arena(shape, where) as arena, RowGatherer(where, 2) as gatherer:
        pool = arena.grow(segments)
        for number, segment in enumerate(pool):
            segment.views["rows"].copy_(random(heads, tokens, 2, head_dim, device=device, seed=number))
        table = SegmentTable.of([segment.tensors["rows"] for segment in pool], where, rows=rows)
        union = GroupRows.allocate(rows, heads, 1, capacity, 0, 0, 1, where)
        union.rows.fill_(POISON)
        for row, amounts in enumerate(counts):
            for head, amount in enumerate(amounts):
                # The first and the last token of the segments are among them.
                some = torch.randperm(segments * tokens, generator=torch.Generator().manual_seed(head))[:amount]
                edges = torch.tensor([0, tokens - 1, (segments - 1) * tokens, segments * tokens - 1])[:amount]
                some[: len(edges)] = edges
                union.rows[row, head, :amount] = some.sort().values.int()
                union.counts[row, head] = amount
        box = gatherer.box(rows * heads * capacity, 2, head_dim, shape.dtype)
        total, units = sum(map(sum, counts)), handover.row_units(table)
        for ticket in (1, 2):
            box.wanted[total:] = POISON
            kernel.list_rows(table, union, box.mailbox, units)
            kernel.await_rows(box.mailbox)
            found, expected = (poisoned(2, rows, heads, capacity, head_dim, dtype=shape.dtype, device=device) for _ in range(2))
            kernel.take_rows(box.mailbox, union, found)
            rows_kernel.fetch_rows(table, union, expected, 0, False)
            equal(found.isnan(), expected.isnan(), "rows in use")
            equal(found.nan_to_num(), expected.nan_to_num(), "gathered rows")
            cells = handover.reference.list_rows(table.addresses.cpu(), union.rows.cpu(), union.counts.cpu(), tokens, units)
            equal(box.wanted[:total].cpu(), cells, "listed rows")
            assert (box.wanted[total:] == POISON).all()
            lines = box.mailbox.flags[:, 0].tolist()
            assert (lines[TOTAL], lines[REQUEST], lines[DONE], lines[FAILED]) == (total, ticket, ticket, 0)
        gatherer.check()


@check([{"capacity": 3}], [{"capacity": 3}])
def check_waiting(device: str, capacity: int) -> None:
    """An answer that comes late, none, one of a host that has gone, and no second wait."""
    from fathom_eval.kernels.handover import triton as kernel

    box, patience = Box.allocate(capacity, 2, 8, torch.float32, torch.device(device)), handover.PATIENCE

    def state() -> tuple[int, ...]:
        lines = box.mailbox.flags[:, 0].tolist()
        return lines[REQUEST], lines[FAILED], int(box.mailbox.ticket), int(box.mailbox.given_up)

    box.flags[DONE * handover.LINE] = 0
    answer = threading.Thread(target=lambda: (time.sleep(0.05), box.flags.__setitem__(DONE * handover.LINE, 1)))
    answer.start()
    kernel.await_rows(box.mailbox)
    assert state() == (1, 0, 1, 0)
    answer.join()
    handover.PATIENCE = 50
    try:
        kernel.await_rows(box.mailbox)
        assert state() == (2, 2, 2, 1)
        handover.PATIENCE = patience
        started = time.monotonic()
        kernel.await_rows(box.mailbox)
        assert state() == (3, 3, 3, 1)
        assert time.monotonic() - started < 1
        box.mailbox.given_up.zero_()
        box.answer(from_now_on=False)
        kernel.await_rows(box.mailbox)
        assert state() == (4, 4, 4, 1)
        assert time.monotonic() - started < 2
    finally:
        handover.PATIENCE = patience
