"""Self-Indexing KVCache: retrieve by the signs of the keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.methods.base import Method
from fathom_eval.sign_codes import SignCodeSpec
from fathom_eval.stores import StoreSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts


@dataclass(frozen=True)
class SelfIndexing(Method):
    """One bit a channel, the sign of the key less the channel's median; the signs of four channels name a centroid.

    Only the retrieval is this method's: attention is exact over the selected set. The authors' cache attends to 2-bit keys and values,
    keeps the 64 tokens that the prompt's last query scores best in full, and averages the queries of a group (``share=group_sum``).

    Attributes:
        group: Channels of a centroid; divides head_dim.
    """

    name: ClassVar[str] = "self_indexing"
    family: ClassVar[str] = "Self-Indexing"
    source: ClassVar[str] = (
        "Self-Indexing KVCache (arXiv:2603.14224): its one-bit sign codes and centroids of the prefix's keys as the scan, per query head; "
        "not its 2-bit attention nor its 64 full-precision tokens"
    )

    group: int = 4

    def check(self, facts: ModelFacts) -> None:
        if not 1 <= self.group <= 8 or facts.head_dim % self.group:
            raise UserError(f"self_indexing: group={self.group} must lie in 1..8 and divide the head_dim {facts.head_dim}")

    def store(self, facts: ModelFacts) -> StoreSpec | None:
        return SignCodeSpec(self.group)

    def declared_bits(self, plan: Tensor | None, facts: ModelFacts) -> float:
        return facts.head_dim

    def typical_bits(self, head_dim: int) -> str:
        return f"{head_dim}"
