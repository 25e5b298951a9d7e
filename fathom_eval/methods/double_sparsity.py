"""Double Sparsity: a label cache of channels chosen once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from torch import Tensor

from fathom_eval import labels
from fathom_eval.calibration_file import SESSION, calibration_of, resolve, statistics_of
from fathom_eval.methods.base import IF_CHANGED, Method, channel_count, top_channels
from fathom_eval.observations import Observation
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
        statistics: ``session``, the prefix's own keys and queries, or a calibration by name or path.
    """

    name: ClassVar[str] = "double_sparsity"
    family: ClassVar[str] = "Double Sparsity"
    source: ClassVar[str] = "Double Sparsity (arXiv:2408.07092), channels by mean|q|·mean|k| of the prefix, 4-bit codes"

    c: str = "D/4"
    statistics: str = field(default=SESSION, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        object.__setattr__(self, "statistics", resolve(self.statistics, "double_sparsity: statistics"))

    def check(self, facts: ModelFacts) -> None:
        channel_count(self.c, facts.head_dim, "double_sparsity: c")
        if self.statistics != SESSION:
            calibration_of(self.statistics).check(facts, "double_sparsity: statistics")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return PlaneSpec("raw")

    def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
        source = statistics_of(self.statistics, layer)
        importance = source.query_statistics.mean_magnitude * source.key_statistics.mean_magnitude
        return top_channels(importance, channel_count(self.c, facts.head_dim, "double_sparsity: c")) * 4

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        depths: Tensor = index
        return depths.expand(query.shape[0], -1, -1)

    def typical_bits(self, head_dim: int) -> str:
        return f"{4.25 * channel_count(self.c, head_dim, 'double_sparsity: c'):g}"


@dataclass(frozen=True)
class DoubleSparsityPublished(Method):
    """Double Sparsity as its authors' code runs it: labels of the channels with the largest mean|q ⊙ k| of each query head.

    A label is quantised on its own, and so is the query's, so a group of G query heads reads G labels of every key. The mean is that of
    the whole prefill; the authors' calibration keeps the last of its blocks only. Their selection keeps no sink and no window beyond the
    current token.

    Attributes:
        c: Channels of a label, a number or a share of head_dim.
    """

    name: ClassVar[str] = "double_sparsity_published"
    family: ClassVar[str] = "Double Sparsity as published"
    source: ClassVar[str] = (
        "Double Sparsity as andy-yang-1/DoubleSparse runs it (arXiv:2408.07092): mean|q·k| per query head, 4-bit labels of q and k "
        "a token, layers 0 and 1 dense, no sink, no local window"
    )
    version: ClassVar[int] = 2
    published: ClassVar[bool] = True

    c: str = "D/4"

    def policy_defaults(self) -> Mapping[str, Any]:
        return {"sink": 0, "local": 1, "dense_layers": (0, 1)}

    def check(self, facts: ModelFacts) -> None:
        channel_count(self.c, facts.head_dim, f"{self.name}: c")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return labels.LabelSpec(channel_count(self.c, facts.head_dim, f"{self.name}: c"))

    def observes(self, facts: ModelFacts) -> tuple[Observation, ...]:
        return (labels.STATISTIC,)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return facts.query_heads // facts.kv_heads * self._bits(facts.head_dim)

    def typical_bits(self, head_dim: int) -> str:
        return f"{self._bits(head_dim)} a query head"

    def _bits(self, head_dim: int) -> int:
        """Of one label: its codes, step and smallest level."""
        return labels.BITS * channel_count(self.c, head_dim, f"{self.name}: c") + 32
