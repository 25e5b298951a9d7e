"""Which stores keep the prefix property: that the first t bits of a b-bit code are as good as a code of t bits would be.

A scan that decides its read depth for every query needs it; a store without it must keep one copy for every depth.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fathom_eval.kernels.pack import BLOCK
from fathom_eval.kivi import KiviSpec, KiviStore
from fathom_eval.nonuniform import NonuniformSpec, NonuniformStore
from fathom_eval.planes import PlaneSpec
from fathom_eval.rotated import RotatedSpec, RotatedStore

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer


@dataclass(frozen=True)
class PrefixRead:
    """One store read to one depth.

    Attributes:
        store: The method that scans it.
        bits: Of its codes.
        read: Of them that are read.
        prefix_error: ‖k̂ − k‖² of such a read, as a share of ‖k − mean‖², over all keys and heads.
        own_error: The same of the store with codes of ``read`` bits.
        identical: Every value that is read is the one that the shorter code stands for.
    """

    store: str
    bits: int
    read: int
    prefix_error: float
    own_error: float
    identical: bool

    @property
    def ratio(self) -> float:
        """How many times the error of its own quantiser a prefix has; 1 where nothing is lost."""
        return self.prefix_error / self.own_error if self.own_error else float("inf" if self.prefix_error else 1)


def measure_prefixes(layer: PrefixLayer, bits: int = 4) -> list[PrefixRead]:
    """Every store at every depth below ``bits``, on the whole blocks of a layer's keys.

    Where a read leaves open which of several levels is meant, it is taken as the mean of the levels; TurboQuant's, whose distribution is
    known beforehand, as their weighted mean.

    Raises:
        ValueError: The layer has no whole block.
    """
    tokens = layer.keys.shape[-2] // BLOCK * BLOCK
    if not tokens:
        raise ValueError(f"{layer.keys.shape[-2]} keys are not one block of {BLOCK}")
    reads = []
    for name, reader in _READERS.items():
        keys, values = reader(layer, tokens, bits)
        spread = (keys - keys.mean(-2, keepdim=True)).square().sum()
        for read in range(1, bits):
            own_keys, own_values = reader(layer, tokens, read)
            found, own = values(read), own_values(read)
            lost, own_lost = (((part - whole).square().sum() / spread).item() for part, whole in ((found, keys), (own, own_keys)))
            reads.append(PrefixRead(name, bits, read, lost, own_lost, torch.allclose(found, own, rtol=1e-5, atol=1e-6)))
    return reads


# Each gives the keys in the store's basis [H, n, D], and what they are read as from the first t bits.
_Reader = Callable[["PrefixLayer", int, int], tuple[Tensor, Callable[[int], Tensor]]]


def _planes(layer: PrefixLayer, tokens: int, bits: int) -> tuple[Tensor, Callable[[int], Tensor]]:
    store = PlaneSpec("raw", bits).start(layer)
    store.append(layer.keys[:, :tokens])

    def values(read: int) -> Tensor:
        planes = [torch.cat([segment.plane_values(plane) for segment in store.segments], dim=-1) for plane in range(read)]
        return torch.stack(planes).sum(0).transpose(-1, -2)

    return layer.keys[:, :tokens].float(), values


def _coded(store: KiviStore | RotatedStore | NonuniformStore, keys: Tensor) -> tuple[Tensor, Callable[[int], Tensor]]:
    parts = store.encode(keys)
    return store.project(keys), lambda read: store.decode_prefix(parts, read)


def _kivi(layer: PrefixLayer, tokens: int, bits: int) -> tuple[Tensor, Callable[[int], Tensor]]:
    return _coded(KiviSpec(bits).start(layer), layer.keys[:, :tokens])


def _turboquant(layer: PrefixLayer, tokens: int, bits: int) -> tuple[Tensor, Callable[[int], Tensor]]:
    return _coded(RotatedSpec(bits).start(layer), layer.keys[:, :tokens])


def _kvquant(layer: PrefixLayer, tokens: int, bits: int) -> tuple[Tensor, Callable[[int], Tensor]]:
    return _coded(NonuniformSpec(bits).start(layer), layer.keys[:, :tokens])


_READERS: dict[str, _Reader] = {"fathom": _planes, "kivi": _kivi, "turboquant": _turboquant, "kvquant": _kvquant}
