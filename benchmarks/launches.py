"""Sweep launch configurations on one GPU: ``python benchmarks/launches.py [--step | --rows] > sweep.jsonl``.

Alone, the scans of one layer; with ``--step``, whole decode steps, where few programs leave room for what runs beside a scan; with
``--rows``, the fetch of K/V rows at 1M tokens by pages of host memory, rows a program, order of the list, and how much memory the rows are
strewn over. The settings that the kernels ship with were chosen from such sweeps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
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
from fathom_eval.offload.pinned import huge_bytes, huge_pages_offered
from fathom_eval.offload.weights import SHAPES

ROW_SEGMENTS, ROWS = 32, 1280
"""Segments of a layer of 1M tokens, and rows of a KV head: 188 MB a step of 36 layers."""

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


def sweep_rows(host_gib: float, repeats: int) -> None:
    shape = SegmentShape(kernels.HEADS, kernels.CHANNELS, SEGMENT_BLOCKS, torch.bfloat16, ())
    device, link = torch.device("cuda"), quick_rates(torch.device("cuda"))["link_gb_s"]
    for pages in ("small", *(["huge"] if huge_pages_offered() else [])):
        with Arena(shape, device, host_pages=pages) as arena:
            layers = max(1, int(host_gib * 2**30) // (arena.estimate(1)[0] * ROW_SEGMENTS))
            before, started = huge_bytes(), time.perf_counter()
            arena.grow(layers * ROW_SEGMENTS)
            share = (huge_bytes() - before) / arena.estimate(len(arena.segments))[0]
            say(f"{pages} pages: {layers} layers pinned in {time.perf_counter() - started:.1f} s, {share:.3f} of them in huge pages")
            for number, segment in enumerate(arena.segments):
                segment.views["rows"].copy_(torch.randn(segment.views["rows"].shape, device=device, dtype=torch.bfloat16) + number)
            pools = [[one.tensors["rows"] for one in arena.segments[at * ROW_SEGMENTS :][:ROW_SEGMENTS]] for at in range(layers)]
            tables = [SegmentTable.of(pool, device) for pool in pools]
            out = torch.empty(2, 1, kernels.HEADS, ROWS, kernels.CHANNELS, device=device, dtype=torch.bfloat16)
            for size in (4, 8, 16, 32):
                rows.ROWS = size
                paths = []
                for order in ("runs", "ascending"):
                    fresh, spread = row_lists(8, order), row_lists(layers, order)
                    places = {"same rows again": [(tables[0], fresh[0])] * 8, "one layer": [(tables[0], union) for union in fresh]}
                    places[f"{layers} layers"] = list(zip(tables, spread, strict=True))
                    for place, pairs in places.items():
                        launches = [partial(fetch_rows, table, union, out) for table, union in pairs]
                        launches[0]()
                        token = int(pairs[0][1].rows[0, 5, 77])
                        stored = pools[0][token // (SEGMENT_BLOCKS * 64)][5, token % (SEGMENT_BLOCKS * 64)]
                        assert torch.equal(out[:, 0, 5, 77].cpu(), stored), "the fetch differs from its source"
                        facts = {"host_pages": pages, "huge_share": share, "rows_a_program": size, "order": order, "place": place}
                        paths.append(Path(f"{pages}, {size} a program, {order}, {place}", launches, 512 * kernels.HEADS * ROWS, facts))
                for record in path_records("rows", ROW_SEGMENTS * SEGMENT_BLOCKS * 64, paths, link, repeats):
                    print(json.dumps(record), flush=True)
                    say(f"{record['name']}: {record['gpu_ms']:.3f} ms, {record['gb_s']:.1f} GB/s, {record['of_ceiling']:.3f} of the link")


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
    add("--programs", type=int, nargs="+", default=[0, 64, 96, 132, 264], help="with --step; 0 is one a tile (default: 0 64 96 132 264)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: needs a CUDA device")
    try:
        with torch.inference_mode():
            if options.step:
                sweep_steps(options.context, options.repeats, options.host_memory, options.lanes, options.programs)
            elif options.rows:
                sweep_rows(options.host_memory, options.repeats)
            else:
                sweep_scans(options.context, options.index, options.repeats)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
