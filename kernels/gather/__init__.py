"""Stage the runs of a read plan in another memory: the contiguous copy that the paper gives every method (§3.6)."""

from __future__ import annotations

from torch import Tensor

from fathom_eval.kernels.gather import reference
from fathom_eval.kernels.segments import SegmentTable

__all__ = ["gather_channels"]


def gather_channels(
    source: SegmentTable,
    target: SegmentTable,
    channels: Tensor,
    depths: Tensor,
    blocks: Tensor,
    *,
    unit: int,
    limit: int,
    segment_blocks: int,
) -> None:
    """Copy ``min(depth, limit) · unit`` bytes from the start of every chosen channel, in every segment in use, to the same place.

    The run list has one slot a channel with inactive slots of depth 0, so the launch has a fixed size and nothing waits. Whole runs are
    copied also where the last segment is partly filled. For planes ``unit`` is the bytes of one plane (``8 · segment_blocks``) and
    ``limit`` 4; for scales ``2 · segment_blocks`` and 1; for 4-bit channels ``32 · segment_blocks`` and 1.

    Args:
        source, target: Segments ``[H, D, …]`` of one shape, R rows each. The source may be pinned host memory.
        channels, depths: int32 ``[R, H, N]``.
        blocks: int32 ``[R]``, blocks in use.
        unit: Bytes, a multiple of 16.

    Raises:
        ValueError: ``unit`` is not a multiple of 16.
    """
    if unit % 16:
        raise ValueError(f"a run of {unit} bytes is not a multiple of 16")
    if channels.is_cuda:
        from fathom_eval.kernels.gather import triton as kernel

        kernel.gather_channels(source, target, channels, depths, blocks, unit, limit, segment_blocks)
        return
    for row, count in enumerate(blocks.tolist()):
        for index in range(-(-count // segment_blocks)):
            lengths = depths[row].clamp(max=limit) * unit
            reference.gather_channels(source.segments[row][index], channels[row], lengths, target.segments[row][index])
