"""Samples spread over several copies of the model: processes of this machine, or actors of a Ray cluster.

Samples are independent, so a worker gets one at a time and gives back its records. Only the caller writes them, into one run directory. A
worker that dies loses nothing but the sample it was at: that goes to the next free worker, and the dead one is started anew.
"""

from __future__ import annotations

import os
import socket
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from fathom_eval.errors import UserError

if TYPE_CHECKING:
    from fathom_eval.models import LoadedModel, ModelFacts

ATTEMPTS = 3
"""A sample whose workers died so often is recorded as failed; a worker that dies so often while it loads the model is given up."""
_PATIENCE_SECONDS = 30.0

UnitT = TypeVar("UnitT")
UnitT_contra = TypeVar("UnitT_contra", contravariant=True)


@dataclass(frozen=True)
class ModelRequest:
    """How a model is loaded: the arguments of :func:`fathom_eval.models.load_model`."""

    spec: str
    dtype: str = "auto"
    device: str = "auto"
    offline: bool = False
    revision: str | None = None
    trust_remote_code: bool = False
    rope_scaling: str | None = None

    def load(self, say: Callable[[str], None], device: str | None = None) -> LoadedModel:
        """The model, on ``device`` if one is given. Raises UserError as ``load_model`` does."""
        from fathom_eval.models import load_model

        return load_model(
            self.spec,
            dtype=self.dtype,
            device=device or self.device,
            offline=self.offline,
            revision=self.revision,
            trust_remote_code=self.trust_remote_code,
            rope_scaling=self.rope_scaling,
            say=say,
        )


@dataclass(frozen=True)
class Measured:
    """What came of one unit: its records, to be written together, and lines for the reader."""

    records: list[dict[str, Any]]
    notes: tuple[str, ...] = ()


class Work(Protocol[UnitT_contra]):
    """What every worker is sent once, by pickle.

    Attributes:
        model: The model that it loads.
    """

    @property
    def model(self) -> ModelRequest: ...

    def prepare(self, loaded: LoadedModel) -> Callable[[UnitT_contra], Measured]:
        """The function that measures one unit with the loaded model."""


def worker_identity(facts: ModelFacts) -> dict[str, Any]:
    """What every worker must have in common with the run: the model as it was loaded, and the versions of what can change a number."""
    from fathom_eval.ruler import versions

    names = ("model_fingerprint", "tokenizer_fingerprint", "dtype")
    return {**{name: getattr(facts, name) for name in names}, "device": facts.device.split(":")[0], **versions()}


class Worker:
    """One copy of the model, in a process of its own."""

    def __init__(self) -> None:
        self._measure: Callable[[Any], Measured] | None = None

    def load(self, work: Work[Any], device: str | None, threads: int | None) -> dict[str, Any]:
        """Load the model and say who and where this is: identity (:func:`worker_identity`), ``pid`` and ``host``."""
        import torch

        if threads is not None:
            torch.set_num_threads(threads)
        loaded = work.model.load(lambda line: None, device)
        self._measure = work.prepare(loaded)
        return {"identity": worker_identity(loaded.facts), "pid": os.getpid(), "host": socket.gethostname()}

    def measure(self, unit: Any) -> Measured:
        """Measure one unit."""
        assert self._measure is not None, "load comes first"
        return self._measure(unit)


class Slot(Protocol):
    """Holds one worker, and a new one after that has died."""

    def start(self) -> Future[dict[str, Any]]:
        """Start a worker in place of any earlier one and let it load the model; see :meth:`Worker.load`."""

    def measure(self, unit: Any) -> Future[Measured]:
        """Give it a unit."""

    def has_died(self, error: BaseException) -> bool:
        """Whether an error of a future means that the worker is gone."""

    def close(self) -> None:
        """End the worker, whatever it is at."""


def spread(
    units: Sequence[UnitT],
    slots: Sequence[Slot],
    *,
    identity: Mapping[str, Any],
    failed: Callable[[UnitT, str], list[dict[str, Any]]],
    say: Callable[[str], None] = lambda line: None,
) -> Iterator[tuple[UnitT, Measured]]:
    """Measure units on workers, each unit with its result as it is finished, in any order.

    Args:
        identity: Of the run, from :func:`worker_identity`.
        failed: Records for a unit whose workers died :data:`ATTEMPTS` times, given why.
        say: Takes a line for every worker that starts or dies.

    Raises:
        UserError: From a worker; one of another model or version than the run's; or none is left.
    """
    waiting = deque((unit, 1) for unit in units)
    crew = [_Member(slot, number) for number, slot in enumerate(slots, start=1)]
    running: dict[Future[Any], tuple[_Member, tuple[UnitT, int] | None]] = {}
    idle: list[_Member] = []
    finished = 0
    try:
        for member in crew[: len(units)]:
            running[member.slot.start()] = (member, None)
        while finished < len(units):
            while waiting and idle:
                member, task = idle.pop(), waiting.popleft()
                running[_give(member, task[0])] = (member, task)
            if not running:
                raise UserError(f"every worker died while it loaded the model ({member.death}); finished work is kept")
            done, _ = wait(running, timeout=_PATIENCE_SECONDS, return_when=FIRST_COMPLETED)
            if not done and all(task is None for _, task in running.values()):
                say("waiting for a worker to start: is the cluster full?")
            for future in done:
                member, current = running.pop(future)
                try:
                    answer = future.result()
                except Exception as error:
                    if not member.slot.has_died(error):
                        _raise(error)
                    member.death = str(error).strip().partition("\n")[0] or type(error).__name__
                    say(f"{member.name} died: {member.death}")
                    if current is None:
                        member.failed_starts += 1
                    elif current[1] < ATTEMPTS:
                        waiting.appendleft((current[0], current[1] + 1))
                    else:
                        finished += 1
                        reason = f"{ATTEMPTS} workers died of it, the last one thus: {member.death}"
                        yield current[0], Measured(failed(current[0], reason))
                    if member.failed_starts < ATTEMPTS and finished < len(units):
                        running[member.slot.start()] = (member, None)
                    continue
                if current is None:
                    _check(answer["identity"], identity, answer["host"])
                    member.failed_starts = 0
                    member.name = f"worker {member.number} (process {answer['pid']} on {answer['host']})"
                    say(f"{member.name} has the model")
                    idle.append(member)
                    continue
                if waiting:  # before the result is written, so that no worker waits for the disk
                    task = waiting.popleft()
                    running[_give(member, task[0])] = (member, task)
                else:
                    idle.append(member)
                finished += 1
                yield current[0], answer
    finally:
        for member in crew:
            member.slot.close()


@dataclass
class _Member:
    slot: Slot
    number: int
    name: str = field(init=False)
    failed_starts: int = 0
    death: str = "unknown"

    def __post_init__(self) -> None:
        self.name = f"worker {self.number}"


def _give(member: _Member, unit: Any) -> Future[Measured]:
    """Hand a unit to a worker; one that has died since its last unit shows it in the result."""
    try:
        return member.slot.measure(unit)
    except Exception as error:
        if not member.slot.has_died(error):
            raise
        future: Future[Measured] = Future()
        future.set_exception(error)
        return future


def _raise(error: Exception) -> None:
    """Raise what went wrong in a worker: as it is, or what the user can act on alone."""
    cause = getattr(error, "cause", None) or error  # Ray wraps what its actors raise
    if isinstance(cause, UserError):
        raise UserError(str(cause)) from None
    raise error


def _check(theirs: Mapping[str, Any], ours: Mapping[str, Any], host: str) -> None:
    differing = [f"{name} is {theirs.get(name)} there and {ours[name]} here" for name in ours if theirs.get(name) != ours[name]]
    if differing:
        raise UserError(f"the worker on {host} measures something else: {'; '.join(differing)}")
