"""The measurements of the runtime on a machine without a GPU, and their arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fathom_eval.cli import main
from fathom_eval.commands.bench import _TIMED
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method, parse_methods
from fathom_eval.offload.arena import Arena, SegmentShape
from fathom_eval.offload.bench import steps
from fathom_eval.offload.bench.duration import table_seconds
from fathom_eval.offload.bench.equal_error import equal_error, write_table
from fathom_eval.offload.bench.sources import SyntheticSource, closing
from fathom_eval.offload.bench.timing import PARTS, busy_time, part_of
from fathom_eval.offload.gatherer import Box
from fathom_eval.offload.weights import SHAPES
from fathom_eval.reports import build_report
from fathom_eval.run import Run

without_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without a CUDA device")
TINY = [
    "bench",
    "step",
    "--model",
    "tiny-shape",
    "--device",
    "cpu",
    "--contexts",
    "4096",
    "--k",
    "96",
    "--repeats",
    "2",
    "--host-memory",
    "0.05",
]


def records(path: Path) -> list[dict[str, Any]]:
    with Run.load(path) as run:
        return run.records()


def test_overlapping_intervals_count_once() -> None:
    assert busy_time([(0, 2), (1, 3), (5, 6), (5.5, 5.7)]) == pytest.approx(4)
    assert busy_time([]) == 0


def test_every_kernel_has_its_part() -> None:
    names = {
        "_scan_planes": "scan",
        "_top_blocks": "top_k",
        "_fetch_rows": "rows",
        "_union_rows": "union",
        "_linear": "gemm",
        "_attend_pieces": "attention",
        "_list_rows": "rows",
        "_await_rows": "rows_wait",
        "_take_rows": "rows",
    }
    names |= {"_union_rows": "union", "_keep_best": "rerank"}
    names |= {"Memcpy HtoD (Pinned -> Device)": "copy", "_add_norm": "other", "_plan_depths": "other"}
    assert {name: part_of(name) for name in names} == names
    assert "other" not in PARTS


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


def test_rows_of_the_cpu_are_a_variant_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
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
    assert "steps that rerank fetch their rows by the GPU" in capsys.readouterr().out
    found = records(tmp_path / "run")
    kinds = [(one["sessions"], one["rerank"], one["rows_by"], one.get("gather_threads")) for one in found]
    plain = [("gpu", None), ("cpu", 1), ("both", 1)]
    expected = [(sessions, 1.0, *who) for sessions in (1, 2) for who in plain] + [(sessions, 2.0, "gpu", None) for sessions in (1, 2)]
    assert sorted(kinds, key=str) == sorted(expected, key=str)
    assert len({(one["sessions"], one["link_bytes"], one["rows_bytes"]) for one in found if one["rerank"] == 1}) == 2
    assert all(one["last_lane"] == 1 for one in found)
    assert main(command) == 0
    assert len(records(tmp_path / "run")) == len(found)
    files = build_report([tmp_path / "run"], tmp_path / "report")
    text = files.markdown.read_text(encoding="utf-8")
    assert "2 lanes, the last of 1 KV head, rows gathered by the CPU but for the last lane" in text
    assert len([path for path in files.tables if path.name.startswith("steps-")]) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--lanes", "3"], "--lanes 3 --batch 1: 1 sessions of 2 KV heads cannot be shared among 3 lanes"),
        (["--batch", "2", "--lanes", "1"], ""),
        (["--batch", "2", "--lanes", "3"], "--lanes 3 --batch 2: 2 sessions of 2 KV heads cannot be shared among 3 lanes"),
        (["--last-lane", "2"], "--lanes 2 --batch 1 --last-lane 2: 1 sessions of 2 KV heads cannot be shared among 2 lanes"),
    ],
)
def test_lanes_that_cannot_be_are_refused_before_memory_is_taken(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    built: list[SyntheticSource] = []

    def build(source: SyntheticSource) -> None:
        built.append(source)
        raise UserError("built")

    monkeypatch.setattr(SyntheticSource, "build", build)
    command = [*TINY, "--methods", "fathom:basis=raw", *options, "--output", str(tmp_path / "run")]
    assert main(command) == 2
    error = capsys.readouterr().err
    assert (message or "built") in error
    assert bool(built) == (not message)
    assert (tmp_path / "run").exists() == (not message)


def test_rows_that_nobody_gathered_are_the_reason_that_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Box, "gather", lambda box: 1 / 0)
    assert main([*TINY, "--methods", "fathom:basis=raw", "--rows", "cpu", "--output", str(tmp_path / "run")]) == 2
    assert "the CPU could not gather rows: division by zero" in capsys.readouterr().err


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


def test_the_table_of_all_contexts_is_estimated_to_fit_a_short_loan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Against what an H200 took: 21 s for six steps at 1M tokens after 25.9 GiB were pinned and filled in 6.2 s."""
    contexts = [2**power for power in range(15, 21)]

    def estimate(methods: str, contexts: list[int], gib: float, repeats: int, lanes: int) -> float:
        specs = parse_methods(methods)
        source = SyntheticSource(
            SHAPES["qwen3-8b-shape"],
            specs,
            contexts,
            1,
            device=torch.device("cpu"),
            index="host",
            spread=1.0,
            host_limit=int(gib * 2**30),
            say=lambda line: None,
        )
        source.arena.host_pages = "huge"
        return table_seconds(source, {context: [steps.Variant(spec, 512) for spec in specs] * lanes for context in contexts}, repeats)

    monkeypatch.setattr(Arena, "check", lambda *arguments, **options: None)
    recorded = estimate("fathom:budget=48:basis=raw,sparq:r=16,double_sparsity:c=32", [2**20], 26, 4, 2)
    assert 27 < recorded < 54
    table = estimate(_TIMED, contexts, 80, 5, 1)
    assert recorded < table < 300
    assert estimate(_TIMED, contexts, 80, 20, 1) > table + 15


def test_landmarks_of_two_sizes_need_runs_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*TINY, "--methods", "landmark:size=4,landmark:size=8", "--output", str(tmp_path / "run")]) == 2
    assert "landmarks of 4 and 8 tokens" in capsys.readouterr().err
    assert main([*TINY, "--methods", "landmark:size=4", "--output", str(tmp_path / "run")]) == 0
    assert records(tmp_path / "run")[0]["scan_bits"] == 16 * 32 / 4


def test_layers_share_segments_where_memory_is_short(tmp_path: Path) -> None:
    less = [*TINY[:-1], "0.004", "--methods", "sparq:r=4", "--batch", "2", "--output", str(tmp_path / "run")]
    assert main(less) == 0
    (one,) = records(tmp_path / "run")
    assert (one["distinct_layers"], one["aliased_layers"]) == (1, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "copy"], "cannot time 'copy'"),
        (["bench", "equal-error"], "needs --errors"),
        (["bench", "step", "--methods", "dense"], "would read every key"),
        ([*TINY, "--methods", "fathom:basis=klt"], "give basis=raw"),
        ([*TINY, "--methods", "loki"], "give basis=raw, or double_sparsity"),
        ([*TINY, "--contexts", "5000"], "not a multiple of"),
        ([*TINY, "--host-memory", "0.0001"], "of host memory and 0 MiB are allowed"),
        ([*TINY, "--lanes", "3"], "cannot be shared among 3 lanes"),
        ([*TINY, "--rerank", "x"], "--rerank"),
        ([*TINY, "--k", "36"], "k=36"),
        ([*TINY, "--batch", "9"], "more than the 8"),
        ([*TINY, "--rows", "gpu,host"], "--rows: no 'host'"),
        ([*TINY, "--lanes", "2", "--rows", "cpu", "--gather-threads", "0"], "--gather-threads 0 must be at least 1"),
        ([*TINY, "--lanes", "2", "--last-lane", "2"], "2 lanes, the last one of 2"),
        ([*TINY, "--index", "disk"], "'host' or 'hbm', not in 'disk'"),
    ],
)
def test_what_cannot_be_timed_is_said_in_one_line(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if arguments[1] == "step" and "tiny-shape" not in arguments:
        arguments = [*arguments, "--model", "tiny-shape"]
    assert main([*arguments, "--output", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error


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


def test_a_difference_from_the_reference_stops_the_run(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    real = steps.DecodeStep._scan_lane

    def scan(self: Any, number: int, work: Any, tables: Any, query: Any) -> None:
        real(self, number, work, tables, query)
        work.scores[0, 0, 0, 5] += 1000

    monkeypatch.setattr(steps.DecodeStep, "_scan_lane", scan)
    assert main([*TINY, "--methods", "fathom", "--output", str(tmp_path / "run")]) == 2
    assert "differ from the torch reference" in capsys.readouterr().err


def test_shared_queries_set_how_many_rows_a_group_reads() -> None:
    source = SyntheticSource(
        SHAPES["tiny-shape"],
        parse_methods("sparq:r=4"),
        [4096],
        1,
        device=torch.device("cpu"),
        index="host",
        spread=1.0,
        host_limit=2**26,
        say=lambda line: None,
    )
    with closing(source), torch.inference_mode():
        source.build()
        source.open(4096)
        spec, counts = parse_method("fathom"), []
        for share in (0.0, 0.9):
            source._queries.set(share)
            cache, scan = source.prepare(spec, 1, 1)
            step = steps.DecodeStep(source.weights(), cache, scan, 96, spec.policy)
            step.run()
            counts.append(step.union_counts.double().mean().item())
            assert scan.channels().mean().item() == pytest.approx(8, abs=2)
        assert counts[1] < counts[0] - 10
    assert not source.arena.segments


def test_the_floor_and_the_scan_against_the_link() -> None:
    record = {"index": "host", "sessions": 1, "adaptive": False, "link_gb_s": 50.0, "hbm_gb_s": 4000.0, "gpu_ms": 30.0, "gpu_sum_ms": 30.0}
    record |= {"link_bytes": 10**9, "scan_bytes": 9 * 10**8, "weight_bytes": 16 * 10**9, "parts_ms": {"scan": 20.0}}
    found = steps._floor(record)
    assert found == pytest.approx({"floor_ms": 24, "floor_ratio": 1.25, "scan_gb_s": 45, "scan_of_link": 0.9, "ahead_ms": 20})
    side_by_side = steps._floor({**record, "gpu_sum_ms": 35.0, "adaptive": True})
    assert (side_by_side["scan_gb_s"], side_by_side["scan_of_link"], side_by_side["ahead_ms"]) == (None, None, None)
    in_memory = steps._floor({**record, "index": "hbm", "link_bytes": 10**8})
    assert in_memory["floor_ms"] == pytest.approx(2 + 4.225)
    assert (in_memory["scan_of_link"], in_memory["ahead_ms"]) == (None, None)
    assert set(steps._floor({})) == set(found)


def fidelity(method: str, label: str, bits: float, error: float, **options: object) -> dict[str, Any]:
    cell = {"kind": "fidelity", "finish": "complete", "context": 8192, "k": 256, "head_dim": 64}
    return {**cell, "method": method, "label": label, "options": options, "bits": bits, "error_dense": error}


def step(method: str, label: str, bits: float, milliseconds: float, **changes: object) -> dict[str, Any]:
    cell = {"kind": "step", "context": 2**20, "k": 512, "head_dim": 128, "model": "shape", "index": "host", "batch": 1, "sessions": 1}
    times = {"rerank": 1.0, "void": False, "gpu_ms": milliseconds, "wall_ms": 2 * milliseconds}
    return {**cell, **times, "method": method, "label": label, "scan_bits": bits, **changes}


def test_each_method_is_timed_where_it_reaches_the_error(tmp_path: Path) -> None:
    errors = [
        fidelity("double_sparsity", "double_sparsity c=D/4", 68, 0.2),
        fidelity("fathom", "fathom budget=48", 28, 0.25),
        fidelity("fathom", "fathom budget=48", 28, 0.13),  # two windows, whose mean is 0.19
        fidelity("fathom", "fathom budget=64", 38, 0.1),
        fidelity("fathom", "fathom budget=32 rerank=2", 19, 0.18, rerank=2.0),
        fidelity("fathom", "fathom budget=24 basis=klt attend=union", 19, 0.05, basis="klt", attend="union"),
        fidelity("fathom", "fathom budget=64 basis=klt", 38, 0.09, basis="klt"),
        fidelity("sparq", "sparq r=D/8", 34, 0.21),
        fidelity("landmark", "landmark size=8", 128, 0.01),
    ]
    steps = [
        step("double_sparsity", "double_sparsity c=32", 136, 120),
        step("double_sparsity", "double_sparsity c=32", 136, 110, lanes=2),
        step("double_sparsity", "double_sparsity c=32", 136, 50, batch=2),
        step("fathom", "fathom budget=48 basis=raw", 57, 55),
        step("fathom", "fathom budget=64 basis=raw", 75, 70),
        step("fathom", "fathom budget=32 rerank=2", 38, 44, rerank=2.0),
        step("fathom", "fathom budget=32", 38, 40),
        step("sparq", "sparq r=16", 68, 60),
        step("landmark", "landmark size=8", 256, 10, void=True),
    ]
    rows = equal_error(errors, steps, "double_sparsity c=D/4")
    assert [(row.step_label, row.step_ms, row.ratio) for row in rows] == [
        ("double_sparsity c=32", 110, 1.0),
        ("fathom budget=32 rerank=2", 44, 2.5),
        ("fathom budget=64 basis=raw", 70, 110 / 70),
    ]
    assert [(row.windows, row.basis) for row in rows] == [(1, ""), (1, ""), (1, "klt")]
    write_table(tmp_path / "table.csv", rows)
    assert (tmp_path / "table.csv").read_text().splitlines()[2].startswith("8192,256,1,fathom,,fathom budget=32 rerank=2,0.18,")
    joint = step("fathom", "fathom budget=32 attend=union", 38, 30, options={"attend": "union"})
    assert equal_error(errors, [*steps, joint], "double_sparsity c=D/4")[2].step_label == "fathom budget=32 attend=union"
    with pytest.raises(UserError, match="did you mean"):
        equal_error(errors, steps, "double_sparsity c=D/3")
    with pytest.raises(UserError, match="no step of the run"):
        equal_error(errors, steps[3:], "double_sparsity c=D/4")


def test_an_arena_is_emptied_on_every_way_out() -> None:
    shape = SegmentShape(2, 16, 2, torch.float32, ("planes", "landmarks"))
    arena = Arena(shape, torch.device("cpu"))

    def use() -> None:
        with arena:
            arena.grow(3)
            assert arena.estimate(3)[0] == sum(part.nbytes for segment in arena.segments for part in segment.tensors.values())
            raise RuntimeError("on the way")

    with pytest.raises(RuntimeError, match="on the way"):
        use()
    assert arena.segments == []
