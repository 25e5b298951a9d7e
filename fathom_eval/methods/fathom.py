"""Fathom: every query decides how many bits of each channel it reads."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import Tensor

from fathom_eval.calibration_file import SESSION, calibration_of, resolve, statistics_of
from fathom_eval.depth_tables import DepthTable, measure_depths
from fathom_eval.errors import UserError
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.methods.base import IF_CHANGED, Method
from fathom_eval.planes import PlaneSpec, stored_depths
from fathom_eval.stores import StoreSpec
from fathom_eval.waterfill import channel_importance, read_depths

if TYPE_CHECKING:
    from fathom_eval.methods.step import Step
    from fathom_eval.models import ModelFacts
    from fathom_eval.prefill import PrefixLayer


LEAST_BUDGET, MOST_BUDGET = 24, 128
"""Bounds of a budget by ratio."""


@dataclass(frozen=True)
class Fathom(Method):
    """Reverse water-filling of a bit budget over the channels of a bit-plane store (paper §3).

    Attributes:
        budget: Code bits a key for a head_dim of 128, the paper's unit; it scales with head_dim (48 is 24 bits at 64 channels).
        basis: ``raw`` channels, ``klt`` planes, or ``auto``: raw for models with QK-norm, otherwise klt (paper §3.5).
        statistics: ``session``, those of the prefix's own keys, or a calibration by name or path.
        layer_plan: A calibration by name or path, whose per-layer plan of mean ``budget`` replaces the flat budget (paper §3.4).
        codes: ``4bit`` planes; ``8bit`` planes, of which up to eight are read; or ``allocated``: four planes of which only as many are
            stored as make head_dim bits a key, the same for every query (paper §6, B1).
        scales: ``fp16``, or ``fp8``, which takes 8 of the 16 bits of every scale that is read.
        depths: ``model``: Eq. 4. ``measured``: errors of each channel and depth as they are in the prefix, the first plane at its true
            cost; ``budget`` then includes the scales, so that budget=56 reads what a budget of 48 reads otherwise.
        by_ratio: Spend more where k is a smaller share of the n tokens: ``budget`` + 8·log₂(0.016·n / k), within 24..128. At k = 1.6 % of
            the tokens that is the budget itself.
    """

    name: ClassVar[str] = "fathom"
    family: ClassVar[str] = "Fathom"
    source: ClassVar[str] = "Fathom (arXiv:2609.17652) §3; statistics of the prefix's own keys"

    budget: int = 48
    basis: Literal["auto", "raw", "klt"] = "auto"
    statistics: str = field(default=SESSION, metadata=IF_CHANGED)
    layer_plan: str = field(default="", metadata=IF_CHANGED)
    codes: Literal["4bit", "8bit", "allocated"] = field(default="4bit", metadata=IF_CHANGED)
    scales: Literal["fp16", "fp8"] = field(default="fp16", metadata=IF_CHANGED)
    depths: Literal["model", "measured"] = field(default="model", metadata=IF_CHANGED)
    by_ratio: bool = field(default=False, metadata=IF_CHANGED)

    def __post_init__(self) -> None:
        object.__setattr__(self, "statistics", resolve(self.statistics, f"{self.name}: statistics"))
        if self.layer_plan:
            object.__setattr__(self, "layer_plan", resolve(self.layer_plan, f"{self.name}: layer_plan", session=False))

    def check(self, facts: ModelFacts) -> None:
        if not 1 <= self.budget <= 4 * 128:
            raise UserError(f"{self.name}: budget={self.budget} must lie in 1..512 (code bits for a head_dim of 128)")
        if self.statistics != SESSION:
            calibration_of(self.statistics).check(facts, f"{self.name}: statistics")
        if self.depths == "measured" and self.codes == "allocated":
            raise UserError(f"{self.name}: depths=measured knows nothing of what codes=allocated stores; give one of them")
        if self.depths == "measured" and self.layer_plan:
            raise UserError(f"{self.name}: a per-layer plan holds code bits, and depths=measured spends bits with scales; give one of them")
        if self.by_ratio and (self.layer_plan or self.depths == "measured"):
            other = "layer_plan" if self.layer_plan else "depths=measured"
            raise UserError(f"{self.name}: by_ratio takes the budget from k and the tokens, and {other} fixes it; give one of them")
        if self.layer_plan:
            self._check_plan(facts)

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return self._plane_spec(facts)

    def index(self, layer: PrefixLayer, facts: ModelFacts) -> Any:
        spec = self._plane_spec(facts)
        if self.depths == "measured":
            return measure_depths(layer, spec, self.budget * facts.head_dim / 128)
        statistics = statistics_of(self.statistics, layer).key_statistics
        variance = statistics.basis.variance if self._basis(facts) == "klt" else statistics.variance
        budget = calibration_of(self.layer_plan).plans[self.budget][layer.number] if self.layer_plan else self.budget
        bits = scaled_bits(budget, facts.head_dim)
        return (variance, bits, stored_depths(layer, spec)) if spec.stored else (variance, bits)

    def plan(self, query: Tensor, index: Any) -> Tensor | None:
        if isinstance(index, DepthTable):
            return index.depths(query)
        variance, bits, *limits = index
        return read_depths(channel_importance(query, variance), bits, self._planes, *limits)

    def plan_step(self, query: Tensor, step: Step) -> Tensor | None:
        if not self.by_ratio:
            return self.plan(query, step.index)
        variance, _, *limits = step.index
        bits = ratio_bits(self.budget, step.tokens, step.k, query.shape[-1]).unsqueeze(-1)
        return read_depths(channel_importance(query, variance), bits, self._planes, *limits)

    @property
    def extended(self) -> bool:
        # plan_step is plan unless the budget goes by k / n.
        others = ("scan_query", "rank", "log_weights", "remainder", "learn")
        return self.by_ratio or type(self).plan_step is not Fathom.plan_step or self.overrides(*others)

    def plan_key(self, index: Any) -> Hashable:
        # Equal variances are one tensor of the layer's statistics.
        return None if isinstance(index, DepthTable) or len(index) > 2 else (id(index[0]), self._planes)

    @classmethod
    def plan_together(cls, query: Tensor, members: Sequence[tuple[Fathom, Any, int]]) -> Tensor:
        first, (variance, *_), _ = members[0]
        budgets = tuple(bits for _, (_, bits), rows in members for _ in range(rows))
        return read_depths(channel_importance(query, variance), budgets, first._planes)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> Tensor | float:
        assert plan is not None
        return plan.sum(-1) + (16 if self.scales == "fp16" else 8) / BLOCK * (plan > 0).sum(-1)

    def typical_bits(self, head_dim: int) -> str:
        if self.depths == "measured":
            return f"{self.budget * head_dim / 128:g} at most"
        if self.by_ratio:
            return f"{scaled_bits(LEAST_BUDGET, head_dim)} to {scaled_bits(MOST_BUDGET, head_dim)}, by k / n, + scales"
        return f"{self.code_bits(head_dim)} + scales"

    def line(self) -> str:
        words = [f"{self.family} {self.basis}"]
        defaults = {"codes": "4bit", "scales": "fp16", "depths": "model"}
        words += [f"{name}={value}" for name, usual in defaults.items() if (value := getattr(self, name)) != usual]
        if self.by_ratio:
            words.append("by ratio")
        if self.statistics != SESSION:
            words.append(f"statistics={self.statistics}")
        if self.layer_plan:
            words.append(f"layer_plan={self.layer_plan}")
        return " ".join(words)

    def code_bits(self, head_dim: int) -> int:
        """The flat budget, or the mean of the plan, at this head_dim."""
        return scaled_bits(self.budget, head_dim)

    def _check_plan(self, facts: ModelFacts) -> None:
        calibration = calibration_of(self.layer_plan)
        calibration.check(facts, f"{self.name}: layer_plan")
        settings = calibration.provenance.plan
        if settings is None:
            raise UserError(
                f"{self.name}: {calibration.name} holds no per-layer plan; make one with 'fathom-eval calibrate --plan {self.budget}'"
            )
        if self.budget not in settings.means:
            means = ", ".join(map(str, settings.means))
            raise UserError(f"{self.name}: {calibration.name} holds plans of mean {means}, not of budget={self.budget}")
        if self._basis(facts) != settings.basis:
            raise UserError(
                f"{self.name}: the plan of {calibration.name} was made for basis={settings.basis}; give that, or calibrate --plan-basis"
            )

    @property
    def _planes(self) -> int:
        return 8 if self.codes == "8bit" else 4

    def _plane_spec(self, facts: ModelFacts) -> PlaneSpec:
        basis = self._basis(facts)
        stored = facts.head_dim if self.codes == "allocated" else 0
        # Without an allocation or eight-bit scales, raw planes are the same whatever the statistics: methods share them.
        depends = basis == "klt" or stored or self.scales == "fp8"
        return PlaneSpec(basis, self._planes, self.statistics if depends else SESSION, self.scales, stored)

    def _basis(self, facts: ModelFacts) -> Literal["raw", "klt"]:
        if self.basis == "auto":
            return "raw" if facts.qk_norm else "klt"
        return self.basis


def ratio_bits(budget: int, tokens: Tensor, k: int, head_dim: int) -> Tensor:
    """Code bits at this head_dim for k of ``tokens`` tokens, int64 of their shape: ``budget`` at k = 1.6 % of them."""
    wanted = budget + 8 * torch.log2(0.016 * tokens.double() / k)
    return (wanted.clamp(LEAST_BUDGET, MOST_BUDGET) * (head_dim / 128)).round().long().clamp_min(1)


def scaled_bits(budget: int, head_dim: int) -> int:
    """A budget for a head_dim of 128, the paper's unit, at this head_dim: at least one bit."""
    return max(1, round(budget * head_dim / 128))
