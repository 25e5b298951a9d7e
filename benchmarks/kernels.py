"""Time the kernels of the host-resident runtime on one GPU: ``python benchmarks/kernels.py > kernels.jsonl``.

One layer of the Qwen3-8B shape (8 KV heads, 128 channels, 4 query heads a KV head), synthetic keys. Every timed path is first compared with
the torch reference on the same data. Paths that are compared run in turn in one process, each captured in a CUDA graph whose launches walk
over stores larger together than the L2 cache; a line gives the median. The link's rates are measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fathom_eval.kernels import attend, gather, landmark, nibble, pack, plan, rows, scan, topk
from fathom_eval.kernels.plan import ReadPlan
from fathom_eval.kernels.rows import GroupRows
from fathom_eval.kernels.segments import SEGMENT_BLOCKS, SegmentTable

HEADS, CHANNELS, GROUP = 8, 128, 4
SINK, LOCAL, K, TAIL = 4, 32, 512, 95
SEGMENT_TOKENS = SEGMENT_BLOCKS * 64
COLD_BYTES = 200 * 2**20
"""Bytes that the launches of one graph read together, several times the L2 cache."""


@dataclass
class Path:
    """One thing to time: launches to capture, and the bytes that each moves."""

    name: str
    launches: list[Callable[[], None]]
    moved: float
    facts: dict[str, Any] = field(default_factory=dict)


def time_paths(paths: list[Path], repeats: int) -> dict[str, float]:
    """Median milliseconds a launch of every path, the paths taking turns."""
    graphs = {}
    for path in paths:
        for launch in path.launches[:2]:
            launch()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for launch in path.launches:
                launch()
        graphs[path.name] = graph
    samples: dict[str, list[float]] = {path.name: [] for path in paths}
    for repeat in range(repeats + 2):
        for path in paths:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graphs[path.name].replay()
            end.record()
            end.synchronize()
            if repeat >= 2:
                samples[path.name].append(begin.elapsed_time(end) / len(path.launches))
    return {name: statistics.median(values) for name, values in samples.items()}


def report(kind: str, context: int, paths: list[Path], ceiling: float | None, repeats: int) -> dict[str, float]:
    """Time paths and print a line for each; ``ceiling`` is the rate in GB/s that their bytes could move at."""
    times = time_paths(paths, repeats)
    for path in paths:
        milliseconds = times[path.name]
        line = {"kind": kind, "context": context, "name": path.name, "ms": round(milliseconds, 4)} | path.facts
        if path.moved:
            rate = path.moved / milliseconds / 1e6
            line |= {"mbytes": round(path.moved / 1e6, 2), "gbytes_per_s": round(rate, 1)}
            if ceiling:
                line["of_ceiling"] = round(rate / ceiling, 3)
        print(json.dumps(line), flush=True)
    return times


def check_scores(name: str, found: Tensor, expected: Tensor) -> float:
    error = ((found.float() - expected).norm() / expected.norm()).item()
    if not error < 1e-3:
        raise SystemExit(f"{name}: scores differ from the reference by {error:.2e}")
    return error


class Layer:
    """The stores of one layer: keys with channels of unequal scale, packed on the GPU and held there or in pinned host memory.

    Args:
        context: Tokens, a multiple of the segment.
        spread: Standard deviation of the channels' log scale; chosen so that 48 bits a key touch 30 to 34 channels.
    """

    def __init__(self, context: int, spread: float, seed: int, *, host: bool) -> None:
        self.context, self.host = context, host
        self.blocks = torch.tensor([context // 64], dtype=torch.int32, device="cuda")
        generator = torch.Generator("cuda").manual_seed(seed)
        scale = torch.exp(torch.randn(HEADS, 1, CHANNELS, generator=generator, device="cuda") * spread)
        self.query = torch.randn(1, HEADS, GROUP, CHANNELS, generator=generator, device="cuda").bfloat16()
        self.variance = scale.square().squeeze(1)
        flags = torch.zeros(HEADS, dtype=torch.int32, device="cuda")
        planes, scales, nibbles, means = [], [], [], []
        for _ in range(context // SEGMENT_TOKENS):
            keys = (torch.randn(HEADS, SEGMENT_TOKENS, CHANNELS, generator=generator, device="cuda") * scale).bfloat16()
            part = torch.empty(HEADS, CHANNELS, 4, SEGMENT_BLOCKS, dtype=torch.int64, device="cuda")
            width = torch.empty(HEADS, CHANNELS, SEGMENT_BLOCKS, dtype=torch.float16, device="cuda")
            pack.pack_blocks(keys, part, width, flags)
            planes.append(self._place(part))
            scales.append(self._place(width))
            nibbles.append(self._place(nibble.pack_nibbles(pack.quantise(keys, width))))
            means.append(self._place(landmark.landmark_means(keys, 8)))
        assert not flags.any()
        self.planes, self.scales, self.nibbles, self.means = (SegmentTable.of(part, "cuda") for part in (planes, scales, nibbles, means))
        self.plan = ReadPlan.allocate(1, HEADS, CHANNELS, "cuda")
        plan.plan_depths(self.query, self.variance, 48, self.plan)
        self.thumbnail = uniform_plan(2)
        self.channels = {count: torch.empty(1, HEADS, count, dtype=torch.int32, device="cuda") for count in (16, 32, 128)}
        for picked in self.channels.values():
            plan.top_channels(self.query, self.variance.sqrt(), picked)

    def _place(self, tensor: Tensor) -> Tensor:
        return tensor.cpu().pin_memory() if self.host else tensor

    def plane_bytes(self, read: ReadPlan) -> float:
        return self.context * (read.depths.sum().item() + 0.25 * (read.depths > 0).sum().item()) / 8

    def nibble_bytes(self, channels: int) -> float:
        return self.context * HEADS * channels * 4.25 / 8

    def facts(self) -> dict[str, Any]:
        bits = self.plane_bytes(self.plan) * 8 / HEADS / self.context
        return {"bits": round(bits, 2), "active_channels": round((self.plan.depths > 0).sum().item() / HEADS, 1)}

    def check(self, scores: Tensor, read: ReadPlan, segment: int) -> float:
        """Compare a segment's scores of two heads with the reference."""
        worst = 0.0
        for head in (0, HEADS - 1):
            used = read.depths[0, head].nonzero().flatten()
            words = self.planes.segments[0][segment][head].cuda()[used]
            widths = self.scales.segments[0][segment][head].cuda()[used]
            expected = scan.scan_planes(self.query[0, head][:, used], read.depths[0, head, used], words, widths)
            place = slice(segment * SEGMENT_TOKENS, (segment + 1) * SEGMENT_TOKENS)
            worst = max(worst, check_scores("planes", scores[0, head, :, place], expected))
        return worst


def uniform_plan(depth: int) -> ReadPlan:
    read = ReadPlan.allocate(1, HEADS, CHANNELS, "cuda")
    read.depths.fill_(depth)
    read.slots.fill_(depth)
    read.channels.copy_(torch.arange(CHANNELS, device="cuda"))
    read.counts[..., :depth] = CHANNELS
    return read


def measure_link(context: int, repeats: int) -> dict[str, float]:
    host = torch.empty(256 * 2**20, dtype=torch.uint8).pin_memory()
    device, other = torch.empty_like(host, device="cuda"), torch.empty(2**30, dtype=torch.uint8, device="cuda")
    source = torch.randint(0, 255, (2**30,), dtype=torch.uint8, device="cuda")
    paths = [
        Path("copy pinned to GPU", [lambda: device.copy_(host, non_blocking=True)], host.numel()),
        Path("copy within HBM (read + write)", [lambda: other.copy_(source)], 2 * source.numel()),
    ]
    times = report("rate", context, paths, None, repeats)
    return {path.name: path.moved / times[path.name] / 1e6 for path in paths}


def scan_paths(layers: list[Layer], scores: Tensor, maxima: Tensor, names: list[str]) -> list[Path]:
    """Plane, channel and landmark scans over the same layers."""

    def planes(layer: Layer, read: ReadPlan) -> Callable[[], None]:
        return lambda: scan.scan_segments(layer.query, read, layer.planes, layer.scales, layer.blocks, scores, maxima)

    def nibbles(layer: Layer, count: int) -> Callable[[], None]:
        return lambda: nibble.scan_nibbles(layer.query, layer.channels[count], layer.nibbles, layer.scales, layer.blocks, scores, maxima)

    def landmarks(layer: Layer) -> Callable[[], None]:
        part = scores.view(-1)[: scores.numel() // 8].view(1, HEADS, GROUP, -1)
        return lambda: landmark.scan_landmarks(layer.query, layer.means, 8, layer.blocks, part, maxima)

    first = layers[0]
    found = [
        Path("fathom 48", [planes(layer, layer.plan) for layer in layers], first.plane_bytes(first.plan), first.facts()),
        Path("nibble 16 channels", [nibbles(layer, 16) for layer in layers], first.nibble_bytes(16)),
        Path("nibble 32 channels", [nibbles(layer, 32) for layer in layers], first.nibble_bytes(32)),
        Path("thumbnail, planes 128 x 2", [planes(layer, layer.thumbnail) for layer in layers], first.plane_bytes(first.thumbnail)),
        Path("landmark of 8, fp16", [landmarks(layer) for layer in layers], first.context * HEADS * CHANNELS * 2 / 8),
        Path("full 4-bit, nibble 128 channels", [nibbles(layer, 128) for layer in layers], first.nibble_bytes(128)),
    ]
    return [path for path in found if path.name in names or not names]


def check_layer(layer: Layer, scores: Tensor, maxima: Tensor) -> None:
    """Every scan of a layer against its reference, and the block maxima against the scores."""
    last = layer.context // SEGMENT_TOKENS - 1
    errors = {}
    for name, read in (("fathom 48", layer.plan), ("thumbnail", layer.thumbnail)):
        scores.fill_(float("nan"))
        scan.scan_segments(layer.query, read, layer.planes, layer.scales, layer.blocks, scores, maxima)
        errors[name] = max(layer.check(scores, read, 0), layer.check(scores, read, last))
        assert torch.equal(scores.unflatten(-1, (-1, 64)).amax(-1), maxima)
    for count, channels in layer.channels.items():
        scores.fill_(float("nan"))
        nibble.scan_nibbles(layer.query, channels, layer.nibbles, layer.scales, layer.blocks, scores, maxima)
        words, widths = (table.segments[0][last][:1].cuda() for table in (layer.nibbles, layer.scales))
        expected = nibble.reference.scan_nibbles(layer.query[0, :1], channels[0, :1], words, widths)[0]
        errors[f"nibble {count}"] = check_scores(f"nibble {count}", scores[0, 0, :, last * SEGMENT_TOKENS :], expected)
        assert torch.equal(scores.unflatten(-1, (-1, 64)).amax(-1), maxima)
    kind = "host" if layer.host else "hbm"
    print(json.dumps({"kind": "check", "context": layer.context, "index": kind, "relative_error": errors}), flush=True)


def buffers(context: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Tensor]:
    scores = torch.empty(1, HEADS, GROUP, context, dtype=dtype, device="cuda")
    return scores, torch.empty(1, HEADS, GROUP, context // 64, dtype=dtype, device="cuda")


def bench_host(context: int, spread: float, repeats: int, link: float) -> None:
    """Scans that read pinned host memory, against the staged gather of the same runs."""
    layer = Layer(context, spread, 0, host=True)
    scores, maxima = buffers(context)
    check_layer(layer, scores, maxima)
    staged = SegmentTable.of([torch.zeros_like(part, device="cuda") for part in layer.planes.segments[0]], "cuda")
    staged_scales = SegmentTable.of([torch.zeros_like(part, device="cuda") for part in layer.scales.segments[0]], "cuda")

    def stage() -> None:
        for source, target, unit, limit in ((layer.planes, staged, 8, 4), (layer.scales, staged_scales, 2, 1)):
            gather.gather_channels(
                source, target, layer.plan.channels, layer.plan.slots, layer.blocks,
                unit=unit * SEGMENT_BLOCKS, limit=limit, segment_blocks=SEGMENT_BLOCKS,
            )  # fmt: skip

    def stage_and_scan() -> None:
        stage()
        scan.scan_segments(layer.query, layer.plan, staged, staged_scales, layer.blocks, scores, maxima)

    stage_and_scan()
    layer.check(scores, layer.plan, 0)
    moved = layer.plane_bytes(layer.plan)
    paths = [
        Path("gather of fathom 48's runs", [stage], moved, layer.facts()),
        Path("gather, then scan in HBM", [stage_and_scan], moved, layer.facts()),
        *scan_paths([layer], scores, maxima, []),
    ]
    times = report("index in pinned host memory", context, paths, link, repeats)
    gathered = times["gather of fathom 48's runs"]
    ratio = {"scan rate over gather rate": round(gathered / times["fathom 48"], 3)}
    for path in paths[3:]:
        ratio[f"{path.name} / fathom 48"] = round(times[path.name] / times["fathom 48"], 3)
    print(json.dumps({"kind": "ratio, host", "context": context} | ratio), flush=True)


def hbm_layers(context: int, spread: float) -> list[Layer]:
    first = Layer(context, spread, 0, host=False)
    count = min(24, max(2, round(COLD_BYTES / first.plane_bytes(first.plan))))
    return [first, *(Layer(context, spread, seed, host=False) for seed in range(1, count))]


def bench_hbm(context: int, spread: float, repeats: int, rate: float) -> None:
    layers = hbm_layers(context, spread)
    scores, maxima = buffers(context)
    check_layer(layers[0], scores, maxima)
    times = report("index in HBM", context, scan_paths(layers, scores, maxima, []), rate, repeats)
    ratio = {f"{name} / fathom 48": round(value / times["fathom 48"], 3) for name, value in times.items() if name != "fathom 48"}
    print(json.dumps({"kind": "ratio, HBM", "context": context} | ratio), flush=True)


def sweep(context: int, spread: float, repeats: int) -> None:
    """Launch configurations of the plane and the channel scan, index in HBM and in host memory."""
    from fathom_eval.kernels.nibble import triton as nibble_kernel
    from fathom_eval.kernels.scan import triton as scan_kernel

    scores, maxima = buffers(context)
    places = ("device", "host")
    for index, layers in (("HBM", hbm_layers(context, spread)), ("host", [Layer(context, spread, 0, host=True)])):
        for words, stages, registers in itertools.product((32, 64, 128), (3, 4), (168, 208, 255)):
            scan_kernel.WORDS, scan_kernel.STAGES, scan_kernel.REGISTERS = dict.fromkeys(places, words), stages, registers
            nibble_kernel.BLOCKS, nibble_kernel.STAGES, nibble_kernel.REGISTERS = dict.fromkeys(places, words // 2), stages, registers
            chosen = scan_paths(layers, scores, maxima, ["fathom 48", "nibble 16 channels", "nibble 32 channels"])
            times = time_paths(chosen, repeats)
            line = {"kind": "sweep", "index": index, "context": context, "words": words, "stages": stages, "registers": registers}
            print(json.dumps(line | {name: round(value, 4) for name, value in times.items()}), flush=True)


def bench_selection(context: int, repeats: int, link: float) -> None:
    """Plan, top-k, union, row fetch and attention."""
    count, heads = K - SINK - LOCAL, HEADS
    layer = Layer(SEGMENT_TOKENS, 1.3, 0, host=False)
    read = ReadPlan.allocate(1, heads, CHANNELS, "cuda")
    picked = torch.empty(1, heads, 16, dtype=torch.int32, device="cuda")
    paths = [
        Path("plan, 48 bits", [lambda: plan.plan_depths(layer.query, layer.variance, 48, read)], 0),
        Path("plan, top 16 channels", [lambda: plan.top_channels(layer.query, None, picked)], 0),
    ]
    report("selection", context, paths, None, repeats)
    blocks = torch.tensor([context // 64 - 1], dtype=torch.int32, device="cuda")
    tokens = torch.tensor([context - 1], dtype=torch.int32, device="cuda")
    scratch = torch.empty(1, heads, GROUP, topk.scratch_size(count, TAIL), dtype=torch.int32, device="cuda")
    indices = torch.empty(1, heads, GROUP, count, dtype=torch.int32, device="cuda")
    for dtype in (torch.float16, torch.float32):
        scores, maxima = buffers(context, dtype)
        # Heads of a group agree in part, as they do on real keys: rows a group amount to about 2.5 heads' worth.
        common = torch.randn(1, heads, 1, context, device="cuda")
        scores.copy_(common + 0.7 * torch.randn(scores.shape, device="cuda"))
        maxima.copy_(scores.unflatten(-1, (-1, 64)).amax(-1))
        late = torch.randn(1, heads, GROUP, TAIL, device="cuda").to(dtype)
        arguments = (scores, maxima, late, blocks, tokens, SINK, LOCAL, scratch, indices)
        topk.top_tokens(*arguments)
        sealed = context - 64
        known = torch.cat([scores[..., :sealed], late[..., : context - 1 - sealed]], -1)[..., SINK : context - 1 - LOCAL]
        exact = known.topk(count).values.sort().values
        mine = known.gather(-1, indices.long() - SINK).sort().values
        assert torch.equal(mine, exact), "top-k differs from torch.topk"
        flat, kept = scores.view(heads * GROUP, -1), maxima.view(heads * GROUP, -1)
        paths = [
            Path(f"top-k from block maxima, {dtype}", [lambda a=arguments: topk.top_tokens(*a)], 0),  # type: ignore[misc]
            Path(f"torch.topk, {dtype}", [lambda f=flat: f.topk(count)], 0),  # type: ignore[misc]
            Path(f"torch.topk of the maxima alone, {dtype}", [lambda m=kept: m.topk(count)], 0),  # type: ignore[misc]
        ]
        report("selection", context, paths, None, repeats)
    bench_rows(context, blocks, tokens, indices, repeats, link)


def bench_rows(context: int, blocks: Tensor, tokens: Tensor, indices: Tensor, repeats: int, link: float) -> None:
    count = indices.shape[-1]
    segments = [
        torch.empty(2, HEADS, SEGMENT_TOKENS, CHANNELS, dtype=torch.bfloat16).pin_memory() for _ in range(context // SEGMENT_TOKENS)
    ]
    for segment in segments:
        segment.copy_(torch.randn(segment.shape, device="cuda", dtype=torch.bfloat16))
    table = SegmentTable.of(segments, "cuda")
    union = GroupRows.allocate(1, HEADS, GROUP, count, SINK, LOCAL, TAIL, "cuda")
    out = torch.full((2, *union.rows.shape, CHANNELS), float("nan"), dtype=torch.bfloat16, device="cuda")
    query = torch.randn(1, HEADS, GROUP, CHANNELS, device="cuda").bfloat16()
    late = torch.randn(2, 1, HEADS, TAIL, CHANNELS, device="cuda").bfloat16()
    size = attend.workspace_size(1, HEADS, GROUP, CHANNELS, union.rows.shape[-1], TAIL)
    workspace, mixed = torch.empty(size, device="cuda"), torch.empty(1, HEADS, GROUP, CHANNELS, device="cuda")
    scaling = CHANNELS**-0.5
    rows.union_rows(indices, blocks, tokens, SINK, LOCAL, union)
    rows.fetch_rows(table, union, out)
    attend.attend_rows(query, out[0], out[1], union, late[0], late[1], workspace, mixed, scaling)
    for head in (0, HEADS - 1):
        used = int(union.counts[0, head])
        wanted = union.rows[0, head, :used].cpu().long()
        stored = torch.stack([segments[t // SEGMENT_TOKENS][:, head, t % SEGMENT_TOKENS] for t in wanted.tolist()], 1)
        assert torch.equal(out[:, 0, head, :used].cpu(), stored), "fetched rows differ"
        both = [torch.cat([out[part, 0, head, :used], late[part, 0, head]]) for part in (0, 1)]
        members = torch.cat([union.members[0, head, :used], union.tail_members[0, head]])
        exact = attend.reference.attend_rows(query[0, head], both[0], both[1], members, scaling)
        check_scores("attention", mixed[0, head], exact)
    moved = int(union.counts.sum()) * 2 * CHANNELS * 2
    facts = {"rows_a_head": round(union.counts.float().mean().item(), 1), "mbytes_of_36_layers": round(moved * 36 / 1e6, 1)}
    paths = [
        Path("union of rows", [lambda: rows.union_rows(indices, blocks, tokens, SINK, LOCAL, union)], 0),
        Path("fetch of K and V rows", [lambda: rows.fetch_rows(table, union, out)], moved, facts),
        Path(
            "attention over rows and tail",
            [lambda: attend.attend_rows(query, out[0], out[1], union, late[0], late[1], workspace, mixed, scaling)],
            0,
        ),
    ]
    report("selection", context, paths, link, repeats)
    keys = torch.randn(HEADS, SEGMENT_TOKENS, CHANNELS, device="cuda").bfloat16()
    planes = torch.empty(HEADS, CHANNELS, 4, SEGMENT_BLOCKS, dtype=torch.int64, device="cuda")
    scales = torch.empty(HEADS, CHANNELS, SEGMENT_BLOCKS, dtype=torch.float16, device="cuda")
    flags = torch.zeros(HEADS, dtype=torch.int32, device="cuda")
    packing = Path("pack a segment", [lambda: pack.pack_blocks(keys, planes, scales, flags)], keys.numel() * (2 + 0.5 + 2 / 64))
    report("pack", SEGMENT_TOKENS, [packing], None, repeats)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--contexts", type=int, nargs="+", default=[2**17, 2**20], help="tokens, multiples of 32768 (default: 131072 1048576)"
    )
    parser.add_argument("--spread", type=float, default=1.0, help="standard deviation of the channels' log scale (default: 1.0)")
    parser.add_argument("--repeats", type=int, default=30, help="timed turns (default: 30)")
    parser.add_argument("--sweep", action="store_true", help="time launch configurations of the scans instead")
    parser.add_argument("--skip", nargs="*", default=[], choices=["host", "hbm", "selection"], help="parts to leave out")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("error: needs a CUDA device")
    card = {"kind": "device", "name": torch.cuda.get_device_name(), "torch": torch.__version__}
    print(json.dumps(card), flush=True)
    rates = measure_link(0, options.repeats)
    link, hbm = rates["copy pinned to GPU"], rates["copy within HBM (read + write)"]
    for context in options.contexts:
        if options.sweep:
            sweep(context, options.spread, options.repeats)
            continue
        if "hbm" not in options.skip:
            bench_hbm(context, options.spread, options.repeats, hbm)
        if "host" not in options.skip:
            bench_host(context, options.spread, options.repeats, link)
        if "selection" not in options.skip:
            bench_selection(context, options.repeats, link)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
