"""Host memory that a GPU reads directly: allocated in whole segments, estimated before, released on every way out."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.gguf_models import one_line
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.memory import free_bytes, gib, host_bytes
from fathom_eval.offload.pinned import HOST_PAGES, LEAST, HugeBlock, carve, carved_bytes, huge_pages_offered

STORES = ("planes", "nibbles", "landmarks")
"""What a scan can read: bit planes with scales, 4-bit channels with scales, fp16 means of a few tokens."""


ROW_ALIGNMENT = 4096
"""Bytes that a segment's rows start at multiples of, as pinned memory does: a row can then be named by its address."""


@dataclass(frozen=True)
class SegmentShape:
    """The shape of one segment of one layer and row.

    Attributes:
        heads, head_dim: H and D.
        blocks: Blocks of 64 tokens that it holds, a power of two of at least 2.
        dtype: Of the K/V rows.
        stores: Names of :data:`STORES` beside the rows.
        landmark: Tokens a landmark.
        rows: Whether it holds K/V rows at all.
    """

    heads: int
    head_dim: int
    blocks: int
    dtype: torch.dtype
    stores: tuple[str, ...]
    landmark: int = 8
    rows: bool = True

    @property
    def parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor of a segment; heads lead, so that those of some heads are one piece of memory."""
        h, d, b = self.heads, self.head_dim, self.blocks
        shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
        if self.rows:
            # Key and value of a token lie side by side: one run to fetch, on one page.
            shapes["rows"] = ((h, BLOCK * b, 2, d), self.dtype)
        if "planes" in self.stores:
            shapes["planes"] = ((h, d, 4, b), torch.int64)
        if "nibbles" in self.stores:
            shapes["nibbles"] = ((h, d, 8, b), torch.int32)
        if "planes" in self.stores or "nibbles" in self.stores:
            shapes["scales"] = ((h, d, b), torch.float16)
        if "landmarks" in self.stores:
            shapes["landmarks"] = ((h, BLOCK * b // self.landmark, d), torch.float16)
        return shapes


@dataclass(frozen=True)
class Segment:
    """Tensors of one segment by name, and views of them that the kernels' device can write (the same memory)."""

    tensors: dict[str, Tensor]
    views: dict[str, Tensor]


class Arena:
    """Segments in pinned host memory (or in the memory of a CPU device), K/V rows always, the index where it is asked for.

    A context manager: leaving it, also by an error, gives the pinned memory back to the system. Segments must not be used afterwards.

    Args:
        shape: Of the segments.
        device: Where the kernels run.
        index: ``host`` or ``hbm``.
        host_pages: The pages of pinned memory, see :mod:`fathom_eval.offload.pinned`. ``auto`` takes ``huge`` for large segments where they
            can be had, and ``small`` otherwise.

    Attributes:
        host_pages: ``huge`` or ``small``, as it is.
    """

    def __init__(self, shape: SegmentShape, device: torch.device, index: str = "host", host_pages: str = "auto") -> None:
        check_index(index)
        if host_pages not in HOST_PAGES:
            raise UserError(f"host pages are {', '.join(HOST_PAGES)}, not '{host_pages}'")
        self.shape, self.device, self.index = shape, device, index
        self.segments: list[Segment] = []
        self._blocks: list[HugeBlock] = []
        self._demanded = host_pages == "huge"
        self.host_pages = self._pages(host_pages)

    def _pages(self, asked: str) -> str:
        if self.device.type != "cuda" or asked == "small":
            return "small"
        if huge_pages_offered():
            return "huge" if self._demanded or carved_bytes(self._host_parts()) >= LEAST else "small"
        if self._demanded:
            raise UserError("this system gives no huge pages (see /sys/kernel/mm/transparent_hugepage/enabled): give --host-pages small")
        return "small"

    def estimate(self, count: int) -> tuple[int, int]:
        """Bytes of host and of device memory that ``count`` segments take, pinned blocks rounded up as they are allocated."""
        host = device = 0
        for name, (shape, dtype) in self.shape.parts.items():
            size = self._bytes(shape, dtype)
            if self.device.type == "cpu":
                host += size
            elif not self._on_host(name):
                device += size
            elif self.host_pages == "small":
                host += 1 << (size - 1).bit_length()
        if self.host_pages != "small":
            host = carved_bytes(self._host_parts())
        return host * count, device * count

    def check(self, count: int, *, limit: int | None = None) -> None:
        """Raise :class:`UserError` with the figures where ``count`` more segments exceed what is free, or a given limit in host bytes."""
        host, device = self.estimate(count)
        free_host = limit if limit is not None else host_bytes()
        if free_host is not None and host > free_host:
            what = "are allowed" if limit is not None else "are free"
            raise UserError(
                f"{count} segments of {BLOCK * self.shape.blocks} tokens need {gib(host)} of host memory and {gib(free_host)} {what}: "
                "give a shorter context, or fewer sessions"
            )
        if self.device.type == "cuda":
            free = free_bytes(self.device)
            if free is not None and device > free:
                raise UserError(
                    f"an index of {gib(device)} does not fit into the {gib(free)} free on {self.device}: leave it in host memory"
                )

    def grow(self, count: int) -> list[Segment]:
        """``count`` new segments, zeroed where they lie on the device and otherwise unwritten.

        Raises:
            UserError: The system has not enough memory.
        """
        made = []
        try:
            parts = self._host_parts()
            size = carved_bytes(parts)
            for _ in range(count):
                memory = self._memory(size)
                carved = {} if memory is None else carve(memory, parts)
                tensors = {name: carved[name] if name in carved else self._tensor(name, *part) for name, part in self.shape.parts.items()}
                made.append(Segment(tensors, {name: device_view(tensor, self.device) for name, tensor in tensors.items()}))
        except (RuntimeError, MemoryError) as error:
            host, device = self.estimate(count)
            made.clear()
            raise UserError(
                f"{gib(host)} of host and {gib(device)} of device memory for {count} segments could not be had: {one_line(error)}"
            ) from None
        self.segments += made
        return made

    def close(self) -> None:
        """Give all memory back. Closing twice does no harm."""
        self.segments.clear()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            with contextlib.ExitStack() as closing:
                closing.callback(release_pinned)
                for block in self._blocks:
                    closing.callback(block.close)
                self._blocks.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _on_host(self, name: str) -> bool:
        return name == "rows" or self.index == "host"

    @staticmethod
    def _bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
        return math.prod(shape) * dtype.itemsize

    def _host_parts(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        return {name: part for name, part in self.shape.parts.items() if self._on_host(name)}

    def _memory(self, size: int) -> Tensor | None:
        """A new block's bytes, None where tensors come from torch's allocator one by one. ``auto`` turns to these only before any block."""
        if self.host_pages == "small" or not size:
            return None
        try:
            block = HugeBlock(size)
        except RuntimeError:
            if self._blocks or self._demanded:
                raise
            self.host_pages = "small"
            return None
        self._blocks.append(block)
        return block.memory

    def _tensor(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if self.device.type == "cpu":
            size = self._bytes(shape, dtype)
            memory = torch.zeros(size + ROW_ALIGNMENT, dtype=torch.uint8)
            start = -memory.data_ptr() % ROW_ALIGNMENT
            return memory[start : start + size].view(dtype).view(shape)
        if self._on_host(name):
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        return torch.zeros(shape, dtype=dtype, device=self.device)


class _HostBytes:
    """A pinned tensor's bytes as an array that torch takes for device memory: with unified addressing the address is the same."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "data": (tensor.data_ptr(), False),
            "version": 3,
        }
        self.owner = tensor


def check_index(index: str) -> None:
    """Raise :class:`UserError` for a place where no index lies."""
    if index not in ("host", "hbm"):
        raise UserError(f"the index lies in 'host' or 'hbm', not in '{index}'")


def device_view(tensor: Tensor, device: torch.device) -> Tensor:
    """The same memory as a tensor that operations on ``device`` can write."""
    if device.type == "cpu" or tensor.is_cuda:
        return tensor
    return torch.as_tensor(_HostBytes(tensor), device=device).view(tensor.dtype).view(tensor.shape)


def release_pinned() -> None:
    """Give pinned memory that torch holds unused back to the system."""
    for owner, name in ((torch.accelerator, "empty_host_cache"), (torch._C, "_host_emptyCache")):
        release = getattr(owner, name, None)
        if release is not None:
            release()
            return


def total_host_bytes() -> int | None:
    """Physical memory of the machine, None where unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def segments_for(tokens: int, blocks: int) -> int:
    """Segments of ``blocks`` blocks that hold ``tokens``, at least one."""
    return max(1, -(-tokens // (BLOCK * blocks)))


def known_stores(names: Sequence[str]) -> tuple[str, ...]:
    """The stores in a fixed order, each once."""
    return tuple(name for name in STORES if name in names)
