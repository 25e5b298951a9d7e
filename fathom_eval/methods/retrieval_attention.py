"""RetrievalAttention: the keys as a vector index."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fathom_eval.errors import UserError
from fathom_eval.methods.base import IF_CHANGED, Method
from fathom_eval.observations import Observation, RecentQueries
from fathom_eval.pair_graph import PairGraphSpec
from fathom_eval.stores import StoreSpec
from fathom_eval.vector_index import GraphSpec, InvertedSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts
    from fathom_eval.selection import Policy


@dataclass(frozen=True)
class RetrievalAttention(Method):
    """Search a vector index of the keys with every query head; only what the search finds competes (arXiv:2409.10516).

    The authors' graph links keys through the queries of the prompt that they are near to, because queries lie elsewhere than keys: that is
    ``pairs``, in torch. The other two come from faiss and know the keys alone: ``ivf`` are inverted lists, ``hnsw`` is a graph. Bits are
    the keys and centroids that a search touches, not the links of a graph that led there. It leaves out, so it promises nothing about k of
    all tokens.

    Attributes:
        kind: ``ivf``, ``hnsw`` or ``pairs``.
        size: Keys a list on average, with ``ivf``.
        probes: Share of the lists that a query looks into, with ``ivf``.
        candidates: Keys that a search of a graph returns, with ``hnsw`` or ``pairs``; at least k.
    """

    name: ClassVar[str] = "retrieval_attention"
    family: ClassVar[str] = "RetrievalAttention"
    source: ClassVar[str] = (
        "after RetrievalAttention (arXiv:2409.10516): a faiss index of the keys alone, inverted lists or HNSW, or (kind=pairs) a graph "
        "from query-key pairs as the authors build; bits are the keys and centroids touched, without a graph's links"
    )
    version: ClassVar[int] = 2
    ranks_all: ClassVar[bool] = False
    declares: ClassVar[bool] = False

    kind: Literal["ivf", "hnsw", "pairs"] = "ivf"
    size: int = field(default=64, metadata=IF_CHANGED)
    probes: float = field(default=0.05, metadata=IF_CHANGED)
    candidates: int = field(default=256, metadata=IF_CHANGED)

    def check(self, facts: ModelFacts) -> None:
        idle = ("candidates",) if self.kind == "ivf" else ("size", "probes")
        for option in dataclasses.fields(self):
            if option.name in idle and getattr(self, option.name) != option.default:
                raise UserError(f"retrieval_attention: {option.name} does nothing with kind={self.kind}")
        if self.kind != "pairs" and importlib.util.find_spec("faiss") is None:
            raise UserError("retrieval_attention: the package faiss is not installed; pip install 'fathom-eval[faiss]'")
        if self.size < 1:
            raise UserError(f"retrieval_attention: size={self.size} must be at least 1")
        if not 0 < self.probes <= 1:
            raise UserError(f"retrieval_attention: probes={self.probes:g} must lie above 0 and at most at 1, a share of the lists")
        if self.candidates < 1:
            raise UserError(f"retrieval_attention: candidates={self.candidates} must be at least 1")

    def check_k(self, k: int, policy: Policy) -> None:
        if self.kind != "ivf" and self.candidates < k:
            raise UserError(
                f"retrieval_attention: candidates={self.candidates} must be at least k={k}, or a search finds fewer than k keys"
            )

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        if self.kind == "ivf":
            return InvertedSpec(self.size, self.probes)
        return GraphSpec(candidates=self.candidates) if self.kind == "hnsw" else PairGraphSpec(candidates=self.candidates)

    def observes(self, facts: ModelFacts) -> tuple[Observation, ...]:
        return (RecentQueries(PairGraphSpec().queries),) if self.kind == "pairs" else ()

    def typical_bits(self, head_dim: int) -> str:
        return "as touched"

    def line(self) -> str:
        return f"{self.family} {self.kind}"


@dataclass(frozen=True)
class RetrievalAttentionPublished(RetrievalAttention):
    """RetrievalAttention as its authors run it: a graph from query-key pairs beside the first 128 and the last 512 tokens.

    Their queries are all of the prompt's, here they are the last 2,048 of each head; and keys that no query is near to are linked to the
    tokens beside them, where theirs search the graph for neighbours. They retrieve 100 keys; here k is k.
    """

    name: ClassVar[str] = "retrieval_attention_published"
    family: ClassVar[str] = "RetrievalAttention as published"
    source: ClassVar[str] = (
        "RetrievalAttention as its authors run it (arXiv:2409.10516): a graph from query-key pairs, first 128 and last 512 tokens kept; k "
        "must exceed 640"
    )
    version: ClassVar[int] = 1
    published: ClassVar[bool] = True

    kind: Literal["ivf", "hnsw", "pairs"] = field(default="pairs", metadata=IF_CHANGED)
    candidates: int = field(default=1024, metadata=IF_CHANGED)

    def policy_defaults(self) -> Mapping[str, Any]:
        return {"sink": 128, "local": 512}

    def line(self) -> str:
        return self.family if self.kind == "pairs" else super().line()
