"""The gated activation in torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional


def silu_gate(both: Tensor) -> Tensor:
    """``[R, 2F]`` to ``[R, F]``."""
    gate, up = both.chunk(2, dim=-1)
    return functional.silu(gate) * up
