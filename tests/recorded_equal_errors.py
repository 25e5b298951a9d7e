"""The published steps at equal error, and the tables that the document of the runtime makes of them."""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from statistics import fmean

from fathom_eval.offload.bench.equal_error import equal_error
from tests.recorded_names import EQUAL, PACED_EQUAL, ROOT
from tests.recorded_steps import Record, equal_steps, lines_of, paced_equal, row

FIDELITY = {length: ROOT / f"reports/published/fidelity-qwen-coder-{length}-small-budgets" for length in ("90k", "32k")}
SMALL = "fathom budget={} basis=klt attend=union"

Line = dict[str, str]


def reranked() -> list[tuple[Record, Record]]:
    """Steps that rescore, each with the one without; all took turns."""
    steps = {step["label"]: step for step in paced_equal()}
    return [(step, steps[label.replace(f" rerank={step['rerank']}", "")]) for label, step in steps.items() if step["rerank"] > 1]


def rerank() -> list[str]:
    return [
        row(
            (
                step["label"],
                *(f"{time:.2f}" for name in ("gpu_ms", "wall_ms") for time in (without[name], step[name])),
                f"{step['floor_ratio']:.3f}",
                *(f"{part['fetched_bytes'] / 1e6:.0f}" for part in (without, step)),
                f"{step['parts_ms']['rerank']:.2f}",
            )
        )
        for step, without in reranked()
    ]


@cache
def equal_lines(folder: Path = PACED_EQUAL) -> dict[tuple[str, str], dict[str, Line]]:
    """What the command wrote of Fathom, by the errors' length and the reference, then by basis."""
    found: dict[tuple[str, str], dict[str, Line]] = {}
    for length in FIDELITY:
        with (folder / f"equal-error-{length}.csv").open(encoding="utf-8") as file:
            for line in csv.DictReader(file):
                members = found.setdefault((length, line["reference"]), {})
                if line["method"] == "fathom":
                    members[line["basis"]] = line
    return found


def wall_ratio(line: Line) -> float:
    return float(line["reference_wall_ms"]) / float(line["step_wall_ms"])


def windows(length: str, label: str) -> dict[int, float]:
    """Errors of a configuration, by window."""
    return {line["sample"]: line["error_dense"] for line in lines_of("records.jsonl.gz", FIDELITY[length]) if line["label"] == label}


def below(length: str, label: str, reference: str) -> str:
    """In how many windows a configuration's error is below the reference's."""
    own, other = windows(length, label), windows(length, reference)
    assert own.keys() == other.keys()
    return f"{sum(own[number] < other[number] for number in own)} of {len(own)}"


def errors_without_the_largest_gain(length: str, label: str, reference: str) -> tuple[float, float]:
    """Means over windows of a configuration and of the reference, without the window in which they differ most."""
    own, other = windows(length, label), windows(length, reference)
    kept = sorted(own, key=lambda number: other[number] - own[number])[:-1]
    return fmean(own[number] for number in kept), fmean(other[number] for number in kept)


def plain_ratio(length: str, reference: str) -> float:
    """Fathom's speed in a basis at a reference's error, where heads attend to their own winners and nothing is rescored.

    Before rows were paced: few of these were timed after.
    """
    lines = lines_of("records.jsonl.gz", FIDELITY[length])
    plain = [line for line in lines if not {"attend=union", "rerank=1.5", "rerank=2.0"}.intersection(line["label"].split())]
    (found,) = (line for line in equal_error(plain, lines_of("records.jsonl.gz", EQUAL), reference) if line.basis == "klt")
    return found.ratio


def equal() -> list[str]:
    """The references whose error Fathom reaches at a budget that was timed."""
    found = []
    for (length, reference), members in equal_lines().items():
        if "klt" not in members:
            continue
        error, line = fmean(windows(length, reference).values()), members["klt"]
        short = line["label"].replace(" basis=klt", "").replace("fathom ", "")
        cells = [short, f"{float(line['error']):.3f}", below(length, line["label"], reference), f"{float(line['step_ms']):.2f}"]
        cells += [f"{float(line['ratio']):.2f}", f"{wall_ratio(line):.2f}"]
        found.append(row((length, reference, f"{error:.3f}", *cells)))
    return found


def turned() -> list[tuple[float, float]]:
    """Milliseconds of GEMMs and of wall time that a step in a basis takes more than one in the model's channels, both of one round."""
    steps = {(step["label"], step["round"], step["rows_by"]): step for step in equal_steps()}
    found = []
    for (label, together, rows), step in steps.items():
        raw = steps.get((label.replace("basis=klt", "basis=raw"), together, rows), step)
        if raw is not step:
            found.append((step["parts_ms"]["gemm"] - raw["parts_ms"]["gemm"], step["wall_ms"] - raw["wall_ms"]))
    return found


def both_ways() -> list[tuple[Record, Record]]:
    """Steps of the second start with rows by ``both``, and the same with rows by the GPU."""
    last = equal_steps()[-1]["round"]
    steps = {(step["label"], step["rows_by"]): step for step in equal_steps() if step["round"] == last}
    return [(step, steps[label, "gpu"]) for (label, rows), step in steps.items() if rows == "both"]


def gathering() -> list[str]:
    return [
        row(
            (
                both["label"],
                *(f"{step[name]:.2f}" for name in ("gpu_ms", "wall_ms") for step in (gpu, both)),
                *(f"{gpu[name] - both[name]:.2f}".replace("-", "−") for name in ("gpu_ms", "wall_ms")),
            )
        )
        for both, gpu in both_ways()
        if both["rerank"] == 1
    ]
