"""The arithmetic of the measurements, the keys and queries that they make up, and the memory that they give back."""

from __future__ import annotations

import pytest
import torch

from fathom_eval.calibration import Basis
from fathom_eval.commands.bench import default_methods
from fathom_eval.methods import parse_method, parse_methods
from fathom_eval.offload.arena import Arena, SegmentShape
from fathom_eval.offload.bench import steps
from fathom_eval.offload.bench.duration import table_seconds
from fathom_eval.offload.bench.sources import SyntheticSource, closing
from fathom_eval.offload.bench.timing import PARTS, busy_time, part_of
from fathom_eval.offload.weights import SHAPES
from tests.offload.bench_runs import tiny_source


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
    table = estimate(default_methods(128), contexts, 80, 5, 1)
    assert recorded < table < 300
    assert estimate(default_methods(128), contexts, 80, 20, 1) > table + 15


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
