"""What methods want to know of the dense prefill beyond the moments of its queries: gathered only where a method asks.

Shapes: H KV heads, G query heads a KV head, n tokens, D channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fathom_eval.errors import METHOD_ERRORS, raised_at
from fathom_eval.memory_errors import is_out_of_memory

if TYPE_CHECKING:
    from fathom_eval.methods.base import Method
    from fathom_eval.models import ModelFacts

WEIGHT_ELEMENTS = 2**25
"""Attention weights that are recomputed at a time (128 MB in fp32)."""


class Accumulator(Protocol):
    """Gathers one observation of one layer, chunk by chunk."""

    def add(self, query: Tensor, keys: Tensor, scaling: float) -> None:
        """Post-RoPE queries ``[H, G, m, D]`` of the last m of the tokens whose keys are ``[H, n, D]``."""

    def result(self) -> Any:
        """What has been gathered."""


class Observation(ABC):
    """Names what is gathered. A frozen dataclass: equal ones are gathered once for all methods."""

    @abstractmethod
    def start(self) -> Accumulator:
        """An accumulator for one layer."""


@dataclass(frozen=True)
class ReceivedAttention(Observation):
    """Attention that each token has got from all queries so far, its own included (H2O's score), fp32 ``[H, G, n]``."""

    def start(self) -> Accumulator:
        return _Received(None)


@dataclass(frozen=True)
class ReceivedLocalAttention(Observation):
    """Attention that each token has got from the queries of the ``window`` tokens after it (InfLLM's score), fp32 ``[H, G, n]``.

    The weights are those of the dense softmax. The last tokens have fewer queries after them and so a smaller sum.
    """

    window: int

    def start(self) -> Accumulator:
        return _Received(self.window)


@dataclass(frozen=True)
class MeanQueryKeyProduct(Observation):
    """Mean of |q_j·k_j| over positions, query and key of the same position, fp32 ``[H, G, D]`` (Double Sparsity's statistic)."""

    def start(self) -> Accumulator:
        return _Products()


@dataclass(frozen=True)
class RecentQueries(Observation):
    """The queries of the last ``window`` tokens (fewer if there are fewer), ``[H, G, w, D]`` in the model's dtype."""

    window: int

    def start(self) -> Accumulator:
        return _Recent(self.window)


class Observed(dict[Observation, Any]):
    """What was gathered in one layer. Looking up what failed raises a RuntimeError that says why.

    Args:
        failures: By observation.
    """

    def __init__(self, failures: Mapping[Observation, str]) -> None:
        super().__init__()
        self._failures = failures

    def __missing__(self, observation: Observation) -> Any:
        if observation in self._failures:
            raise RuntimeError(self._failures[observation])
        raise KeyError(observation)


class LayerObservers:
    """The accumulators of all layers of one prefill. One that raises ends no prefill: the methods that ask for it find out."""

    def __init__(self, observations: Sequence[Observation], layers: int) -> None:
        self._failures: dict[Observation, str] = {}
        self._accumulators: list[dict[Observation, Accumulator]] = [{} for _ in range(layers)]
        for accumulators in self._accumulators:
            for observation in observations:
                with self._watched(observation):
                    accumulators[observation] = observation.start()

    def add(self, layer: int, query: Tensor, keys: Tensor, scaling: float) -> None:
        """See :meth:`Accumulator.add`."""
        for observation, accumulator in self._accumulators[layer].items():
            if observation not in self._failures:
                with self._watched(observation):
                    accumulator.add(query, keys, scaling)

    def results(self, layer: int) -> dict[Observation, Any]:
        """What was gathered in one layer."""
        found = Observed(self._failures)
        for observation, accumulator in self._accumulators[layer].items():
            if observation not in self._failures:
                with self._watched(observation):
                    found[observation] = accumulator.result()
        return found

    @contextmanager
    def _watched(self, observation: Observation) -> Iterator[None]:
        """Keep what an observation raises for the methods that ask for it; a lack of memory is the prefill's."""
        try:
            yield
        except METHOD_ERRORS as error:
            if is_out_of_memory(error):
                raise
            reason = f"{type(error).__name__}: {error}{raised_at(error)}"
            self._failures.setdefault(observation, f"{type(observation).__name__} failed: {reason}")


def needed_observations(methods: Iterable[Method], facts: ModelFacts) -> tuple[Observation, ...]:
    """What these methods ask for, each once."""
    return tuple(dict.fromkeys(observation for method in methods for observation in method.observes(facts)))


class _Received:
    def __init__(self, window: int | None) -> None:
        self._window = window
        self._sum: Tensor | None = None

    def add(self, query: Tensor, keys: Tensor, scaling: float) -> None:
        heads, group, length, _ = query.shape
        tokens = keys.shape[1]
        before = self._sum.shape[-1] if self._sum is not None else 0
        fresh = torch.zeros(heads, group, tokens - before, dtype=torch.float32, device=query.device)
        received = fresh if self._sum is None else torch.cat([self._sum, fresh], dim=-1)
        rows = max(1, WEIGHT_ELEMENTS // (heads * group * tokens))
        columns = torch.arange(tokens, device=query.device)
        transposed = keys.float().transpose(-1, -2).unsqueeze(1)
        for start in range(0, length, rows):
            part = query[:, :, start : start + rows].float() * scaling
            first = tokens - length + start
            last = first + part.shape[2]
            age = torch.arange(first, last, device=query.device).unsqueeze(-1) - columns[:last]
            weights = (part @ transposed[..., :last]).masked_fill_(age < 0, -torch.inf).softmax(-1)
            if self._window is not None:
                weights = weights.masked_fill_((age < 1) | (age > self._window), 0.0)
            received[..., :last] += weights.sum(2)
        self._sum = received

    def result(self) -> Any:
        return self._sum


class _Products:
    def __init__(self) -> None:
        self._count = 0
        self._sum: Tensor | float = 0.0

    def add(self, query: Tensor, keys: Tensor, scaling: float) -> None:
        length = query.shape[2]
        self._count += length
        own = keys[:, keys.shape[1] - length :].float().unsqueeze(1)
        self._sum = self._sum + (query.float() * own).abs().sum(2)

    def result(self) -> Any:
        return torch.as_tensor(self._sum) / self._count


class _Recent:
    def __init__(self, window: int) -> None:
        self._window = window
        self._kept: Tensor | None = None

    def add(self, query: Tensor, keys: Tensor, scaling: float) -> None:
        kept = query if self._kept is None else torch.cat([self._kept, query], dim=2)
        self._kept = kept[:, :, -self._window :].clone()  # a view would hold the whole chunk

    def result(self) -> Any:
        return self._kept
