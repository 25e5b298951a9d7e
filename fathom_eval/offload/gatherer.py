"""Rows gathered by the CPU: a thread of the host copies what the lanes of steps ask for, and the GPU takes it in one contiguous piece.

Random rows cross the link far below its rate, because each costs a translation of its address. The host's cores read them from their own
memory meanwhile. One thread looks at the flags of all mailboxes and has torch's threads copy (``index_select``); the interpreter's lock is
held for a few microseconds a list alone. See :mod:`fathom_eval.kernels.handover` for the other side.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from fathom_eval.devices import current
from fathom_eval.errors import UserError
from fathom_eval.gguf_models import one_line
from fathom_eval.kernels.handover import DONE, FAILED, FLAGS, LINE, REQUEST, TOTAL, Mailbox
from fathom_eval.offload.arena import ROW_ALIGNMENT, SegmentShape, device_view

GATHERERS = ("gpu", "cpu", "both")
"""Who brings the rows of a step: the GPU; the CPU; the CPU where a lane's rows come behind the scan of another, and else the GPU."""

NOBODY = -1
"""The answer of a mailbox that nobody looks at: the GPU gives up at once."""

RESTLESS, PAUSE = 200_000, 2e-4
"""Looks without a request after which the thread sleeps between looks, and for how many seconds."""

HOSTS = ("x86_64", "AMD64")
"""Processors whose reads and writes of memory stay in order; elsewhere a flag could be seen before what it announces."""

_REQUEST = REQUEST * LINE
_ADDRESSES = 2**48
_ELEMENT = torch.int16  # torch shares a copy among threads by elements: small ones make small shares


def default_threads() -> int:
    """Threads that gather where nobody says how many: half of the cores at most, and no more than eight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(8, cores // 2))


@dataclass
class Box:
    """The host's side of a mailbox.

    Attributes:
        mailbox: As the kernels see it.
        memory: All of the host's addresses as rows of this mailbox's size.
        wanted, rows: The mailbox's tensors as the host sees them, rows flat.
        flags: The same of its flags, flat.
        answered: The ticket answered last.
        attended: Whether somebody looks at it.
    """

    mailbox: Mailbox
    memory: Tensor
    wanted: Tensor
    rows: Tensor
    flags: memoryview
    answered: int = 0
    attended: bool = False

    @classmethod
    def allocate(cls, capacity: int, parts: int, width: int, dtype: torch.dtype, device: torch.device) -> Box:
        """For lists of at most ``capacity`` rows of ``parts`` times ``width`` numbers."""
        pinned = device.type == "cuda"
        with current(device):  # pinned memory is viewed from the GPU that was current when it was pinned
            wanted = torch.zeros(capacity, dtype=torch.int64, pin_memory=pinned)
            flags = torch.zeros(FLAGS, LINE, dtype=torch.int64, pin_memory=pinned)
            rows = torch.zeros(capacity, parts, width, dtype=dtype, pin_memory=pinned)
            flags[DONE, 0] = NOBODY
            ticket, given_up = (torch.zeros(1, dtype=kind, device=device) for kind in (torch.int64, torch.int32))
            mailbox = Mailbox(device_view(wanted, device), device_view(flags, device), device_view(rows, device), ticket, given_up)
        flat = rows.view(capacity, -1).view(_ELEMENT)
        return cls(mailbox, all_memory(flat.shape[1] * _ELEMENT.itemsize), wanted, flat, flags.view(-1).numpy().data)

    def gather(self) -> None:
        """Copy the rows that the device has asked for, and answer."""
        ticket = self.flags[_REQUEST]
        total = self.flags[TOTAL * LINE]
        if not 0 <= total <= len(self.wanted):
            raise RuntimeError(f"a list of {total} rows where {len(self.wanted)} have room")
        # A device that has given up does not wait before it lists anew: the total may be ahead of the numbers, which are addresses.
        if total and not self.gave_up:
            torch.index_select(self.memory, 0, self.wanted[:total], out=self.rows[:total])
        self.answered = ticket
        self.flags[DONE * LINE] = ticket
        if not self.attended:  # dropped meanwhile: the device must not wait for the next answer
            self.flags[DONE * LINE] = NOBODY

    @property
    def gave_up(self) -> bool:
        """Whether the device waited in vain."""
        return bool(self.flags[FAILED * LINE])

    def answer(self, *, from_now_on: bool) -> None:
        """Say to the device whether somebody looks at the box."""
        self.attended = from_now_on
        self.flags[DONE * LINE] = self.answered if from_now_on else NOBODY


class RowGatherer:
    """Gathers rows for all steps that were given it. A context manager: the thread runs inside and has ended outside, also after an error.

    Steps must not run outside; if one does, its GPU gives up at once and says so.

    Args:
        device: Where the steps run.
        threads: That copy, at least one.

    Raises:
        UserError: No threads.
    """

    def __init__(self, device: torch.device, threads: int | None = None) -> None:
        self.threads = default_threads() if threads is None else threads
        if self.threads < 1:
            raise UserError(f"rows are gathered by at least one thread, not by {self.threads}")
        self._device = device
        self._boxes: tuple[Box, ...] = ()
        self._lock = threading.Lock()
        self._stopping, self._running = threading.Event(), False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def box(self, capacity: int, parts: int, width: int, dtype: torch.dtype) -> Box:
        """A new mailbox that is looked at from now on; arguments as :meth:`Box.allocate`."""
        made = Box.allocate(capacity, parts, width, dtype, self._device)
        with self._lock:
            made.answer(from_now_on=self._running)
            self._boxes += (made,)
        return made

    def drop(self, boxes: list[Box]) -> None:
        """Look at these no longer; their memory is free once the device is done with it, which is waited for."""
        with self._lock:
            for one in boxes:
                one.answer(from_now_on=False)
            self._boxes = tuple(one for one in self._boxes if all(one is not other for other in boxes))
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def check(self) -> None:
        """Raise :class:`UserError` if rows could not be gathered or came too late. Looks at the host's memory alone."""
        if self._error is not None:
            raise UserError(f"the CPU could not gather rows: {one_line(self._error)}") from self._error
        if any(one.gave_up for one in self._boxes):
            raise UserError("the GPU waited in vain for rows that the CPU gathers; the step's output is void: give --rows gpu")

    def __enter__(self) -> Self:
        if platform.machine() not in HOSTS:
            raise UserError(
                f"the CPU gathers rows on {HOSTS[0]} hosts, and this one is {platform.machine()}: let the GPU fetch them (--rows gpu)"
            )
        before = torch.get_num_threads()
        ready = threading.Event()
        self._thread = threading.Thread(target=self._work, args=(ready,), name="row gatherer", daemon=True)
        with self._lock:
            self._running = True
            for one in self._boxes:
                one.answer(from_now_on=True)
        self._stopping.clear()
        self._thread.start()
        ready.wait()
        torch.set_num_threads(before)  # what the new thread asked for holds for that thread alone
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stopping.set()
        assert self._thread is not None
        self._thread.join()
        self._thread = None
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _work(self, ready: threading.Event) -> None:
        try:
            torch.set_num_threads(self.threads)
            torch.get_num_threads()  # takes the number for this thread; later it would be whatever another thread asked for
            ready.set()
            with torch.inference_mode():
                self._look_around()
        except BaseException as error:  # check() tells it in the thread that runs the step
            self._error = error
        finally:
            ready.set()
            with self._lock:
                self._running = False
                for one in self._boxes:
                    one.answer(from_now_on=False)

    def _look_around(self) -> None:
        quiet = 0
        while not self._stopping.is_set():
            quiet += 1
            for one in self._boxes:
                if one.flags[_REQUEST] != one.answered:
                    one.gather()
                    quiet = 0
            # Sleeping for no time still lets other threads have the interpreter.
            time.sleep(0 if quiet < RESTLESS else PAUSE)


def all_memory(row_bytes: int) -> Tensor:
    """All addresses of the process as rows, from the second row on; only rows that are allocated may be read, by number."""

    class Addresses:
        __array_interface__: dict[str, Any] = {  # noqa: RUF012 - the protocol's own form
            "shape": (_ADDRESSES // row_bytes - 1, row_bytes // _ELEMENT.itemsize),
            "typestr": "<i2",
            "data": (row_bytes, False),
            "version": 3,
        }

    return torch.from_numpy(np.asarray(Addresses()))


def check_gathered(rows_by: str, shape: SegmentShape, lanes: int) -> None:
    """Raise :class:`UserError` where a step cannot have its rows brought like that."""
    if rows_by not in GATHERERS:
        raise UserError(f"rows are brought by {', '.join(GATHERERS)}, not by '{rows_by}'")
    if rows_by == "gpu":
        return
    if rows_by == "both" and lanes == 1:
        raise UserError("with one lane no rows come behind another's scan: give --rows cpu, --rows gpu, or more lanes")
    if not gathers(shape):
        raise UserError(f"rows of {row_bytes(shape)} bytes are not gathered by the CPU, which takes powers of two: give --rows gpu")


def row_bytes(shape: SegmentShape) -> int:
    """Bytes of one token's key and value in one KV head."""
    return 2 * shape.head_dim * shape.dtype.itemsize


def gathers(shape: SegmentShape) -> bool:
    """Whether rows lie at multiples of their bytes wherever a segment lies: powers of two up to a page."""
    size = row_bytes(shape)
    return size & (size - 1) == 0 and size <= ROW_ALIGNMENT
