"""What the README says must be what was recorded and what the commands take."""

from __future__ import annotations

import csv
import json
import re
import shlex
import statistics
from pathlib import Path

import pytest

from fathom_eval.cli import build_parser

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_result_table_is_the_published_runs() -> None:
    published = (ROOT / "reports/published/ruler-smollm2-2048/results.md").read_text(encoding="utf-8")
    section = published.split("### 2,048 tokens, k = 64")[1].split("### ")[0]
    table = [line for line in section.splitlines() if line.startswith("|")]
    assert len(table) == 2 + 14
    assert [line for line in README.splitlines() if line.startswith("|")] == table


def test_what_is_said_of_the_result_table() -> None:
    with (ROOT / "reports/published/ruler-smollm2-2048/overview.csv").open(encoding="utf-8") as file:
        scans = [one for one in csv.DictReader(file) if one["minus_exact_top_k"]]
    below = {k: {one["method"] for one in scans if one["k"] == k and float(one["minus_exact_top_k_high"]) < 0} for k in ("64", "128")}
    above = {k: {one["method"] for one in scans if one["k"] == k and float(one["minus_exact_top_k_low"]) > 0} for k in ("64", "128")}
    pair = {"landmark size=8", "double_sparsity c=D/4"}
    assert below == {"64": pair | {"sparq r=D/8", "thumbnail depth=2", "fathom budget=48 basis=raw"}, "128": pair}
    assert [len(names) for names in above.values()] == [0, 4]
    words = " ".join(README.split())
    assert "Five of the twelve scans do over all tasks" in words
    assert "29 or 30 samples a task" in words
    with (ROOT / "reports/published/ruler-smollm2-2048/results.csv").open(encoding="utf-8") as file:
        assert {one["samples"] for one in csv.DictReader(file)} == {"29", "30"}


def test_every_published_folder_is_linked() -> None:
    folders = {path.name for path in (ROOT / "reports/published").iterdir() if path.is_dir()}
    assert folders == {name for name in folders if f"](reports/published/{name}" in README}


def test_the_cost_is_the_recorded_one() -> None:
    recorded = json.loads((ROOT / "reports/published/branching-cpu/result.json").read_text(encoding="utf-8"))
    words = " ".join(README.split())
    for seconds in (recorded["branched_seconds"], recorded["separate_seconds"]):
        assert f"take {statistics.median(seconds):.1f} s ({min(seconds):.1f} to {max(seconds):.1f})" in words
    assert f"{recorded['ratio']['median']:.1f} times less" in words
    assert f"{recorded['peak_growth_over_prefix_and_stores']:.2f} times the prefix's K/V and the stores" in words


def test_every_command_shown_is_one_that_the_parser_takes() -> None:
    commands = [line.split("#")[0] for line in README.splitlines() if line.startswith("fathom-eval ")]
    assert len(commands) >= 5
    for command in commands:
        build_parser().parse_args(shlex.split(command)[1:])


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_links_lead_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


def test_there_are_exactly_two_set_up_commands() -> None:
    block = README.split("## Set up")[1].split("```")[1]
    assert re.findall(r"^make \w+", block, re.MULTILINE) == ["make demo", "make test"]
