"""Rows that the host gathers for a step: the device lists where they lie, waits, and takes them from one contiguous buffer.

Random rows of host memory cross the link far below its rate, contiguous ones at it (``docs/runtime.md``). A mailbox is how device and host
hand over, in memory that both see. One lane of a step owns it and uses it once a layer, always on one stream or on streams that wait for
each other, so that its list and its buffer are free again when the next layer asks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from torch import Tensor

from fathom_eval.kernels.handover import reference
from fathom_eval.kernels.rows import GroupRows
from fathom_eval.kernels.segments import ADDRESS_UNIT, SegmentTable

__all__ = [
    "DONE",
    "FAILED",
    "FLAGS",
    "LINE",
    "PATIENCE",
    "REQUEST",
    "TOTAL",
    "Mailbox",
    "await_rows",
    "list_rows",
    "row_units",
    "take_rows",
]

TOTAL, REQUEST, DONE, FAILED = range(4)
"""Lines of the flags: rows listed, the last ticket the device asked with, the last one the host answered (below zero: nobody answers), and
the last one whose answer the device went on without."""

FLAGS, LINE = 4, 8
"""Lines of the flags, and their length: what one side writes shares no cache line with what the other writes."""

PATIENCE = 2**21
"""Looks at the answer before the device gives up: seconds, since one look takes about a microsecond over a link."""


@dataclass(frozen=True)
class Mailbox:
    """What one lane hands over, as tensors that the kernels' device reads and writes.

    Attributes:
        wanted: int64 ``[R·H·C]`` in host memory, numbers of the rows, those of all groups behind each other. A row's number is its address
            over its bytes, less one (:func:`row_units`), so that the host needs no table of segments.
        flags: int64 ``[FLAGS, LINE]`` in host memory; the first entry of each line counts.
        rows: ``[R·H·C, P, W]`` in host memory, the rows in the order of ``wanted``.
        ticket: int64 ``[1]`` on the device, how often it has asked. Only kernels count, so that a replayed graph needs nothing of the host.
        given_up: int32 ``[1]`` on the device, 1 once it has waited in vain; from then on it waits no more.
    """

    wanted: Tensor
    flags: Tensor
    rows: Tensor
    ticket: Tensor
    given_up: Tensor


def row_units(table: SegmentTable) -> int:
    """Address units of a row, all its parts.

    Raises:
        ValueError: Rows do not lie at multiples of their bytes.
    """
    example = table.example
    size = example.shape[-2] * example.shape[-1] * example.element_size()
    if size % ADDRESS_UNIT or any(segment.data_ptr() % size for row in table.segments for segment in row):
        raise ValueError(f"rows of {size} bytes do not lie at multiples of their size")
    return size // ADDRESS_UNIT


def list_rows(table: SegmentTable, union: GroupRows, mailbox: Mailbox) -> None:
    """Write where the rows of every group's list lie, and how many there are.

    Args:
        table: Segments ``[H, 64·B, P, W]`` of rows.
        union: Lists from :func:`fathom_eval.kernels.rows.union_rows`.
    """
    units = row_units(table)
    if union.rows.is_cuda:
        from fathom_eval.kernels.handover import triton as kernel

        kernel.list_rows(table, union, mailbox, units)
        return
    wanted = reference.list_rows(table.addresses, union.rows, union.counts, table.example.shape[1], units)
    mailbox.wanted[: len(wanted)] = wanted
    mailbox.flags[TOTAL, 0] = len(wanted)


def await_rows(mailbox: Mailbox) -> None:
    """Ask the host for the listed rows and wait for them, not longer than :data:`PATIENCE`, and not at all once that was in vain."""
    if mailbox.ticket.is_cuda:
        from fathom_eval.kernels.handover import triton as kernel

        kernel.await_rows(mailbox)
        return
    ticket = int(mailbox.ticket) + 1
    mailbox.ticket.fill_(ticket)
    mailbox.flags[REQUEST, 0] = ticket
    looks = PATIENCE if int(mailbox.given_up) else 0
    while 0 <= int(mailbox.flags[DONE, 0]) < ticket and looks < PATIENCE:
        looks += 1
        time.sleep(0)
    if int(mailbox.flags[DONE, 0]) < ticket:
        mailbox.given_up.fill_(1)
        mailbox.flags[FAILED, 0] = ticket


def take_rows(mailbox: Mailbox, union: GroupRows, out: Tensor) -> None:
    """Copy the gathered rows to where :func:`fathom_eval.kernels.rows.fetch_rows` would have put them.

    Args:
        out: ``[P, R, H, C, W]``, contiguous.
    """
    if out.is_cuda:
        from fathom_eval.kernels.handover import triton as kernel

        kernel.take_rows(mailbox, union, out)
        return
    counts = union.counts.flatten().tolist()
    for pair, part in enumerate(mailbox.rows[: sum(counts)].split(counts)):
        row, head = divmod(pair, union.counts.shape[1])
        out[:, row, head, : len(part)] = part.transpose(0, 1)
