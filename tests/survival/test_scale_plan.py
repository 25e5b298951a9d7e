"""The plan of a long run: its fits, its page, and the published measurements behind it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.survival.scripts import ROOT, script

LENGTHS = (16384, 32768, 65536, 131072)


def test_a_fit_finds_what_made_the_points() -> None:
    fits = script("scale_plan").scale_measured
    for linear, square in ((3e-5, 2e-10), (1e-4, 0.0), (0.0, 5e-9)):
        points = [(n, linear * n + square * n**2) for n in LENGTHS]
        assert fits.square(points)(2**20) == pytest.approx(linear * 2**20 + square * 2**40, rel=1e-6)
    assert fits.square([(10, 5.0), (20, 5.0), (40, 4.0)])(1000) > 0
    for height, slope in ((0.5, 1e-5), (0.0, 2e-5), (3.0, 0.0)):
        points = [(n, height + slope * n) for n in LENGTHS]
        assert fits.straight(points)(2**20) == pytest.approx(height + slope * 2**20, rel=1e-6)
    assert fits.straight([(10, 5.0), (20, 5.0), (40, 4.0)])(1000) == pytest.approx(5.0), "no cost falls with the length"
    assert fits.straight([(10, 1.0), (20, 4.0), (40, 10.0)])(1) > 0, "nor is any below nothing"


@pytest.mark.parametrize("spoiled", LENGTHS)
@pytest.mark.parametrize("factor", [0.5, 2.0, 10.0])
def test_a_line_is_not_led_astray_by_one_point(spoiled: int, factor: float) -> None:
    """As a first step may be, by what it alone has to do; with one point of four no least squares withstand it."""
    straight = script("scale_plan").scale_measured.straight
    true = {n: 0.5 + 1e-5 * n * (1 + 0.02 * (-1) ** place) for place, n in enumerate(LENGTHS)}
    points = [(n, seconds * (factor if n == spoiled else 1)) for n, seconds in true.items()]
    assert straight(points)(2**20) == pytest.approx(0.5 + 1e-5 * 2**20, rel=0.15)


def test_measurements_replace_what_the_plan_extrapolates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("scale_plan")
    shape = {"parameters": 10**9, "layers": 36, "query_heads": 32, "kv_heads": 8, "head_dim": 128}
    lines: list[dict[str, Any]] = [
        {"kind": "device", "name": "Card", "memory_bytes": 2**37, "torch": "2.13", "methods": ["dense", "exact"], "k": 128},
        {"kind": "model", "model": "Qwen3-8B", **shape},
    ]
    sizes = {"weights_bytes": 2**30, "prefix_bytes": 2**29, "store_bytes": 2**29, "peak_bytes": 3 * 2**30, "estimated_bytes": 2**30}
    for tokens in (1000, 2000, 3000, 4000):
        lines += [{"kind": kind, "model": "Qwen3-8B", "tokens": tokens, "seconds": tokens / 1e4} for kind in ("prefill", "stores", "step")]
        lines.append({"kind": "memory", "model": "Qwen3-8B", "tokens": tokens, **sizes})
    lines[-2]["seconds"] = 0.44
    slow = next(line for line in lines if line["kind"] == "stores" and line["tokens"] == 2000)
    slow["seconds"] = 7.7
    (tmp_path / "measured.jsonl").write_text("\n".join(map(json.dumps, lines)))
    monkeypatch.setattr(sys, "argv", ["scale_plan.py", f"--measured={tmp_path / 'measured.jsonl'}", "--tokens=10000", "--new-tokens=10"])
    assert module.main() == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "Times come from `measured.jsonl` of `benchmarks/scale.py` on one Card, torch 2.13." in printed
    assert "**beyond 4,000 tokens they are extrapolated** by these" in printed
    assert "**Times are extrapolated** from measurements of a small model" not in printed
    assert "| Qwen3-8B | 1 s (8 %) | 1 s (8 %) | 10 s (83 %) | 12 s |" in printed
    assert "| Qwen3-8B | 2,000 | 0.2 s | 145 | 7.7 s † | 0.2 s | 1.0 | 3.0 | 2.0 |" in printed
    assert printed.count("†") == 2
    assert "**†** is more than 20 % from its fit: stores of Qwen3-8B at 2,000 tokens, 7.7 s by the clock and 0.2 s by the fit." in printed
    assert "What made a step differ" not in printed
    assert "The run's sessions are 2.5 times as long as the longest measured." in printed
    assert "the prefill of that would have been foretold within 0 %" in printed
    assert "and a step within 9 %; with prefills and steps by those fits the run would take" in printed
    assert "1.50 to 1.50 times what weights and estimate say together. " in printed, "and not that it never was more"
    assert "No session of more than 4,000 tokens and no model on several GPUs was timed" in printed
    assert (
        "compilation of kernels is likely, since stores grow with the length and a first step may need kernels that none before it did."
        in (printed)
    )
    other = [{**line, "model": "Qwen3-4B", **({"seconds": 0.2} if line is slow else {})} for line in lines[1:]]
    (tmp_path / "measured.jsonl").write_text("\n".join(map(json.dumps, [*lines, *other])))
    assert module.main() == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "did; it is not shown: Qwen3-4B, whose KV heads are as many and as large, took 0.2 s at 2,000 tokens." in printed
    slow["seconds"] = 0.2
    lines.append(lines.pop(lines.index(slow)))
    (tmp_path / "measured.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert module.main() == 0
    assert "†" not in capsys.readouterr().out, "nothing is marked where all lie on their fits"


def test_the_page_of_the_plan_is_what_the_script_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = script("scale_plan")
    monkeypatch.setattr(sys, "argv", ["scale_plan.py"])
    assert module.main() == 0
    page = (ROOT / "docs" / "scale.md").read_text(encoding="utf-8")
    assert capsys.readouterr().out == page
    measured = (ROOT / "reports" / "published" / "scale-h200" / "measured.jsonl").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in measured.splitlines()]
    for line in lines:
        if line["kind"] == "memory":
            assert line["peak_bytes"] < line["weights_bytes"] + line["estimated_bytes"]
    assert page.count(" s † |") == 4
    shapes, matrices = {line["model"]: line for line in lines if line["kind"] == "model"}, module.layers_of
    for name, shape in module.SHAPES.items():
        tables = 2 * shape["vocab"] * shape["hidden_size"]
        assert 0 < shapes[name]["parameters"] - tables - matrices(shape) < 1e6, "all but norms and biases"
    for model in ("Qwen3-8B", "Llama-3.1-8B"):
        stores = {line["tokens"]: line["seconds"] for line in lines if line["kind"] == "stores" and line["model"] == model}
        assert stores[32768] > 3 * stores[131072], "something else than stores, likely compilation"
        assert f"stores of {model} at 32,768 tokens, " in " ".join(page.split())


def test_without_measurements_the_plan_extrapolates_and_says_so(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = script("scale_plan")
    monkeypatch.setattr(sys, "argv", ["scale_plan.py", "--extrapolate"])
    assert module.main() == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "**Times are extrapolated** from measurements of a small model at 84,144 to 96,875 tokens (below)" in printed
    assert "At 400 TFLOP/s, with steps that only read what they must, all would take 139 GPU hours: that is the lower bound." in printed
    assert "**In all: 401 GPU hours, 50 hours on 8 GPUs.**" in printed
    assert "| Qwen3-4B | 38 min (94 %) | 0.059 s (0 %) | 152 s (6 %) | 41 min | 13 h | 137 h |" in printed
    assert "No session of more than 96,875 tokens, no model above 0.5 B and no model spread over several GPUs was timed." in printed
    assert "## What was measured" not in printed
    assert "No forecast for larger models" not in printed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--measured={}/none.jsonl"], r"none\.jsonl cannot be read: No such file or directory; --extrapolate does without"),
        (["--measured={}/page.md"], r"page\.md holds something else than what benchmarks/scale\.py prints"),
        (["--measured={}/device.jsonl"], "has no device, or no model at two lengths or more"),
        (["--gpus=1"], r"--gpus 1 are too few: a copy of Qwen3-4B takes 2 of 139\.8"),
        (["--gpu-gib=0.5"], r"GPUs of 0\.5 GiB \(--gpu-gib\) are too small for one of the 36 layers of Qwen3-4B"),
        (["--gpu-gib=0.5", "--extrapolate", "--gpus=1000"], r"GPUs of 0\.5 GiB"),
        (["--gpu-gib=nan"], "--gpu-gib nan must be above 0"),
        (["--gpus=0"], "--gpus 0 must be above 0"),
        (["--sessions=0"], "--sessions 0 must be above 0"),
        (["--tokens=-1"], "--tokens -1 must be above 0"),
        (["--new-tokens=0"], "--new-tokens 0 must be above 0"),
        (["--tokens=2047"], "--tokens 2047 are fewer than the k = 2048"),
    ],
)
def test_a_plan_that_cannot_be_is_refused(arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text("# A page")
    (tmp_path / "device.jsonl").write_text('{"kind": "device"}')
    module = script("scale_plan")
    monkeypatch.setattr(sys, "argv", ["scale_plan.py", *(argument.format(tmp_path) for argument in arguments)])
    with pytest.raises(SystemExit, match=said):
        module.main()


def test_what_was_measured_is_read_from_the_published_runs() -> None:
    module = script("scale_records")
    sessions, step = module.read_sessions(), module.read_lock_step()
    assert [(one.tokens, one.branches) for one in sessions[:2]] == [(88590, 32), (88748, 32)]
    assert all(one.prefill < one.decoding and one.held < one.peak for one in sessions)
    assert len(step.branches) == 12
    assert 0 < step.dense_gpu < step.gpu < step.wall
    assert step.launches_a_layer < step.kernels_a_layer, "scans are replayed as graphs"
    own = module.layer_weights(24, 14, 2, 64, *module.SMALL_WIDTHS)
    norms_and_biases = 24 * (2 * 896 + 64 * (14 + 2 * 2)) + 896
    assert own + 151936 * 896 + norms_and_biases == module.SMALL_PARAMETERS, "all others are the embedding, which is looked up"
    assert module.operations(24, 14, 64, own, 1000) == 2 * own * 1000 + 4 * 24 * 14 * 64 * 1000**2 / 2
    rates = sorted(module.prefill_rate([one]) for one in sessions)
    assert rates[0] < module.prefill_rate(sessions) < rates[-1]


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
    first, *later = json.loads((folder / "agent-session.json").read_text(encoding="utf-8"))["turns"]
    for title, name, digits, unit in (
        ("whole session", "seconds", 1, " s"),
        ("without the noise floor", "without_noise_floor_seconds", 1, " s"),
        ("noise floor: two branches, each decoded alone", "noise_floor_seconds", 1, " s"),
        ("stores", "stores_seconds", 1, " s"),
        ("step in lock-step ÷ step of dense attention alone", "ratio", 2, ""),
    ):
        values = [f"{turn[name]:.{digits}f}" for turn in later]
        assert f"| {title} | {first[name]:.{digits}f}{unit} | {min(values)} to {max(values)}{unit} |" in readme
    measured = [json.loads(line) for line in (folder / "measured.jsonl").read_text(encoding="utf-8").splitlines()]
    stores = [line["seconds"] for line in measured if line["kind"] == "stores" and line["tokens"] == 32768]
    assert f"took {stores[1]:.1f} s and {stores[2]:.1f} s, longer than at any greater length" in readme
    assert f"Qwen3-4B, whose KV heads are as many and as large, took {stores[0]:.2f} s there" in readme
    assert all(line.startswith("ok") for line in (folder / "graph-checks.log").read_text(encoding="utf-8").splitlines()[1:-1])
