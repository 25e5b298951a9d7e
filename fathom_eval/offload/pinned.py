"""Pinned host memory by the pages that it lies in.

``huge`` asks the system for huge pages, filled in by several threads and then registered with the driver: they are pinned sooner. ``small``
takes every tensor from torch's allocator. A GPU reads both alike; ``docs/runtime.md`` says which other kinds were tried.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

HOST_PAGES = ("auto", "huge", "small")

HUGE = 2**21
"""Bytes of a huge page."""

LEAST = 2**24
"""Bytes of a block for which huge pages are worth their rounding."""

_MADV_POPULATE_WRITE = 23
_OFFER = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def huge_pages_offered() -> bool:
    """Whether this system gives huge pages to those who ask."""
    try:
        return hasattr(mmap, "MADV_HUGEPAGE") and "[never]" not in _OFFER.read_text(encoding="ascii")
    except OSError:
        return False


def huge_bytes() -> int:
    """Bytes of this process that lie in huge pages now, 0 where unknown."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("AnonHugePages:"))


class HugeBlock:
    """Host memory in huge pages of the system, registered with the driver.

    Attributes:
        memory: uint8, starting at a page. It must not be touched after :meth:`close`.

    Raises:
        RuntimeError: The system or the driver refuses.
    """

    def __init__(self, size: int) -> None:
        try:
            mapping = mmap.mmap(-1, size + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError as error:
            raise RuntimeError(f"huge pages: {error}") from None
        whole = torch.frombuffer(mapping, dtype=torch.uint8)
        place = -whole.data_ptr() % HUGE
        self.memory = whole[place : place + size]
        populate(self.memory)
        code = int(torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), size, 0))
        if code:
            with contextlib.suppress(RuntimeError):  # the error would come up again at the next launch
                torch.zeros(1, device="cuda")
            raise RuntimeError(f"the driver does not register {size} bytes of host memory: CUDA error {code}")
        self._registered = True

    def close(self) -> None:
        """Take the memory back from the driver; it returns to the system once no tensor is left. Closing twice does no harm."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.memory.data_ptr())
            self._registered = False


def carved_bytes(parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> int:
    """Bytes that :func:`carve` takes, in whole huge pages."""
    return rounded_up(sum(rounded_up(math.prod(shape) * dtype.itemsize, 256) for shape, dtype in parts.values()))


def carve(memory: Tensor, parts: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    """Tensors of the given shapes and dtypes, one after the other in a block's bytes."""
    tensors, start = {}, 0
    for name, (shape, dtype) in parts.items():
        size = math.prod(shape) * dtype.itemsize
        tensors[name] = memory[start : start + size].view(dtype).view(shape)
        start += rounded_up(size, 256)
    return tensors


def rounded_up(size: int, unit: int = HUGE) -> int:
    """The next multiple."""
    return -(-size // unit) * unit


def populate(memory: Tensor) -> None:
    """Let several threads fault all pages of fresh memory in; a kernel that cannot do it leaves that to whoever touches them first.

    Raises:
        RuntimeError: There is not enough memory.
    """
    threads = max(1, min(8, (os.cpu_count() or 1) // 2))
    step = rounded_up(-(-memory.nbytes // threads))
    library = ctypes.CDLL(None, use_errno=True)

    def fault(start: int) -> int:
        length = min(step, memory.nbytes - start)
        address = ctypes.c_void_p(memory.data_ptr() + start)
        failed = library.madvise(address, ctypes.c_size_t(length), ctypes.c_int(_MADV_POPULATE_WRITE))
        return ctypes.get_errno() if failed else 0

    with ThreadPoolExecutor(threads) as pool:
        errors = list(pool.map(fault, range(0, memory.nbytes, step)))
    if any(error not in (0, 22) for error in errors):  # 22, EINVAL: a Linux before 5.14
        raise RuntimeError("the system has no memory for it")
