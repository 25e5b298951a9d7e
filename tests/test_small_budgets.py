"""The runs of small budgets with union and rerank are what docs/fidelity.md says; its numbers are held to in tests/test_findings.py."""

from __future__ import annotations

import json
import re

from tests.findings import KLT, PUBLISHED, ROOT, SPARQ_QUARTER, helps, reached, records
from tests.small_budgets import (
    ADDED,
    BEFORE,
    BOTH,
    OWN,
    QUARTERS,
    RERANK,
    RUNS,
    UNION,
    alike_table,
    alone_table,
    budgets,
    declared_bits,
    errors_table,
    factors,
    klt,
    mean,
    reach,
    reranked_at_equal_bytes,
    union_factors,
    windows,
)


def test_they_were_measured_in_two_starts_on_the_windows_of_the_runs_before() -> None:
    for context, name in RUNS.items():
        manifest = json.loads((PUBLISHED / name / "manifest.json").read_text(encoding="utf-8"))
        first, second = (one["settings"] for one in manifest["invocations"])
        added = set(second["methods"]) - set(first["methods"])
        assert {int(re.findall(r"budget=(\d+) ", label)[0]) for label in added} == set(ADDED)
        assert set(first["methods"]) < set(second["methods"])
        for settings in (first, second):
            assert (settings["suite"], settings["windows"], settings["k"], settings["positions"]) == ("equal-error", 8, [512], 128)
        for method in ("exact", KLT, SPARQ_QUARTER):
            new = windows(name, method)
            assert len(new) == 8
            for window, value in windows(BEFORE[context], method).items():
                assert abs(new[window] - value) < 1e-4


def test_union_helps_every_scan_and_the_smallest_budgets_least() -> None:
    for context in RUNS:
        assert max(union_factors(context)) < 1
        found = [factors(context, UNION, [klt(budget)])[0] for budget in budgets(context, UNION)]
        assert found == sorted(found, reverse=True)


def test_rerank_costs_bytes_at_small_budgets() -> None:
    gains = [line for line in helps() if "| 0.57 % |" in line and "rerank" in line and float(line.split(" | ")[-2]) < 1]
    assert [line.split(" | ")[4] for line in gains] == ["budget=48 rerank=2.0"]
    for context in RUNS:
        assert min(map(float, reranked_at_equal_bytes(context).values())) > 1
        assert budgets(context, RERANK) == budgets(context, BOTH) == [24, 32]


def test_like_for_like_the_budgets_are_those_of_the_runs_before() -> None:
    for context, name in RUNS.items():
        for scan in QUARTERS:
            plain, joint = (reach(context, scan, switch, switch) for switch in (OWN, UNION))
            assert plain is not None
            bits_before, _ = reached(BEFORE[context], context, 512, scan)
            assert abs(declared_bits(context, klt(plain.budget)) - bits_before) < 0.05
            assert (joint and joint.budget) == (None if scan == SPARQ_QUARTER else plain.budget)
            assert reach(context, scan, BOTH, BOTH) is None
        reads = [one["label"] for one in records(name) if one["method"] == "fathom"]
        assert min(mean(context, read) for read in dict.fromkeys(reads)) > mean(context, SPARQ_QUARTER + UNION)
    found = {(context, scan): reach(context, scan, RERANK, RERANK) for context in RUNS for scan in QUARTERS}
    [(cell, single)] = [(cell, one) for cell, one in found.items() if one is not None]
    assert cell == (32768, QUARTERS[0])
    assert single.tie


def test_each_table_stands_under_its_setting() -> None:
    text = (ROOT / "docs/fidelity.md").read_text(encoding="utf-8")
    for context, what in ((90112, "Agent sessions"), (32768, "WikiText")):
        table = "\n".join(errors_table(context))
        assert f"{what}, {context:,} tokens, k = 512, 8 windows:\n\n{table}\n" in text
    before, alike = text.split("**Like for like.**")
    assert "\n".join(alone_table()) in before.split("**Against the scans as they are.**")[1]
    assert "\n".join(alike_table()) in alike.split("\n## ")[0]
