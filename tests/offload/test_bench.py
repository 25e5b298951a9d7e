"""The measurements of the runtime on a machine without a GPU: what is timed, and what is recorded of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fathom_eval.cli import main
from fathom_eval.commands.bench import default_methods
from fathom_eval.methods import parse_methods
from fathom_eval.offload.bench import steps
from fathom_eval.offload.bench.sources import SyntheticSource
from fathom_eval.offload.weights import SHAPES
from fathom_eval.reports import build_report
from tests.offload.bench_runs import TINY, records
from tests.tiny import save_tiny


def test_a_step_is_recorded_whole_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*TINY, "--methods", "fathom:basis=raw,landmark", "--lanes", "1,2", "--rerank", "1,2", "--output", str(tmp_path / "run")]
    assert main(command) == 0
    found = records(tmp_path / "run")
    assert len(found) == 8
    assert {(one["method"], one["lanes"], one["rerank"]) for one in found} == {
        (method, lanes, rerank) for method in ("fathom", "landmark") for lanes in (1, 2) for rerank in (1.0, 2.0)
    }
    for one in found:
        assert one["wall_ms_p10"] <= one["wall_ms"] <= one["wall_ms_p90"]
        assert one["gpu_ms"] is None
        assert one["floor_ms"] is None
        assert one["host_pages"] == "small"
        assert one["link_bytes"] == one["scan_bytes"] + one["fetched_bytes"]
        assert one["aliased_layers"] == 0
        assert one["synthetic"]
        assert not one["void"]
        assert json.dumps(one)
    plain = {(one["method"], one["lanes"]): one for one in found if one["rerank"] == 1}
    for one in found:
        same = plain[one["method"], one["lanes"]]
        if one["rerank"] == 2:
            assert one["candidate_rows"] > same["candidate_rows"]
            assert one["union_rows"] == pytest.approx(same["union_rows"], rel=0.2)
        else:
            assert one["candidate_rows"] == one["union_rows"]
            assert one["fetched_bytes"] == one["rows_bytes"]
    assert "no CUDA device" in capsys.readouterr().out
    before = (tmp_path / "run" / "records.jsonl").read_bytes()
    monkeypatch.setattr(SyntheticSource, "build", lambda source: pytest.fail("nothing is missing, and memory was taken"))
    assert main(command) == 0
    assert (tmp_path / "run" / "records.jsonl").read_bytes() == before


def test_the_methods_of_the_default_read_the_same_share_of_every_head_dim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = [spec.label for spec in parse_methods(default_methods(128))]
    assert labels[3:5] == ["sparq r=16", "double_sparsity c=32"], "as published: a change would time them again"
    assert labels[:3] == [f"fathom budget={budget} basis=raw" for budget in (40, 48, 64)]
    assert [spec.method.name for spec in parse_methods(default_methods(None))[5:]] == ["full", "landmark", "thumbnail"]

    monkeypatch.setattr(steps, "time_in_turn", lambda runs, *_, real=steps.time_in_turn, **options: real(runs, 1, 0, **options))
    model = save_tiny(tmp_path / "model", layers=2, query_heads=4, kv_heads=2, head_dim=16, max_positions=2048)
    for flags, r, c, place in (
        (TINY, 4, 8, "shape"),
        (["bench", "step", "--model", str(model), "--contexts", "300", "--k", "96"], 2, 4, "m"),
    ):
        command = [*flags, "--device", "cpu", "--repeats", "1", "--output", str(tmp_path / place)]
        assert main(command + (["--offline"] if place == "m" else [])) == 0
        found = {one["label"]: one["options"] for one in records(tmp_path / place)}
        assert len(found) == 8
        assert (found[f"sparq r={r}"]["r"], found[f"double_sparsity c={c}"]["c"]) == (str(r), str(c))
        assert json.loads((tmp_path / place / "manifest.json").read_text())["settings"]["methods"] == default_methods(8 * r)
        said = capsys.readouterr().out
        assert "the step runs the torch references themselves" in said
        assert "rows and selection checked; its scores and attention are those of the references" in said
        assert said.splitlines()[-2:] == [
            f"its tables and figures: fathom-eval report {tmp_path / place}",
            f"run: {tmp_path / place}",
        ]


def test_what_a_check_on_a_gpu_found_is_said_in_words() -> None:
    found = steps._checked({"scores": 1.2345e-4, "attention": 3e-3}, torch.device("cuda"))
    assert found == "checked, relative errors of scores 1.2e-04 and attention 3.0e-03"


def test_rows_of_the_cpu_are_a_variant_of_their_own(tmp_path: Path) -> None:
    command = [
        *TINY,
        "--methods",
        "fathom:basis=raw",
        "--lanes",
        "2",
        "--last-lane",
        "1",
        "--rows",
        "gpu,cpu,both",
        "--gather-threads",
        "1",
    ]
    command += ["--rerank", "1,2", "--sessions", "1,2", "--output", str(tmp_path / "run")]
    assert main(command) == 0
    found = records(tmp_path / "run")
    kinds = [(one["sessions"], one["rerank"], one["rows_by"], one.get("gather_threads")) for one in found]
    plain = [("gpu", None), ("cpu", 1), ("both", 1)]
    expected = [(sessions, rerank, *who) for sessions in (1, 2) for rerank in (1.0, 2.0) for who in plain]
    assert sorted(kinds, key=str) == sorted(expected, key=str)
    assert len({(one["sessions"], one["link_bytes"], one["rows_bytes"]) for one in found if one["rerank"] == 1}) == 2
    reranked = {one["rows_by"]: one for one in found if (one["sessions"], one["rerank"]) == (1, 2.0)}
    assert len({one["rows_bytes"] for one in reranked.values()}) == 1
    assert reranked["gpu"]["fetched_bytes"] < reranked["both"]["fetched_bytes"] < reranked["cpu"]["fetched_bytes"]
    assert all(one["last_lane"] == 1 for one in found)
    assert main(command) == 0
    assert len(records(tmp_path / "run")) == len(found)
    files = build_report([tmp_path / "run"], tmp_path / "report")
    text = files.markdown.read_text(encoding="utf-8")
    assert "2 lanes, the last of 1 KV head, rows gathered by the CPU but for the last lane" in text
    assert len([path for path in files.tables if path.name.startswith("steps-")]) == 6


def test_a_run_that_was_stopped_goes_on_with_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = [*TINY, "--methods", "sparq:r=4,landmark", "--index", "host,hbm", "--output", str(tmp_path / "run")]
    real, whole = steps._floor, steps._time

    def stopped(record: dict[str, Any]) -> dict[str, Any]:
        if record["method"] == "landmark":
            raise KeyboardInterrupt
        return real(record)

    monkeypatch.setattr(steps, "_floor", stopped)
    assert main(command) == 130
    assert [(one["method"], one["index"]) for one in records(tmp_path / "run")] == [("sparq", "host")]
    monkeypatch.setattr(steps, "_floor", real)
    timed: list[int] = []
    monkeypatch.setattr(
        steps, "_time", lambda source, context, prepared, *rest: timed.append(len(prepared)) or whole(source, context, prepared, *rest)
    )
    assert main(command) == 0
    assert timed == [1, 2]
    assert "index host: 1 of 2 steps to time" in capsys.readouterr().out
    found = records(tmp_path / "run")
    assert {(one["method"], one["index"]) for one in found} == {
        (method, index) for method in ("sparq", "landmark") for index in ("host", "hbm")
    }
    assert len({one["round"] for one in found}) == 3


def test_layers_share_segments_where_memory_is_short(tmp_path: Path) -> None:
    less = [*TINY[:-1], "0.004", "--methods", "sparq:r=4", "--batch", "2", "--output", str(tmp_path / "run")]
    assert main(less) == 0
    (one,) = records(tmp_path / "run")
    assert (one["distinct_layers"], one["aliased_layers"]) == (1, 3)


def test_a_step_in_a_basis_reads_what_one_in_raw_channels_reads(tmp_path: Path) -> None:
    methods = [f"fathom:budget=24:basis={basis}{attend}" for basis in ("klt", "raw") for attend in ("", ":attend=union")]
    methods += ["loki:r=D/4", "double_sparsity:c=D/4:attend=union"]
    command = [*TINY, "--methods", ",".join(methods), "--rerank", "1,1.5", "--lanes", "2", "--output", str(tmp_path / "run")]
    assert main(command) == 0
    found = {(one["label"], one["rerank"]): one for one in records(tmp_path / "run")}
    assert len(found) == 12
    assert len({one["round"] for one in found.values()}) == 1
    for one in found.values():
        turned = "basis=klt" in one["label"] or one["method"] == "loki"
        assert (one["scan_basis"], one["basis_of_keys"]) == (("klt", "identity") if turned else ("raw", None))
        if one["method"] != "fathom":
            assert (one["scan_bits"], one["active_channels"]) == (4.25 * 8, 8)
        elif turned:
            same = found[one["label"].replace("klt", "raw"), one["rerank"]]
            for name in ("scan_bits", "active_channels", "scan_bytes", "union_rows", "candidate_rows"):
                assert one[name] == same[name]
            layers, heads, head_dim = one["layers"], SHAPES["tiny-shape"].kv_heads, one["head_dim"]
            assert one["weight_bytes"] - same["weight_bytes"] == 4 * layers * heads * head_dim * (head_dim + 1), "its fp32 bases and means"


def test_what_a_step_does_not_take_or_select_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    named = "fathom:basis=raw:rerank=2"
    mixed = [*TINY, "--output", str(tmp_path / "run"), "--methods", f"{named},sparq:r=4"]
    assert main([*mixed, "--rerank", "1,1.5", "--repeats", "1"]) == 0
    line = "warning: --rerank 1,1.5 is not for what names a rerank itself: fathom budget=48 basis=raw rerank=2.0\n"
    assert capsys.readouterr().err == line
    assert sorted(one["rerank"] for one in records(tmp_path / "run")) == [1.0, 1.5, 2.0]
    for flags in ([], ["--rerank", "2"]):
        assert main([*TINY, "--output", str(tmp_path / "run"), "--methods", named, *flags]) == 0
        assert not capsys.readouterr().err
    assert main([*TINY, "--output", str(tmp_path / "all"), "--methods", "sparq:r=4", "--k", "4096", "--repeats", "1"]) == 0
    assert capsys.readouterr().err.startswith("warning: k=4096 selects every token of 4096: ")


without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")


@without_gpu
@pytest.mark.parametrize(("what", "says"), [("kernels", "Triton's interpreter on any machine"), ("step", "--model tiny-shape or smollm2")])
def test_a_machine_without_gpu_says_what_it_can_do(what: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", what]) == 2
    assert says in capsys.readouterr().err


@without_gpu
def test_the_link_of_a_machine_without_gpu_is_its_memory(tmp_path: Path) -> None:
    assert main(["bench", "link", "--output", str(tmp_path / "run")]) == 0
    (one,) = records(tmp_path / "run")
    assert one["host_cores"] >= 1
