"""What a prefix, its stores and the decoding of its branches take on the model's device: estimated before, measured after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from fathom_eval.branches import Branch
from fathom_eval.errors import UserError
from fathom_eval.planes import PlaneSpec
from fathom_eval.prefill import CHUNK
from fathom_eval.store_sizes import store_bytes

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts

_GIB = 2**30


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes beside the model's weights.

    Attributes:
        prefix: K/V of all layers.
        stores: What the methods scan, in all layers, built once and shared.
        tails: K/V of the branches' own tokens.
        work: Intermediate results of one layer, in the prefill or in a decode step, whichever is larger.
        pinned: Host memory that the host-resident runtime pins beside a GPU's; no part of the total.
    """

    prefix: int
    stores: int
    tails: int
    work: int
    pinned: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.prefix + self.stores + self.tails + self.work

    def share(self, layers: float) -> MemoryEstimate:
        """What a device takes that has this share of the layers; the work space is needed on each."""
        return MemoryEstimate(int(layers * self.prefix), int(layers * self.stores), int(layers * self.tails), self.work)

    def __str__(self) -> str:
        parts = (("prefix", self.prefix), ("stores", self.stores), ("decode tails", self.tails), ("work space", self.work))
        pinned = f" and {gib(self.pinned)} of host memory" if self.pinned else ""
        return f"{gib(self.total)} (" + ", ".join(f"{name} {gib(size)}" for name, size in parts) + f"){pinned}"


def estimate_memory(facts: ModelFacts, branches: Sequence[Branch], tokens: int, max_new_tokens: int, batch_size: int) -> MemoryEstimate:
    """What one session needs.

    Args:
        branches: All branches of the session.
        tokens: Of the prompt.
        max_new_tokens: Of every branch.
        batch_size: The most branches of one batch.
    """
    item = torch.finfo(getattr(torch, facts.dtype)).bits // 8
    row = facts.kv_heads * facts.head_dim
    stores = {(spec, branch.spec.policy.local) for branch in branches if (spec := branch.spec.method.store(facts)) is not None}
    rows = min(len(branches), batch_size)
    most = max((branch.k or 0 for branch in branches), default=0)
    one_layer_of_keys = row * tokens
    prefill_work = CHUNK * tokens * (1 + item) + 2 * one_layer_of_keys * item
    decode_work = (
        3 * rows * facts.query_heads * tokens * 4  # scores, joined scores and what the selection sorts
        + rows * facts.query_heads * most * facts.head_dim * 2 * (item + 4)  # gathered K and V, and both in fp32
        + 2 * one_layer_of_keys * 4  # dense attention, the oracle and sets of any size read fp32 copies
    )
    turned = any(isinstance(spec, PlaneSpec) and spec.basis == "klt" for spec, _ in stores)
    return MemoryEstimate(
        prefix=2 * facts.layers * one_layer_of_keys * item,
        stores=facts.layers * sum(store_bytes(spec, facts, tokens - local, item) for spec, local in stores),
        tails=2 * facts.layers * rows * row * max_new_tokens * item,
        work=max(prefill_work, decode_work, basis_work(facts, tokens) if turned else 0),
    )


def basis_work(facts: ModelFacts, tokens: int) -> int:
    """Bytes that the Karhunen–Loève bases of a layer's keys are made in, in fp64."""
    return 2 * facts.kv_heads * facts.head_dim * tokens * 8


def check_memory(estimate: MemoryEstimate, devices: Mapping[str, float], what: str) -> None:
    """Raise UserError where the estimate exceeds what is free, of a device or of host memory; where that is unknown, nothing is checked.

    Args:
        devices: Each device's share of the layers.
    """
    check_pinned(estimate.pinned, what)
    for device, layers in devices.items():
        part, free = estimate.share(layers), free_bytes(torch.device(device))
        if free is not None and part.total > free:
            raise UserError(
                f"{what} needs about {part} beside the model, and {gib(free)} are free on {device}: give shorter sessions "
                "(--session-tokens), fewer methods, a smaller --batch-size, or --dtype bfloat16"
            )


def check_pinned(pinned: int, what: str, instead: str = "shorter sessions (--session-tokens), --runtime hbm") -> None:
    """Raise UserError where more host memory is to be pinned than is free; where that is unknown, nothing is checked.

    Args:
        instead: What would take less.
    """
    free = host_bytes() if pinned else None
    if free is not None and pinned > free:
        raise UserError(
            f"{what} needs about {gib(pinned)} of pinned host memory, and {gib(free)} are free: give {instead}, or leave --runtime out"
        )


def free_bytes(device: torch.device) -> int | None:
    """Free memory of a device: of a GPU with what torch holds unused, of a CPU what Linux calls available. None where unknown."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    try:
        for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        pass
    return None


def host_bytes() -> int | None:
    """Host memory that can still be had, None where unknown. A control group's limit counts where it is lower than what Linux reports."""
    free = free_bytes(torch.device("cpu"))
    limits = [free] if free is not None else []
    try:
        most, used = (Path(f"/sys/fs/cgroup/memory.{name}").read_text(encoding="ascii").strip() for name in ("max", "current"))
        if most.isdigit():
            limits.append(int(most) - int(used))
    except (OSError, ValueError):
        pass
    return min(limits) if limits else None


def gib(size: int) -> str:
    """Bytes as GiB, or MiB where that says more."""
    return f"{size / _GIB:.1f} GiB" if size >= _GIB // 2 else f"{size / 2**20:.0f} MiB"
