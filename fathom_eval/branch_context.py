"""One layer of one decode step, addressed as one sequence of tokens, whoever holds them.

Shapes: R rows, H KV heads, G query heads a KV head, n tokens of the prefix, T of a branch's own, D channels.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fathom_eval.kernels.pack import BLOCK
from fathom_eval.prefill import PrefixLayer

Rows = slice | Tensor
"""Rows of the batch: a slice where they are consecutive, which costs no copy."""


def sealed_tokens(tokens: int, local: int) -> int:
    """Tokens in sealed blocks: full, and outside the local window."""
    return max(0, tokens - local) // BLOCK * BLOCK


class StepContext:
    """One layer and step: the shared prefix and the branches' own tails, addressed as one sequence of tokens."""

    def __init__(self, layer: PrefixLayer, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> None:
        self.layer, self.query, self.keys, self.values, self.scaling = layer, query, keys, values, scaling
        self.prefix_tokens = layer.keys.shape[1]
        self.tokens = self.prefix_tokens + keys.shape[2]

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

    def kept(self, rows: Rows, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of the sink ``[0, start)`` and the window ``[stop, tokens)``, ``[R, H, c, D]``."""
        pairs = ((self.layer.keys, self.keys[rows]), (self.layer.values, self.values[rows]))
        keys, values = (
            torch.cat([self._range(shared, own, 0, start), self._range(shared, own, stop, self.tokens)], dim=2) for shared, own in pairs
        )
        return keys, values

    def gather_keys(self, rows: Rows, indices: Tensor, stop: int) -> Tensor:
        """Keys ``[R, H, G, m, D]`` of the given tokens, all of them below ``stop``."""
        return self._gather(self.layer.keys, self.keys[rows], indices, stop)

    def gather_values(self, rows: Rows, indices: Tensor, stop: int) -> Tensor:
        """Values ``[R, H, G, m, D]`` of the given tokens, all of them below ``stop``."""
        return self._gather(self.layer.values, self.values[rows], indices, stop)

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

    def _gather(self, shared: Tensor, own: Tensor, indices: Tensor, stop: int) -> Tensor:
        n, heads = self.prefix_tokens, shared.shape[0]
        head = torch.arange(heads, device=indices.device).view(-1, 1, 1)
        if stop <= n:
            return _rows_at(shared, indices + head * n)
        of_prefix = _rows_at(shared, indices.clamp_max(n - 1) + head * n)
        row = torch.arange(len(own), device=indices.device).view(-1, 1, 1, 1)
        of_tail = _rows_at(own, (indices - n).clamp_min(0) + (row * heads + head) * own.shape[2])
        return torch.where((indices < n).unsqueeze(-1), of_prefix, of_tail)


def _rows_at(rows: Tensor, flat: Tensor) -> Tensor:
    """Rows of ``[…, D]`` by their number over all leading dimensions: ``flat […]`` to ``[…, D]``."""
    return rows.reshape(-1, rows.shape[-1]).index_select(0, flat.flatten()).view(*flat.shape, rows.shape[-1])


def folded(left: Tensor, right: Tensor) -> Tensor:
    """``[R, H, G, A] × [H, A, B]`` to ``[R, H, G, B]``: one product a head, so that ``right`` is read once for all rows."""
    rows, heads, group, inner = left.shape
    product = left.transpose(0, 1).reshape(heads, rows * group, inner) @ right
    unfolded: Tensor = product.view(heads, rows, group, -1).transpose(0, 1)
    return unfolded
