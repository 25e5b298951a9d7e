"""Host memory that the CUDA driver itself allocates, through ``libcuda``: in pages of 2 MiB, or as one pinned allocation of any size.

Memory that was allocated elsewhere and then registered is mapped to the GPU in small pages, whatever its own pages are. Physical memory of
the driver's virtual memory management comes in units of 2 MiB, which a GPU can translate with one entry each.
"""

from __future__ import annotations

import contextlib
import ctypes
from functools import cache
from typing import Any

import torch
from torch import Tensor

PAGE = 2**21
"""Bytes that physical host memory is allocated in."""

_PINNED, _READ_WRITE = 1, 3
_DEVICE, _HOST, _HOST_NUMA = 1, 2, 3
_NUMA_NODE, _NUMA_SUPPORTED, _HOST_SUPPORTED = 134, 141, 145
_PORTABLE_AND_MAPPED = 3


class Location(ctypes.Structure):
    """``CUmemLocation``."""

    _fields_ = (("kind", ctypes.c_int), ("number", ctypes.c_int))


class AllocationFlags(ctypes.Structure):
    """The last member of ``CUmemAllocationProp``; all zero here."""

    _fields_ = (("compression", ctypes.c_ubyte), ("rdma", ctypes.c_ubyte), ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 4))


class AllocationProperties(ctypes.Structure):
    """``CUmemAllocationProp``, 32 bytes from CUDA 10.2 to 13."""

    _fields_ = (
        ("kind", ctypes.c_int),
        ("handles", ctypes.c_int),
        ("location", Location),
        ("security", ctypes.c_void_p),
        ("flags", AllocationFlags),
    )


class AccessDescription(ctypes.Structure):
    """``CUmemAccessDesc``, 12 bytes."""

    _fields_ = (("location", Location), ("access", ctypes.c_int))


@cache
def library() -> Any:
    """The driver's library.

    Raises:
        OSError: There is none.
    """
    return ctypes.CDLL("libcuda.so.1")


def call(name: str, *arguments: Any) -> None:
    """Call a function of the driver.

    Raises:
        RuntimeError: What it returned, in the driver's words.
    """
    driver = library()
    code = getattr(driver, name)(*arguments)
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise RuntimeError(f"{name}: {(text.value or b'unknown error').decode()} (CUDA error {code})")


def host_locations(device: int) -> list[Location]:
    """Where the driver allocates host memory of its own, the NUMA node next to the device first; nothing where it does not."""
    found = []
    try:
        torch.cuda.synchronize(device)  # makes the context that memory is mapped in
        if _attribute(_NUMA_SUPPORTED, device) > 0:
            found.append(Location(_HOST_NUMA, max(0, _attribute(_NUMA_NODE, device))))
        if _attribute(_HOST_SUPPORTED, device) > 0:
            found.append(Location(_HOST, 0))
    except (OSError, RuntimeError, AttributeError):  # no library, an old driver, an older one
        pass
    return found


def _attribute(number: int, device: int) -> int:
    value, ordinal = ctypes.c_int(0), ctypes.c_int(0)
    call("cuDeviceGet", ctypes.byref(ordinal), ctypes.c_int(device))
    try:
        call("cuDeviceGetAttribute", ctypes.byref(value), ctypes.c_int(number), ordinal)
    except RuntimeError:  # a driver that does not know the attribute
        return 0
    return value.value


class DriverBlock:
    """Physical host memory of the driver, mapped for one device and for the host.

    Args:
        size: Bytes, rounded up to whole pages.
        device: Ordinal of the device that reads it.

    Attributes:
        memory: uint8. It must not be touched after :meth:`close`.

    Raises:
        RuntimeError: The driver refuses.
    """

    def __init__(self, size: int, device: int) -> None:
        errors = []
        for location in host_locations(device):
            try:
                self.memory, self._undo = self._map(size, device, location)
            except RuntimeError as error:
                errors.append(str(error))
            else:
                return
        raise RuntimeError("; ".join(dict.fromkeys(errors)) or "the driver has no virtual memory management for host memory")

    @staticmethod
    def _map(size: int, device: int, location: Location) -> tuple[Tensor, contextlib.ExitStack]:
        properties = AllocationProperties(kind=_PINNED, location=location)
        unit, address, handle = ctypes.c_size_t(0), ctypes.c_ulonglong(0), ctypes.c_ulonglong(0)
        recommended, none = ctypes.c_int(1), ctypes.c_ulonglong(0)
        call("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(properties), recommended)
        page = max(unit.value, PAGE)
        length = ctypes.c_size_t(-(-size // page) * page)
        with contextlib.ExitStack() as undo:
            call("cuMemAddressReserve", ctypes.byref(address), length, ctypes.c_size_t(page), none, none)
            undo.callback(call, "cuMemAddressFree", address, length)
            call("cuMemCreate", ctypes.byref(handle), length, ctypes.byref(properties), none)
            try:
                call("cuMemMap", address, length, ctypes.c_size_t(0), handle, none)
            finally:
                call("cuMemRelease", handle)  # what is mapped stays until it is unmapped
            undo.callback(call, "cuMemUnmap", address, length)
            users = (AccessDescription * 2)(*(AccessDescription(place, _READ_WRITE) for place in (Location(_DEVICE, device), location)))
            call("cuMemSetAccess", address, length, users, ctypes.c_size_t(2))
            return _bytes_at(address.value, length.value), undo.pop_all()

    def close(self) -> None:
        """Give the memory back. Closing twice does no harm."""
        self._undo.close()


class SingleBlock:
    """One pinned allocation of the driver, of exactly the size asked for (torch's allocator rounds up to a power of two).

    Raises:
        RuntimeError: The driver refuses.
    """

    def __init__(self, size: int) -> None:
        address = ctypes.c_void_p()
        call("cuMemHostAlloc", ctypes.byref(address), ctypes.c_size_t(size), ctypes.c_uint(_PORTABLE_AND_MAPPED))
        self._undo = contextlib.ExitStack()
        self._undo.callback(call, "cuMemFreeHost", address)
        self.memory = _bytes_at(address.value or 0, size)

    def close(self) -> None:
        """Give the memory back. Closing twice does no harm."""
        self._undo.close()


def _bytes_at(address: int, size: int) -> Tensor:
    return torch.frombuffer((ctypes.c_ubyte * size).from_address(address), dtype=torch.uint8)


def mapped_view(tensor: Tensor, device: torch.device) -> Tensor:
    """Mapped memory as a tensor of the device, at the same address; it is not asked what kind of memory that is, and does not keep it."""
    view = torch.empty(0, dtype=tensor.dtype, device=device)
    storage = torch._C._construct_storage_from_data_pointer(tensor.data_ptr(), view.device, tensor.nbytes)
    view.set_(storage, 0, tensor.shape, tensor.stride())
    return view
