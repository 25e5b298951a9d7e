"""Names of devices, one or several for a model whose layers are spread over them."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from fathom_eval.errors import UserError

if TYPE_CHECKING:
    import torch

SEVERAL = "+"
"""Between the devices that one model is spread over."""


def resolve_devices(device: str) -> list[torch.device]:
    """The torch devices of ``auto``, ``cpu``, ``cuda``, ``cuda:N``, ``cuda:N+cuda:M`` (a model spread over these) or ``cuda:all``.

    Raises:
        UserError: There is none such, or one is named twice.
    """
    import torch

    if device == "cuda:all":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if not count:
            raise UserError(f"device 'cuda:all' is not available: torch {torch.__version__} sees no CUDA device")
        return [torch.device("cuda", number) for number in range(count)]
    names = device.split(SEVERAL)
    found = [resolve_device(name) for name in names]
    if len(names) > 1 and not all(one.type == "cuda" for one in found):
        raise UserError(f"device '{device}': a model is spread over GPUs alone, e.g. cuda:0+cuda:1")
    if len(set(found)) < len(found):
        raise UserError(f"device '{device}' names a GPU twice")
    return found


def resolve_device(device: str) -> torch.device:
    """The torch device that ``auto``, ``cpu``, ``cuda`` or ``cuda:N`` names. Raises UserError if there is none such."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, index = device.partition(":")
    if kind not in ("cpu", "cuda") or (index and not (kind == "cuda" and index.isdigit())):
        raise UserError(
            f"unknown device '{device}'; choose from auto, cpu, cuda, cuda:N, or cuda:N+cuda:M and cuda:all for one model on several"
        )
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    number = int(index or 0)
    if number >= count:
        raise UserError(f"device '{device}' is not available: torch {torch.__version__} sees {count} CUDA devices")
    return torch.device("cuda", number)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one: Triton launches its kernels there, wherever their tensors lie."""
    import torch

    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
