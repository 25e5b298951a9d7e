"""Synthetic K/V and queries for timing: what a real step reads, without a million tokens of prefill.

Two figures make such data a fair stand-in, and both are measured in the step that is timed: Fathom 48 reads 56 ± 1 bits over 30 to 34
channels, and the rows of the winners amount to 167 to 216 MB a step (paper, Table 2). Keys have channels of unequal scale, and so have
queries, as those of real models do. The query heads of a group share a part of their projection, so that they share winners; the larger
the part, the fewer distinct rows. It is the same part in every channel: a method that picks channels by the queries' size finds strong
ones rather than those in which the heads happen to agree, and its rows are about as many as everybody's. A tilt of the projection towards
the keys' strong channels sets how many channels the budget is spent on.

The channels are independent of each other, so that they are a Karhunen–Loève basis themselves. A method that scans in such a basis finds
the same store in the same pool, and its step does all that a basis takes: it turns each query by a dense matrix, here the identity.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fathom_eval.calibration import Basis
from fathom_eval.errors import UserError
from fathom_eval.offload.arena import Arena
from fathom_eval.offload.cache import TieredCache, fill_segment
from fathom_eval.offload.weights import DecoderWeights
from fathom_eval.waterfill import channel_importance, read_depths

BITS = (55.0, 57.0)
"""Bits a token that Fathom 48 must read."""

ROW_BYTES = (167e6, 216e6)
"""Bytes of K/V rows a step, over 36 layers of 8 KV heads, k = 512."""

CHANNELS = (30.0, 34.0)
"""Channels that Fathom 48 must touch; the tilt aims at the middle."""

QUERY_SPREAD = 1.05
"""Standard deviation of the log scale of the queries' channels."""

_DRAWS = 8


@dataclass
class SyntheticKeys:
    """Keys of H heads whose channels differ in scale; the two coordinates of a rotation have the same one.

    Attributes:
        scale: Standard deviation of every channel, fp32 ``[H, D]``.
    """

    scale: Tensor

    @classmethod
    def draw(cls, heads: int, head_dim: int, spread: float, device: torch.device, seed: int = 0) -> SyntheticKeys:
        """Scales whose logarithm has the standard deviation ``spread``."""
        return cls(_pair_scales((heads, head_dim), spread, torch.Generator(device).manual_seed(seed)))

    @property
    def variance(self) -> Tensor:
        """fp32 ``[H, D]``."""
        return self.scale.square()

    @property
    def basis(self) -> Basis:
        """A Karhunen–Loève basis of the keys in the order of their channels, in memory of its own: the identity as a dense matrix.

        Scans do not depend on the order of a basis, so that of the eigenvalues would read the same bits.
        """
        heads, head_dim = self.scale.shape
        vectors = torch.eye(head_dim, device=self.scale.device).repeat(heads, 1, 1)
        return Basis(torch.zeros_like(self.scale), vectors, self.variance)

    def fill(self, arena: Arena) -> None:
        """Fill all segments of the arena with random K/V."""
        shape, device = arena.shape, self.scale.device
        generator = torch.Generator(device).manual_seed(1)
        flags = torch.zeros(shape.heads, dtype=torch.int32, device=device)
        for segment in arena.segments:
            size = (shape.heads, 64 * shape.blocks, shape.head_dim)
            keys = torch.randn(size, generator=generator, device=device).mul_(self.scale.unsqueeze(1)).to(shape.dtype)
            values = torch.randn(size, generator=generator, device=device).to(shape.dtype)
            fill_segment(segment, keys, values, 0, arena, None, flags)
        if flags.any():
            raise UserError("synthetic keys overflow: give a smaller --spread")


def _pair_scales(size: tuple[int, ...], spread: float, generator: torch.Generator) -> Tensor:
    """Log-normal scales ``[…, D]``, the same for both coordinates of a rotation."""
    half = torch.exp(torch.randn(*size[:-1], size[-1] // 2, generator=generator, device=generator.device) * spread)
    return torch.cat([half, half], dim=-1)


class SharedQueries:
    """The query projections of a model with random weights, rewritten so that a group's heads share a part of them.

    Args:
        weights: Whose ``projections`` are rewritten in place.
        keys: For the direction of the tilt.
    """

    def __init__(self, weights: DecoderWeights, keys: SyntheticKeys, seed: int = 2) -> None:
        self._weights, self._keys = weights, keys
        heads, group, head_dim = weights.heads, weights.group, weights.head_dim
        self._rows = heads * group * head_dim
        generator = torch.Generator(weights.device).manual_seed(seed)
        self._gains = _pair_scales((len(weights.layers), heads, head_dim), QUERY_SPREAD, generator)
        self._own = [layer.projections[: self._rows].clone() for layer in weights.layers]
        inputs = self._own[0].shape[1]
        self._common = [
            torch.empty(heads, 1, head_dim, inputs, dtype=weights.dtype, device=weights.device).normal_(
                0, inputs**-0.5, generator=generator
            )
            for _ in weights.layers
        ]
        self.share, self.tilt = 0.0, 0.0

    def set(self, share: float) -> None:
        """Give the common part ``share`` of the queries' variance, with the tilt at which Fathom 48 reads the right channels."""
        weights = self._weights
        heads, group, head_dim = weights.heads, weights.group, weights.head_dim
        self.share, self.tilt = share, self._fitting_tilt(share)
        scales = (self._gains * self._keys.scale.pow(self.tilt)).to(weights.dtype).view(-1, heads, 1, head_dim, 1)
        for layer, own, common, scale in zip(weights.layers, self._own, self._common, scales, strict=True):
            mixed = own.view(heads, group, head_dim, -1) * (1 - share) ** 0.5 + common * share**0.5
            layer.projections[: self._rows] = (mixed * scale).view(self._rows, -1)

    def energy(self) -> Tensor:
        """The mean of q² in every channel, up to a factor a head, fp32 ``[L, H, D]``."""
        return (self._gains * self._keys.scale.pow(self.tilt)).square()

    def _fitting_tilt(self, share: float) -> float:
        low, high = -1.0, 1.0  # further down, the scales of keys and queries no longer cancel out
        for _ in range(20):
            middle = (low + high) / 2
            low, high = (
                (middle, high) if self._channels(share, middle) > sum(CHANNELS) / 2 * self._weights.head_dim / 128 else (low, middle)
            )
        return (low + high) / 2

    def _channels(self, share: float, tilt: float) -> float:
        """Channels that 48 bits are spent on, for queries as the projection and the norm make them."""
        weights, scale = self._weights, self._keys.scale
        heads, head_dim = scale.shape
        generator = torch.Generator(scale.device).manual_seed(3)

        def draw(group: int) -> Tensor:
            return torch.randn(_DRAWS, len(weights.layers), heads, group, head_dim, generator=generator, device=scale.device)

        query = (draw(weights.group) * (1 - share) ** 0.5 + draw(1) * share**0.5) * (self._gains * scale.pow(tilt)).unsqueeze(-2)
        query = query * torch.rsqrt(query.square().mean(-1, keepdim=True))
        depths = read_depths(channel_importance(query, self._keys.variance), round(48 * head_dim / 128))
        return float((depths > 0).sum(-1).float().mean())


def attach_pool(cache: TieredCache, context: int, session: int = 0, sessions: int = 1) -> int:
    """Give every layer and row of an empty cache its segments from the arena's pool, and the length ``context``.

    Where the pool holds fewer, layers share segments, in whole runs so that no layer sees one twice. Sessions that run side by side start
    in different places of the pool, so that one does not find in a cache what the other has just read.

    Returns:
        Layers (times rows) that have segments of their own.
    """
    pool, size = cache.arena.segments, 64 * cache.arena.shape.blocks
    need = -(-context // size)
    if need > len(pool):
        raise UserError(f"a context of {context} tokens needs {need} segments a layer, and the arena holds {len(pool)}")
    distinct = len(pool) // need
    for number in range(len(cache.layers)):
        for row in range(cache.rows):
            start = (number * cache.rows + row + session * distinct // sessions) % distinct * need
            for segment in pool[start : start + need]:
                cache.attach(number, row, segment)
    for row in range(cache.rows):
        cache.set_length(row, context - cache.local)
    cache.tail.normal_(generator=torch.Generator(cache.tail.device).manual_seed(4))
    return min(distinct, len(cache.layers) * cache.rows)
