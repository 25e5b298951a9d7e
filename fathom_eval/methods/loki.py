"""Loki: the leading principal components of the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fathom_eval.methods.base import Method, channel_count, top_channels
from fathom_eval.planes import PlaneSpec
from fathom_eval.stores import StoreSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts
    from fathom_eval.prefill import PrefixLayer


@dataclass(frozen=True)
class Loki(Method):
    """r coordinates of the keys' PCA basis in 4-bit codes, ordered by score variance λ_j·E[(qV)_j²] (paper §2).

    Attributes:
        r: Coordinates, a number or a share of head_dim.
    """

    name: ClassVar[str] = "loki"
    family: ClassVar[str] = "Loki"
    source: ClassVar[str] = "Loki (arXiv:2406.02542), 4-bit codes, PCA of the prefix's keys ordered by score variance"

    r: str = "D/4"

    def check(self, facts: ModelFacts) -> None:
        channel_count(self.r, facts.head_dim, "loki: r")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return PlaneSpec("klt")

    def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
        basis = layer.key_statistics.basis
        energy = ((layer.query_statistics.second_moment @ basis.vectors) * basis.vectors).sum(-2)  # E[(qV)_j²]
        return top_channels(basis.variance * energy, channel_count(self.r, facts.head_dim, "loki: r")) * 4

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        depths: Tensor = index
        return depths.expand(query.shape[0], -1, -1)

    def typical_bits(self, head_dim: int) -> str:
        return f"{4.25 * channel_count(self.r, head_dim, 'loki: r'):g}"
