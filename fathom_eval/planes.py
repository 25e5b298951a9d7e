"""The bit-plane key store (paper §3.2): a 4-bit key copy whose plane prefixes are exact coarser quantisers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from fathom_eval.calibration import Basis
from fathom_eval.calibration_file import SESSION, statistics_of
from fathom_eval.kernels.pack import BLOCK, block_scales, pack_planes, quantise, unpack_plane
from fathom_eval.reads import Reads
from fathom_eval.scales import eight_bit_scales, scale_unit
from fathom_eval.stores import DeferredReads, Store, StoreSpec, batched_scores, score_into
from fathom_eval.waterfill import read_depths

if TYPE_CHECKING:
    from fathom_eval.prefill import PrefixLayer

SEGMENT_BLOCKS = 512
"""Blocks of one segment (32k tokens): one plane of one channel of a full segment is a contiguous run of 4 KB."""

DECODED_LIMIT = 80 * 2**20
"""Bytes up to which a segment keeps its planes decoded beside the packed words, since unpacking bits takes longer than scoring."""


@dataclass(frozen=True)
class PlaneSpec(StoreSpec):
    """A bit-plane store in the model's own channels or in a Karhunen–Loève basis.

    Attributes:
        planes: Bits of a code, 1 to 8.
        statistics: Where that basis comes from, see :func:`fathom_eval.calibration_file.resolve`.
        scales: A block's scale in fp16, or in fp8 relative to the channel's size (:mod:`fathom_eval.scales`).
        stored: Code bits of a key that are kept at all, spent on the channels once by :func:`stored_depths` (paper §6, B1); 0 keeps all
            planes of all channels. Planes that are not kept hold nothing, but their room in memory is not given back.
    """

    basis: Literal["raw", "klt"] = "raw"
    planes: int = 4
    statistics: str = SESSION
    scales: Literal["fp16", "fp8"] = "fp16"
    stored: int = 0

    def build(self, layer: PrefixLayer, tokens: int) -> Store:
        store = self.start(layer)
        store.append(layer.keys[:, :tokens])
        return store

    def start(self, layer: PrefixLayer) -> PlaneStore:
        """The store of a layer before any key is in it."""
        heads, _, channels = layer.keys.shape
        keys = statistics_of(self.statistics, layer).key_statistics
        basis = keys.basis if self.basis == "klt" else None
        unit = None
        if self.scales == "fp8":
            unit = scale_unit(keys.mean, keys.variance) if basis is None else scale_unit(torch.zeros_like(keys.mean), basis.variance)
        limits = stored_depths(layer, self) if self.stored else None
        device = layer.keys.device
        return PlaneStore((heads,), channels, basis=basis, planes=self.planes, scale_unit=unit, limits=limits, device=device)


def stored_depths(layer: PrefixLayer, spec: PlaneSpec) -> Tensor:
    """How many planes of each channel a rate-allocated store keeps, int64 ``[H, D]``: Eq. 4 with the mean of q² for a query's own."""
    statistics = statistics_of(spec.statistics, layer)
    variance, moment = statistics.key_statistics.variance, statistics.query_statistics.second_moment
    if spec.basis == "klt":
        basis = statistics.key_statistics.basis
        variance, energy = basis.variance, ((moment @ basis.vectors) * basis.vectors).sum(-2)
    else:
        energy = moment.diagonal(dim1=-2, dim2=-1)
    return read_depths(energy * variance, spec.stored, spec.planes)


class _Segment:
    """A run of blocks with room to grow: planes int64 ``[…, D, P, capacity]``, scales fp16 ``[…, D, capacity]``."""

    def __init__(self, lead: tuple[int, ...], channels: int, planes: int, capacity: int, device: torch.device) -> None:
        self.planes = torch.zeros(*lead, channels, planes, capacity, dtype=torch.int64, device=device)
        self.scales = torch.zeros(*lead, channels, capacity, dtype=torch.float16, device=device)
        self.blocks = 0
        self.decoded: Tensor | None = None

    @property
    def room(self) -> int:
        return self.scales.shape[-1] - self.blocks

    @property
    def bytes(self) -> int:
        return self.planes.nbytes + self.scales.nbytes + (self.decoded.nbytes if self.decoded is not None else 0)

    def write(self, planes: Tensor, scales: Tensor) -> None:
        end = self.blocks + scales.shape[-1]
        self.planes[..., self.blocks : end] = planes
        self.scales[..., self.blocks : end] = scales
        self.blocks = end
        self.decoded = None

    def plane_values(self, plane: int) -> Tensor:
        """What the bits of one plane add to the keys, fp32 ``[…, D, tokens]``: ±a / 2^(plane + 1).

        The mid-rise value of a t-bit prefix is the sum over its planes, since
        (c_t + 1/2 - 2^(t-1)) · a / 2^(t-1) = Σ_{p<t} (2·bit_p - 1) · a / 2^(p+1).
        """
        bits = unpack_plane(self.planes[..., plane, : self.blocks])
        step = self.scales[..., : self.blocks].float() * 2.0 ** -(plane + 1)
        signs = bits.unflatten(-1, (-1, BLOCK)).float() * 2 - 1
        values: Tensor = signs * step.unsqueeze(-1)
        return values.flatten(-2)


@dataclass(frozen=True)
class PlaneReads(DeferredReads):
    """The planes that a scan read of each channel, boolean ``[R, H, P, D]``: the mask that its queries were multiplied with."""

    mask: Tensor
    tokens: int
    scale_bits: int

    @property
    def device(self) -> torch.device:
        return self.mask.device

    @classmethod
    def totals(cls, noted: Sequence[DeferredReads]) -> tuple[Tensor, Tensor]:
        """See :class:`~fathom_eval.stores.DeferredReads`. All are of one store, so that a scale has one size."""
        reads = [one for one in noted if isinstance(one, PlaneReads)]
        planes = torch.stack([one.mask for one in reads]).sum(-1)  # channels of which each plane was read
        channels = planes[..., 0]
        tokens = torch.tensor([one.tokens for one in reads]).to(planes.device, non_blocking=True).view(-1, 1, 1)
        bits = planes.sum(-1) * tokens + channels * (tokens // BLOCK * reads[0].scale_bits)
        return bits.sum((0, 2)), channels.sum((0, 2))


class PlaneStore(Store):
    """Keys as bit planes, laid out ``[head][channel][plane][block]`` in segments.

    Args:
        lead: Leading dimensions of the keys, ``(H,)`` shared or ``(R, H)`` for blocks that branches sealed themselves.
        channels: D.
        basis: Store (k - μ)V instead of k.
        planes: Bits of a code.
        scale_unit: What fp8 scales are relative to, ``[H, D]``; None for fp16 scales.
        limits: Planes that are kept of each channel, ``[H, D]``; None for all. No read goes deeper.
        segment_blocks: Blocks that a segment made by a later :meth:`append` holds.
    """

    def __init__(
        self,
        lead: tuple[int, ...],
        channels: int,
        *,
        basis: Basis | None = None,
        planes: int = 4,
        scale_unit: Tensor | None = None,
        limits: Tensor | None = None,
        device: torch.device | str = "cpu",
        segment_blocks: int = SEGMENT_BLOCKS,
    ) -> None:
        self._lead = lead
        self._channels = channels
        self._basis = basis
        self._planes = planes
        self._scale_unit = scale_unit
        self._limits = limits
        self._device = torch.device(device)
        self._segment_blocks = segment_blocks
        self._scale_bits = 16 if scale_unit is None else 8
        self._levels = torch.arange(planes, device=self._device).view(-1, 1)
        self.segments: list[_Segment] = []

    @property
    def bytes(self) -> int:
        return sum(segment.bytes for segment in self.segments)

    def append(self, keys: Tensor) -> None:
        keys = self.transform(keys)
        done, total = 0, keys.shape[-2] // BLOCK
        while done < total:
            if not self.segments or not self.segments[-1].room:
                # A prefix is sealed in one go and its segments need no spare room; blocks sealed later come one by one.
                capacity = min(SEGMENT_BLOCKS, total - done) if total > 1 else self._segment_blocks
                self.segments.append(_Segment(self._lead, self._channels, self._planes, capacity, self._device))
            segment = self.segments[-1]
            count = min(segment.room, total - done)
            part = keys[..., done * BLOCK : (done + count) * BLOCK, :]
            scales = block_scales(part)
            if self._scale_unit is not None:
                scales = eight_bit_scales(scales, self._scale_unit)
            words = pack_planes(quantise(part, scales, self._planes), self._planes)
            if self._limits is not None:
                levels = torch.arange(self._planes, device=words.device)
                words = words * (self._limits.unsqueeze(-1) > levels).unsqueeze(-1)
            segment.write(words, scales)
            done += count
        self.tokens += keys.shape[-2]

    def empty(self, rows: int) -> Store:
        lead = (rows, self._lead[-1])
        # A branch seals a block in 64 of its steps: a few blocks of room are many steps.
        return PlaneStore(
            lead,
            self._channels,
            basis=self._basis,
            planes=self._planes,
            scale_unit=self._scale_unit,
            limits=self._limits,
            device=self._device,
            segment_blocks=4,
        )

    def transform(self, keys: Tensor) -> Tensor:
        """Keys ``[…, n, D]`` in the store's basis."""
        return keys if self._basis is None else (keys.float() - self._basis.mean.unsqueeze(-2)) @ self._basis.vectors

    def project(self, query: Tensor) -> Tensor:
        query = query.float()
        return query if self._basis is None else query @ self._basis.vectors

    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Reads]:
        """See :meth:`Store.scan`; ``plan`` is the read depth of every channel, integers in 0..P ``[R, H, D]``.

        A plane takes part in the scores of a branch through a query that is zero on the channels which the branch does not
        read that deep. The same mask is what is counted, so nothing that is not counted can reach a score.
        """
        assert plan is not None, "a plane store needs read depths"
        if self._limits is not None:
            plan = torch.minimum(plan, self._limits)
        read = plan.unsqueeze(-2) > self._levels  # [R, H, P, D]
        queries = projected.unsqueeze(-3) * read.unsqueeze(-2)  # [R, H, P, G, D]
        scores = torch.cat([self._scan_segment(segment, queries) for segment in self.segments], dim=-1)
        if self._basis is not None:
            scores = scores + (query.float() @ self._basis.mean.unsqueeze(-1))
        blocks = self.tokens // BLOCK
        channels = read[:, :, 0].sum(-1)
        planes_read = read.sum((-1, -2))
        return scores, Reads(
            code_bits=planes_read * (blocks * BLOCK),
            scale_bits=channels * (blocks * self._scale_bits),
            other_bits=torch.zeros_like(channels),
            channels=channels,
            tokens=self.tokens,
        )

    def scan_into(
        self, query: Tensor, projected: Tensor, plan: Tensor | None, out: Tensor, own: Store | None = None
    ) -> Reads | DeferredReads:
        """See :meth:`Store.scan_into`: :meth:`scan` with fewer operations, and the same mask of what is read for both stores."""
        assert plan is not None, "a plane store needs read depths"
        if self._limits is not None:
            plan = torch.minimum(plan, self._limits)
        rows, heads, group, channels = projected.shape
        read = plan.unsqueeze(-2) > self._levels  # [R, H, P, D]
        queries = torch.empty(heads, rows, group, self._planes, channels, dtype=torch.float32, device=query.device)
        torch.mul(projected.transpose(0, 1).unsqueeze(-2), read.transpose(0, 1).unsqueeze(2), out=queries)
        done = 0
        for store in (self, own):
            for segment in store.segments if isinstance(store, PlaneStore) else ():
                piece = out[..., done : done + segment.blocks * BLOCK]
                if store is self and self._decode(segment) and segment.decoded is not None:
                    score_into(queries.view(heads, rows * group, -1), segment.decoded, piece)
                else:
                    piece.copy_(self._scan_segment(segment, queries.permute(1, 0, 3, 2, 4)))
                done += segment.blocks * BLOCK
        if self._basis is not None:
            out += query.float() @ self._basis.mean.unsqueeze(-1)
        return PlaneReads(read, done, self._scale_bits)

    def coverage(self, projected: Tensor, plan: Tensor | None) -> Tensor:
        assert plan is not None
        if self._limits is not None:
            plan = torch.minimum(plan, self._limits)
        magnitude = projected.abs()
        return (magnitude * (plan.unsqueeze(-2) > 0)).sum(-1) / magnitude.sum(-1).clamp_min(torch.finfo(torch.float32).tiny)

    def _scan_segment(self, segment: _Segment, queries: Tensor) -> Tensor:
        if self._decode(segment) and segment.decoded is not None:
            flat = queries.transpose(-3, -2).flatten(-2)  # [R, H, G, P·D]
            return batched_scores(flat, segment.decoded)
        scores: Tensor | float = 0.0
        for plane in range(self._planes):
            scores = scores + batched_scores(queries[:, :, plane], segment.plane_values(plane))
        return torch.as_tensor(scores)

    def _decode(self, segment: _Segment) -> bool:
        """Whether a segment's planes are kept decoded, ``[…, P·D, tokens]``."""
        if segment.decoded is None and 4 * self._planes * segment.scales[..., : segment.blocks].numel() * BLOCK <= DECODED_LIMIT:
            values = [segment.plane_values(plane) for plane in range(self._planes)]
            segment.decoded = torch.stack(values, dim=-3).flatten(-3, -2)
        return segment.decoded is not None
