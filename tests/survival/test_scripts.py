"""What the scripts compute before they run anything long."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from fathom_eval.cli import main
from fathom_eval.run import RECORDS
from tests.survival.conftest import Arguments

ROOT = Path(__file__).resolve().parents[2]


def script(name: str) -> ModuleType:
    path = list(sys.path)
    specification = importlib.util.spec_from_file_location(f"scripts_{name}", ROOT / "scripts" / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    try:
        specification.loader.exec_module(module)
    finally:
        sys.path[:] = path
    return module


def test_a_fit_finds_what_made_the_points() -> None:
    fit = script("scale_plan").scale_measured.fit
    for linear, square in ((3e-5, 2e-10), (1e-4, 0.0), (0.0, 5e-9)):
        points = [(n, linear * n + square * n**2) for n in (16384, 32768, 65536, 131072)]
        assert fit(points, (1, 2))(2**20) == pytest.approx(linear * 2**20 + square * 2**40, rel=1e-6)
    assert fit([(10, 5.0), (20, 5.0), (40, 4.0)], (0, 1))(1000) == pytest.approx(4.6, rel=0.02), "no cost falls with the length"


def test_measurements_replace_what_the_plan_extrapolates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("scale_plan")
    shape = {"parameters": 10**9, "layers": 36, "query_heads": 32, "head_dim": 128}
    lines: list[dict[str, Any]] = [
        {"kind": "device", "name": "Card", "memory_bytes": 2**37, "torch": "2.13", "methods": ["dense", "exact"], "k": 128},
        {"kind": "model", "model": "Qwen3-8B", **shape},
    ]
    sizes = {"weights_bytes": 2**30, "prefix_bytes": 2**29, "store_bytes": 2**29, "peak_bytes": 3 * 2**30, "estimated_bytes": 2**30}
    for tokens in (1000, 2000, 4000):
        lines += [{"kind": kind, "model": "Qwen3-8B", "tokens": tokens, "seconds": tokens / 1e4} for kind in ("prefill", "stores", "step")]
        lines.append({"kind": "memory", "model": "Qwen3-8B", "tokens": tokens, **sizes})
    lines[-2]["seconds"] = 0.5
    (tmp_path / "measured.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(sys, "argv", ["scale_plan.py", f"--measured={tmp_path / 'measured.jsonl'}", "--tokens=10000", "--new-tokens=10"])
    assert module.main() == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Times come from `measured.jsonl` of `benchmarks/scale.py` on one Card, torch 2.13. Beyond 4,000 tokens" in printed
    assert "extrapolated** from measurements of a small model" not in printed
    assert "| Qwen3-8B | 1 s (8 %) | 1 s (8 %) | 11 s (84 %) | 13 s |" in printed
    assert "| Qwen3-8B | 4,000 | 0.4 s | 32 | 0.4 s | 0.5 s | 1.0 | 3.0 | 2.0 |" in printed
    assert "the prefill of that would have been foretold within 0% and a step within 20%" in printed
    assert "1.50 to 1.50 times what weights and estimate say together" in printed
    assert "No session of more than 4,000 tokens" in printed


def test_the_page_of_the_plan_is_what_the_script_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("scale_plan")
    monkeypatch.setattr(sys, "argv", ["scale_plan.py", "--measured=/nowhere"])
    assert module.main() == 0
    assert capsys.readouterr().out == (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")


def test_what_was_measured_is_read_from_the_published_runs() -> None:
    module = script("scale_records")
    sessions, step = module.read_sessions(), module.read_lock_step()
    assert [(one.tokens, one.branches) for one in sessions[:2]] == [(88590, 32), (88748, 32)]
    assert all(one.prefill < one.decoding and one.held < one.peak for one in sessions)
    assert len(step.branches) == 12
    assert 0 < step.dense_gpu < step.gpu < step.wall
    assert step.launches_a_layer < step.kernels_a_layer, "scans are replayed as graphs"
    rates = sorted(module.prefill_rate([one]) for one in sessions)
    assert rates[0] < module.prefill_rate(sessions) < rates[-1]


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


def test_the_published_runs_on_several_gpus_are_what_the_script_and_the_page_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, published = script("several_devices"), ROOT / "reports" / "published" / "several-gpus"
    for packed in published.glob("runs/*/records.jsonl.gz"):
        folder = tmp_path / packed.parent.name
        folder.mkdir()
        shutil.copy(packed.with_name("manifest.json"), folder)
        (folder / RECORDS).write_bytes(gzip.decompress(packed.read_bytes()))
    assert module.main([f"--compare-only={tmp_path}"]) == 1, "two of the runs were stopped"
    found, recorded = json.loads(capsys.readouterr().out), json.loads((published / "several-gpus.json").read_text(encoding="utf-8"))
    tests = recorded.pop("tests")
    assert {test["outcome"] for test in tests} == {"passed"}
    # The runs' tables are not published.
    without = [{name: value for name, value in run.items() if not name.startswith("tables")} for run in recorded["runs"]]
    assert [{name: value for name, value in run.items() if not name.startswith("tables")} for run in found["runs"]] == without
    assert {name: value for name, value in found.items() if name != "runs"} == {
        name: value for name, value in recorded.items() if name != "runs"
    }
    runs = {run["name"]: run for run in recorded["runs"]}
    readme, page = ((path).read_text(encoding="utf-8") for path in (published / "README.md", ROOT / "docs" / "durability.md"))
    for name, run in runs.items():
        if name != module.ONE:
            counts = (f"{run['samples']} of {run['of']}", f"{run['equal']} of {run['records']}")
            stopped = ", stopped" if run["missing"] else ""
            [line] = [line for line in readme.splitlines() if line.startswith(f"| {name} |")]
            assert f"| {counts[0]}{stopped} | {counts[1]} |" in line
            assert ("none written" in line) == (run["tables"] == 0) == (not run["tables_equal"])
    assert f"all {len(tests)} passed" in readme
    assert f"| {runs['each']['equal']} of {runs['each']['records']} records and all tables equal to one GPU's |" in page
    for name in ("split", "split, two copies"):
        run = runs[name]
        assert re.search(rf"after {run['samples']} of {run['of']} samples: (its|their) {run['equal']} records equal to one GPU's", page)
    assert recorded["logits"] == []
    assert '| logits, and `device_map="auto"` on two GPUs | **not run** |' in page


def test_what_is_no_complete_run_to_compare_with_is_said(ruler: Arguments, tmp_path: Path) -> None:
    module = script("several_devices")
    with pytest.raises(SystemExit, match="holds no run named 'one'"):
        module.main([f"--compare-only={tmp_path}"])
    assert main(ruler("one", limit=2)) == 0
    path = tmp_path / "one" / RECORDS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["sample"] == 0))
    with pytest.raises(SystemExit, match="is unfinished: it has 1 of 2 samples"):
        module.main([f"--compare-only={tmp_path}"])


def test_the_published_times_at_90_000_tokens_are_those_of_their_logs() -> None:
    folder = ROOT / "reports" / "published" / "scale-h200"
    found, log = (
        json.loads((folder / "fidelity-90k.json").read_text(encoding="utf-8")),
        (folder / "fidelity-90k.log").read_text(encoding="utf-8"),
    )
    seconds = found["seconds"]
    assert (len(found["methods"]), found["positions"], found["context"], found["failures"]) == (25, 128, 90112, [])
    marks = {
        f"[{seconds['model loaded, from the start of the process']:6.1f} s] model loaded",
        f"[{seconds['report written, from the start of the process']:6.1f} s] exit 0",
    }
    assert marks < set(log.splitlines())
    assert f"measured in {seconds['window']} s; failures: []" in log
    assert f"seconds a layer: {seconds['layers']} peak {found['peak_gpu_gib']} GiB" in log
    assert seconds["window"] == pytest.approx(seconds["prefill of the window"] + sum(seconds["layers"]), abs=0.5)
    readme = " ".join((folder / "README.md").read_text(encoding="utf-8").split())
    assert f"the prefill {seconds['prefill of the window']} s and the 24 layers {sum(seconds['layers']):.1f} s" in readme
    assert f"{seconds['report written, from the start of the process']} s from the start of the process to the written report" in readme
    ratio = json.loads((folder / "lock-step.json").read_text(encoding="utf-8"))["ratio"]
    assert (
        f"took {ratio['median']:.2f} times as long as dense attention alone ({ratio['low']:.2f} to {ratio['high']:.2f}, five turns)"
        in readme
    )
    assert all(line.startswith("ok") for line in (folder / "graph-checks.log").read_text(encoding="utf-8").splitlines()[1:-1])


def test_runs_on_several_devices_are_held_together(ruler: Arguments, tmp_path: Path) -> None:
    module = script("several_devices")
    assert main(ruler("one", limit=1)) == 0
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    found = module.compare(tmp_path / "one", tmp_path / "other")
    assert (found["records"], found["equal"], found["missing"], found["tables_equal"]) == (5, 5, 0, True)
    table = tmp_path / "other" / "report" / "samples.csv"
    head, first, *rest = table.read_text().splitlines(keepends=True)
    table.write_text("".join([head, *rest, first]))
    found = module.compare(tmp_path / "one", tmp_path / "other")
    assert (found["tables_equal"], found["tables_in_another_order"]) == (True, ["samples.csv"])
    table.write_text("".join([head, *rest]))
    found = module.compare(tmp_path / "one", tmp_path / "other")
    assert (found["tables_equal"], found["tables_in_another_order"]) == (False, [])
    path = tmp_path / "other" / RECORDS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = next(line for line in lines if line.get("method") == "sparq")
    changed |= {"generation": "another", "rows": changed["rows"] + 2}
    gone = next(line for line in lines if line.get("method") == "landmark")
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines if line is not gone))
    found = module.compare(tmp_path / "one", tmp_path / "other")
    assert (found["records"], found["equal"], found["missing"]) == (4, 3, 1)
    assert found["differing_fields"] == {"generation": 1, "rows": 1}
    assert found["largest_differences"] == {"rows": 2}
