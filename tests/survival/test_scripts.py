"""What the scripts compute before they run anything long."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
    fit = script("scale_plan").fit
    for linear, square in ((3e-5, 2e-10), (1e-4, 0.0), (0.0, 5e-9)):
        points = [(n, linear * n + square * n**2) for n in (16384, 32768, 65536, 131072)]
        assert fit(points, (1, 2))(2**20) == pytest.approx(linear * 2**20 + square * 2**40, rel=1e-6)
    assert fit([(10, 5.0), (20, 5.0), (40, 4.0)], (0, 1))(1000) == pytest.approx(4.6, rel=0.02), "no cost falls with the length"


def test_measurements_replace_what_the_plan_extrapolates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("scale_plan")
    lines = [{"kind": "device", "name": "Card", "memory_bytes": 2**37, "torch": "2.13"}]
    for tokens in (1000, 2000, 4000):
        lines += [{"kind": kind, "model": "Qwen3-8B", "tokens": tokens, "seconds": tokens / 1e4} for kind in ("prefill", "stores", "step")]
    (tmp_path / "measured.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(sys, "argv", ["scale_plan.py", f"--measured={tmp_path / 'measured.jsonl'}", "--tokens=10000", "--new-tokens=10"])
    assert module.main() == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Times come from `measured.jsonl` of `benchmarks/scale.py` on one Card, torch 2.13. Beyond 4,000 tokens" in printed
    assert "extrapolated** from measurements of a small model" not in printed
    assert "| Qwen3-8B | 1 s (8 %) | 1 s (8 %) | 10 s (83 %) | 12 s |" in printed


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
