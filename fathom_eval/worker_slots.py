"""Where workers live: processes of this machine, or actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import math
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from fathom_eval.devices import SEVERAL
from fathom_eval.errors import UserError
from fathom_eval.workers import Measured, ModelRequest, Slot, Work, Worker

_QUIET_RAY = {"logging_level": "ERROR", "log_to_driver": False}


class ProcessSlot:
    """A worker in a process of this machine."""

    def __init__(self, work: Work[Any], device: str, threads: int | None) -> None:
        self._arguments = (work, device, threads)
        self._executor: ProcessPoolExecutor | None = None
        self._processes: set[Any] = set()

    def start(self) -> Future[dict[str, Any]]:
        self.close()
        # Spawned, not forked: a forked copy of a process with threads or a CUDA context cannot use them.
        self._executor = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=_begin)
        others = set(multiprocessing.active_children())
        loaded = self._executor.submit(_load, *self._arguments)
        self._processes = set(multiprocessing.active_children()) - others
        return loaded

    def measure(self, unit: Any) -> Future[Measured]:
        assert self._executor is not None, "start comes first"
        return self._executor.submit(_measure, unit)

    def has_died(self, error: BaseException) -> bool:
        return isinstance(error, BrokenProcessPool)

    def close(self) -> None:
        if self._executor is None:
            return
        # A sample takes minutes: who is at one is not waited for.
        for process in self._processes:
            with contextlib.suppress(ValueError):  # it is closed already
                process.kill()
        self._executor.shutdown(wait=False, cancel_futures=True)
        self._executor, self._processes = None, set()


_WORKER = Worker()
"""Of a worker process."""


def _load(work: Work[Any], device: str | None, threads: int | None) -> dict[str, Any]:
    return _WORKER.load(work, device, threads)


def _measure(unit: Any) -> Measured:
    return _WORKER.measure(unit)


def _begin() -> None:
    """Ctrl-C is for the parent, which then ends this process; and with a parent that was killed, this process ends too."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


class RaySlot:
    """A worker as an actor of a Ray cluster; Ray chooses the machine."""

    def __init__(self, work: Work[Any], *, cpus: float, gpus: int) -> None:
        import ray

        self._ray = ray
        self._cpus, self._gpus = cpus, gpus
        self._work = ray.put(work)
        self._actor: Any = None

    def start(self) -> Future[dict[str, Any]]:
        self.close()
        actor = self._ray.remote(num_cpus=self._cpus, num_gpus=self._gpus, max_restarts=0, max_task_retries=0)(Worker)
        self._actor = actor.remote()
        # Of a node's GPUs an actor sees those that it was given, by numbers from 0.
        device = SEVERAL.join(f"cuda:{number}" for number in range(self._gpus)) or "cpu"
        threads = None if self._gpus else max(1, int(self._cpus))
        future: Future[dict[str, Any]] = self._actor.load.remote(self._work, device, threads).future()
        return future

    def measure(self, unit: Any) -> Future[Measured]:
        future: Future[Measured] = self._actor.measure.remote(unit).future()
        return future

    def has_died(self, error: BaseException) -> bool:
        exceptions = self._ray.exceptions
        return isinstance(error, exceptions.RayError) and not isinstance(error, exceptions.RayTaskError)

    def close(self) -> None:
        if self._actor is not None:
            with contextlib.suppress(Exception):  # a dead actor, or a cluster that is gone
                self._ray.kill(self._actor)
            self._actor = None


def process_slots(work: Work[Any], count: int, device: str) -> list[Slot]:
    """Slots for ``count`` processes. On GPUs each has its own as far as they go; on a CPU they share its cores.

    Args:
        device: Where the run computes: ``cpu``, ``cuda`` or ``cuda:N``; a GPU that is named, or several for one model, all share.
    """
    import torch

    if device == "cuda":
        gpus = torch.cuda.device_count()
        return [ProcessSlot(work, f"cuda:{number % gpus}", None) for number in range(count)]
    threads = max(1, torch.get_num_threads() // count) if device == "cpu" else None
    return [ProcessSlot(work, device, threads) for _ in range(count)]


@contextlib.contextmanager
def ray_slots(work: Work[Any], address: str, count: int | None, device: str) -> Iterator[list[Slot]]:
    """Slots for actors of a Ray cluster, which is left as it was.

    Args:
        address: ``local`` starts a cluster on this machine for the time of the run; else of the head node, or ``auto``.
        count: Actors; None for as many as GPUs suffice for, or one a node where the run computes on CPUs.
        device: ``cpu`` or ``cuda``, or several GPUs joined by ``+``: every actor gets as many.

    Raises:
        UserError: Ray is not installed, the cluster cannot be reached, or it has no GPU where the run computes on one.
    """
    try:
        ray: Any = importlib.import_module("ray")
    except ImportError:
        raise UserError("--ray needs the package 'ray': pip install 'fathom-eval[ray]'") from None
    started = not ray.is_initialized()
    if started:
        _connect(ray, address)
    try:
        resources = ray.cluster_resources()
        on_gpu = device.startswith("cuda")
        gpus = int(resources.get("GPU", 0))
        each = len(device.split(SEVERAL)) if on_gpu else 0
        if gpus < each:
            raise UserError(
                f"a copy of the model takes {each} GPU and the Ray cluster has {gpus or 'none'}: give --device cpu, or another cluster"
            )
        cores = [node["Resources"].get("CPU", 0) for node in ray.nodes() if node["Alive"]]
        cores = [number for number in cores if number] or [1]
        actors = count or (gpus // each if on_gpu else len(cores))
        # Of the smallest node, so that an actor can be placed on any.
        cpus = 1.0 if on_gpu else max(1.0, min(cores) // math.ceil(actors / len(cores)))
        packed = dataclasses.replace(work, model=_anywhere(work.model))  # type: ignore[type-var]
        yield [RaySlot(packed, cpus=cpus, gpus=each) for _ in range(actors)]
    finally:
        if started:
            ray.shutdown()


def _connect(ray: Any, address: str) -> None:
    local: dict[str, Any] = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, **local, **_QUIET_RAY)
    # A wrong address, no head node there, another version of Ray or of Python: no common type of error.
    except Exception as error:
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise UserError(f"the Ray cluster '{address}' cannot be used: {reason}") from None


def _anywhere(model: ModelRequest) -> ModelRequest:
    """The request with the full path of a local model: actors work in other folders."""
    path = Path(model.spec).expanduser()
    return dataclasses.replace(model, spec=str(path.resolve())) if path.exists() else model
