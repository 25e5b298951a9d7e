"""The measurements of the runtime on a machine without a GPU, and their arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fathom_eval.calibration import Basis
from fathom_eval.cli import main
from fathom_eval.commands.bench import _TIMED
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method, parse_methods
from fathom_eval.offload.arena import Arena, SegmentShape
from fathom_eval.offload.bench import steps
from fathom_eval.offload.bench.duration import table_seconds
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
        ([*TINY, "--methods", "fathom:basis=klt:depths=measured"], "the runtime has no depth tables"),
        ([*TINY, "--methods", "fathom:basis=klt:scales=fp8"], "the runtime has no step for this method"),
        ([*TINY, "--methods", "loki:bits=16"], "the runtime has no step for this method"),
        ([*TINY, "--methods", "loki:r=D/5"], "head_dim 32 is not a multiple of 5"),
        ([*TINY, "--contexts", "5000"], "not a multiple of"),
        ([*TINY, "--host-memory", "0.0001"], "of host memory and 0 MiB are allowed"),
        ([*TINY, "--lanes", "3"], "cannot be shared among 3 lanes"),
        ([*TINY, "--rerank", "x"], "--rerank"),
        ([*TINY, "--spread", "-0.5"], "--spread -0.5 must be at least 0"),
        ([*TINY, "--spread", "nan"], "--spread nan must be at least 0"),
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


@pytest.mark.parametrize("method", ["fathom:basis=klt:statistics=text", "fathom:layer_plan=text", "loki:statistics=text"])
def test_synthetic_keys_have_no_calibration(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in ("fathom", "loki"):
        monkeypatch.setattr(f"fathom_eval.methods.{module}.resolve", lambda name, what, session=True: name)
    assert main([*TINY, "--methods", method, "--output", str(tmp_path / "run")]) == 2
    assert "synthetic keys have statistics of their own; leave the calibration out" in capsys.readouterr().err


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


def test_a_basis_is_a_dense_matrix_of_every_layer_and_loki_ranks_by_keys_and_queries() -> None:
    source = tiny_source("fathom:basis=klt,loki")
    with closing(source), torch.inference_mode():
        source.build()
        source.open(4096)
        spec = parse_method("fathom:budget=24:basis=klt")
        cache, scan = source.prepare(spec, 1, 1)
        bases = [layer.basis for layer in cache.layers]
        assert len({basis.vectors.data_ptr() for basis in bases}) == len(bases) == source.facts.layers
        step = steps.DecodeStep(source.weights(), cache, scan, 96, spec.policy)
        step.run()
        turned, offset = step.project(0)
        assert torch.equal(turned, step.query.float())
        assert not offset.any()
        basis = bases[1]
        turn = torch.linalg.qr(torch.randn(basis.vectors.shape, generator=torch.Generator().manual_seed(0))).Q
        cache.layers[0].basis = Basis(basis.mean + 1, turn, basis.variance)
        other, offset = step.project(0)
        assert not torch.allclose(other, turned)
        assert offset.any()
        source._queries.set(0.5)
        _, loki = source.prepare(parse_method("loki:r=D/4"), 1, 1)
        loki.allocate(source.facts.layers, 1, 2, 32, torch.device("cpu"))
        gains = source._queries._gains * source.keys.scale ** (1 + source._queries.tilt)
        for layer, picked in enumerate(loki._picked):
            assert torch.equal(picked[0].long(), gains[layer].topk(8).indices.sort(-1).values)


def tiny_source(methods: str, contexts: tuple[int, ...] = (4096,)) -> SyntheticSource:
    return SyntheticSource(
        SHAPES["tiny-shape"],
        parse_methods(methods),
        contexts,
        1,
        device=torch.device("cpu"),
        index="host",
        spread=1.0,
        host_limit=2**26,
        say=lambda line: None,
    )


def test_shared_queries_set_how_many_rows_a_group_reads() -> None:
    source = tiny_source("sparq:r=4")
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


@pytest.mark.parametrize("contexts", [(1,), (36,), (63, 4096)])
def test_contexts_shorter_than_a_block_are_refused(contexts: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="is not a multiple of 128 tokens"):
        tiny_source("sparq:r=4", contexts)
