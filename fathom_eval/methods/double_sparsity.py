"""Double Sparsity: a label cache of channels chosen once."""

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
class DoubleSparsity(Method):
    """The c channels with the largest mean|q| · mean|k|, 4-bit codes (arXiv:2408.07092 as the Fathom paper runs it, §2).

    Attributes:
        c: Channels, a number or a share of head_dim.
    """

    name: ClassVar[str] = "double_sparsity"
    family: ClassVar[str] = "Double Sparsity"
    source: ClassVar[str] = "Double Sparsity (arXiv:2408.07092), channels by mean|q|·mean|k| of the prefix, 4-bit codes"

    c: str = "D/4"

    def check(self, facts: ModelFacts) -> None:
        channel_count(self.c, facts.head_dim, "double_sparsity: c")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return PlaneSpec("raw")

    def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
        importance = layer.query_statistics.mean_magnitude * layer.key_statistics.mean_magnitude
        return top_channels(importance, channel_count(self.c, facts.head_dim, "double_sparsity: c")) * 4

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        depths: Tensor = index
        return depths.expand(query.shape[0], -1, -1)

    def typical_bits(self, head_dim: int) -> str:
        return f"{4.25 * channel_count(self.c, head_dim, 'double_sparsity: c'):g}"
