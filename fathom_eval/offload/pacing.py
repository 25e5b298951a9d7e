"""How many programs fetch a lane's rows behind the scan of the next: few enough to leave the link to the scan, which both share.

Settings were timed on an H200: ``reports/published/step-h200-paced/pacing.jsonl``.
"""

from __future__ import annotations

from fathom_eval.kernels.pack import BLOCK
from fathom_eval.offload.cache import Lane, TieredCache
from fathom_eval.offload.scans import Scan

PROGRAMS = 110
"""Programs that fetch a lane's rows where those of a KV head are as many bytes as its scan.

That makes 17 at 1M tokens, k = 512 and 48 bits, four for each of four KV heads. More slow the scan beside them by more than the rows' own
bytes; with fewer the rows come after the scan has ended.
"""

DEEPEST = 0.375
"""Bits a channel beyond which a scan hides no more rows, 48 of 128 channels: it lasts longer, but rows beside it take longer too."""

SHALLOWEST = 0.1875
"""Bits a channel below which a scan hides no slow fetch, 24 of 128 channels: top-k and union take most of its time."""

CROWDED = 3
"""A lane may have so many times the KV heads of the next one before its rows take more programs."""


def fetch_programs(cache: TieredCache, lane: Lane, scan: Scan, rows: float) -> int | None:
    """Programs for the rows of a lane; None for as many as are fastest, where no scan shares the link with them or one is too short.

    Args:
        scan: Whose buffers are made.
        rows: That a KV head fetches, were those of its query heads all different. A key or a value that is fetched alone counts as one.
    """
    number, shape = cache.lanes.index(lane), cache.arena.shape
    if cache.arena.index != "host" or number == len(cache.lanes) - 1:
        return None
    if not scan.hides_rows or scan.code_bits < SHALLOWEST * shape.head_dim:
        return None
    following = cache.lanes[number + 1]
    bits = min(scan.code_bits, DEEPEST * shape.head_dim)
    scanned = cache.capacity_blocks * BLOCK * bits / 8
    fetched = rows * 2 * shape.head_dim * cache.tail.element_size()
    crowd = lane.row_count * lane.head_count / (CROWDED * following.row_count * following.head_count)
    return max(1, round(PROGRAMS * fetched / scanned * max(1.0, crowd)))
