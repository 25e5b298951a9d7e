"""RetrievalAttention: the keys as a vector index."""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar, Literal

from fathom_eval.errors import UserError
from fathom_eval.methods.base import IF_CHANGED, Method
from fathom_eval.stores import StoreSpec
from fathom_eval.vector_index import GraphSpec, InvertedSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts
    from fathom_eval.selection import Policy


@dataclass(frozen=True)
class RetrievalAttention(Method):
    """Search a vector index of the keys with every query head; only what the search finds competes (arXiv:2409.10516).

    The authors' graph links keys through the queries of the prompt that they are near to, because queries lie elsewhere than keys. Neither
    index here knows the prompt's queries: ``ivf`` are inverted lists, and ``hnsw`` a graph of the keys alone. Both come from faiss, and
    bits are the keys and centroids that a search touches. It leaves out, so it promises nothing about k of all tokens.

    Attributes:
        kind: ``ivf`` or ``hnsw``.
        size: Keys a list on average, with ``ivf``.
        probes: Share of the lists that a query looks into, with ``ivf``.
        candidates: Keys that a search of the graph returns, with ``hnsw``; at least k.
    """

    name: ClassVar[str] = "retrieval_attention"
    family: ClassVar[str] = "RetrievalAttention"
    source: ClassVar[str] = (
        "after RetrievalAttention (arXiv:2409.10516): a faiss index of the keys alone, inverted lists or HNSW, where the authors build "
        "a graph from query-key pairs; bits are the keys and centroids touched"
    )
    version: ClassVar[int] = 2
    ranks_all: ClassVar[bool] = False
    declares: ClassVar[bool] = False

    kind: Literal["ivf", "hnsw"] = "ivf"
    size: int = field(default=64, metadata=IF_CHANGED)
    probes: float = field(default=0.05, metadata=IF_CHANGED)
    candidates: int = field(default=256, metadata=IF_CHANGED)

    def check(self, facts: ModelFacts) -> None:
        idle = ("size", "probes") if self.kind == "hnsw" else ("candidates",)
        for option in dataclasses.fields(self):
            if option.name in idle and getattr(self, option.name) != option.default:
                raise UserError(f"retrieval_attention: {option.name} does nothing with kind={self.kind}")
        if importlib.util.find_spec("faiss") is None:
            raise UserError("retrieval_attention: the package faiss is not installed; pip install 'fathom-eval[faiss]'")
        if self.size < 1:
            raise UserError(f"retrieval_attention: size={self.size} must be at least 1")
        if not 0 < self.probes <= 1:
            raise UserError(f"retrieval_attention: probes={self.probes:g} must lie above 0 and at most at 1, a share of the lists")
        if self.candidates < 1:
            raise UserError(f"retrieval_attention: candidates={self.candidates} must be at least 1")

    def check_k(self, k: int, policy: Policy) -> None:
        if self.kind == "hnsw" and self.candidates < k:
            raise UserError(
                f"retrieval_attention: candidates={self.candidates} must be at least k={k}, or a search finds fewer than k keys"
            )

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return InvertedSpec(self.size, self.probes) if self.kind == "ivf" else GraphSpec(candidates=self.candidates)

    def typical_bits(self, head_dim: int) -> str:
        return "as touched"

    def line(self) -> str:
        return f"{self.family} {self.kind}"
