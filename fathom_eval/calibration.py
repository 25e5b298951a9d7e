"""Statistics of keys and queries, and the bases made from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Basis:
    """A Karhunen–Loève basis of the keys of one layer (paper §3.5), one a KV head.

    Attributes:
        mean: Key mean, fp32 ``[H, D]``.
        vectors: Orthonormal eigenvectors of the key covariance in columns, largest eigenvalue first, fp32 ``[H, D, D]``.
        variance: Their eigenvalues, fp32 ``[H, D]``.
    """

    mean: Tensor
    vectors: Tensor
    variance: Tensor


class KeyStatistics:
    """Moments of the keys of one layer.

    Args:
        keys: Post-RoPE keys as the attention sees them, ``[H, n, D]``, n ≥ 2.
    """

    def __init__(self, keys: Tensor) -> None:
        if keys.shape[-2] < 2:
            raise ValueError("key statistics need at least two keys")
        self._keys = keys

    @cached_property
    def mean(self) -> Tensor:
        """fp32 ``[H, D]``."""
        return self._keys.float().mean(-2)

    @cached_property
    def mean_magnitude(self) -> Tensor:
        """Mean of |k|, fp32 ``[H, D]``."""
        return self._keys.float().abs().mean(-2)

    @cached_property
    def variance(self) -> Tensor:
        """Variance of every channel with n - 1 in the denominator, fp32 ``[H, D]``."""
        centred = self._keys.float() - self.mean.unsqueeze(-2)
        return centred.square_().sum(-2) / (centred.shape[-2] - 1)  # an order faster than torch.var over this dimension

    @cached_property
    def basis(self) -> Basis:
        """Eigenvectors of the centred covariance. Computed in fp64, so that the basis does not depend on the order of sums."""
        centred = self._keys.double() - self._keys.double().mean(-2, keepdim=True)
        covariance = centred.transpose(-1, -2) @ centred / (centred.shape[-2] - 1)
        values, vectors = torch.linalg.eigh(covariance)
        # An eigenvector's sign is arbitrary; a fixed one makes stores reproducible across LAPACK builds.
        largest = vectors.abs().argmax(-2, keepdim=True)
        vectors = vectors * vectors.gather(-2, largest).sign()
        return Basis(self.mean, vectors.flip(-1).float().contiguous(), values.flip(-1).clamp_min(0).float().contiguous())


class QueryStatistics:
    """Moments of the queries of one layer, accumulated chunk by chunk during the prefill.

    The query heads that share a KV head are pooled.
    """

    def __init__(self) -> None:
        self.count = 0
        self._magnitude: Tensor | float = 0.0
        self._second_moment: Tensor | float = 0.0

    def add(self, query: Tensor) -> None:
        """Add post-RoPE queries ``[H, G, m, D]``."""
        query = query.float()
        self.count += query.shape[1] * query.shape[2]
        self._magnitude = self._magnitude + query.abs().sum((1, 2))
        pooled = query.flatten(1, 2)
        self._second_moment = self._second_moment + pooled.transpose(-1, -2) @ pooled

    @property
    def mean_magnitude(self) -> Tensor:
        """Mean of |q| over positions and the heads of the group, fp32 ``[H, D]``."""
        return torch.as_tensor(self._magnitude) / self.count

    @property
    def second_moment(self) -> Tensor:
        """E[q qᵀ], fp32 ``[H, D, D]``."""
        return torch.as_tensor(self._second_moment) / self.count
