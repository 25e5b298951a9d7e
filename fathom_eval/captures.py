"""Recording work of a GPU as a CUDA graph, on a stream of its own, so that a recording that fails leaves nothing behind."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from typing import Any

import torch

STREAMS = 32
"""Streams of a device that torch hands out in turn: the next one is the first again."""

_FREE: list[torch.cuda.Stream] = []
"""Streams whose graphs are gone."""


class CaptureError(RuntimeError):
    """Work that can be launched could not be recorded as a CUDA graph."""


@contextlib.contextmanager
def recording(graph: torch.cuda.CUDAGraph, stream: torch.cuda.Stream, pool: Any, mode: str = "global") -> Iterator[None]:
    """Record what is launched meanwhile instead of doing it.

    ``torch.cuda.graph`` does the same where all goes well. Where a recording cannot be ended, it leaves its stream the current one, and
    torch's allocator in the recording.

    Args:
        stream: What is recorded on, the current one meanwhile.
        pool: Of ``torch.cuda.graph_pool_handle``, where the graph's memory comes from. Once this has failed it is not to be used again.
        mode: What is forbidden meanwhile, ``capture_error_mode`` of ``torch.cuda.graph``.

    Raises:
        RuntimeError: Something was launched that cannot be recorded.
    """
    with torch.cuda.stream(stream):
        try:
            graph.capture_begin(pool=pool, capture_error_mode=mode)
            yield
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the work's own error says more
                end_recording(graph, stream.device, pool)
            raise
        end_recording(graph, stream.device, pool)


def end_recording(graph: torch.cuda.CUDAGraph, device: torch.device, pool: Any) -> None:
    """End a recording, and take torch's allocator out of it where that fails.

    Raises:
        RuntimeError: The recording has failed.
    """
    try:
        graph.capture_end()
    except RuntimeError:
        # Releases of torch leave the allocator in a capture that failed: it never empties its cache again, nor frees that memory. The
        # pool is given up only where it was left.
        with contextlib.suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(device.index, pool)
            torch._C._cuda_releasePool(device.index, pool)
        raise


def take_stream(device: torch.device, taken: Collection[torch.cuda.Stream | None]) -> torch.cuda.Stream:
    """A stream that is not taken; where all are, one that at least the last ones were not.

    Streams that were given back come first: cuBLAS keeps a workspace for every stream that it ever ran on.
    """
    for stream in [stream for stream in _FREE if stream.device == device]:
        _FREE.remove(stream)
        if stream not in taken:
            return stream
    for _ in range(STREAMS):
        stream = torch.cuda.Stream(device)
        if stream not in taken:
            return stream
    return torch.cuda.Stream(device)


def give_stream(stream: torch.cuda.Stream) -> None:
    """Give a stream back that no graph was recorded on, or whose graph is gone."""
    if stream not in _FREE:
        _FREE.append(stream)
