"""MagicPIG: keys sampled by locality-sensitive hashing, with importance weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.hashing import HashSpec, HashStore
from fathom_eval.methods.base import Method
from fathom_eval.methods.step import Step
from fathom_eval.stores import StoreSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts


@dataclass(frozen=True)
class MagicPIG(Method):
    """Attention to the keys that share at least two of ``tables`` hashes of ``bits`` bits with the query (arXiv:2410.16179).

    Each sampled key weighs 1/u, u being the probability that it is sampled, so that sums over the samples estimate sums over all keys
    without bias. Keys are centred by the mean of those that can be sampled, which changes no softmax; queries are not. The size of the set
    is whatever the hashes give; k is only that of the exact set beside it. It samples, so it promises nothing about k of all tokens.

    Attributes:
        bits: K, sign projections of one hash.
        tables: L.
        seed: Of the projections.
    """

    name: ClassVar[str] = "magicpig"
    family: ClassVar[str] = "MagicPIG"
    source: ClassVar[str] = (
        "MagicPIG (arXiv:2410.16179): LSH sampling of centred keys, at least two collisions, importance weights; bits are the bucket "
        "entries touched"
    )
    ranks_all: ClassVar[bool] = False
    capped: ClassVar[bool] = False
    declares: ClassVar[bool] = False
    version: ClassVar[int] = 2
    least_probability: ClassVar[float] = 0.0  # added to u

    bits: int = 10
    tables: int = 150
    seed: int = 0

    def check(self, facts: ModelFacts) -> None:
        if not 1 <= self.bits <= 15:
            raise UserError(f"{self.name}: bits={self.bits} must lie in 1..15")
        if self.tables < 2:
            raise UserError(f"{self.name}: tables={self.tables} must be at least 2, since a key is sampled by two collisions")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return HashSpec(self.bits, self.tables, self.seed)

    def log_weights(self, step: Step) -> Tensor:
        if not step.stores:
            return step.query.new_zeros(*step.query.shape[:3], 0, dtype=torch.float32)
        parts = []
        for store in step.stores:
            assert isinstance(store, HashStore)
            parts.append(-log_sampling_probability(store.cosine(step.query), self.bits, self.tables, self.least_probability))
        return torch.cat(parts, dim=-1)

    def typical_bits(self, head_dim: int) -> str:
        return "as touched"


@dataclass(frozen=True)
class MagicPIGPublished(MagicPIG):
    """MagicPIG as its authors' code runs it: layers 0, 16, 32, … attend to everything, and the local window holds 64 tokens.

    A key weighs 1/(u + 10⁻⁴), so that one which is found against all odds does not outweigh the others. Theirs never hashes what is
    generated; here it is once its block is sealed.
    """

    name: ClassVar[str] = "magicpig_published"
    family: ClassVar[str] = "MagicPIG as published"
    source: ClassVar[str] = "MagicPIG as Infini-AI-Lab/MagicPIG runs it (arXiv:2410.16179): layers 0, 16, 32, … dense, local window 64"
    least_probability: ClassVar[float] = 1e-4
    published: ClassVar[bool] = True

    def policy_defaults(self) -> Mapping[str, Any]:
        return {"dense_every": 16, "local": 64}


def log_sampling_probability(cosine: Tensor, bits: int, tables: int, least: float = 0.0) -> Tensor:
    """Log (u + least) with u = 1 − (1 − p^K)^L − L·p^K·(1 − p^K)^(L−1) and p = 1 − acos(cosine)/π (Eq. 7 of the paper), fp32.

    Rounding takes cosines of nearly parallel vectors above 1, where acos is not a number, so they are clamped.
    """
    collide = (1 - cosine.double().clamp(-1, 1).acos() / torch.pi) ** bits
    # 1 − (1 − x)^(L−1)·(1 + (L−1)·x), in logarithms since x may be tiny.
    missed = (tables - 1) * torch.log1p(-collide) + torch.log1p((tables - 1) * collide)
    return (-torch.expm1(missed) + least).clamp_min(torch.finfo(torch.float32).tiny).log().float()
