"""Suites of ablations, and comparison at equal bytes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import fathom_eval.calibration_file as files
from fathom_eval import cli
from fathom_eval.calibrate import TokenSource, describe, measure_statistics
from fathom_eval.calibration_file import PlanSettings, calibration_path, save_calibration
from fathom_eval.equal_bytes import compare_at_equal_bytes, comparison_rows, comparison_values, step_bytes
from fathom_eval.errors import UserError
from fathom_eval.run import Run
from fathom_eval.suites import ROLES, SUITES, Suite, find_suite, parse_calibrations
from tests.tiny import save_tiny, tiny_model


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(files, "_READ", {})


def make_calibrations() -> dict[str, str]:
    import dataclasses

    import torch

    tiny = tiny_model(layers=2, query_heads=4, kv_heads=2, head_dim=16)
    window = list(range(2, 200))
    tensors = measure_statistics(tiny, [window])
    plans = {f"plan_{mean}": torch.tensor([mean, mean]) for mean in (48, 64)}
    made = describe(tiny, TokenSource("text", "0" * 64, window, ()), tokens=198, context=198)
    for role in ROLES:
        settings = PlanSettings("klt", 198, 64, 8, (48, 64), role)
        save_calibration(calibration_path(role), {**tensors, **plans}, dataclasses.replace(made, plan=settings))
    return {role: role for role in ROLES}


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.name)
def test_a_suite_is_methods_that_can_run(suite: Suite) -> None:
    made = make_calibrations()
    calibrations = {role: made[role] for role in suite.roles}
    specs = suite.expand(calibrations)
    assert [spec.label for spec in specs[:2]] == ["dense", "exact"]
    assert len(set(specs)) == len(specs) == len(suite.methods) + 2
    facts = tiny_model(layers=2, query_heads=4, kv_heads=2, head_dim=16).facts
    k_values, left_out = suite.k_values(suite.context)
    assert left_out == []
    for spec in specs:
        spec.check(facts, k_values)
    labels = [spec.label for spec in specs]
    assert all(label in labels for label in suite.plain_labels(calibrations))
    assert set(suite.plain) <= set(suite.methods)


def test_suites_have_names_of_their_own_and_k_of_the_paper() -> None:
    assert len({suite.name for suite in SUITES}) == len(SUITES)
    assert find_suite("selection-ratio").k_values(131072) == ([128, 512, 2048], [])
    assert find_suite("basis").k_values(32768) == ([512], [])
    assert find_suite("selection-ratio").k_values(16384)[0] == [64, 256]
    assert find_suite("selection-ratio").k_values(16384)[1] == ["0.1 % of 16,384 tokens is 16 keys, no selection: left out"]
    with pytest.raises(UserError, match="32 keys, no selection; give --k, or --context 2368 or more"):
        find_suite("basis").k_values(2048)
    with pytest.raises(UserError, match="did you mean 'layer-plan'"):
        find_suite("layerplan")


def test_every_ablation_of_the_paper_and_every_option_beyond_it_has_a_suite() -> None:
    sources = {suite.name: suite.source for suite in SUITES}
    for name, table in (
        ("layer-plan", "A1"),
        ("layer-plan-length", "A1"),
        ("basis", "A2"),
        ("selection-ratio", "A3"),
        ("depth", "A4"),
        ("sparq-selection", "A5"),
        ("store-precision", "B1"),
        ("loki-rank", "B2"),
        ("active-channels", "B3"),
        ("calibration-domain", "B5"),
    ):
        assert sources.pop(name).startswith(table)
    assert sources.keys() == {
        *("rerank", "union", "equal-error", "depth-tables", "depth-tables-raw", "budget-ratio", "scales", "session-statistics"),
    }
    assert all(source.startswith("beyond the paper") for source in sources.values())
    for name, option in (
        ("layer-plan", "layer_plan={plan}"),
        ("layer-plan-length", "layer_plan={other_plan}"),
        ("store-precision", "codes=8bit"),
        ("store-precision", "codes=allocated"),
        ("loki-rank", "bits=16"),
        ("sparq-selection", "per_head=true"),
        ("calibration-domain", "statistics={text}"),
        ("calibration-domain", "statistics={transcripts}"),
        ("rerank", "rerank=2"),
        ("union", "attend=union"),
        ("depth-tables", "depths=measured"),
        ("budget-ratio", "by_ratio=true"),
        ("scales", "scales=fp8"),
        ("equal-error", "fathom:budget=16:basis=klt:rerank=1.5:attend=union"),
        ("equal-error", "fathom:budget=32:basis=klt:rerank=2:attend=union"),
        ("equal-error", "fathom:budget=64:basis=raw:attend=union"),
        ("equal-error", "loki:r=D/4:rerank=2:attend=union"),
        ("equal-error", "double_sparsity:c=D/4:rerank=1.5"),
    ):
        assert any(option in method for method in find_suite(name).methods), (name, option)
    for name in ("union", "equal-error"):
        assert "exact:attend=union" in find_suite(name).methods, "its own oracle"
    assert all("rerank" not in method and "attend" not in method and "klt" in method for method in find_suite("equal-error").plain)


def test_calibrations_are_given_by_role() -> None:
    assert parse_calibrations(["text=wiki", "plan=/tmp/x.safetensors"]) == {"text": "wiki", "plan": "/tmp/x.safetensors"}
    for given, message in (
        (["wiki"], "is not ROLE=NAME"),
        (["txt=wiki"], "did you mean 'text'"),
        (["text=a", "text=b"], "gives 'text' twice"),
        (["text=a,b"], "cannot stand in a method"),
    ):
        with pytest.raises(UserError, match=message):
            parse_calibrations(given)
    with pytest.raises(UserError, match="needs --calibration plan=NAME, per-layer plans made at"):
        find_suite("layer-plan").expand({})
    with pytest.raises(UserError, match="no use for the calibration 'text': it takes none"):
        find_suite("basis").expand({"text": "wiki"})


def record(label: str, scan_bytes: float, error: float, **changes: Any) -> dict[str, Any]:
    base = {"context": 1000, "k": 64, "label": label, "control": False, "finish": "complete", "head_dim": 4, "bits": 1.0}
    counts = {"rows": 10.0, "candidate_rows": 0.0, "active_channels": 2.0, "scan_bytes": scan_bytes}
    return {**base, **counts, "error_dense": error, "error_exact": error / 2} | changes


def test_bytes_of_a_step() -> None:
    # 10 rows of K and V and 5 of K, four channels of two bytes each.
    assert step_bytes(record("a", 100, 1, candidate_rows=5.0)) == 100 + 25 * 4 * 2
    assert step_bytes(record("a", 100, 1), element_bytes=4) == 100 + 20 * 4 * 4
    # Without a count of bytes: bits of the sealed tokens of the context, 960 of 1000.
    uncounted = record("a", 0, 1, bits=8.0)
    del uncounted["scan_bytes"]
    assert step_bytes(uncounted) == 960 + 160
    assert step_bytes({**uncounted, "prompt_tokens": 130}) == 128 + 160
    assert step_bytes(record("exact", 0, 1, control=True)) is None
    assert step_bytes({**record("dense", 0, 1, control=True, k=None, bits=None), "scan_bytes": None}) == 160
    assert step_bytes({**record("a", 1, 1), "rows": None}) is None


def test_a_variant_is_compared_with_the_line_at_its_own_bytes() -> None:
    line = [record("p1", 40, 0.4), record("p2", 640, 0.1)]  # 200 and 800 bytes: error falls as 1 / bytes
    variant = record("v", 140, 0.1, candidate_rows=12.5)  # 400 bytes, 100 of them for reranking
    outside = record("w", 5000, 0.01)
    failed = record("f", 1, 1, finish="error")
    found = {row.method: row for row in compare_at_equal_bytes([*line, variant, outside, failed], ["p1", "p2"])}
    assert found.keys() == {"p1", "p2", "v", "w"}
    assert found["v"].bytes == 400
    plain = found["v"].plain
    assert plain["error_dense"] == pytest.approx(0.2)
    assert plain["error_exact"] == pytest.approx(0.1)
    assert found["w"].plain == found["p1"].plain == {"error_dense": None, "error_exact": None}
    cells = {row["method"]: row for row in comparison_rows(list(found.values()))}
    assert cells["v"]["× plain to dense"] == "0.50"
    assert cells["p1"]["× plain to dense"] == ""
    assert cells["v"]["error to dense"] == "0.1"
    values = {row["method"]: row for row in comparison_values(list(found.values()))}
    assert (values["v"]["error_dense"], values["v"]["bytes"], values["v"]["k"]) == (0.1, 400, 64)
    assert values["v"]["plain_error_dense"] == pytest.approx(0.2)
    assert values["p1"]["plain_error_dense"] is None


def test_errors_are_means_over_windows() -> None:
    [row] = compare_at_equal_bytes([record("p", 40, 0.2), record("p", 60, 0.4)], ["p"])
    assert row.bytes == 210
    assert row.errors["error_dense"] == pytest.approx(0.3)


def test_the_command_runs_a_suite(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_tiny(tmp_path / "model", layers=2, query_heads=4, kv_heads=2, head_dim=16, max_positions=2048)
    text = tmp_path / "prose.txt"
    text.write_text("".join(f" The boat number {word} left the old harbour." for word in range(150)), encoding="utf-8")
    base = ["fidelity", "--offline", f"--model={model}", f"--haystack={text}", "--context=300", "--windows=1", "--positions=4"]
    run = tmp_path / "run"
    assert cli.main([*base, "--k=64", "--suite=rerank", "--json", f"--output={run}"]) == 0
    document = json.loads(capsys.readouterr().out)
    rows = {row["method"]: row for row in document["equal_bytes_table"]}
    assert len(rows) == len(find_suite("rerank").methods) + 2
    reranked = rows["fathom budget=32 basis=auto rerank=2.0"]
    assert reranked["candidate_rows"] > 0
    assert rows["fathom budget=32 basis=auto rerank=1.5"]["plain_error_dense"] > 0
    assert reranked["bytes"] > rows["fathom budget=32 basis=auto"]["bytes"]
    assert Path(document["equal_bytes"]).read_text(encoding="utf-8").count("\n") == len(rows) + 1
    manifest = Run.load(run).manifest
    assert manifest["settings"]["suite"] == "rerank"
    for flags, message in (
        (["--suite=rerank"], "5 keys, no selection"),
        (["--suite=rerank", "--methods=fathom"], "a suite has its own methods"),
        (["--suite=renk"], "did you mean 'rerank'"),
        (["--calibration=text=x"], "--calibration goes with --suite"),
        (["--suite=session-statistics", "--k=64"], "needs --calibration text=NAME"),
    ):
        assert cli.main([*base, *flags]) == 2
        assert message in capsys.readouterr().err


def test_suites_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fidelity", "--list-suites"]) == 0
    out = capsys.readouterr().out
    assert all(suite.name in out for suite in SUITES)
