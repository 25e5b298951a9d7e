"""Keys in the singular basis of the queries: InfiniGen's skewing (arXiv:2406.19707 §4.2).

Shapes: H KV heads, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fathom_eval.calibration import Basis, eigenbasis
from fathom_eval.columns import ColumnStore
from fathom_eval.stores import Store, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer


@dataclass(frozen=True)
class SkewedSpec(StoreSpec):
    """fp16 coordinates of the keys along the right singular vectors of the prefix's queries, largest singular value first.

    Queries and keys are turned alike, so q·k stays what it is, but a few coordinates hold most of a query. Queries and keys are those after
    RoPE, and the query heads of a group share one basis.
    """

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        heads, _, channels = layer.keys.shape
        store = ColumnStore((heads,), channels, skewed_basis(layer), centred=False)
        store.append(layer.keys[:, :tokens])
        return store


def skewed_basis(layer: PrefixLayer) -> Basis:
    """Right singular vectors of the prefix's queries; ``variance`` is their mean square along each, ``mean`` that of the keys."""
    moment = layer.query_statistics.second_moment.to(torch.float64)
    return eigenbasis(layer.key_statistics.mean, moment)
