"""Landmark scores on the GPU: a matrix-vector product that streams the landmarks once."""
# mypy: allow-untyped-defs, allow-untyped-calls, disable-error-code="untyped-decorator, misc"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from fathom_eval.kernels.segments import SegmentTable

LANDMARKS = 128
"""Landmarks of a tile."""

PROGRAMS: dict[str, int | None] = {"device": None, "host": 264}
"""Programs of a launch by where the landmarks lie, as for the plane scan."""


@triton.jit
def _scan_landmarks(
    query,
    table,
    blocks,
    scores,
    maxima,
    scaling,
    pairs,
    heads,
    head_dim,
    segments,
    GROUP: tl.constexpr,
    CHANNELS: tl.constexpr,
    CAPACITY: tl.constexpr,
    BLOCK: tl.constexpr,
    LANDMARKS: tl.constexpr,
):
    tiles: tl.constexpr = CAPACITY // LANDMARKS
    # A program walks over tiles of all heads, so that a launch can be smaller than its work.
    for index in tl.range(tl.program_id(0), pairs * segments * tiles, tl.num_programs(0)):
        tile = index % (segments * tiles)
        pair = index // (segments * tiles)
        row = pair // heads
        head = (pair % heads).to(tl.int64)
        segment = tile // tiles
        first = (tile % tiles) * LANDMARKS
        begin = segment * CAPACITY + first
        sealed = tl.load(blocks + row) * BLOCK
        if begin < sealed:
            landmark = tl.arange(0, LANDMARKS)
            channel = tl.arange(0, CHANNELS)
            base = (tl.load(table + row * segments + segment) * 16).to(tl.pointer_type(tl.float16)) + head * CAPACITY * head_dim
            inside = (begin + landmark < sealed)[:, None] & (channel < head_dim)[None, :]
            pointers = base + (first + landmark)[:, None] * head_dim + channel[None, :]
            # The address comes from memory, so the compiler must be told that it is aligned.
            pointers = tl.multiple_of(tl.max_contiguous(pointers, [1, 8]), [1, 16])
            means = tl.load(pointers, mask=inside, other=0.0).to(tl.float32)
            block = begin // BLOCK + tl.arange(0, LANDMARKS // BLOCK)
            for member in tl.static_range(GROUP):
                line = pair.to(tl.int64) * GROUP + member
                value = tl.load(query + line * head_dim + channel, mask=channel < head_dim, other=0.0).to(tl.float32) * scaling
                found = tl.sum(means * value[None, :], axis=1)
                out = line * segments * CAPACITY
                tl.store(scores + out + begin + landmark, found.to(scores.dtype.element_ty), mask=begin + landmark < sealed)
                maximum = tl.max(tl.reshape(found, [LANDMARKS // BLOCK, BLOCK]), axis=1)
                tl.store(maxima + out // BLOCK + block, maximum.to(maxima.dtype.element_ty), mask=block * BLOCK < sealed)


def scan_landmarks(query: Tensor, means: SegmentTable, size: int, blocks: Tensor, scores: Tensor, maxima: Tensor, scaling: float) -> None:
    """See :func:`fathom_eval.kernels.landmark.scan_landmarks`."""
    rows, heads, group, head_dim = query.shape
    capacity = means.example.shape[-2]
    landmarks = min(LANDMARKS, capacity)
    place = "device" if means.example.is_cuda else "host"
    tiles = rows * heads * means.capacity * capacity // landmarks
    _scan_landmarks[(min(tiles, PROGRAMS[place] or tiles),)](
        query,
        means.addresses,
        blocks,
        scores,
        maxima,
        scaling,
        rows * heads,
        heads,
        head_dim,
        means.capacity,
        GROUP=group,
        CHANNELS=triton.next_power_of_2(head_dim),
        CAPACITY=capacity,
        BLOCK=64 // size,
        LANDMARKS=landmarks,
    )
