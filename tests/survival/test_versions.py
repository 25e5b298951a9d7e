"""The versions that the script of the tests runs, and its table of the recorded runs."""

from __future__ import annotations

import pytest

from tests.survival.scripts import ROOT, script


def test_the_lower_ends_are_those_that_the_project_declares() -> None:
    module = script("test_versions")
    bounds = module.lower_bounds((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert bounds.keys() == {"torch", "transformers"}
    from fathom_eval.compat import MINIMUM_TRANSFORMERS, version_numbers

    assert version_numbers(bounds["transformers"]) == MINIMUM_TRANSFORMERS
    assert module.pins("low", ["torch"], {"torch": "2.8"}) == ["torch==2.8.*"]
    assert module.pins("new", ["torch"], {"torch": "2.8"}) == []
    with pytest.raises(SystemExit, match="declares no lower bound of transformers"):
        module.lower_bounds('[project]\ndependencies = ["torch>=2.8"]')


def test_the_table_of_versions_is_made_of_the_recorded_runs() -> None:
    module = script("test_versions")
    page = (ROOT / "docs" / "durability.md").read_text(encoding="utf-8")
    assert module.with_table(page, module.read_runs()) == page
    with pytest.raises(SystemExit, match="the page has no lines"):
        module.with_table("# Another page", [])


def test_the_last_run_of_a_combination_is_the_one_that_counts() -> None:
    module = script("test_versions")
    line = {"python": "3.11.7", "torch": "2.8.0", "transformers": "5.8.1", "device": "CPU", "tests": [], "passed": True}
    new = {**line, "python": "3.13.0", "torch": "2.13.0+cpu", "counts": {"passed": 5, "failed": 0, "skipped": 1}}
    lines = [
        new,
        {**line, "counts": {"passed": 3, "failed": 2, "skipped": 0}},
        {**line, "counts": {"passed": 5, "failed": 0, "skipped": 0}},
    ]
    lines.append({**line, "python": "3.12.3", "tests": ["tests/a.py"], "counts": {"passed": 1}})
    assert module.table(lines)[2:] == [
        "| 3.11.7 | 2.8.0 | 5.8.1 | CPU | all fast ones | 5 | 0 | 0 |",
        "| 3.12.3 | 2.8.0 | 5.8.1 | CPU | `tests/a.py` | 1 |  |  |",
        "| 3.13.0 | 2.13.0+cpu | 5.8.1 | CPU | all fast ones | 5 | 0 | 1 |",
        "",
        "Not passed as a whole: Python 3.12.",
    ]
    xml = '<testsuites><testsuite tests="9" failures="1" errors="2" skipped="3"/></testsuites>'
    assert module.read_counts(xml) == {"passed": 3, "failed": 3, "skipped": 3}
