"""Read depths from what each plane of each channel is measured to gain, instead of a quarter of the error a bit (paper Eq. 4).

Eq. 4 takes the error of t bits to be Var(k)·4^(−t) and a bit to cost one bit. Neither holds at the first plane: a sign read at the middle
of its half can be further off than no read at all, and it brings the block's scale with it.

Shapes: R branches, H KV heads, G query heads a KV head, D channels, P planes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.kernels.pack import BLOCK
from fathom_eval.planes import PlaneSpec

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer

MEASURED_BLOCKS = 128
"""Blocks that errors are measured on, evenly spaced over a longer prefix."""


@dataclass(frozen=True)
class DepthTable:
    """The best way down for every channel: the concave hull of what is gained over what is paid.

    Attributes:
        gain: Error saved a bit by each plane for a query of 1, fp32 ``[H, D, P]``. Planes that pay off only together share theirs; a gain
            that is not above 0 is never worth a bit.
        vertex: The deepest hull vertex at or above a depth, int64 ``[H, D, P + 1]``.
        cost: Bits a token of each plane, its scale with the first, fp32 ``[P]``.
        budget: Bits a token that may be spent, scales included.
    """

    gain: Tensor
    vertex: Tensor
    cost: Tensor
    budget: float

    def depths(self, query: Tensor) -> Tensor:
        """Spend the budget on a query ``[R, H, G, D]`` in the store's basis: depths int64 ``[R, H, D]``.

        Planes are taken in the order of what they gain a bit until the next does not fit, without looking further.
        """
        planes = self.gain.shape[-1]
        energy = query.float().square().sum(-2)
        ordered = (energy.unsqueeze(-1) * self.gain).flatten(-2).sort(dim=-1, descending=True, stable=True)
        paid = self.cost[ordered.indices % planes].cumsum(-1)
        taken = ((paid <= self.budget) & (ordered.values > 0)).long()
        depths = torch.zeros_like(energy, dtype=torch.int64).scatter_add_(-1, ordered.indices // planes, taken)
        # The budget may end between planes that pay off only together.
        return self.vertex.expand(*depths.shape, -1).gather(-1, depths.unsqueeze(-1)).squeeze(-1)


def measure_depths(layer: PrefixLayer, spec: PlaneSpec, budget: float) -> DepthTable:
    """The table of a layer, measured on the whole blocks of its prefix; the errors of Eq. 4 where there is none.

    Args:
        budget: Bits a token, scales included.
    """
    errors = _measured_errors(layer, spec)
    planes = errors.shape[-1] - 1
    cost = torch.ones(planes, device=errors.device)
    cost[0] += (16 if spec.scales == "fp16" else 8) / BLOCK
    paid = torch.nn.functional.pad(cost.cumsum(0), (1, 0))
    # Slope of the least concave majorant over plane t: the least, over starts before it, of the steepest way on from there.
    gains = []
    for t in range(1, planes + 1):
        ways = [
            torch.stack([(errors[..., i] - errors[..., j]) / (paid[j] - paid[i]) for j in range(t, planes + 1)], dim=-1).amax(-1)
            for i in range(t)
        ]
        gains.append(torch.stack(ways, dim=-1).amin(-1))
    gain = torch.stack(gains, dim=-1)
    number = torch.arange(planes + 1, device=errors.device)
    ends = torch.ones_like(errors, dtype=torch.bool)
    ends[..., 1:-1] = gain[..., :-1] > gain[..., 1:]
    vertex = torch.where(ends, number, 0).cummax(-1).values
    return DepthTable(gain, vertex, cost, budget)


def _measured_errors(layer: PrefixLayer, spec: PlaneSpec) -> Tensor:
    """Variance of what t planes leave of every channel, fp32 ``[H, D, P + 1]``; t = 0 is the keys' own."""
    store = spec.start(layer)
    blocks = layer.keys.shape[-2] // BLOCK
    if not blocks:
        variance = store.transform(layer.keys).float().var(-2)
        return variance.unsqueeze(-1) * torch.pow(4.0, -torch.arange(spec.planes + 1.0, device=variance.device))
    chosen = torch.arange(0, blocks, -(-blocks // MEASURED_BLOCKS), device=layer.keys.device)
    keys = layer.keys[:, : blocks * BLOCK].unflatten(-2, (-1, BLOCK))[:, chosen].flatten(1, 2)
    store.append(keys)
    [segment] = store.segments
    left = store.transform(keys).float().transpose(-1, -2)
    errors = [left.var(-1)]
    for plane in range(spec.planes):
        left = left - segment.plane_values(plane)
        errors.append(left.var(-1))
    return torch.stack(errors, dim=-1)
