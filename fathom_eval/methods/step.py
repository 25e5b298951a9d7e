"""What a method may know of a step beside its query."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fathom_eval.stores import Store


@dataclass(frozen=True)
class Step:
    """One layer of one step. Its R rows are branches, or the positions that a fidelity run computes at once.

    Attributes:
        layer: Its number.
        index: What :meth:`~fathom_eval.methods.base.Method.index` gave for it.
        k: Of the rows; all of them have the same.
        scaling: Of the scores, before the softmax.
        length: N, the columns of all scores and masks: tokens of the longest row, the current one included.
        tokens: Tokens of each row, int64 ``[R]``. What stands after them in a row belongs to the future.
        query: The model's own queries, post-RoPE, ``[R, H, G, D]``.
        previous_query: Those of the layer before in the same step; None in the first layer.
        stores: Of the sealed tokens, in order: each holds the next ``store.tokens`` of them. The first is shared by all rows
            (keys ``[H, n, D]``), a second one holds what each row sealed itself (``[R, H, n, D]``).
        state: Of this branch and layer; empty in its first step, and kept from step to step. Always empty in ``scan_query`` and
            ``plan_step``.
        rehearsed_query: The queries that this layer would have of the layer before's attention input, where the method
            :attr:`~fathom_eval.methods.base.Method.rehearses`; None in the first layer.
    """

    layer: int
    index: Any
    k: int
    scaling: float
    length: int
    tokens: Tensor
    query: Tensor
    previous_query: Tensor | None
    stores: tuple[Store, ...]
    state: dict[str, Any]
    rehearsed_query: Tensor | None = None
