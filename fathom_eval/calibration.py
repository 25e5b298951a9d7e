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


def eigenbasis(mean: Tensor, covariance: Tensor) -> Basis:
    """The Karhunen–Loève basis of keys with this mean ``[H, D]`` and this covariance, fp64 ``[H, D, D]``."""
    values, vectors = torch.linalg.eigh(covariance)
    # An eigenvector's sign is arbitrary; a fixed one makes stores reproducible across LAPACK builds.
    largest = vectors.abs().argmax(-2, keepdim=True)
    vectors = vectors * vectors.gather(-2, largest).sign()
    return Basis(mean.float(), vectors.flip(-1).float().contiguous(), values.flip(-1).clamp_min(0).float().contiguous())


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
        return eigenbasis(self.mean, covariance)


class KeyMoments:
    """The moments of :class:`KeyStatistics`, accumulated chunk by chunk in fp64: memory does not grow with the keys.

    Chunks are merged by the pairwise update of Chan, Golub and LeVeque (1979), which never subtracts large sums.
    """

    def __init__(self) -> None:
        self.count = 0
        self._mean: Tensor | None = None
        self._magnitude: Tensor | float = 0.0
        self._scatter: Tensor | float = 0.0

    def add(self, keys: Tensor, chunk: int = 4096) -> None:
        """Add post-RoPE keys ``[H, m, D]``; at most ``chunk`` of them are held in fp64 at a time."""
        for part in keys.split(chunk, dim=-2):
            if part.shape[-2]:
                self._merge(part.double())

    def _merge(self, keys: Tensor) -> None:
        added = keys.shape[-2]
        mean = keys.mean(-2)
        centred = keys - mean.unsqueeze(-2)
        self._magnitude = self._magnitude + keys.abs().sum(-2)
        scatter = centred.transpose(-1, -2) @ centred
        total = self.count + added
        if self._mean is None:
            self._mean = mean
        else:
            shift = mean - self._mean
            scatter = scatter + shift.unsqueeze(-1) * shift.unsqueeze(-2) * (self.count * added / total)
            self._mean = self._mean + shift * (added / total)
        self._scatter = self._scatter + scatter
        self.count = total

    def statistics(self) -> FixedKeyStatistics:
        """What has been accumulated. Raises ValueError for fewer than two keys."""
        if self.count < 2 or self._mean is None:
            raise ValueError("key statistics need at least two keys")
        covariance = torch.as_tensor(self._scatter) / (self.count - 1)
        return FixedKeyStatistics(
            mean=self._mean.float(),
            mean_magnitude=(torch.as_tensor(self._magnitude) / self.count).float(),
            variance=covariance.diagonal(dim1=-2, dim2=-1).float().contiguous(),
            basis=eigenbasis(self._mean, covariance),
        )


@dataclass(frozen=True)
class FixedKeyStatistics:
    """What :class:`KeyStatistics` gives, computed beforehand; fp32 ``[H, D]``."""

    mean: Tensor
    mean_magnitude: Tensor
    variance: Tensor
    basis: Basis


@dataclass(frozen=True)
class FixedQueryStatistics:
    """What :class:`QueryStatistics` gives, computed beforehand; fp32 ``[H, D]`` and ``[H, D, D]``."""

    mean_magnitude: Tensor
    second_moment: Tensor


@dataclass(frozen=True)
class LayerStatistics:
    """Statistics of one layer that do not come from a prefix, under the names that a prefix layer has for its own."""

    key_statistics: FixedKeyStatistics
    query_statistics: FixedQueryStatistics


class QueryStatistics:
    """Moments of the queries of one layer, accumulated chunk by chunk during the prefill.

    The query heads that share a KV head are pooled.

    Args:
        dtype: That sums are kept in.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.count = 0
        self._dtype = dtype
        self._magnitude: Tensor | float = 0.0
        self._second_moment: Tensor | float = 0.0

    def add(self, query: Tensor) -> None:
        """Add post-RoPE queries ``[H, G, m, D]``."""
        query = query.to(self._dtype)
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
