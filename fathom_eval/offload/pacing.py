"""How many programs fetch a lane's rows behind the scan of the next: few enough to leave the link to the scan, which both share.

Settings were timed on an H200: ``reports/published/step-h200-paced/pacing.jsonl``.
"""

from __future__ import annotations

from fathom_eval.kernels.pack import BLOCK
from fathom_eval.offload.cache import Lane, TieredCache

PROGRAMS = 110
"""Programs that fetch rows where these are as many bytes as the scan that hides them.

That makes 16 at 1M tokens, k = 512 and 48 bits. More slow the scan beside them by more than the rows' own bytes; with fewer the rows come
after the scan has ended.
"""

DEEPEST = 0.375
"""Bits a channel beyond which a scan hides no more rows, 48 of 128 channels: it lasts longer, but rows beside it take longer too."""

CROWDED = 3
"""A lane may have so many times the KV heads of the next one before its rows take more programs."""


def fetch_programs(cache: TieredCache, lane: Lane, code_bits: float, rows: float) -> int | None:
    """Programs for the rows of a lane; None where no scan shares the link with them.

    Args:
        code_bits: Bits a key that a scan reads, without scales.
        rows: That a KV head fetches, were those of its query heads all different.
    """
    number, shape = cache.lanes.index(lane), cache.arena.shape
    if cache.arena.index != "host" or number == len(cache.lanes) - 1:
        return None
    following = cache.lanes[number + 1]
    bits = min(code_bits, DEEPEST * shape.head_dim)
    scanned = cache.capacity_blocks * BLOCK * bits / 8
    fetched = rows * 2 * shape.head_dim * cache.tail.element_size()
    crowd = lane.row_count * lane.head_count / (CROWDED * following.row_count * following.head_count)
    return max(1, round(PROGRAMS * fetched / scanned * max(1.0, crowd)))
