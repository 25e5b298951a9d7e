"""Threshold selection: every token whose score comes near the best, instead of a fixed number."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.methods.step import Step
from fathom_eval.methods.uniform import Thumbnail

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts


@dataclass(frozen=True)
class Threshold(Thumbnail):
    """The candidates of a thumbnail scan whose approximate logit is within ``margin`` of the best candidate's, at most k (after FFD).

    Logits are scaled as for the softmax, so a token that is left out has at most e^−margin of the best one's weight, as far as the scan
    can tell. It cuts off, so it promises nothing about k of all tokens.

    Attributes:
        depth: Planes read of every channel, 1 to 4.
        margin: In logits.
    """

    name: ClassVar[str] = "threshold"
    family: ClassVar[str] = "threshold"
    source: ClassVar[str] = "thumbnail scan with threshold selection (Fathom paper §4, after FFD), capped at k"
    ranks_all: ClassVar[bool] = False

    margin: float = 5.0

    def check(self, facts: ModelFacts) -> None:
        super().check(facts)
        if not self.margin >= 0:
            raise UserError(f"threshold: margin={self.margin:g} must be at least 0")

    def rank(self, scores: Tensor, step: Step) -> Tensor:
        least = scores.amax(-1, keepdim=True) - self.margin / step.scaling
        return scores.masked_fill(scores < least, -torch.inf)
