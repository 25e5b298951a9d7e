"""The dense prefill of a window: keys and values of every layer, the queries of its last positions, and what methods may know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from fathom_eval.calibration import QueryStatistics
from fathom_eval.compat import cache_argument
from fathom_eval.errors import UserError
from fathom_eval.fidelity_layer import WindowLayer
from fathom_eval.models import LoadedModel
from fathom_eval.observations import LayerObservers, Observation
from fathom_eval.prefill import CHUNK, dense_pass, use_attention
from fathom_eval.rehearsal import Rehearsal


def capture(
    loaded: LoadedModel,
    token_ids: Sequence[int],
    positions: int,
    *,
    full_window: bool = False,
    chunk: int = CHUNK,
    observations: Sequence[Observation] = (),
    rehearsal: Rehearsal | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[WindowLayer]:
    """Run the model densely over a window and keep its keys and values, and the queries of its last positions.

    Args:
        token_ids: The window.
        positions: How many of its last positions are evaluated.
        full_window: Query moments of the whole window, instead of those before the first evaluated position.
        chunk: Tokens of one forward pass.
        observations: What else to gather, of the same positions as the moments.
        rehearsal: To watch the prefill.
        progress: Called with the tokens done so far after every chunk.

    Raises:
        UserError: A key, a value or a query is not finite; layer and KV head are named.
    """
    facts, model = loaded.facts, loaded.model
    use_attention(loaded)
    ids = torch.tensor([list(token_ids)], device=model.device)
    probe = _ScalingProbe()
    with torch.inference_mode():
        scratch: Cache = DynamicCache()
        model(input_ids=ids[:, :1], use_cache=True, logits_to_keep=1, branches=probe, **{cache_argument(model): scratch})
        observer = _QueryCapture(facts.layers, len(token_ids) - positions, full_window, observations)
        cache: Any = DynamicCache()
        with nullcontext() if rehearsal is None else rehearsal.watching():
            dense_pass(model, ids, cache, chunk=chunk, observer=observer, progress=progress)
    layers = []
    for number in range(facts.layers):
        keys, values = cache.layers[number].keys[0], cache.layers[number].values[0]
        queries, further = observer.queries(number), observer.further.results(number)
        for what, part in (("keys", keys), ("values", values), ("queries", queries.transpose(0, 1))):
            finite = torch.isfinite(part).flatten(1).all(-1)
            if not finite.all():
                heads = ", ".join(map(str, (~finite).nonzero().flatten().tolist()))
                raise UserError(f"the prefill gave {what} that are not finite in layer {number}, KV head {heads}")
        layers.append(WindowLayer(keys, values, queries, observer.statistics[number], probe.scaling[number], further))
    return layers


class _QueryCapture:
    """Keeps the queries of the evaluated positions, and what is to be known of those before them (or of all)."""

    def __init__(self, layers: int, first: int, full_window: bool, observations: Sequence[Observation]) -> None:
        self.statistics = [QueryStatistics() for _ in range(layers)]
        self.further = LayerObservers(observations, layers)
        self._first, self._full_window = first, full_window
        self._seen = [0] * layers
        self._kept: list[list[Tensor]] = [[] for _ in range(layers)]

    def observe(self, layer: int, query: Tensor, keys: Tensor, scaling: float) -> None:
        length = query.shape[2]
        before = min(max(self._first - self._seen[layer], 0), length)
        self._seen[layer] += length
        known = length if self._full_window else before
        if known:
            self.statistics[layer].add(query[:, :, :known])
            self.further.add(layer, query[:, :, :known], keys[:, : keys.shape[1] - length + known], scaling)
        if before < length:
            self._kept[layer].append(query[:, :, before:].clone())  # a view would hold the whole chunk

    def queries(self, layer: int) -> Tensor:
        """``[P, H, G, D]``."""
        return torch.cat(self._kept[layer], dim=2).permute(2, 0, 1, 3).contiguous()


class _ScalingProbe:
    """Learns what each layer scales its scores by."""

    def __init__(self) -> None:
        self.scaling: dict[int, float] = {}

    def attend(self, layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
        self.scaling[layer] = scaling
        return torch.zeros_like(query)
