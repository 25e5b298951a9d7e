"""Sweep launch configurations on one GPU: ``python benchmarks/launches.py [--step | --rows] > sweep.jsonl``.

Alone, the scans of one layer; with ``--step``, whole decode steps, where few programs leave room for what runs beside a scan; with
``--rows``, the fetch of K/V rows at 1M tokens by pages of host memory, rows at once, programs, order of the list, and what was read before:
the same rows, others of that layer, those of other layers, or a scan's share of an index. The settings that the kernels ship with were
chosen from such sweeps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from fathom_eval.errors import UserError
from fathom_eval.kernels.landmark import triton as landmark
from fathom_eval.kernels.nibble import triton as nibble
from fathom_eval.kernels.rows import GroupRows, fetch_rows
from fathom_eval.kernels.rows import triton as rows
from fathom_eval.kernels.scan import triton as scan
from fathom_eval.kernels.segments import SEGMENT_BLOCKS, SegmentTable
from fathom_eval.methods import parse_methods
from fathom_eval.offload.arena import Arena, SegmentShape
from fathom_eval.offload.bench import kernels
from fathom_eval.offload.bench.link import quick_rates
from fathom_eval.offload.bench.sources import SyntheticSource, closing
from fathom_eval.offload.bench.steps import Variant, fit_source, measure
from fathom_eval.offload.bench.timing import Path, path_records
from fathom_eval.offload.pinned import HOST_PAGES
from fathom_eval.offload.weights import SHAPES

ROW_SEGMENTS, ROWS = 32, 1280
"""Segments of a layer of 1M tokens, and rows of a KV head: 188 MB a step of 36 layers."""

ROW_BYTES = 512 * kernels.HEADS * ROWS
ROW_SHAPE = SegmentShape(kernels.HEADS, kernels.CHANNELS, SEGMENT_BLOCKS, torch.bfloat16, ())
SCAN_BYTES = 15 * 2**22
"""What a scan reads of a layer of 1M tokens, about 60 MB."""

METHODS = "fathom:budget=48:basis=raw,double_sparsity:c=32"


def configure(words: int, stages: int, programs: int | None, places: tuple[str, ...]) -> dict[str, Any]:
    for place in places:
        scan.WORDS[place], nibble.BLOCKS[place] = words, words // 2
        scan.PROGRAMS[place] = nibble.PROGRAMS[place] = programs
        landmark.PROGRAMS[place] = None if programs is None else 2 * programs
    scan.STAGES = nibble.STAGES = stages
    return {"words": words, "stages": stages, "programs": programs}


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def sweep_scans(context: int, index: str, repeats: int) -> None:
    for words, stages, programs in itertools.product((64, 128), (4, 6), (None, 132, 264, 528) if index == "host" else (None, 792)):
        settings = configure(words, stages, programs, ("host", "device"))
        for record in kernels.measure_scans(context, index, 1.0, repeats, 1.0):
            print(json.dumps({**settings, **record}), flush=True)


def sweep_steps(context: int, repeats: int, host_gib: float, lanes: list[int], programs: list[int]) -> None:
    device, specs = torch.device("cuda"), parse_methods(METHODS)
    source = SyntheticSource(
        SHAPES["qwen3-8b-shape"], specs, [context], 1, device=device, index="host", spread=1.0, host_limit=int(host_gib * 2**30), say=say
    )
    with closing(source):
        source.build()
        rates = quick_rates(device)
        source.open(context)
        common = fit_source(source, 512, specs[0], say)
        variants = [Variant(spec, 512, lanes=count) for spec in specs for count in lanes]
        for count in programs:
            settings = configure(128, 4, count or None, ("host",))
            for record in measure(source, context, variants, rates, index="host", repeats=repeats, common={**settings, **common}, say=say):
                print(json.dumps(record), flush=True)
                parts = {part: round(value, 2) for part, value in record["parts_ms"].items()}
                times = f"GPU {record['gpu_ms']:.2f} wall {record['wall_ms']:.2f}"
                say(f"programs {count} lanes {record['lanes']} {record['label']}: {times} {parts}")


def row_lists(layers: int, order: str) -> list[GroupRows]:
    """Random rows for each layer: as a union lists them (one ascending run a query head), or ascending throughout."""
    generator, tokens = torch.Generator("cuda").manual_seed(layers), ROW_SEGMENTS * SEGMENT_BLOCKS * 64
    lists = []
    for _ in range(layers):
        union = GroupRows.allocate(1, kernels.HEADS, 4, ROWS // 4, 0, 0, 1, "cuda")
        drawn = torch.randint(tokens, (1, kernels.HEADS, 4, ROWS // 4), generator=generator, device="cuda", dtype=torch.int32)
        union.rows.copy_(drawn.sort(-1).values.flatten(2) if order == "runs" else drawn.flatten(2).sort(-1).values)
        union.counts.fill_(ROWS)
        lists.append(union)
    return lists


def sweep_rows(host_gib: float, repeats: int, kinds: list[str], sizes: list[int], programs: list[int]) -> None:
    link = quick_rates(torch.device("cuda"))["link_gb_s"]
    say(f"link {link:.1f} GB/s; GB/s of fetches of {ROWS} rows a KV head:")
    for pages in kinds:
        try:
            with Arena(ROW_SHAPE, torch.device("cuda"), host_pages=pages) as arena:
                started = time.perf_counter()
                layers = max(1, int(host_gib * 2**30) // (arena.estimate(1)[0] * ROW_SEGMENTS))
                arena.grow(layers * ROW_SEGMENTS)
                say(f"{arena.host_pages} pages: {layers} layers pinned in {time.perf_counter() - started:.1f} s")
                heads, tokens = (torch.arange(size, device="cuda") for size in ROW_SHAPE.parts["rows"][0][:2])
                marks = (tokens[:, None, None] + 4099 * heads[:, None, None, None]).to(torch.int16)
                for number, segment in enumerate(arena.segments):
                    segment.views["rows"].view(torch.int16).copy_(marks + 77 * number)
                for size, count in itertools.product(sizes, programs):
                    rows.ROWS, rows.PROGRAMS["host"] = size, count or None
                    settings = {"host_pages": arena.host_pages, "rows_at_once": size, "programs": count}
                    for record in rows_of_pool(arena, layers, settings, link, repeats):
                        print(json.dumps(record), flush=True)
        except UserError as error:  # this kind of pages cannot be had here, and the others are still to be measured
            say(f"{pages} pages: {error}")


def rows_of_pool(arena: Arena, layers: int, settings: dict[str, Any], link: float, repeats: int) -> Iterator[dict[str, Any]]:
    """Records of one setting: both orders at every place."""
    device = arena.device
    pools = [[one.tensors["rows"] for one in arena.segments[at * ROW_SEGMENTS :][:ROW_SEGMENTS]] for at in range(layers)]
    tables = [SegmentTable.of(pool, device) for pool in pools]
    out = torch.empty(2, 1, kernels.HEADS, ROWS, kernels.CHANNELS, device=device, dtype=torch.bfloat16)
    reads = [partial(read_runs, pool, torch.empty(SCAN_BYTES // 4, device=device, dtype=torch.int32)) for pool in runs_of(arena, layers)]
    for order in ("runs", "ascending"):
        fresh, spread = row_lists(8, order), row_lists(layers, order)
        fetches = [partial(fetch_rows, table, union, out) for table, union in zip(tables, spread, strict=True)]
        places: dict[str, list[Callable[[], None]]] = {
            "again": [partial(fetch_rows, tables[0], fresh[0], out)] * 8,
            "one layer": [partial(fetch_rows, tables[0], union, out) for union in fresh],
            "layers": fetches,
            "scan": reads,
            "scan and rows": [partial(both, read, fetch) for read, fetch in zip(reads, fetches, strict=True)],
        }
        fetches[0]()
        token = int(spread[0].rows[0, 5, 77])
        stored = pools[0][token // (SEGMENT_BLOCKS * 64)][5, token % (SEGMENT_BLOCKS * 64)]
        assert torch.equal(out[:, 0, 5, 77].cpu().view(torch.int16), stored.view(torch.int16)), "the fetch differs from its source"
        facts = {**settings, "order": order}
        paths = [Path(place, launches, 0 if "scan" in place else ROW_BYTES, facts) for place, launches in places.items()]
        found = {record["name"]: record for record in path_records("rows", ROW_SEGMENTS * SEGMENT_BLOCKS * 64, paths, link, repeats)}
        after = found["scan and rows"]["gpu_ms"] - found["scan"]["gpu_ms"]
        rate = ROW_BYTES / after / 1e6
        cold = {"name": "after a scan", "gpu_ms": after, "gb_s": rate, "of_ceiling": rate / link}
        found["after a scan"] = {**found["layers"], **cold}
        found["scan"]["gb_s"] = SCAN_BYTES / found["scan"]["gpu_ms"] / 1e6
        rates = ", ".join(f"{place} {found[place]['gb_s']:.1f}" for place in ("again", "one layer", "layers", "scan", "after a scan"))
        how = f"{settings['host_pages']:>6} {settings['rows_at_once']:>3} at once, {settings['programs'] or 'all':>4} programs"
        say(f"{how}, {order:>9}: {rates}")
        yield from found.values()


def runs_of(arena: Arena, layers: int) -> list[list[torch.Tensor]]:
    """Of every layer, views of a scan's share: runs of 4 KB, 128 KB apart."""
    segments = [segment.views["rows"].view(torch.int32).view(-1, 32768)[:, :1024] for segment in arena.segments]
    return [segments[at * ROW_SEGMENTS :][: SCAN_BYTES // (segments[0].numel() * 4)] for at in range(layers)]


def read_runs(parts: list[torch.Tensor], out: torch.Tensor) -> None:
    for part, piece in zip(parts, out.split(parts[0].numel()), strict=False):
        torch.bitwise_not(part, out=piece.view(part.shape))


def both(read: Callable[[], None], fetch: Callable[[], None]) -> None:
    read()
    fetch()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--context", type=int, default=2**17, help="tokens, a multiple of 32768 (default: 131072)")
    add("--index", default="host", choices=["host", "hbm"], help="where the index of the scans lies (default: host)")
    add("--repeats", type=int, default=10, help="timed turns (default: 10)")
    add("--step", action="store_true", help="time whole steps")
    add("--rows", action="store_true", help="time the fetch of rows")
    add("--host-memory", type=float, default=24, help="GiB that steps and rows may pin (default: 24)")
    add("--lanes", type=int, nargs="+", default=[1, 2, 4], help="with --step (default: 1 2 4)")
    add("--programs", type=int, nargs="+", default=None, help="of a scan or a fetch; 0 is one a piece (default: a few)")
    add("--pages", nargs="+", default=["small", "huge"], choices=HOST_PAGES, help="with --rows (default: small huge)")
    add("--at-once", type=int, nargs="+", default=[8, 32], help="rows that a program fetches at once (default: 8 32)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: needs a CUDA device")
    try:
        with torch.inference_mode():
            if options.step:
                sweep_steps(options.context, options.repeats, options.host_memory, options.lanes, options.programs or [0, 64, 96, 128, 132])
            elif options.rows:
                sweep_rows(options.host_memory, options.repeats, options.pages, options.at_once, options.programs or [0, 132, 528])
            else:
                sweep_scans(options.context, options.index, options.repeats)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
