"""Attention of many branches over one shared prefix and the tokens of their own: over what each head selected, or over everything.

Nothing is gathered on a GPU: the kernels read K/V rows where they lie, in the prefix or in a branch's tail.

Shapes: R rows, H KV heads, G query heads a KV head, n tokens of the prefix, T of a branch's own, D channels.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fathom_eval.kernels.branches import reference
from fathom_eval.kernels.choose import Contest, compiled

__all__ = ["SharedRows", "attend_everything", "attend_lists", "rerank_lists"]


@dataclass(frozen=True)
class SharedRows:
    """K/V of all tokens of some branches.

    Attributes:
        keys, values: Of the prefix, ``[H, n, D]``.
        tail_keys, tail_values: Of each branch's own tokens, which follow, ``[R, H, T, D]``.
    """

    keys: Tensor
    values: Tensor
    tail_keys: Tensor
    tail_values: Tensor

    @property
    def prefix_tokens(self) -> int:
        return self.keys.shape[1]

    @property
    def tokens(self) -> int:
        return self.prefix_tokens + self.tail_keys.shape[2]

    def of(self, rows: slice | list[int] | Tensor) -> SharedRows:
        """The same for some of the branches."""
        return SharedRows(self.keys, self.values, self.tail_keys[rows], self.tail_values[rows])


def attend_lists(query: Tensor, shared: SharedRows, lists: Tensor, contest: Contest, scaling: float, mask: Tensor | None = None) -> Tensor:
    """Exact attention of every query head over its list and what is always kept, in fp32.

    Args:
        query: ``[R, H, G, D]``.
        lists: Tokens of each head, ``[R, H, G, C]``; the ``counts`` of the contest are attended to, or all C with a mask.
        mask: ``[R, H, G, C]``, False on entries that do not take part.
        scaling: Multiplies q·k.

    Returns:
        fp32 ``[R, H, G, D]``.
    """
    if compiled(query):
        from fathom_eval.kernels.branches import triton as kernel

        return kernel.attend_lists(query, shared, lists, contest, scaling, mask)
    return reference.attend_lists(query, shared, lists, contest, scaling, mask)


def rerank_lists(query: Tensor, shared: SharedRows, lists: Tensor, contest: Contest, share: str) -> Tensor:
    """Rescore each head's ``fetched`` candidates with their own keys and keep the ``counts`` best; of equal scores the lower token.

    Args:
        query: ``[R, H, G, D]``.
        lists: From :func:`fathom_eval.kernels.choose.choose_tokens`. They may be narrowed in place.
        share: See :class:`fathom_eval.selection.Policy`: heads that share a set have one list of candidates, and keep one.

    Returns:
        Lists with the best in the first ``counts`` places, ascending on a GPU.
    """
    if compiled(query) and share == "head":
        from fathom_eval.kernels.branches import triton as kernel

        return kernel.rerank_lists(query, shared, lists, contest)
    found = reference.rerank_lists(query, shared, lists, contest, share)
    return found.sort(-1).values if compiled(query) else found


def attend_everything(query: Tensor, shared: SharedRows, scaling: float) -> Tensor:
    """Dense attention in fp32 without a copy of the prefix for every row, ``[R, H, G, D]`` to fp32 ``[R, H, G, D]``."""
    if compiled(query):
        from fathom_eval.kernels.branches import triton as kernel

        return kernel.attend_everything(query, shared, scaling)
    return reference.attend_everything(query, shared, scaling)
