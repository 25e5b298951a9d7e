"""One dense, chunked prefill of a sample: the prefix that every branch reads and none writes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import DynamicCache

from fathom_eval.attention import IMPLEMENTATION
from fathom_eval.calibration import KeyStatistics, QueryStatistics
from fathom_eval.compat import cache_argument
from fathom_eval.errors import UserError
from fathom_eval.observations import LayerObservers, Observation
from fathom_eval.stores import Store, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.models import LoadedModel

CHUNK = 2048


@dataclass(frozen=True)
class PrefixLayer:
    """One layer of a prefix.

    Attributes:
        keys, values: As the attention sees them, ``[H, n, D]``.
        query_statistics: Moments of the prefill's queries.
        number: Of the layer in its model.
        observations: What the prefill gathered because a method asked for it.
    """

    keys: Tensor
    values: Tensor
    query_statistics: QueryStatistics
    number: int = 0
    observations: Mapping[Observation, Any] = field(default_factory=dict, repr=False)
    _stores: dict[tuple[StoreSpec, int], Store] = field(default_factory=dict, repr=False)

    @cached_property
    def key_statistics(self) -> KeyStatistics:
        """Moments of this prefix's own keys ("session" statistics)."""
        return KeyStatistics(self.keys)

    @cached_property
    def value_sum(self) -> Tensor:
        """fp32 ``[H, D]``."""
        return self.values.float().sum(-2)

    def store(self, spec: StoreSpec, tokens: int) -> Store:
        """The store of the first ``tokens`` keys, built once and shared."""
        if (spec, tokens) not in self._stores:
            self._stores[spec, tokens] = spec.build(self, tokens)
        return self._stores[spec, tokens]

    @property
    def store_bytes(self) -> int:
        """Size of the stores built so far."""
        return sum(store.bytes for store in self._stores.values())


@dataclass(frozen=True)
class Prefix:
    """The K/V of a prompt without its last token, which is every branch's first step.

    Attributes:
        token_ids: The whole prompt, ``n + 1`` ids.
        layers: One :class:`PrefixLayer` a layer of the model.
    """

    token_ids: tuple[int, ...]
    layers: tuple[PrefixLayer, ...]

    @property
    def tokens(self) -> int:
        """n, the tokens that are in the cache."""
        return len(self.token_ids) - 1

    @property
    def bytes(self) -> int:
        """Size of the K/V."""
        return sum(layer.keys.nbytes + layer.values.nbytes for layer in self.layers)

    @property
    def store_bytes(self) -> int:
        """Size of the stores built so far."""
        return sum(layer.store_bytes for layer in self.layers)

    def checksum(self) -> str:
        """sha256 of all K/V: equal before and after the branches, since none may write."""
        digest = hashlib.sha256()
        for layer in self.layers:
            for tensor in (layer.keys, layer.values):
                digest.update(tensor.contiguous().cpu().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()


class _QueryObserver:
    def __init__(self, layers: int, observations: Sequence[Observation]) -> None:
        self.statistics = [QueryStatistics() for _ in range(layers)]
        self.further = LayerObservers(observations, layers)

    def observe(self, layer: int, query: Tensor, keys: Tensor, scaling: float) -> None:
        self.statistics[layer].add(query)
        self.further.add(layer, query, keys, scaling)


@torch.inference_mode()
def prefill(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    *,
    chunk: int = CHUNK,
    observations: Sequence[Observation] = (),
    progress: Callable[[int], None] | None = None,
) -> Prefix:
    """Run the model densely over a prompt and keep its K/V.

    Args:
        token_ids: The prompt, at least three tokens, the last of which is left to the branches.
        chunk: Tokens of one forward pass; memory for activations and masks is bounded by it.
        observations: What the methods want to know of the prefill beyond moments, from
            :func:`~fathom_eval.observations.needed_observations`.
        progress: Called with the tokens done so far after every chunk.

    Raises:
        UserError: The prompt is too short or longer than the model's positions.
    """
    facts, model = loaded.facts, loaded.model
    tokens = len(token_ids) - 1
    if tokens < 2:
        raise UserError(f"a prompt of {len(token_ids)} tokens is too short: at least 3 are needed")
    if len(token_ids) > facts.max_positions:
        raise UserError(f"the prompt has {len(token_ids)} tokens, but {facts.name} holds {facts.max_positions}")
    use_attention(loaded)
    observer = _QueryObserver(facts.layers, observations)
    cache = DynamicCache()
    ids = torch.tensor([list(token_ids[:-1])], device=model.device)
    dense_pass(model, ids, cache, chunk=chunk, observer=observer, progress=progress)
    if observer.statistics[0].count == 0:
        raise UserError(f"{facts.name} does not use transformers' attention interface, so no method can run in it")
    held: list[Any] = cache.layers
    layers = tuple(
        PrefixLayer(layer.keys[0], layer.values[0], statistics, number, observer.further.results(number))
        for number, (layer, statistics) in enumerate(zip(held, observer.statistics, strict=True))
    )
    for number, layer in enumerate(layers):
        finite = torch.isfinite(layer.keys).all(-1).all(-1)
        if not finite.all():
            heads = ", ".join(str(head) for head in (~finite).nonzero().flatten().tolist())
            raise UserError(f"the prefill gave keys that are not finite in layer {number}, KV head {heads}")
    return Prefix(tuple(token_ids), layers)


def use_attention(loaded: LoadedModel) -> None:
    """Switch the model to this package's attention implementation."""
    if loaded.model.config._attn_implementation != IMPLEMENTATION:
        loaded.model.set_attn_implementation(IMPLEMENTATION)


def dense_pass(model: Any, ids: Tensor, cache: Any, *, chunk: int, observer: Any, progress: Callable[[int], None] | None = None) -> None:
    """Run tokens through the model densely, chunk by chunk, so that neither all logits nor all scores are held at once.

    Args:
        ids: ``(1, tokens)``.
        cache: Takes the keys and values of all layers.
        observer: Sees every layer's queries and keys, see :mod:`fathom_eval.attention`.
        progress: Called with the number of tokens that have been through, after each chunk.
    """
    for start in range(0, ids.shape[1], chunk):
        stop = min(start + chunk, ids.shape[1])
        model(
            input_ids=ids[:, start:stop],
            position_ids=torch.arange(start, stop, device=ids.device).unsqueeze(0),
            use_cache=True,
            logits_to_keep=1,
            observer=observer,
            **{cache_argument(model): cache},
        )
        if progress is not None:
            progress(stop)
