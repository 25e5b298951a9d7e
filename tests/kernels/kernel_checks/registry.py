"""The list of checks, and what they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

POISON = -7777

Check = Callable[..., None]
CHECKS: dict[str, tuple[Check, list[dict[str, Any]], list[dict[str, Any]]]] = {}


def check(small: list[dict[str, Any]], full: list[dict[str, Any]]) -> Callable[[Check], Check]:
    """Register a check with its cases for the interpreter and those for a GPU."""

    def register(function: Check) -> Check:
        CHECKS[function.__name__] = (function, small, full)
        return function

    return register


def case_name(name: str, case: dict[str, Any]) -> str:
    return f"{name}[{','.join(f'{key}={value}' for key, value in case.items())}]"


def random(*shape: int, device: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def poisoned(*shape: int, dtype: torch.dtype, device: str) -> Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else POISON, dtype=dtype, device=device)


def whole(values: list[int], device: str) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def equal(found: Tensor, expected: Tensor, what: str) -> None:
    assert found.dtype == expected.dtype, (what, found.dtype, expected.dtype)
    different = found != expected
    assert not different.any(), f"{what}: {int(different.sum())} of {found.numel()} differ, first at {different.nonzero()[0].tolist()}"


def close(found: Tensor, expected: Tensor, what: str, tolerance: float = 2e-5) -> None:
    """``|found - expected|`` within ``tolerance`` of the largest value, and fp16's half unit where that is the output."""
    limit = tolerance * expected.abs().max() + (2**-10 * expected.abs() if found.dtype == torch.float16 else 0)
    error = (found.float() - expected.float()).abs()
    assert (error <= limit).all(), f"{what}: off by up to {error.max().item():.3g}, values up to {expected.abs().max().item():.3g}"


def split(tensor: Tensor, capacity: int, dimension: int, device: str, *, host: bool = False) -> list[Tensor]:
    """Cut a store into segments of one capacity; what the last one has too much is poison."""
    parts = []
    for part in tensor.split(capacity, dim=dimension):
        shape = list(part.shape)
        shape[dimension] = capacity
        segment = poisoned(*shape, dtype=part.dtype, device="cpu" if host else device)
        segment.narrow(dimension, 0, part.shape[dimension]).copy_(part)
        parts.append(segment.pin_memory() if host else segment)
    return parts
