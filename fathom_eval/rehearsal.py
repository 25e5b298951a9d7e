"""What a layer's queries would be if its input were that of the layer before: InfiniGen's speculation (arXiv:2406.19707 §4.3).

The attention input of a layer (after its norm) is kept as it goes in, and the next layer's own attention module is run on it, with the
rotary positions of that step, up to the point where it asks for attention. So the projection, its bias, a norm of the queries and the
rotary embedding are the model's, whatever they are. Hooks are PyTorch's public ones, and no model is patched.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Cache

from fathom_eval.gguf_models import one_line
from fathom_eval.memory_errors import is_out_of_memory

if TYPE_CHECKING:
    from fathom_eval.methods.base import Method


class Rehearsal:
    """The rehearsed queries of every layer of a model, of its last forward pass or of a window's last positions.

    A rehearsal that fails ends no forward pass: whoever asks for its queries finds out.

    Args:
        model: A causal language model of transformers that runs with this package's attention.
        layers: How many it has.
        first: Keep the queries of all positions from this one on, over all forward passes, counted from the first; without it each forward
            pass replaces what the one before left.
    """

    def __init__(self, model: nn.Module, layers: int, first: int | None = None) -> None:
        self._model, self._layers, self._first = model, layers, first
        self._seen = [0] * layers
        self._inputs: dict[int, Tensor] = {}
        self._kept: dict[int, list[Tensor]] = {}
        self._failure: str | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Rehearse in every forward pass within."""
        try:
            modules = attention_modules(self._model, self._layers)
        except LookupError as error:
            self._failure, modules = str(error), []
        handles = [module.register_forward_pre_hook(self._before, with_kwargs=True) for module in modules]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()
            self._inputs.clear()

    def query(self, layer: int) -> Tensor | None:
        """Post-RoPE queries ``[R, H, G, D]`` of the rows of the last pass, or of the positions kept; None in the first layer.

        Raises:
            RuntimeError: There is none: says why.
        """
        if layer == 0:
            return None
        if self._failure is not None:
            raise RuntimeError(f"no query could be rehearsed: {self._failure}")
        if layer not in self._kept:
            raise RuntimeError(f"no query was rehearsed for layer {layer}")
        return torch.cat(self._kept[layer]) if len(self._kept[layer]) > 1 else self._kept[layer][0]

    def take(self, layer: int, query: Tensor) -> None:
        """What the attention function was asked with, ``[R, H, G, m, D]``."""
        fresh = query.permute(0, 3, 1, 2, 4).flatten(0, 1)
        if self._first is None:
            self._kept[layer] = [fresh]
            return
        before = max(self._first - (self._seen[layer] - query.shape[3]), 0)
        self._kept.setdefault(layer, []).append(fresh[before:].clone())  # a view would hold the whole chunk

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._failure is not None:
            return
        layer = int(module.layer_idx)  # type: ignore[arg-type]
        try:
            self._rehearse(module, layer, args, kwargs)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            self._failure = f"layer {layer}: {type(error).__name__}: {one_line(error)}"

    def _rehearse(self, module: nn.Module, layer: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = args[0] if args else kwargs["hidden_states"]
        self._seen[layer] += own.shape[1]
        if self._first is not None and self._seen[layer] <= self._first:
            return
        self._inputs[layer] = own
        if layer == 0:
            return
        previous = self._inputs.pop(layer - 1).to(own.device)
        if self._first is None:
            self._kept.pop(layer, None)
        # Nothing of a rehearsal may reach the cache, the branches or the observer.
        named = {name: _but_the_cache(value) for name, value in kwargs.items() if name not in ("hidden_states", "branches", "observer")}
        module.forward(previous, *(_but_the_cache(value) for value in args[1:]), **named, rehearsal=self)
        if layer not in self._kept:
            raise RuntimeError("its attention module went round the attention interface")


def _but_the_cache(value: Any) -> Any:
    return None if isinstance(value, Cache) else value


def needed_rehearsal(methods: Iterable[Method], model: nn.Module, layers: int, first: int | None = None) -> Rehearsal | None:
    """See :class:`Rehearsal`; None where no method asks for it."""
    return Rehearsal(model, layers, first) if any(method.rehearses for method in methods) else None


def rehearsed_query(rehearsal: Rehearsal | None, method: Method, layer: int) -> Tensor | None:
    """What a method finds in its step, for all rows.

    Raises:
        RuntimeError: It asks for what there is not.
    """
    if not method.rehearses or layer == 0:
        return None
    if rehearsal is None:
        raise RuntimeError("no query was rehearsed for it")
    return rehearsal.query(layer)


def attention_modules(model: nn.Module, layers: int) -> list[nn.Module]:
    """The attention module of every layer: the innermost module that knows the layer's number.

    Raises:
        LookupError: A layer has none, or more than one.
    """
    numbered = [module for module in model.modules() if _is_numbered(module)]
    inner = [module for module in numbered if not any(_is_numbered(part) for part in module.modules() if part is not module)]
    numbers = sorted(int(module.layer_idx) for module in inner)  # type: ignore[arg-type]
    if numbers != list(range(layers)):
        raise LookupError(f"of its {layers} layers not every one has one attention module with a layer_idx")
    return inner


def _is_numbered(module: nn.Module) -> bool:
    return isinstance(getattr(module, "layer_idx", None), int)
