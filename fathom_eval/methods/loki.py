"""Loki: the leading principal components of the keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fathom_eval import columns
from fathom_eval.calibration_file import SESSION, calibration_of, resolve, statistics_of
from fathom_eval.errors import UserError
from fathom_eval.methods.base import IF_CHANGED, Method, channel_count, top_channels
from fathom_eval.planes import PlaneSpec
from fathom_eval.stores import StoreSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts
    from fathom_eval.prefill import PrefixLayer


@dataclass(frozen=True)
class Loki(Method):
    """r coordinates of the keys' PCA basis, ordered by score variance λ_j·E[(qV)_j²] (paper §2).

    Attributes:
        r: Coordinates, a number or a share of head_dim.
        bits: Of a coordinate: 4 for codes, 16 for fp16 (paper §6, B2).
        statistics: ``session``, the prefix's own keys and queries, or a calibration by name or path.
    """

    name: ClassVar[str] = "loki"
    family: ClassVar[str] = "Loki"
    source: ClassVar[str] = "Loki (arXiv:2406.02542), 4-bit codes or fp16, PCA of the prefix's keys ordered by score variance"

    r: str = "D/4"
    bits: int = field(default=4, metadata=IF_CHANGED)
    statistics: str = field(default=SESSION, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        object.__setattr__(self, "statistics", resolve(self.statistics, "loki: statistics"))

    def check(self, facts: ModelFacts) -> None:
        channel_count(self.r, facts.head_dim, "loki: r")
        if self.bits not in (4, columns.BITS):
            raise UserError(f"loki: bits={self.bits} must be 4 or {columns.BITS} (fp16)")
        if self.statistics != SESSION:
            calibration_of(self.statistics).check(facts, "loki: statistics")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        if self.bits == columns.BITS:
            return columns.ColumnSpec("klt", statistics=self.statistics)
        return PlaneSpec("klt", statistics=self.statistics)

    def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
        source = statistics_of(self.statistics, layer)
        basis = source.key_statistics.basis
        energy = ((source.query_statistics.second_moment @ basis.vectors) * basis.vectors).sum(-2)  # E[(qV)_j²]
        return top_channels(basis.variance * energy, channel_count(self.r, facts.head_dim, "loki: r")) * self.bits

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        depths: Tensor = index
        return depths.expand(query.shape[0], -1, -1)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> Tensor | float:
        assert plan is not None
        return columns.column_bits(plan) if self.bits == columns.BITS else super().declared_bits(plan, facts)

    def typical_bits(self, head_dim: int) -> str:
        bits = self.bits if self.bits == columns.BITS else 4.25
        return f"{bits * channel_count(self.r, head_dim, 'loki: r'):g}"

    def line(self) -> str:
        return f"{self.family} fp16" if self.bits == columns.BITS else self.family


@dataclass(frozen=True)
class LokiPublished(Method):
    """Loki as its authors' code runs it: fp16, coordinates in the order of the eigenvalues, keys projected without being centred.

    What the keys' mean has in the other directions is added to the scores, since tokens that are not sealed are scored exactly, where their
    code projects them too. Their code keeps no sink and no window beyond the current token and takes a share of the tokens; here k is k.

    Attributes:
        r: Coordinates, a number or a share of head_dim.
        statistics: ``session``, the prefix's own keys, or a calibration by name or path.
    """

    name: ClassVar[str] = "loki_published"
    family: ClassVar[str] = "Loki as published"
    source: ClassVar[str] = "Loki as hpcgroup/loki runs it (arXiv:2406.02542): fp16, eigenvalue order, uncentred, no sink, no local window"
    published: ClassVar[bool] = True

    r: str = "D/4"
    statistics: str = field(default=SESSION, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        object.__setattr__(self, "statistics", resolve(self.statistics, f"{self.name}: statistics"))

    def policy_defaults(self) -> Mapping[str, Any]:
        return {"sink": 0, "local": 1}

    def check(self, facts: ModelFacts) -> None:
        channel_count(self.r, facts.head_dim, f"{self.name}: r")
        if self.statistics != SESSION:
            calibration_of(self.statistics).check(facts, f"{self.name}: statistics")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return columns.ColumnSpec("klt", centred=False, statistics=self.statistics)

    def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
        variance = statistics_of(self.statistics, layer).key_statistics.basis.variance
        leading = torch.arange(facts.head_dim, device=variance.device) < channel_count(self.r, facts.head_dim, f"{self.name}: r")
        return leading.expand_as(variance) * columns.BITS

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        depths: Tensor = index
        return depths.expand(query.shape[0], -1, -1)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> Tensor | float:
        assert plan is not None
        return columns.column_bits(plan)

    def typical_bits(self, head_dim: int) -> str:
        return f"{columns.BITS * channel_count(self.r, head_dim, f'{self.name}: r')}"
