"""Where the segments of a growing store lie: what a kernel needs to read memory that was never moved.

A store grows by whole segments, and a captured CUDA graph must not notice. Kernels therefore find a segment through a small table of
addresses on the device; appending a segment writes one entry. A segment may lie in HBM or in pinned host memory: a pinned tensor's
address is valid on the device (unified virtual addressing), so one kernel reads both.
"""

from __future__ import annotations

import torch
from torch import Tensor

SEGMENT_BLOCKS = 512
"""Blocks of 64 tokens in a segment (32k tokens): one plane of one channel of a segment is a run of 4 KB."""

ADDRESS_UNIT = 16
"""Bytes that an address in a table counts, so that a kernel knows its alignment."""


class SegmentTable:
    """The segments of R rows, all of one shape and dtype.

    Args:
        rows: R, sequences that decode together. Rows may share segments.
        capacity: Segments a row can hold.
        device: Where the kernels run.

    Attributes:
        addresses: int64 ``[R, capacity]`` in units of 16 bytes, 0 where there is no segment yet.
        segments: The tensors of every row; the table keeps them alive.
    """

    def __init__(self, rows: int, capacity: int, device: torch.device | str) -> None:
        self.addresses = torch.zeros(rows, capacity, dtype=torch.int64, device=device)
        self.segments: list[list[Tensor]] = [[] for _ in range(rows)]

    @property
    def capacity(self) -> int:
        return self.addresses.shape[1]

    @property
    def example(self) -> Tensor:
        """Any segment: they have one shape and dtype."""
        return next(row[0] for row in self.segments if row)

    def append(self, row: int, segment: Tensor) -> None:
        """Add a contiguous segment to the end of a row.

        Raises:
            ValueError: The row is full, or the segment is not contiguous, not aligned to 16 bytes, unlike the others, or neither on the
                kernels' device nor pinned.
        """
        held = self.segments[row]
        if len(held) == self.capacity:
            raise ValueError(f"row {row} holds {self.capacity} segments already, all that its table has room for")
        if not segment.is_contiguous() or segment.data_ptr() % ADDRESS_UNIT:
            raise ValueError(f"a segment must be contiguous and aligned to {ADDRESS_UNIT} bytes")
        known = next((other[0] for other in self.segments if other), segment)
        if segment.shape != known.shape or segment.dtype != known.dtype:
            raise ValueError(f"segment {segment.dtype} {list(segment.shape)} is unlike the table's {known.dtype} {list(known.shape)}")
        if segment.device.type != self.addresses.device.type and not segment.is_pinned():
            raise ValueError(f"a segment on {segment.device} must be pinned to be read from {self.addresses.device}")
        self.addresses[row, len(held)] = segment.data_ptr() // ADDRESS_UNIT
        held.append(segment)

    @classmethod
    def of(cls, segments: list[Tensor], device: torch.device | str, *, rows: int = 1) -> SegmentTable:
        """A full table whose rows all read the same segments."""
        table = cls(rows, len(segments), device)
        for row in range(rows):
            for segment in segments:
                table.append(row, segment)
        return table
