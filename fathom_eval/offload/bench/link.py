"""What the link between host and GPU, and the GPU's own memory, can do on this machine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from fathom_eval.kernels.gather import gather_channels
from fathom_eval.kernels.linear import linear
from fathom_eval.kernels.segments import SegmentTable
from fathom_eval.memory import host_bytes
from fathom_eval.offload.arena import release_pinned, total_host_bytes
from fathom_eval.offload.bench.timing import Path, path_records, time_paths

COPY_SIZES = tuple(2**power for power in range(12, 29, 2))
RUN_SIZES = (4096, 16384, 65536, 524288)
_TOTAL = 2**27
_BIG = 2**28


def host_facts() -> dict[str, Any]:
    """Memory and cores of the host."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"host_total_bytes": total_host_bytes(), "host_free_bytes": host_bytes(), "host_cores": cores}


def quick_rates(device: torch.device, repeats: int = 10) -> dict[str, float]:
    """The two ceilings of a step, GB/s: the copy of pinned memory to the GPU, and reading weights from the GPU's memory.

    The second is the fastest of three that read or copy gigabytes, so that the floor made from it is no lower than the card's own.
    """
    rates = _rates(device, repeats)
    release_pinned()
    return {
        "link_gb_s": rates["copy"],
        "hbm_gb_s": max(rates["linear"], rates["library"], rates["copy in memory"]),
        "linear_gb_s": rates["linear"],
        "library_gemv_gb_s": rates["library"],
        "hbm_copy_gb_s": rates["copy in memory"],
    }


def _rates(device: torch.device, repeats: int) -> dict[str, float]:
    host = torch.empty(_BIG, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(_BIG, dtype=torch.uint8, device=device)
    weights = [torch.randn(8192, 12288, device=device, dtype=torch.bfloat16) for _ in range(4)]
    vector, out = torch.randn(1, 12288, device=device, dtype=torch.bfloat16), torch.empty(1, 8192, device=device, dtype=torch.bfloat16)
    other = torch.empty_like(weights[0])
    paths = [
        Path("copy", [partial(target.copy_, host, non_blocking=True)], _BIG),
        Path("linear", [partial(linear, vector, weight, None, out) for weight in weights], weights[0].nbytes),
        Path("library", [partial(torch.mm, vector, weight.T, out=out) for weight in weights], weights[0].nbytes),
        Path("copy in memory", [partial(other.copy_, weight) for weight in weights], 2 * weights[0].nbytes),
    ]
    times = time_paths(paths, repeats)
    return {path.name: path.moved / times[path.name] / 1e6 for path in paths}


def measure(device: torch.device, repeats: int) -> Iterator[dict[str, Any]]:
    """Records of copies by size, gathers by run size, the GPU's own memory, and pinned memory itself."""
    yield {"measure": "host", "name": "host memory", "context": 0, **host_facts()}
    started = time.perf_counter()
    host = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    yield {"measure": "host", "name": "pinning 1 GiB", "context": 0, "wall_ms": (time.perf_counter() - started) * 1e3}
    host.view(torch.int64).random_()
    yield from path_records("copy", 0, _copies(host, device), None, repeats)
    rates = quick_rates(device, repeats)
    yield {"measure": "rates", "name": "ceilings", "context": 0, **rates}
    yield from path_records("gather", 0, list(_gathers(host, device)), rates["link_gb_s"], repeats)


def _copies(host: torch.Tensor, device: torch.device) -> list[Path]:
    target = torch.empty(_BIG, dtype=torch.uint8, device=device)
    paths = []
    for size in COPY_SIZES:
        calls = max(1, min(64, _BIG // size))
        paths.append(Path(f"copy of {size} bytes", [partial(target[:size].copy_, host[:size], non_blocking=True)] * calls, size))
    paths.append(Path(f"copy of {_BIG} bytes to the host", [partial(host[:_BIG].copy_, target, non_blocking=True)], _BIG))
    return paths


def _gathers(host: torch.Tensor, device: torch.device) -> Iterator[Path]:
    """Half of a store's runs, in random order: by one kernel that reads mapped memory, and by one copy call a run."""
    generator = torch.Generator().manual_seed(0)
    for run in RUN_SIZES:
        count = _TOTAL // run
        source = host[: 2 * _TOTAL].view(1, 2 * count, run)
        staged = torch.empty(1, 2 * count, run, dtype=torch.uint8, device=device)
        tables = SegmentTable.of([source], device), SegmentTable.of([staged], device)
        order = torch.randperm(2 * count, generator=generator)[:count]
        channels = order.int().view(1, 1, -1).to(device)
        depths, blocks = torch.ones_like(channels), torch.ones(1, dtype=torch.int32, device=device)

        def gather(tables: Any = tables, arguments: Any = (channels, depths, blocks), run: int = run) -> None:
            gather_channels(*tables, *arguments, unit=run, limit=1, segment_blocks=1)

        gather()
        picked = int(order[0])
        assert torch.equal(staged[0, picked].cpu(), source[0, picked]), "the gather differs from its source"
        yield Path(f"gather of {run}-byte runs", [gather], _TOTAL, {"run_bytes": run})
        some = order[: min(count, 512)].tolist()

        def copy_each(source: torch.Tensor = source, staged: torch.Tensor = staged, some: Any = some) -> None:
            for at in some:
                staged[0, at].copy_(source[0, at], non_blocking=True)

        yield Path(f"one copy a {run}-byte run", [copy_each], run * len(some), {"run_bytes": run})
