"""The published steps and kernels, and the tables that the document of the runtime makes of them."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from fathom_eval.offload.bench.equal_error import equal_error

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "reports/published/step-h200"
KERNELS = ROOT / "reports/published/kernels-h200"
FIDELITY = {length: ROOT / f"reports/published/fidelity-qwen-coder-{length}" for length in ("90k", "32k")}
LONG = 2**20
FATHOM, SPARQ, DOUBLE = "fathom budget=48 basis=raw", "sparq r=16", "double_sparsity c=32"
LANDMARK, THUMBNAIL, FULL = "landmark size=8", "thumbnail depth=2", "full 4-bit"
ALONE = {
    FATHOM: "fathom 48",
    SPARQ: "nibble 16 channels",
    DOUBLE: "nibble 32 channels",
    LANDMARK: "landmark of 8, fp16",
    THUMBNAIL: "thumbnail, planes 128 x 2",
    FULL: "full 4-bit, nibble 128 channels",
}
"""The kernels of the methods' scans."""

Record = dict[str, Any]


@cache
def lines_of(name: str, folder: Path = PUBLISHED) -> list[Record]:
    path = folder / name
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.splitlines()]


def records() -> list[Record]:
    return lines_of("records.jsonl.gz")


def chosen(**wanted: Any) -> list[Record]:
    """Records with these fields; of one session, without rerank and with the index on the host where nothing else is said."""
    wanted = {"batch": 1, "rerank": 1.0, "index": "host", **wanted}
    return [one for one in records() if all(one[name] == value for name, value in wanted.items())]


def one(label: str, **wanted: Any) -> Record:
    (found,) = chosen(label=label, **wanted)
    return found


def main_table() -> dict[str, Record]:
    """The steps at 1M tokens, one session, index on the host."""
    return {step["label"]: step for step in chosen(context=LONG)}


def times_fathom(step: Record, own: Record) -> float:
    assert step["round"] == own["round"], "not timed in turn"
    return float(step["gpu_ms"] / own["gpu_ms"])


def in_turn(step: Record) -> float:
    """A step's time over that of Fathom's read which took turns with it."""
    (own,) = (
        other
        for other in records()
        if other["round"] == step["round"] and other["label"].startswith(FATHOM) and other["context"] == step["context"]
    )
    return times_fathom(step, own)


def of_link(step: Record) -> float:
    return float(step["scan_bytes"] / step["parts_ms"]["scan"] / 1e6 / step["link_gb_s"])


def unhidden(step: Record) -> float:
    """Milliseconds of a step in which neither a scan nor a GEMM runs."""
    return float(step["gpu_ms"] - step["parts_ms"]["scan"] - step["parts_ms"]["gemm"])


def kernel(name: str, kind: str = "index in pinned host memory", context: int = LONG) -> Record:
    (found,) = (
        line for line in lines_of("bench.jsonl", KERNELS) if (line["kind"], line.get("name"), line.get("context")) == (kind, name, context)
    )
    return found


def ratio_line(context: int) -> Record:
    (found,) = (line for line in lines_of("bench.jsonl", KERNELS) if (line["kind"], line.get("context")) == ("ratio, host", context))
    return found


def setting(rows: str, lanes: int, last: int | None, threads: int | None) -> Record:
    (found,) = (
        line
        for line in lines_of("settings.jsonl")
        if "rows" in line and (line["rows"], line["lanes"], line["last"], line["threads"]) == (rows, lanes, last, threads)
    )
    return found


def row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def targets() -> list[str]:
    main = main_table()
    own = main[FATHOM]
    ratios = [
        (f"{name} ÷ Fathom 48", target, aim, f"{times_fathom(main[label], own):.3f}", f"{main[label]['floor_ms'] / own['floor_ms']:.3f}")
        for name, label, target, aim in (
            ("136 bits (double_sparsity c=32)", DOUBLE, "≥ 2.0", "2.15"),
            ("SparQ r=16", SPARQ, "≥ 1.15", "1.18"),
            ("landmark", LANDMARK, "≥ 3.4", "3.7"),
            ("thumbnail", THUMBNAIL, "≥ 3.9", "4.2"),
        )
    ]
    top = setting("gpu", 1, None, None)["parts"]["top_k"] / own["layers"]
    scan, twin = (kernel(name, "index in HBM", 2**17)["ms"] for name in ("nibble 32 channels", "fathom 48"))
    return [
        row(cells)
        for cells in (
            *ratios,
            ("step ÷ floor", "≤ 1.25", "1.15", f"{own['floor_ratio']:.3f}", "–"),
            ("wall ÷ GPU time", "≤ 1.03", "–", f"{own['wall_ms'] / own['gpu_ms']:.3f}", "–"),
            ("exact top-k a layer, ms, one lane", "≤ 0.12", "–", f"{top:.3f}", "–"),
            ("plane scan ÷ gather rate of the link", "≥ 0.95", "–", f"{ratio_line(LONG)['scan rate over gather rate']:.3f}", "–"),
            ("HBM, 128k: nibble scan, 32 channels ÷ plane scan", "≥ 1", "1.3", f"{scan / twin:.2f}", "–"),
        )
    ]


def methods() -> list[str]:
    return [
        row(
            (
                label,
                f"{step['gpu_ms']:.2f}",
                f"{step['wall_ms'] / step['gpu_ms']:.3f}",
                f"{step['floor_ms']:.2f}",
                f"{step['floor_ratio']:.3f}",
                f"{in_turn(step):.3f}",
                f"{step['scan_bits']:.1f}",
                f"{step['rows_bytes'] / 1e6:.1f}",
                f"{of_link(step):.3f}",
                f"{kernel(ALONE[label])['of_ceiling']:.3f}" if label in ALONE else "–",
            )
        )
        for label, step in main_table().items()
    ]


def parts() -> list[str]:
    names = ("scan", "top_k", "union", "rows", "rows_wait", "attention", "gemm", "other")
    return [row((label, *(f"{step['parts_ms'][name]:.2f}" for name in names))) for label, step in main_table().items()]


def contexts() -> list[str]:
    found = []
    for context in (2**15, 2**16, 2**17, 2**18, 2**19, 2**20):
        own = one(FATHOM, context=context)
        others = (in_turn(one(label, context=context)) for label in (SPARQ, DOUBLE, LANDMARK, THUMBNAIL, FULL))
        found.append(
            row(
                (
                    f"{context:,}",
                    own["distinct_layers"],
                    f"{own['gpu_ms']:.2f}",
                    f"{own['floor_ratio']:.3f}",
                    f"{own['wall_ms'] / own['gpu_ms']:.3f}",
                    *(f"{ratio:.2f}" for ratio in others),
                )
            )
        )
    return found


def batches() -> list[str]:
    return [
        row(
            (
                f"{step['context']:,}",
                step["batch"],
                step["label"],
                f"{step['gpu_ms']:.2f}",
                f"{step['gpu_ms'] / step['batch']:.2f}",
                f"{step['floor_ratio']:.3f}",
                f"{in_turn(step):.2f}",
                f"{step['distinct_layers']} of {step['layers'] * step['batch']}",
            )
        )
        for step in records()
        if step["batch"] > 1
    ]


def in_hbm() -> list[str]:
    return [
        row(
            (
                f"{step['context']:,}",
                step["label"],
                f"{step['gpu_ms']:.2f}",
                f"{step['floor_ratio']:.2f}",
                f"{in_turn(step):.2f}",
                *(f"{step['parts_ms'][name]:.2f}" for name in ("scan", "top_k", "rows")),
            )
        )
        for step in records()
        if step["index"] == "hbm"
    ]


def reranked() -> list[Record]:
    return [step for step in records() if step["rerank"] == 2]


def rerank() -> list[str]:
    return [
        row(
            (
                step["label"],
                f"{step['gpu_ms']:.2f}",
                f"{step['floor_ratio']:.3f}",
                f"{step['scan_bits']:.1f}",
                *(f"{step['parts_ms'][name]:.2f}" for name in ("scan", "top_k", "rows", "rerank")),
                step["distinct_layers"],
            )
        )
        for step in reranked()
    ]


def equal_errors() -> list[dict[str, str]]:
    """What the command wrote, of one k, at 1M tokens with the index on the host, without the reference itself."""
    found = []
    for name in ("equal-error-90k.csv", "equal-error-32k.csv"):
        with (PUBLISHED / name).open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                here = (line["error_k"], line["step_context"], line["step_index"]) == ("512", str(LONG), "host")
                if here and line["label"] != line["reference"]:
                    found.append(line)
    return found


def as_fast_as(reference: str, method: str) -> float:
    """Speed of Fathom in a basis at a 136-bit scan's error, if that took what double_sparsity's step takes at 1M tokens."""
    twin = {**main_table()[DOUBLE], "method": method}
    rows = equal_error(lines_of("records.jsonl.gz", FIDELITY["90k"]), [*main_table().values(), twin], reference)
    (found,) = (line for line in rows if (line.method, line.basis, line.error_k) == ("fathom", "klt", 512))
    return found.ratio


def equal() -> list[str]:
    return [
        row(
            (
                f"{int(line['error_context']):,}",
                line["windows"],
                line["label"],
                line["basis"] or "–",
                f"{float(line['error']):.3f}",
                f"{float(line['reference_error']):.3f}",
                f"{float(line['bits_a_channel']):.2f}",
                f"{float(line['step_ms']):.2f}",
                f"{float(line['ratio']):.2f}",
            )
        )
        for line in equal_errors()
    ]


def settings() -> list[str]:
    return [
        row(
            (
                line["rows"],
                line["lanes"],
                line["last"] or "even",
                line["threads"] or "–",
                f"{line['gpu_ms']:.2f}",
                f"{line['floor_ratio']:.3f}",
                f"{line['wall_ms'] / line['gpu_ms']:.3f}",
                *(f"{line['parts'][name]:.2f}" for name in ("scan", "top_k", "rows")),
                f"{line['parts']['rows_wait']:.2f}" if "rows_wait" in line["parts"] else "–",
            )
        )
        for line in sorted((line for line in lines_of("settings.jsonl") if "rows" in line), key=lambda line: line["gpu_ms"])
    ]


def rate(pages: str, at_once: int, programs: int, order: str, name: str) -> float:
    (found,) = (
        line["gb_s"]
        for line in lines_of("rows.jsonl")
        if (line["host_pages"], line["rows_at_once"], line["programs"], line["order"], line["name"])
        == (pages, at_once, programs, order, name)
    )
    return float(found)


def fetches() -> list[str]:
    """Rates of fetches in one setting, by pages."""
    places = ("again", "one layer", "layers", "after a scan", "scan")
    return [
        row((pages, order, programs or "all", *(f"{rate(pages, 8, programs, order, place):.1f}" for place in places)))
        for pages in ("small", "single", "driver")
        for order, programs in (("runs", 0), ("ascending", 0), ("ascending", 132))
    ]


def huge() -> list[str]:
    """Huge pages against small ones: an earlier sweep."""
    found = {
        (line["host_pages"], line["place"]): line["gb_s"]
        for line in lines_of("rows-huge.jsonl")
        if (line["rows_a_program"], line["order"]) == (8, "ascending")
    }
    places = ("same rows again", "one layer", "5 layers")
    return [row((pages, *(f"{found[pages, place]:.1f}" for place in places))) for pages in ("small", "huge")]


def best_of_sweep(name: str) -> float:
    return min(
        float(line[name])
        for line in lines_of("sweep.jsonl", KERNELS)
        if line["kind"] == "sweep" and (line["index"], line["context"]) == ("HBM", 2**17)
    )
