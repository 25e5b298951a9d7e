"""Time the kernels of one layer: the scans of all methods over the same keys, and what follows them.

One layer of the Qwen3-8B shape (8 KV heads, 128 channels, 4 query heads a KV head), synthetic keys. Every timed path is first compared with
the torch reference on the same data. Paths that are compared run in turn, each captured in a CUDA graph whose launches walk over stores
larger together than the L2 cache. The link's rates are measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fathom_eval.errors import UserError
from fathom_eval.kernels.gather import gather_channels
from fathom_eval.kernels.plan import ReadPlan, plan_depths
from fathom_eval.kernels.segments import SEGMENT_BLOCKS, SegmentTable
from fathom_eval.offload.arena import STORES, Arena, Segment, SegmentShape
from fathom_eval.offload.bench.checks import SCORE_TOLERANCE, reference_scores
from fathom_eval.offload.bench.link import quick_rates
from fathom_eval.offload.bench.selection import measure_selection
from fathom_eval.offload.bench.synthetic import SyntheticKeys
from fathom_eval.offload.bench.timing import Path, path_records
from fathom_eval.offload.cache import Lane, LaneTables
from fathom_eval.offload.scans import FixedChannels, Landmarks, Scan, TopChannels, UniformDepth, WaterFilling

HEADS, CHANNELS, GROUP = 8, 128, 4
SEGMENT_TOKENS = SEGMENT_BLOCKS * 64
COLD_BYTES = 200 * 2**20
"""Bytes that the launches of one graph read together, several times the L2 cache."""

_ALL = Lane(slice(0, 1), slice(0, HEADS))


@dataclass(frozen=True)
class _Keys:
    """Layers of one context: their tables, and one query."""

    context: int
    index: str
    layers: list[LaneTables]
    query: Tensor
    keys: SyntheticKeys
    scores: Tensor
    maxima: Tensor
    blocks: Tensor


def measure(contexts: Sequence[int], spread: float, repeats: int) -> Iterator[dict[str, Any]]:
    """Records of all kernels at every context.

    Raises:
        UserError: A context is not a multiple of a segment, memory is lacking, or a kernel differs from its reference.
    """
    for context in contexts:
        if context % SEGMENT_TOKENS:
            raise UserError(f"context {context} is not a multiple of {SEGMENT_TOKENS} tokens, the size of a segment")
    device = torch.device("cuda")
    rates = quick_rates(device, repeats)
    yield {"measure": "rates", "name": "ceilings", "context": 0, **rates}
    for context in contexts:
        for index, ceiling in (("hbm", rates["hbm_gb_s"]), ("host", rates["link_gb_s"])):
            yield from measure_scans(context, index, spread, repeats, ceiling)
        yield from measure_selection(context, repeats, rates)


def measure_scans(context: int, index: str, spread: float, repeats: int, ceiling: float) -> Iterator[dict[str, Any]]:
    """Records of every method's scan of one layer; ``ceiling`` in GB/s."""
    device = torch.device("cuda")
    shape = SegmentShape(HEADS, CHANNELS, SEGMENT_BLOCKS, torch.bfloat16, STORES, rows=False)
    a_layer = context // SEGMENT_TOKENS
    count = 1 if index == "host" else min(24, max(2, round(COLD_BYTES / (context * HEADS * 56 / 8))))
    with Arena(shape, device, index) as arena:
        arena.check(count * a_layer)
        keys = SyntheticKeys.draw(HEADS, CHANNELS, spread, device)
        arena.grow(count * a_layer)
        keys.fill(arena)
        layers = [_tables(arena.segments[at * a_layer : (at + 1) * a_layer]) for at in range(count)]
        generator = torch.Generator(device).manual_seed(5)
        query = torch.randn(1, HEADS, GROUP, CHANNELS, generator=generator, device=device).bfloat16()
        scores = torch.empty(1, HEADS, GROUP, context, dtype=torch.float16, device=device)
        maxima = torch.empty(1, HEADS, GROUP, context // 64, dtype=torch.float16, device=device)
        blocks = torch.tensor([context // 64], dtype=torch.int32, device=device)
        held = _Keys(context, index, layers, query, keys, scores, maxima, blocks)
        paths = [_scan_path(held, name, scan) for name, scan in _scans(keys).items()]
        if index == "host":
            paths = [*_staged_paths(held), *paths]
        yield from path_records(f"scan, index in {index}", context, paths, ceiling, repeats)


def _scans(keys: SyntheticKeys) -> dict[str, Scan]:
    order = keys.scale.sort(dim=-1, descending=True, stable=True).indices
    every = torch.arange(CHANNELS, dtype=torch.int32).expand(HEADS, -1)
    return {
        **{f"fathom {budget}": WaterFilling([keys.variance], [budget]) for budget in (40, 48, 64)},
        "16 channels by query": TopChannels(16),
        "32 fixed channels": FixedChannels([order[:, :32].sort(-1).values.int()]),
        "thumbnail": UniformDepth(2),
        "landmark of 8": Landmarks(8),
        "full 4-bit": FixedChannels([every]),
    }


def _tables(segments: Sequence[Segment]) -> LaneTables:
    return LaneTables({name: SegmentTable.of([segment.tensors[name] for segment in segments], "cuda") for name in segments[0].tensors})


def _scan_path(held: _Keys, name: str, scan: Scan) -> Path:
    """The path of one scan, checked on its first layer against the reference."""
    scan.allocate(1, 1, HEADS, CHANNELS, held.query.device)
    scan.plan(0, held.query)
    scores = held.scores.view(-1)[: held.scores.numel() // scan.span].view(1, HEADS, GROUP, -1)

    def launch(tables: LaneTables) -> Callable[[], None]:
        return lambda: scan.scan(0, _ALL, held.query, tables, held.blocks, scores, held.maxima, 1.0)

    launches = [launch(tables) for tables in held.layers]
    scores.fill_(float("nan"))
    launches[0]()
    error = 0.0
    for index in {0, held.context // SEGMENT_TOKENS - 1}:
        stored = {part: table.segments[0][index][:1].to(scores.device) for part, table in held.layers[0].tables.items()}
        expected = reference_scores(scan, 0, _ALL, held.query[0, :1], stored)[0]
        size = SEGMENT_TOKENS // scan.span
        found = scores[0, 0, :, index * size : (index + 1) * size].float()
        error = max(error, ((found - expected).norm() / expected.norm()).item())
    same = torch.equal(scores.unflatten(-1, (held.context // 64, -1)).amax(-1), held.maxima)
    if not error < SCORE_TOLERANCE or not same:
        raise UserError(f"{name}, index in {held.index}: scores differ from the torch reference by {error:.1e}; nothing was timed")
    bits = scan.bits().mean().item()
    facts = {"scan_bits": bits, "active_channels": scan.channels().mean().item(), "relative_error": error}
    return Path(name, launches, held.context * HEADS * bits / 8, facts)


def _staged_paths(held: _Keys) -> list[Path]:
    """Fathom 48's runs gathered into a staging buffer, alone and with the scan of it: the paper's own way (§3.6)."""
    device = held.query.device
    plan = ReadPlan.allocate(1, HEADS, CHANNELS, device)
    plan_depths(held.query, held.keys.variance, 48, plan)
    tables = held.layers[0].tables
    staged = {
        name: SegmentTable.of([torch.zeros_like(part, device=device) for part in tables[name].segments[0]], device)
        for name in ("planes", "scales")
    }

    def stage() -> None:
        for name, unit, limit in (("planes", 8, 4), ("scales", 2, 1)):
            gather_channels(
                tables[name],
                staged[name],
                plan.channels,
                plan.slots,
                held.blocks,
                unit=unit * SEGMENT_BLOCKS,
                limit=limit,
                segment_blocks=SEGMENT_BLOCKS,
            )

    scan = WaterFilling([held.keys.variance], [48])
    scan.allocate(1, 1, HEADS, CHANNELS, device)
    scan.plan(0, held.query)

    def stage_and_scan() -> None:
        stage()
        scan.scan(0, _ALL, held.query, LaneTables(staged), held.blocks, held.scores, held.maxima, 1.0)

    moved = held.context * HEADS * scan.bits().mean().item() / 8
    return [Path("gather of fathom 48's runs", [stage], moved), Path("gather, then scan in HBM", [stage_and_scan], moved)]
