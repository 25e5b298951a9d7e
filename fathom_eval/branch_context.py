"""One layer of one decode step, addressed as one sequence of tokens, whoever holds them.

Shapes: R rows, H KV heads, G query heads a KV head, n tokens of the prefix, T of a branch's own, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fathom_eval.kernels.branches import SharedRows
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.prefill import PrefixLayer

Rows = slice | Tensor
"""Rows of the batch: a slice where they are consecutive, which costs no copy."""

LONG, PIECE = 8192, 1024
"""The inner dimension from which on :func:`folded` goes by pieces on a GPU, and of one piece."""


def sealed_tokens(tokens: int, local: int) -> int:
    """Tokens in sealed blocks: full, and outside the local window."""
    return max(0, tokens - local) // BLOCK * BLOCK


class StepContext:
    """One layer and step: the shared prefix and the branches' own tails, addressed as one sequence of tokens."""

    def __init__(self, layer: PrefixLayer, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self.layer, self.query, self.keys, self.values, self.scaling = layer, query, keys, values, scaling
        self.shared = SharedRows(layer.keys, layer.values, keys, values)
        self.prefix_tokens, self.tokens = self.shared.prefix_tokens, self.shared.tokens

    def key_range(self, rows: Rows, start: int, stop: int) -> Tensor:
        """Keys of tokens ``[start, stop)``, ``[R, H, stop - start, D]``."""
        return self._range(self.layer.keys, self.keys[rows], start, stop)

    def exact_scores(self, rows: Rows, query: Tensor, start: int) -> Tensor:
        """fp32 scores of all tokens from ``start`` on for queries ``[R, H, G, D]``, ``[R, H, G, tokens - start]``."""
        return query.float() @ self.key_range(rows, start, self.tokens).float().transpose(-1, -2)

    def all_scores(self, rows: Rows) -> Tensor:
        """fp32 scores of all tokens, ``[R, H, G, tokens]``, without a copy of the prefix for every row."""
        query = self.query[rows].float()
        of_prefix = folded(query, self.layer.keys.float().transpose(-1, -2))
        return torch.cat([of_prefix, query @ self.keys[rows].float().transpose(-1, -2)], dim=-1)

    def mix(self, rows: Rows, weights: Tensor) -> Tensor:
        """Values of all tokens, weighted: ``[R, H, G, tokens]`` to fp32 ``[R, H, G, D]``."""
        of_prefix, of_tail = torch.split(weights, [self.prefix_tokens, self.tokens - self.prefix_tokens], dim=-1)
        return folded(of_prefix, self.layer.values.float()) + of_tail @ self.values[rows].float()

    def value_range(self, rows: Rows, start: int, stop: int) -> Tensor:
        """Values of tokens ``[start, stop)``, ``[R, H, stop - start, D]``."""
        return self._range(self.layer.values, self.values[rows], start, stop)

    def mean_value(self, rows: Rows) -> Tensor:
        """The mean of all values so far, fp32 ``[R, H, D]``."""
        return (self.layer.value_sum + self.values[rows].float().sum(2)) / self.tokens

    def _range(self, shared: Tensor, own: Tensor, start: int, stop: int) -> Tensor:
        n = self.prefix_tokens
        of_prefix = shared[:, min(start, n) : min(stop, n)].expand(len(own), -1, -1, -1)
        return of_prefix if stop <= n else torch.cat([of_prefix, own[:, :, max(start - n, 0) : stop - n]], dim=2)


class ScoreBuffer:
    """Room for all scores of a layer, the same in all layers of a device and every step. The rows of a KV head lie side by side."""

    def __init__(self) -> None:
        self._rooms: dict[torch.device, Tensor] = {}

    def of(self, context: StepContext) -> Tensor:
        """fp32 ``[R, H, G, tokens]``, with whatever was left there, zeros at first."""
        rows, heads, group, _ = context.query.shape
        device = context.query.device
        room = self._rooms.get(device)
        if room is None or room.shape[-1] < context.tokens:
            room = self._rooms[device] = torch.zeros(heads, rows, group, (context.tokens // 256 + 1) * 256, device=device)
        return room.transpose(0, 1)[..., : context.tokens]


def folded(left: Tensor, right: Tensor) -> Tensor:
    """``[R, H, G, A] × [H, A, B]`` to ``[R, H, G, B]``: one product a head, so that ``right`` is read once for all rows."""
    rows, heads, group, inner = left.shape
    lines = left.transpose(0, 1).reshape(heads, rows * group, inner)
    product = pieced(lines, right) if left.is_cuda and inner >= LONG else lines @ right
    unfolded: Tensor = product.view(heads, rows, group, -1).transpose(0, 1)
    return unfolded


def pieced(left: Tensor, right: Tensor) -> Tensor:
    """``[H, L, A] × [H, A, B]`` to ``[H, L, B]`` by pieces of A, whose products are summed.

    Few rows and channels of one long product keep only a few multiprocessors busy, and each of them for long.
    """
    whole = left.shape[-1] // PIECE * PIECE
    found = left[..., whole:] @ right[:, whole:]
    for head, (lines, columns) in enumerate(zip(left[..., :whole], right[:, :whole], strict=True)):
        parts = torch.bmm(lines.unflatten(-1, (-1, PIECE)).transpose(0, 1), columns.unflatten(0, (-1, PIECE)))
        found[head] += parts.sum(0)
    return found
