"""Tensors that lie on the CPU and claim to lie elsewhere: what mixes two such devices fails as it does on real ones.

PyTorch has a single CPU device, so code for several devices would otherwise be tried only where there are several.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

KIND = "meta"
"""A type of device that torch names with an index and does not try to start."""


class Claimed(torch.Tensor):
    """A tensor whose device is only claimed."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor, device: torch.device) -> Claimed:
        claimed: Claimed = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype, device=device
        )
        claimed.inner = inner
        return claimed

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(function, args, kwargs or {})


@contextlib.contextmanager
def claimed_devices() -> Iterator[None]:
    """Within it, tensors can be made on and moved to devices of type :data:`KIND`."""
    with _Functions(), _Operations():
        yield


class _Functions(TorchFunctionMode):
    """``torch.tensor`` and ``torch.as_tensor`` make their tensors below what a dispatch mode sees."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.as_tensor and isinstance(args[0], Claimed):
            return args[0].to(**kwargs) if kwargs else args[0]
        device = kwargs.pop("device", None) if function in (torch.tensor, torch.as_tensor) else None
        return function(*args, **kwargs) if device is None else function(*args, **kwargs).to(device)


class _Operations(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _call(function, args, kwargs or {})


def claim(tensor: torch.Tensor, index: int) -> Claimed:
    """The tensor as one of device ``index``, its memory shared."""
    return Claimed(tensor, torch.device(KIND, index))


def _call(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    asked = kwargs.get("device")
    moves = function.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
    found = leaves[0].device if moves else _one_device(leaves, str(function))
    target = found if asked is None else asked
    plain = {name: torch.device("cpu") if name == "device" and value is not None else value for name, value in kwargs.items()}
    result = function(*tree_map(_plain, args), **tree_map(_plain, plain))
    written = next((value for value in (kwargs.get("out"), *args[:1]) if isinstance(value, Claimed)), None)
    if function._schema.is_mutable and written is not None:
        return written
    target = torch.device(target)
    return result if target.type != KIND else tree_map(lambda leaf: _on(leaf, target), result)


def _one_device(leaves: list[Any], what: str) -> torch.device:
    """The device of all tensors; numbers may come from the CPU."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(tensor.device.type == KIND and not isinstance(tensor, Claimed) for tensor in tensors):
        raise RuntimeError(f"{what} takes a tensor that was made where this module does not look")
    devices = {tensor.device for tensor in tensors if tensor.dim() or isinstance(tensor, Claimed)}
    if len(devices) > 1:
        raise RuntimeError(f"{what} mixes {', '.join(sorted(map(str, devices)))}")
    return next(iter(devices), torch.device("cpu"))


def _plain(leaf: Any) -> Any:
    return leaf.inner if isinstance(leaf, Claimed) else leaf


def _on(leaf: Any, device: torch.device) -> Any:
    return Claimed(leaf, device) if isinstance(leaf, torch.Tensor) else leaf
