"""Labels of keys: a few channels of every key for each query head, four bits each (Double Sparsity, arXiv:2408.07092 §3.2).

Shapes: R branches, H KV heads, G query heads a KV head, D channels, n tokens, c channels of a label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from fathom_eval.asymmetric import asymmetric_codes, asymmetric_values, rounded
from fathom_eval.coded import HALF_SCALE, CodedStore, Part
from fathom_eval.observations import MeanQueryKeyProduct
from fathom_eval.stores import Store, StoreSpec

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer

BITS = 4
STATISTIC = MeanQueryKeyProduct()


@dataclass(frozen=True)
class LabelSpec(StoreSpec):
    """Labels of the channels with the largest mean|q ⊙ k| of each query head, in asymmetric codes a token.

    Attributes:
        channels: Of a label, c.
    """

    channels: int

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        importance: Tensor = layer.observations[STATISTIC]
        chosen = importance.sort(dim=-1, descending=True, stable=True).indices[..., : self.channels]
        store = LabelStore((layer.keys.shape[0],), layer.keys.shape[-1], chosen)
        store.append(layer.keys[:, :tokens])
        return store


class LabelStore(CodedStore):
    """Codes ``[…, G, n, c]``, steps and smallest levels ``[…, G, n, 1]``. Queries are rounded as keys are.

    Args:
        chosen: Channels of each query head's label, int64 ``[H, G, c]``.
    """

    parts = (Part(BITS, "code"), HALF_SCALE, HALF_SCALE)

    def __init__(self, lead: tuple[int, ...], channels: int, chosen: Tensor) -> None:
        super().__init__(lead, channels)
        self._chosen = chosen

    def empty(self, rows: int) -> Store:
        return LabelStore((rows, self.lead[-1]), self.channels, self._chosen)

    def encode(self, keys: Tensor) -> tuple[Tensor, ...]:
        group = self._chosen.shape[1]
        wanted = self._chosen.unsqueeze(-2).expand(*keys.shape[:-2], group, keys.shape[-2], -1)
        labels = keys.float().unsqueeze(-3).expand(*keys.shape[:-2], group, -1, -1).gather(-1, wanted)
        codes, step, low = asymmetric_codes(labels, -1, BITS, head=-3)
        return codes, step.unsqueeze(-1), low.unsqueeze(-1)

    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        codes, step, low = parts
        return asymmetric_values(codes, step.squeeze(-1), low.squeeze(-1), -1)

    def operand(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> Tensor:
        return rounded(projected.gather(-1, self._chosen.expand(query.shape[0], -1, -1, -1)), -1, BITS)

    def score(self, operand: Tensor, decoded: Tensor) -> Tensor:
        if decoded.dim() == 5:  # a branch's own blocks
            return (decoded @ operand.unsqueeze(-1)).squeeze(-1)
        # One product a query head reads its labels once for all branches: [H, G, R, c] × [H, G, c, n].
        return (operand.permute(1, 2, 0, 3) @ decoded.transpose(-1, -2)).permute(2, 0, 1, 3)
