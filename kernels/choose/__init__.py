"""Which tokens each branch of a batch selects: exact top-k with a range and a count of its own for every row.

Shapes: R rows, H KV heads, G query heads a KV head, N tokens. A list holds tokens in places up to its row's count and :data:`NONE` after
them. The GPU's lists are int32 and ascending, those of torch int64 and in no particular order.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fathom_eval.kernels.choose import reference
from fathom_eval.kernels.topk import NONE

__all__ = ["LARGEST_COUNT", "NONE", "Contest", "choose_tokens", "compiled", "count_rows"]

LARGEST_COUNT = 2**20 - 1
"""Tokens that may compete in a row."""


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def compiled(tensor: Tensor) -> bool:
    """Whether a tensor's device runs the Triton kernels of this folder's operations; torch does elsewhere."""
    return tensor.is_cuda and _has_triton()


@dataclass(frozen=True)
class Contest:
    """What competes in each row, and how much of it is taken.

    Attributes:
        starts, stops: Tokens ``[start, stop)`` compete. Those before and behind them are always kept.
        counts: Tokens that are selected, at most as many as compete.
        fetched: Candidates that are looked at for it, at least as many.
        table: int32 ``[4, R]``, the same on the device.
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]
    counts: tuple[int, ...]
    fetched: tuple[int, ...]
    table: Tensor

    @classmethod
    def of(cls, ranges: Sequence[tuple[int, int]], counts: Sequence[int], fetched: Sequence[int], device: torch.device | str) -> Contest:
        """The contest of rows with these ranges and counts. The device is not waited for."""
        starts, stops = (tuple(ends) for ends in zip(*ranges, strict=True))
        table = torch.tensor([starts, stops, counts, fetched], dtype=torch.int32).to(device, non_blocking=True)
        return cls(starts, stops, tuple(counts), tuple(fetched), table)

    @property
    def reranks(self) -> bool:
        """Whether any row looks at more tokens than it selects."""
        return self.fetched != self.counts

    def alike(self) -> dict[tuple[int, int, int, int], list[int]]:
        """Rows by their start, stop, count and number of candidates."""
        found: dict[tuple[int, int, int, int], list[int]] = {}
        for row, key in enumerate(zip(self.starts, self.stops, self.counts, self.fetched, strict=True)):
            found.setdefault(key, []).append(row)
        return found


def choose_tokens(scores: Tensor, contest: Contest) -> Tensor:
    """The best candidates of every query head; of equal scores the lower token is taken.

    Args:
        scores: fp32 ``[R, H, G, N]``, the last dimension dense.
        contest: Its ``fetched`` tokens are listed.

    Returns:
        Lists ``[R, H, G, C]``, C the largest of ``fetched``.

    Raises:
        ValueError: More tokens compete than :data:`LARGEST_COUNT`.
    """
    if scores.shape[-1] > LARGEST_COUNT:
        raise ValueError(f"{scores.shape[-1]} tokens are more than the {LARGEST_COUNT} that can compete")
    if compiled(scores):
        from fathom_eval.kernels.choose import triton as kernel

        return kernel.choose_tokens(scores, contest.table[0], contest.table[1], contest.table[3], max(contest.fetched))
    return reference.choose_tokens(scores, contest.starts, contest.stops, contest.fetched)


def count_rows(lists: Tensor, contest: Contest, tokens: int, out: Tensor, *, fetched: bool = False) -> None:
    """How many distinct tokens the lists of each group hold (k∪ of paper Eq. 1).

    Args:
        lists: ``[R, H, G, C]``.
        tokens: More than any token.
        out: int32 ``[R, H]`` of zeros, written.
        fetched: Count the candidates, not what was selected of them.
    """
    if compiled(lists):
        from fathom_eval.kernels.choose import triton as kernel

        counts, column = (contest.fetched, 3) if fetched else (contest.counts, 2)
        kernel.count_rows(lists.contiguous(), contest.table[column], max(counts), out)
        return
    out.copy_(reference.count_rows(lists, tokens, len(set(contest.fetched if fetched else contest.counts)) > 1))
