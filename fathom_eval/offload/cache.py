"""The cache of a decode: K/V rows and index in segments, the unsealed tail on the device, grown by sealed blocks alone."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fathom_eval.calibration import Basis
from fathom_eval.errors import UserError
from fathom_eval.kernels.landmark import landmark_means
from fathom_eval.kernels.nibble import pack_nibbles
from fathom_eval.kernels.pack import BLOCK, pack_blocks, quantise
from fathom_eval.kernels.segments import SegmentTable
from fathom_eval.offload.arena import Arena, Segment, segments_for


@dataclass(frozen=True)
class Lane:
    """A part of the work that is scanned, selected and attended to on its own: whole rows, or some KV heads of one row.

    Tensors ``[R, H, …]`` are contiguous in it either way. With two lanes the top-k and the rows of one run behind the scan of the other.
    """

    rows: slice
    heads: slice

    @property
    def row_count(self) -> int:
        return int(self.rows.stop - self.rows.start)

    @property
    def head_count(self) -> int:
        return int(self.heads.stop - self.heads.start)

    def part(self, tensor: Tensor) -> Tensor:
        """The lane's part of ``[R, H, …]``."""
        return tensor[self.rows, self.heads]


def lanes_of(rows: int, heads: int, count: int, last_heads: int | None = None) -> list[Lane]:
    """``count`` lanes of whole rows, or of KV heads of one row, where the last ones may be a head smaller: what follows their scan shows.

    Args:
        last_heads: KV heads of the last lane of each row, so that less shows; the others share the rest. None for even lanes.

    Raises:
        UserError: The rows and heads cannot be shared.
    """
    if last_heads is not None:
        a_row = count // rows - 1
        if count % rows or a_row < 1 or not a_row <= heads - last_heads < heads:
            raise UserError(f"{rows} sessions of {heads} KV heads cannot be shared among {count} lanes, the last one of {last_heads}")
        cuts = [*(-(-(heads - last_heads) * at // a_row) for at in range(a_row + 1)), heads]
        return [Lane(slice(row, row + 1), slice(*cut)) for row in range(rows) for cut in itertools.pairwise(cuts)]
    if count <= rows and rows % count == 0:
        size = rows // count
        return [Lane(slice(at * size, (at + 1) * size), slice(0, heads)) for at in range(count)]
    a_row = count // rows
    if count % rows == 0 and a_row <= heads:
        cuts = [-(-heads * at // a_row) for at in range(a_row + 1)]
        return [Lane(slice(row, row + 1), slice(*cut)) for row in range(rows) for cut in itertools.pairwise(cuts)]
    raise UserError(f"{rows} sessions of {heads} KV heads cannot be shared among {count} lanes")


LONG_SCAN = 2**19
"""Tokens from which a scan over the link is long enough to hide what more lanes launch."""


def default_lanes(rows: int, heads: int, context: int, index: str) -> tuple[int, int | None]:
    """Lanes of a step and KV heads of the last one, None for as many as the others have, where nobody says how many.

    Each lane's top-k, union and rows run behind the scan of the next, each adds launches, and what follows the last scan shows. On an H200
    at 512k and 1M tokens with the index in host memory one session took the least time with three lanes, the last of one head, and at 128k
    four sessions with four (``docs/runtime.md``). There, these; four even ones for several sessions from 512k on; elsewhere two; one where
    the work cannot be shared evenly.
    """
    long = index == "host" and context >= LONG_SCAN
    if long and rows == 1 and heads >= 3:
        return 3, 1
    for count in (4, 2) if long or (index == "host" and rows >= 4) else (2,):
        if rows % count == 0 or (count % rows == 0 and heads % (count // rows) == 0):
            return count, None
    return 1, None


@dataclass
class LaneTables:
    """Where a lane's segments of one layer lie, one table a tensor of the segment."""

    tables: dict[str, SegmentTable]

    def __getitem__(self, name: str) -> SegmentTable:
        return self.tables[name]


@dataclass
class CacheLayer:
    """One layer.

    Attributes:
        segments: Of every row, in order.
        lanes: Tables of every lane.
        basis: Karhunen–Loève basis of its planes or nibbles, None for the model's own channels.
    """

    segments: list[list[Segment]]
    lanes: list[LaneTables]
    basis: Basis | None = None


@dataclass
class TieredCache:
    """K/V and index of R sessions in all layers.

    Attributes:
        tail: Unsealed K/V ``[L, 2, R, H, T, D]`` on the device.
        blocks, tokens: int32 ``[R]`` on the device: sealed blocks, and all tokens.
        sealed, lengths: The same two on the host, which counts along and never waits.
        flags: int32 ``[H]``, set where a sealed key could not be stored.
    """

    arena: Arena
    lanes: list[Lane]
    layers: list[CacheLayer]
    tail: Tensor
    blocks: Tensor
    tokens: Tensor
    local: int
    sealed: list[int]
    lengths: list[int]
    flags: Tensor = field(repr=False, kw_only=True)

    @classmethod
    def allocate(
        cls,
        arena: Arena,
        layers: int,
        rows: int,
        lanes: list[Lane],
        most_tokens: int,
        local: int,
        bases: Sequence[Basis | None] | None = None,
    ) -> TieredCache:
        """An empty cache whose tables have room for ``most_tokens`` a row; segments come as tokens are sealed."""
        shape, device = arena.shape, arena.device
        capacity = segments_for(most_tokens, shape.blocks)
        made = [
            CacheLayer(
                [[] for _ in range(rows)],
                [LaneTables({name: SegmentTable(lane.row_count, capacity, device) for name in shape.parts}) for lane in lanes],
                None if bases is None else bases[number],
            )
            for number in range(layers)
        ]
        tail = torch.zeros(layers, 2, rows, shape.heads, BLOCK + local - 1, shape.head_dim, dtype=shape.dtype, device=device)
        blocks, tokens = (torch.zeros(rows, dtype=torch.int32, device=device) for _ in range(2))
        flags = torch.zeros(shape.heads, dtype=torch.int32, device=device)
        return cls(arena, lanes, made, tail, blocks, tokens, local, [0] * rows, [0] * rows, flags=flags)

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def capacity_blocks(self) -> int:
        """Blocks that a row's tables have room for."""
        return next(iter(self.layers[0].lanes[0].tables.values())).capacity * self.arena.shape.blocks

    def attach(self, layer: int, row: int, segment: Segment) -> None:
        """Add a segment of the arena to the end of a row; its content is the caller's."""
        held = self.layers[layer]
        for lane, tables in zip(self.lanes, held.lanes, strict=True):
            if lane.rows.start <= row < lane.rows.stop:
                for name, tensor in segment.tensors.items():
                    tables[name].append(row - lane.rows.start, tensor[lane.heads])
        held.segments[row].append(segment)

    def set_length(self, row: int, tokens: int) -> None:
        """Declare that a row holds ``tokens`` tokens, all but the tail sealed (:func:`sealed_tokens` of what the next step sees)."""
        self.lengths[row], self.sealed[row] = tokens, sealed_tokens(tokens + 1, self.local)
        self.tokens[row] = tokens
        self.blocks[row] = self.sealed[row] // BLOCK

    def load(self, layer: int, row: int, keys: Tensor, values: Tensor) -> None:
        """Take over a prefix's K/V ``[H, n, D]``: whole blocks outside the window are sealed, the rest becomes the tail.

        Raises:
            UserError: The tables have no room, or memory for the segments is lacking.
        """
        tokens = keys.shape[1]
        sealed = sealed_tokens(tokens + 1, self.local)
        self._ensure(layer, row, sealed)
        for start, stop in self._pieces(0, sealed):
            write_segment(self.layers[layer].segments[row][start // self._segment_tokens], keys, values, start, stop, self, layer)
        self.tail[layer, 0, row, :, : tokens - sealed] = keys[:, sealed:]
        self.tail[layer, 1, row, :, : tokens - sealed] = values[:, sealed:]

    def advance(self) -> None:
        """Make room for the next token: blocks that leave the local window with it are sealed. One step in 64 has something to do."""
        for row, length in enumerate(self.lengths):
            sealed = sealed_tokens(length + 1, self.local)
            if sealed > self.sealed[row]:
                self._seal(row, length, sealed)
            self.lengths[row] = length + 1

    def check_flags(self) -> None:
        """Raise :class:`UserError` if a sealed key was not finite or overflowed fp16. Waits for the device."""
        bad = [head for head, flag in enumerate(self.flags.tolist()) if flag]
        if bad:
            raise UserError(f"keys that are not finite, or above 65,504, which an fp16 scale cannot hold, in KV head {bad[0]}")

    @property
    def _segment_tokens(self) -> int:
        return BLOCK * self.arena.shape.blocks

    def _pieces(self, start: int, stop: int) -> list[tuple[int, int]]:
        """``[start, stop)`` cut where segments begin."""
        size = self._segment_tokens
        cuts = [start, *range((start // size + 1) * size, stop, size), stop]
        return [(begin, end) for begin, end in itertools.pairwise(cuts) if end > begin]

    def _ensure(self, layer: int, row: int, tokens: int) -> None:
        held = self.layers[layer].segments[row]
        missing = segments_for(tokens, self.arena.shape.blocks) - len(held)
        if len(held) + missing > self.capacity_blocks // self.arena.shape.blocks:
            raise UserError(f"{tokens} tokens exceed the {self.capacity_blocks * BLOCK} that the cache was made for")
        for segment in self.arena.grow(max(missing, 0)):
            self.attach(layer, row, segment)

    def _seal(self, row: int, length: int, sealed: int) -> None:
        done = self.sealed[row]
        count, left = sealed - done, length - sealed
        for number in range(len(self.layers)):
            self._ensure(number, row, sealed)
            keys, values = self.tail[number, :, row].unbind(0)
            for start, stop in self._pieces(done, sealed):
                segment = self.layers[number].segments[row][start // self._segment_tokens]
                write_segment(segment, keys, values, start, stop, self, number, offset=done)
        moved = self.tail[:, :, row, :, count : count + left].clone()
        self.tail[:, :, row, :, :left] = moved
        self.sealed[row] = sealed
        self.blocks[row] = sealed // BLOCK


def write_segment(
    segment: Segment, keys: Tensor, values: Tensor, start: int, stop: int, cache: TieredCache, layer: int, *, offset: int = 0
) -> None:
    """Write tokens ``[start, stop)`` of a row, whole blocks of one segment; ``keys[:, i]`` is token ``offset + i``."""
    basis = cache.layers[layer].basis
    fill_segment(
        segment, keys[:, start - offset : stop - offset], values[:, start - offset : stop - offset], start, cache.arena, basis, cache.flags
    )


def fill_segment(segment: Segment, keys: Tensor, values: Tensor, start: int, arena: Arena, basis: Basis | None, flags: Tensor) -> None:
    """Write K/V ``[H, n, D]`` and everything the segment's index holds of them, from token ``start`` on, without waiting for the device."""
    shape, views = arena.shape, segment.views
    at = start % (BLOCK * shape.blocks)
    count = keys.shape[1]
    if "rows" in views:
        views["rows"][:, at : at + count] = torch.stack((keys, values), dim=2)
    first, blocks = at // BLOCK, count // BLOCK
    if "scales" in views:
        stored = keys.contiguous() if basis is None else ((keys.float() - basis.mean.unsqueeze(-2)) @ basis.vectors).contiguous()
        planes = torch.empty(shape.heads, shape.head_dim, 4, blocks, dtype=torch.int64, device=keys.device)
        scales = torch.empty(shape.heads, shape.head_dim, blocks, dtype=torch.float16, device=keys.device)
        pack_blocks(stored, planes, scales, flags)
        views["scales"][..., first : first + blocks] = scales
        if "planes" in views:
            views["planes"][..., first : first + blocks] = planes
        if "nibbles" in views:
            views["nibbles"][..., first : first + blocks] = pack_nibbles(quantise(stored, scales))
    if "landmarks" in views:
        size = shape.landmark
        views["landmarks"][:, at // size : (at + count) // size] = landmark_means(keys, size)


def sealed_tokens(tokens: int, local: int) -> int:
    """Of ``tokens`` (the current one included), those in blocks that are full and outside the local window."""
    return max(0, tokens - local) // BLOCK * BLOCK
