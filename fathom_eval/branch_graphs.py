"""Scans recorded as CUDA graphs: what every step launches anew is launched at once.

A small model's step is bound by the host, which launches one kernel in the time that a GPU takes for several. Between two sealings the
plans and the scan of what is sealed launch the same kernels on the same memory in every step, so they are recorded once a layer and
replayed. Nothing else changes: a graph holds the very operations that ran without it.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields
from typing import Any, TypeVar

import torch
from torch import Tensor

from fathom_eval.branch_groups import ScanGroup
from fathom_eval.captures import recording
from fathom_eval.gguf_models import one_line
from fathom_eval.planes import PlaneSpec
from fathom_eval.reads import Reads
from fathom_eval.stores import DeferredReads, ExactSpec, LandmarkSpec

T = TypeVar("T")

Read = tuple[Tensor | None, Reads | DeferredReads]
"""What a group's plan is, and what its scan read by it."""

_STORES = (PlaneSpec, ExactSpec, LandmarkSpec)


def steady(group: ScanGroup) -> bool:
    """Whether a group's plans and scan are known to launch the same operations in every step and never to wait for the device.

    A plug-in's may do anything, and what is extended depends on the step.
    """
    methods = [method.spec.method for method in group.methods]
    ours = all(type(method).__module__.startswith("fathom_eval.methods.") and not method.extended for method in methods)
    return ours and type(group.store) in _STORES


class Recorder:
    """Records work on a GPU. All that it records on one device must be replayed one after the other: it works in the same memory."""

    def __init__(self) -> None:
        self._pools: dict[torch.device, Any] = {}

    def record(self, device: torch.device, work: Callable[[], T]) -> tuple[Callable[[], None], T]:
        """What does the work again, and its result, which holds nothing before that is called for the first time.

        The work must have been done before: kernels that are loaded, or caches that are filled, cannot be recorded.
        """
        if device not in self._pools:
            self._pools[device] = torch.cuda.graph_pool_handle()
        graph, side, main = torch.cuda.CUDAGraph(), _side_stream(device), torch.cuda.current_stream(device)
        side.wait_stream(main)
        try:
            # torch.cuda.graph would wait for the device and empty its cache of memory, once a layer.
            with recording(graph, side, self._pools[device], "thread_local"):
                result = work()
        except BaseException:
            # A pool cannot be begun again once nothing uses it. What was recorded before keeps it.
            del self._pools[device]
            raise
        main.wait_stream(side)
        return graph.replay, result


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings: a library's work space belongs to a stream, and is kept."""
    return torch.cuda.Stream(device)


class _Packed:
    """What a scan read, in one run of bytes that is copied at once.

    Attributes:
        bytes: Of all tensors, one behind the other, those of larger elements first, so that each is aligned.
    """

    def __init__(self, reads: Sequence[Read]) -> None:
        values = [{field.name: getattr(noted, field.name) for field in fields(noted)} for _, noted in reads]  # type: ignore[arg-type]
        found = {id(part): part for (plan, _), parts in zip(reads, values, strict=True) for part in (plan, *parts.values())}
        tensors = sorted((part for part in found.values() if isinstance(part, Tensor)), key=lambda part: -part.element_size())
        place = {id(part): number for number, part in enumerate(tensors)}
        self.bytes = torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in tensors])
        self._sizes = [part.nbytes for part in tensors]
        self._kinds = [(part.dtype, part.shape) for part in tensors]
        self._reads = [
            (place.get(id(plan)), type(noted), parts, {name: place[id(value)] for name, value in parts.items() if id(value) in place})
            for (plan, noted), parts in zip(reads, values, strict=True)
        ]

    def copied(self) -> list[Read]:
        """The reads as they are now, in memory that nothing writes again."""
        pieces = self.bytes.clone().split(self._sizes)
        tensors = [piece.view(dtype).view(shape) for piece, (dtype, shape) in zip(pieces, self._kinds, strict=True)]
        return [
            (None if plan is None else tensors[plan], kind(**{**parts, **{name: tensors[at] for name, at in places.items()}}))
            for plan, kind, parts, places in self._reads
        ]


@dataclass
class _Recording:
    key: Hashable
    query: Tensor
    replay: Callable[[], None]
    packed: _Packed


class ScanGraphs:
    """The recorded scans of every layer.

    Attributes:
        recording: Whether work is being recorded, rather than done.
        failure: Why nothing is recorded any more; None while all is well.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recording = False
        self.failure: str | None = None
        self._recorder = recorder
        self._held: dict[int, _Recording] = {}
        self._done: dict[int, Hashable] = {}

    @property
    def active(self) -> bool:
        """Whether scans are replayed."""
        return self.failure is None and bool(self._held)

    def run(self, layer: int, key: Hashable, query: Tensor, scan: Callable[[Tensor], list[Read]]) -> list[Read] | None:
        """Scan by replaying; None where the caller has to do it, which is so the first time that a layer has this key.

        Args:
            key: Equal keys say that a scan launches the same on the same memory.
            query: ``[R, H, G, D]``, of which the scan is given a copy that stays where it is.
            scan: Scores the sealed tokens, and says what it read in tensors of its own.
        """
        held = self._held.get(layer)
        if held is None or held.key != key:
            if self.failure is not None or self._done.get(layer) != key:
                self._done[layer] = key
                return None
            held = self._record(key, query, scan)
            if held is None:
                return None
            self._held[layer] = held
        held.query.copy_(query)
        held.replay()
        return held.packed.copied()

    def _record(self, key: Hashable, query: Tensor, scan: Callable[[Tensor], list[Read]]) -> _Recording | None:
        kept = query.contiguous().clone()
        self.recording = True
        try:
            _Packed(scan(kept))  # so that nothing is loaded, or found out, for the first time while it is recorded
            replay, packed = self._recorder.record(query.device, lambda: _Packed(scan(kept)))
        except Exception as error:  # whatever stands against it, each step can launch its own
            self.failure = f"{type(error).__name__}: {one_line(error)}"
            warnings.warn(f"scans are launched one by one, which is slower: {self.failure}", RuntimeWarning, stacklevel=2)
            return None
        finally:
            self.recording = False
        return _Recording(key, kept, replay, packed)
