"""Sweep launch configurations of the scans on one GPU: ``python benchmarks/launches.py [--step] > sweep.jsonl``.

Alone, a scan of one layer; with ``--step``, whole decode steps, where few programs leave room for what runs beside a scan. The settings
that the kernels ship with were chosen from such a sweep.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from typing import Any

import torch

from fathom_eval.errors import UserError
from fathom_eval.kernels.landmark import triton as landmark
from fathom_eval.kernels.nibble import triton as nibble
from fathom_eval.kernels.scan import triton as scan
from fathom_eval.methods import parse_methods
from fathom_eval.offload.bench import kernels
from fathom_eval.offload.bench.link import quick_rates
from fathom_eval.offload.bench.sources import SyntheticSource, closing
from fathom_eval.offload.bench.steps import Variant, fit_source, measure
from fathom_eval.offload.weights import SHAPES

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--context", type=int, default=2**17, help="tokens, a multiple of 32768 (default: 131072)")
    add("--index", default="host", choices=["host", "hbm"], help="where the index of the scans lies (default: host)")
    add("--repeats", type=int, default=10, help="timed turns (default: 10)")
    add("--step", action="store_true", help="time whole steps")
    add("--host-memory", type=float, default=24, help="GiB that steps may pin (default: 24)")
    add("--lanes", type=int, nargs="+", default=[1, 2, 4], help="with --step (default: 1 2 4)")
    add("--programs", type=int, nargs="+", default=[0, 64, 96, 132, 264], help="with --step; 0 is one a tile (default: 0 64 96 132 264)")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: needs a CUDA device")
    try:
        with torch.inference_mode():
            if options.step:
                sweep_steps(options.context, options.repeats, options.host_memory, options.lanes, options.programs)
            else:
                sweep_scans(options.context, options.index, options.repeats)
    except UserError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
