"""Every number in the document of the runtime, and in the README of the published steps, is a recorded one or a plain setting."""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.offload.cache import LONG_SCAN, default_lanes
from fathom_eval.reports import build_report

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "reports/published/step-h200"
RUNTIME, README = ROOT / "docs/runtime.md", PUBLISHED / "README.md"

# Numbers that are no measurement: names, shapes, settings, powers of two.
_SETTINGS = (
    r"Qwen3-8B|H200|PCIe 5 ×16|Fathom 48|\b(?:136|68|48)-bit|k = 512|batch 1|1M|128k|512k|\b512 B\b|2 MiB|Qwen[23]\b"
    r"|`[^`]*`|\]\([^)]*\)|torch 2\.11|segments of 32,768 tokens|Blocks of 64 tokens|(?:^| )\d\. (?=\*\*)|132 programs"
)


def lines_of(name: str) -> list[dict[str, Any]]:
    path = PUBLISHED / name
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in data.splitlines()]


def steps() -> list[str]:
    """The main table, one line a record."""
    return [
        f"| {one['label']} | {one['lanes']} | {one['gpu_ms']:.2f} | {one['wall_ms'] / one['gpu_ms']:.3f} | {one['floor_ms']:.2f} | "
        f"{one['floor_ratio']:.3f} | {one['gpu_ms'] / own(one)['gpu_ms']:.2f} | {one['scan_bits']:.1f} | {one['active_channels']:.1f} | "
        f"{one['rows_bytes'] / 1e6:.1f} |"
        for one in lines_of("records.jsonl.gz")
    ]


def own(step: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in lines_of("records.jsonl.gz") if one["lanes"] == step["lanes"] and one["method"] == "fathom")


def parts() -> list[str]:
    """Where the time of one lane goes."""
    names = ("scan", "top_k", "union", "rows", "attention", "gemm", "other")
    return [
        f"| {one['label']} | " + " | ".join(f"{one['parts_ms'][name]:.2f}" for name in names) + f" | {one['scan_of_link']:.3f} |"
        for one in lines_of("records.jsonl.gz")
        if one["lanes"] == 1
    ]


def logged() -> dict[int, dict[str, float]]:
    """What the log of the run with more lanes says, by lanes."""
    found = {}
    for line in (PUBLISHED / "lanes.log").read_text(encoding="utf-8").splitlines():
        match = re.search(r"lanes (\d): GPU ([\d.]+) ms \(event [\d.]+; (.*?)\), .* ([\d.]+) of the floor ([\d.]+) ms", line)
        if match:
            pairs = re.findall(r"([a-z_]+) ([\d.]+)", match[3])
            found[int(match[1])] = {"gpu": float(match[2]), "ratio": float(match[4]), "floor": float(match[5])} | {
                name: float(amount) for name, amount in pairs
            }
    return found


def lanes() -> list[str]:
    names = ("gpu", "ratio", "scan", "top_k", "union", "rows")
    digits = {"ratio": 3}
    return [
        f"| {count} | " + " | ".join(f"{row[name]:.{digits.get(name, 2)}f}" for name in names) + " |" for count, row in logged().items()
    ]


def rate(pages: str, at_once: int, programs: int, order: str, name: str) -> float:
    (found,) = (
        one["gb_s"]
        for one in lines_of("rows.jsonl")
        if (one["host_pages"], one["rows_at_once"], one["programs"], one["order"], one["name"]) == (pages, at_once, programs, order, name)
    )
    return float(found)


def fetches() -> list[str]:
    """Rates of fetches in one setting, by pages."""
    places = ("again", "one layer", "layers", "after a scan", "scan")
    return [
        f"| {pages} | {order} | {programs or 'all'} | "
        + " | ".join(f"{rate(pages, 8, programs, order, place):.1f}" for place in places)
        + " |"
        for pages in ("small", "single", "driver")
        for order, programs in (("runs", 0), ("ascending", 0), ("ascending", 132))
    ]


def huge() -> list[str]:
    """Huge pages against small ones: an earlier sweep."""
    rows = lines_of("rows-huge.jsonl")
    return [
        f"| {pages} | "
        + " | ".join(
            f"{next(one['gb_s'] for one in rows if (one['host_pages'], one['rows_a_program'], one['order'], one['place']) == key):.1f}"
            for key in ((pages, 8, "ascending", place) for place in ("same rows again", "one layer", "5 layers"))
        )
        + " |"
        for pages in ("small", "huge")
    ]


def phrases() -> dict[str, list[str]]:
    """What either document says in sentences."""
    records, small, log = lines_of("records.jsonl.gz"), lines_of("small-pages.jsonl"), logged()
    first, other = records[0], small[0]
    scans = [one for one in lines_of("rows.jsonl") if one["name"] == "scan"]
    slow, fast = ([one["gb_s"] for one in scans if one["host_pages"] == pages] for pages in ("driver", "small"))
    twin = next(one for one in small if one["method"] == "fathom" and one["lanes"] == 1)
    parts_of_first, rows_ms = first["parts_ms"], log[1]["rows"]
    copied = first["rows_bytes"] / first["link_gb_s"] / 1e6
    return {
        "both": [
            f"The link copied {first['link_gb_s']:.1f} GB/s, the GPU's memory {first['hbm_gb_s'] / 1e3:.2f} TB/s.",
            f"{first['distinct_layers']} of the 36 layers have buffers of their own",
        ],
        "runtime": [
            f"pinned {first['host_bytes'] / 2**30:.1f} GiB in {first['pin_seconds']:.1f} s, and small ones in {other['pin_seconds']:.1f} s",
            f"{first['gpu_ms']:.2f} and {twin['gpu_ms']:.2f} ms",
            f"{min(slow):.1f} to {max(slow):.1f} GB/s against {min(fast):.1f} to {max(fast):.1f}",
            f"the scan of the step with `driver` pages took {log[1]['scan']:.2f} ms, that with huge pages {parts_of_first['scan']:.2f} ms",
            f"{first['rows_bytes'] / 1e6:.0f} MB of rows would take {copied:.1f} ms at the link's copy rate and take {rows_ms:.1f} ms",
            f"from {rate('small', 8, 0, 'runs', 'after a scan'):.1f} to {rate('small', 8, 132, 'ascending', 'after a scan'):.1f} GB/s",
            f"With four lanes {log[4]['gpu'] - log[4]['floor']:.1f} ms of the step lie above its floor",
        ],
        "readme": [
            f"{len(records)} records",
            f"{records[0]['repeats']} timed turns",
        ],
    }


def words(path: Path) -> str:
    return " ".join(path.read_text(encoding="utf-8").split())


TABLES = {RUNTIME: (parts, lanes, fetches, huge), README: (steps,)}
PHRASES = {RUNTIME: ("both", "runtime"), README: ("both", "readme")}


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_tables_are_the_recorded_ones(path: Path) -> None:
    text = path.read_text(encoding="utf-8").splitlines()
    shown = [line for line in text if line.startswith("| ") and re.search(r"\|.*\d", line)]
    assert shown == [line for made in TABLES[path] for line in made()]


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.name)
def test_sentences_hold_no_number_but_recorded_ones(path: Path) -> None:
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    text = " ".join(line for line in text.splitlines() if not line.startswith("|"))
    text = " ".join(text.split())
    for phrase in (phrase for kind in PHRASES[path] for phrase in phrases()[kind]):
        assert phrase in text
        text = text.replace(phrase, "")
    assert re.findall(r".{0,30}\d.{0,20}", re.sub(_SETTINGS, "", text)) == []


def test_what_the_document_concludes() -> None:
    by_lanes = logged()
    assert sorted(by_lanes) == [1, 2, 4]
    assert by_lanes[4]["gpu"] < by_lanes[2]["gpu"] < by_lanes[1]["gpu"]
    assert default_lanes(1, 8, 2**20, "host") == 4
    assert LONG_SCAN == 2**19
    kernel = (ROOT / "kernels/rows/triton.py").read_text(encoding="utf-8")
    assert "\nROWS = 8\n" in kernel
    assert '"host": 132}' in kernel
    best = [rate(pages, 8, 132, "ascending", "after a scan") for pages in ("small", "single", "driver")]
    assert max(best) / min(best) < 1.03
    for pages in ("small", "single", "driver"):
        rates = {
            (size, programs, order): rate(pages, size, programs, order, "after a scan")
            for size in (8, 32)
            for programs in (0, 132, 528)
            for order in ("runs", "ascending")
        }
        assert max(rates, key=lambda key: rates[key]) == (8, 132, "ascending")


def test_the_tables_beside_are_made_of_the_records(tmp_path: Path) -> None:
    files = build_report([PUBLISHED], tmp_path / "out")
    made = {path.name: path.read_text(encoding="utf-8") for path in files.tables}
    assert made == {path.name: path.read_text(encoding="utf-8") for path in (PUBLISHED / "tables").glob("*.csv")}
    assert files.markdown.read_text(encoding="utf-8") == (PUBLISHED / "results.md").read_text(encoding="utf-8")
    assert sum(path.stat().st_size for path in PUBLISHED.rglob("*")) < 500_000


def test_nothing_published_names_the_machine_it_was_made_on() -> None:
    for path in PUBLISHED.glob("*.[jlm]*"):
        assert not re.search(rb"/tmp|/root|/opt|/home", path.read_bytes()), path.name
