"""ShadowKV: landmarks of chunks, and the chunks that a landmark cannot stand for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.methods.base import Method
from fathom_eval.outliers import OutlierLandmarkSpec, OutlierLandmarkStore
from fathom_eval.stores import StoreSpec

if TYPE_CHECKING:
    from fathom_eval.methods.step import Step
    from fathom_eval.models import ModelFacts


@dataclass(frozen=True)
class ShadowKV(Method):
    """One set of chunks for the group by the largest of its heads' softmax over the landmarks; outlier chunks are always taken.

    Outliers are the prefix's sealed chunks whose landmark describes one of its keys worst. They take no part in the softmax, and they are
    part of k, where the authors keep them, like the last four chunks (the local window), beside their budget. There is no sink. A token
    that is not sealed counts as a chunk of its own. What the authors do to hold keys in low rank and values on the host changes no
    selection and is left out.

    Attributes:
        size: Tokens a chunk; divides 64.
        outlier: Chunks that are always taken.
    """

    name: ClassVar[str] = "shadowkv"
    family: ClassVar[str] = "ShadowKV"
    source: ClassVar[str] = (
        "ShadowKV as ByteDance-Seed/ShadowKV selects (arXiv:2410.21465): fp16 landmarks of 8-token chunks, softmax, largest of the group; "
        "48 outlier chunks and 4 local chunks within k, exact keys"
    )
    published: ClassVar[bool] = True
    forces: ClassVar[bool] = True

    size: int = 8
    outlier: int = 48

    def policy_defaults(self) -> Mapping[str, Any]:
        return {"sink": 0}

    def forced_tokens(self) -> int:
        return self.outlier * self.size

    def check(self, facts: ModelFacts) -> None:
        if self.size < 1 or 64 % self.size:
            raise UserError(f"shadowkv: size={self.size} must divide 64, the tokens of a sealed block")
        if self.outlier < 0:
            raise UserError(f"shadowkv: outlier={self.outlier} must be at least 0")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return OutlierLandmarkSpec(self.size, self.outlier)

    def rank(self, scores: Tensor, step: Step) -> Tensor:
        tokens = scores.shape[-1]
        outliers, sealed = _outliers(step, tokens)
        logits = (scores * step.scaling).masked_fill(outliers, -torch.inf)
        # All tokens of a chunk have its score, but a chunk counts once.
        share = torch.where(torch.arange(tokens, device=scores.device) < sealed, -math.log(self.size), 0.0)
        ranked = logits - (logits + share).logsumexp(-1, keepdim=True)
        return ranked.amax(2, keepdim=True).masked_fill(outliers, torch.inf).expand_as(scores)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return 16 * facts.head_dim / self.size

    def typical_bits(self, head_dim: int) -> str:
        return f"{16 * head_dim / self.size:g}"


def _outliers(step: Step, tokens: int) -> tuple[Tensor, int]:
    """Outlier tokens, boolean ``[R or 1, H, 1, tokens]``, and how many tokens are sealed."""
    heads = step.query.shape[1]
    found = torch.zeros(1, heads, 0, dtype=torch.bool, device=step.query.device)
    for store in step.stores:
        assert isinstance(store, OutlierLandmarkStore)
        part = store.outliers if store.outliers.dim() == 3 else store.outliers.unsqueeze(0)
        rows = max(len(found), len(part))
        found = torch.cat([found.expand(rows, -1, -1), part.expand(rows, -1, -1)], dim=-1)
    sealed = found.shape[-1]
    found = torch.nn.functional.pad(found[..., :tokens], (0, max(0, tokens - sealed)))
    return found.unsqueeze(2), sealed
