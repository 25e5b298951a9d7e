"""The published steps and kernels, and the tables that the document of the runtime makes of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from tests.recorded_names import (
    DOUBLE,
    DOUBLE_4,
    EQUAL,
    FATHOM,
    FULL,
    KERNELS,
    LANDMARK,
    LONG,
    PACED,
    PACED_EQUAL,
    PUBLISHED,
    SPARQ,
    THUMBNAIL,
)

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
    """Of the steps before rows were paced."""
    return lines_of("records.jsonl.gz")


def paced() -> list[Record]:
    return lines_of("records.jsonl.gz", PACED)


def paced_equal() -> list[Record]:
    return lines_of("records.jsonl.gz", PACED_EQUAL)


def again() -> list[Record]:
    """Steps of the main table in another start."""
    return lines_of("again.jsonl", PACED)


def chosen(of: Iterable[Record] | None = None, **wanted: Any) -> list[Record]:
    """Records with these fields; of one session, without rerank and with the index on the host where nothing else is said.

    Args:
        of: Records to choose from, those before rows were paced where nothing else is said.
    """
    wanted = {"batch": 1, "sessions": 1, "rerank": 1.0, "index": "host", **wanted}
    return [one for one in (records() if of is None else of) if all(one[name] == value for name, value in wanted.items())]


@cache
def equal_steps() -> list[Record]:
    """Every step of the run of equal errors: all of its first start, also those that were timed again, and then those of the second."""
    first = lines_of("first-start.jsonl.gz", EQUAL)
    return [*first, *(step for step in lines_of("records.jsonl.gz", EQUAL) if step["round"] != first[0]["round"])]


def one(label: str, of: Iterable[Record] | None = None, **wanted: Any) -> Record:
    (found,) = chosen(of, label=label, **wanted)
    return found


def main_table(of: Iterable[Record] | None = None) -> dict[str, Record]:
    """The steps at 1M tokens, one session, index on the host; as the defaults are where nothing else is said."""
    return {step["label"]: step for step in chosen(paced() if of is None else of, context=LONG)}


def times_fathom(step: Record, own: Record) -> float:
    assert step["round"] == own["round"], "not timed in turn"
    return float(step["gpu_ms"] / own["gpu_ms"])


def in_turn(step: Record) -> float:
    """A step's time over that of Fathom's read which took turns with it."""
    (own,) = (
        other
        for other in (*records(), *paced(), *again(), *paced_equal())
        if other["round"] == step["round"] and other["label"].startswith(FATHOM) and other["context"] == step["context"]
    )
    return times_fathom(step, own)


def other_rounds() -> list[Record]:
    """The other steps of the main table's methods at 1M tokens."""
    return [*again(), *(step for step in paced_equal() if step["label"] in (FATHOM, SPARQ, DOUBLE_4))]


def ratios(labels: Iterable[str], time: str = "gpu_ms") -> list[float]:
    """Of a scan's time to Fathom 48's in the other rounds, under any of its names."""
    own = {step["round"]: step for step in other_rounds() if step["label"] == FATHOM}
    return [step[time] / own[step["round"]][time] for step in other_rounds() if step["label"] in labels]


def ratios_elsewhere(label: str, time: str = "gpu_ms") -> list[float]:
    """Before rows were paced, of a method's time to Fathom 48's in the run of equal errors, by start and by who brought the rows."""
    own = {(step["round"], step["rows_by"]): step for step in equal_steps() if step["label"] == FATHOM}
    return [step[time] / own[step["round"], step["rows_by"]][time] for step in equal_steps() if step["label"] == label]


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


def lane(context: int, batch: int, lanes: int, last: int | None, rows: str) -> Record:
    (found,) = (
        step
        for step in lines_of("lanes.jsonl")
        if (step["context"], step["batch"], step["lanes"], step["last_lane"], step["rows_by"]) == (context, batch, lanes, last, rows)
    )
    return found


def in_words(lanes: int, last: int | None) -> str:
    return str(lanes) if last is None else f"{lanes}, last {last}"


def span(values: Iterable[float], digits: int = 2) -> str:
    """The lowest and the highest, once where they read the same."""
    found = sorted(values)
    return " to ".join(dict.fromkeys(f"{value:.{digits}f}" for value in (found[0], found[-1])))


def row(cells: Iterable[Any]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def targets() -> list[str]:
    main = main_table()
    own = main[FATHOM]
    elsewhere = {DOUBLE: ratios([DOUBLE, DOUBLE_4]), SPARQ: ratios([SPARQ])}
    compared = [
        (
            f"{name} ÷ Fathom 48",
            target,
            aim,
            f"{times_fathom(main[label], own):.3f}",
            span(elsewhere[label], 3) if label in elsewhere else "–",
            f"{main[label]['floor_ms'] / own['floor_ms']:.3f}",
        )
        for name, label, target, aim in (
            ("136 bits (double_sparsity c=32)", DOUBLE, "≥ 2.0", "2.15"),
            ("SparQ r=16", SPARQ, "≥ 1.15", "1.18"),
            ("landmark", LANDMARK, "≥ 3.4", "3.7"),
            ("thumbnail", THUMBNAIL, "≥ 3.9", "4.2"),
        )
    ]
    top = setting("gpu", 1, None, None)["parts"]["top_k"] / own["layers"]
    scan, twin = (kernel(name, "index in HBM", 2**17)["ms"] for name in ("nibble 32 channels", "fathom 48"))
    elsewhere_own = [step for step in other_rounds() if step["label"] == FATHOM]
    floors = span((step["floor_ratio"] for step in elsewhere_own), 3)
    walls = span((step["wall_ms"] / step["gpu_ms"] for step in elsewhere_own), 3)
    return [
        row(cells)
        for cells in (
            *compared,
            ("step ÷ floor", "≤ 1.25", "1.15", f"{own['floor_ratio']:.3f}", floors, "–"),
            ("wall ÷ GPU time", "≤ 1.03", "–", f"{own['wall_ms'] / own['gpu_ms']:.3f}", walls, "–"),
            ("exact top-k a layer, ms, one lane", "≤ 0.12", "–", f"{top:.3f}", "–", "–"),
            ("plane scan ÷ gather rate of the link", "≥ 0.95", "–", f"{ratio_line(LONG)['scan rate over gather rate']:.3f}", "–", "–"),
            ("HBM, 128k: nibble scan, 32 channels ÷ plane scan", "≥ 1", "1.3", f"{scan / twin:.2f}", "–", "–"),
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
    names = ("scan", "top_k", "union", "rows", "attention", "gemm", "other")
    return [row((label, *(f"{step['parts_ms'][name]:.2f}" for name in names))) for label, step in main_table().items()]


def contexts() -> list[str]:
    found = []
    for own in sorted(chosen(paced(), label=FATHOM), key=lambda step: step["context"]):
        others = (in_turn(one(label, paced(), round=own["round"])) for label in (SPARQ, DOUBLE, LANDMARK, THUMBNAIL, FULL))
        found.append(
            row(
                (
                    f"{own['context']:,}",
                    in_words(own["lanes"], own["last_lane"]),
                    own["distinct_layers"],
                    f"{own['gpu_ms']:.2f}",
                    f"{own['floor_ratio']:.3f}",
                    f"{own['wall_ms'] / own['gpu_ms']:.3f}",
                    *(f"{ratio:.2f}" for ratio in others),
                )
            )
        )
    return found


def batched() -> list[Record]:
    """Steps of several sessions; at 128k before rows were paced, without a setting that turned out a bad one, four lanes and ``both``."""
    near = [step for step in records() if (step["context"], step["lanes"]) == (2**17, 2)]
    found = [step for step in (*near, *paced()) if step["batch"] > 1]
    return sorted(found, key=lambda step: (step["context"], step["batch"]))


def batches() -> list[str]:
    return [
        row(
            (
                f"{step['context']:,}",
                step["batch"],
                step["lanes"],
                step["label"],
                f"{step['gpu_ms']:.2f}",
                f"{step['gpu_ms'] / step['batch']:.2f}",
                f"{step['wall_ms_a_token']:.2f}",
                f"{step['floor_ratio']:.3f}",
                f"{in_turn(step):.2f}",
                f"{step['distinct_layers']} of {step['layers'] * step['batch']}",
            )
        )
        for step in batched()
    ]


def beside(label: str, context: int, sessions: int) -> tuple[Record, Record, Record]:
    """Sessions side by side, one alone, and as many in one step."""
    (many,) = (step for step in batched() if (step["label"], step["context"], step["batch"]) == (label, context, sessions))
    # The steps of one session at 1M tokens took their turns just before those of several.
    of, single = (paced(), again()) if context == LONG else (records(), records())
    return one(label, of, context=context, sessions=sessions), one(label, single, context=context), many


def of_many() -> list[Record]:
    """Sessions side by side; at 128k before rows were paced."""
    return [step for step in (*chosen_at(records(), 2**17), *chosen_at(paced(), LONG)) if step["sessions"] > 1]


def chosen_at(of: Iterable[Record], context: int) -> list[Record]:
    return [step for step in of if step["context"] == context]


def side_by_side() -> list[str]:
    found = []
    for step in of_many():
        _, alone, many = beside(step["label"], step["context"], step["sessions"])
        times = [one["wall_ms_a_token"] for one in (step, alone, many)]
        found.append(
            row(
                (
                    f"{step['context']:,}",
                    step["sessions"],
                    step["label"],
                    f"{step['wall_ms']:.2f}",
                    f"{step['gpu_ms']:.2f}",
                    *(f"{time:.2f}" for time in times),
                    *(f"{time / times[0]:.2f}" for time in times[1:]),
                )
            )
        )
    return found


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


def settings() -> list[str]:
    """Fathom 48 by lanes and by who brings the rows, GPU time and wall time; of the CPU's threads, eight."""
    found: dict[tuple[int, int, int, int], dict[str, Record]] = {}
    named = [(LONG, 1, line["last"], line["rows"], line) for line in lines_of("settings.jsonl") if "rows" in line]
    named += [(step["context"], step["batch"], step["last_lane"], step["rows_by"], step) for step in lines_of("lanes.jsonl")]
    for context, batch, last, rows, step in named:
        if step.get("threads") in (None, 8):
            found.setdefault((context, batch, step["lanes"], last or 0), {})[rows] = step
    return [
        row(
            (
                f"{context:,}",
                batch,
                in_words(lanes, last or None),
                *(
                    f"{members[rows][name]:.2f}" if rows in members else "–"
                    for rows, name in (("gpu", "gpu_ms"), ("both", "gpu_ms"), ("cpu", "gpu_ms"), ("gpu", "wall_ms"), ("both", "wall_ms"))
                ),
            )
        )
        for (context, batch, lanes, last), members in sorted(found.items())
    ]


def best_of_sweep(name: str) -> float:
    return min(
        float(line[name])
        for line in lines_of("sweep.jsonl", KERNELS)
        if line["kind"] == "sweep" and (line["index"], line["context"]) == ("HBM", 2**17)
    )
