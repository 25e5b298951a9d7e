"""Scans that are recorded once and replayed: the same outputs and counts as scans that every step launches."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fathom_eval.branch_context import pieced
from fathom_eval.branch_graphs import Recorder, ScanGraphs
from fathom_eval.branches import Branch, BranchBatch, batch_order
from fathom_eval.calibration import QueryStatistics
from fathom_eval.methods import MethodSpec, parse_methods
from fathom_eval.methods.fathom import Fathom
from fathom_eval.methods.loki import Loki
from fathom_eval.methods.sparq import SparQ
from fathom_eval.models import ModelFacts
from fathom_eval.prefill import Prefix, PrefixLayer
from fathom_eval.selection import Policy
from fathom_eval.waterfill import read_depths

METHODS = (
    "dense,exact,fathom:budget=48:basis=klt,fathom:budget=64:basis=klt:rerank=2,loki,fathom:budget=48:basis=raw,sparq,sparq:reallocate=true,"
    "double_sparsity,landmark,kivi,streaming_llm,fathom:depths=measured:basis=raw,fathom:by_ratio=true"
)
LAYERS, HEADS, GROUP, CHANNELS, TOKENS, STEPS = 2, 2, 2, 16, 249, 45
FACTS = ModelFacts("random", "qwen2", LAYERS, HEADS * GROUP, HEADS, CHANNELS, False, 10**6, (), "float32", "cpu", "m", "t")
GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
ON_GPUS = pytest.mark.parametrize("device", [pytest.param("cuda:0", marks=GPU), pytest.param("cuda:1", marks=TWO_GPUS)])
"""The second one while the first is current."""


class Again(Recorder):
    """Does the work once more for each replay, into the tensors of the first time and with the stores and rows of that time alone."""

    recorded = replayed = 0

    def record(self, device: torch.device, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        self.recorded += 1
        packed = work()

        def replay() -> None:
            self.replayed += 1
            packed.bytes.copy_(work().bytes)

        return replay, packed


class Broken(Recorder):
    """Fails within the work, as an operation does that cannot be recorded."""

    def record(self, device: torch.device, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        work()
        raise RuntimeError("operation not permitted when stream is capturing")


def prefix_on(device: str, dtype: torch.dtype = torch.float32) -> Prefix:
    generator = torch.Generator().manual_seed(3)
    layers = []
    for number in range(LAYERS):
        keys, values = torch.randn(2, HEADS, TOKENS, CHANNELS, generator=generator).to(device)
        statistics = QueryStatistics()
        statistics.add(torch.randn(HEADS, GROUP, 40, CHANNELS, generator=generator).to(device))
        layers.append(
            PrefixLayer((keys * torch.logspace(0.5, -1, CHANNELS, device=device)).to(dtype), values.to(dtype), statistics, number)
        )
    return Prefix(tuple([1] * (TOKENS + 1)), tuple(layers))


def branches_of(methods: str = METHODS, extra: tuple[MethodSpec, ...] = ()) -> list[Branch]:
    specs = [*parse_methods(methods), *extra]
    found = [
        Branch(spec, k)
        for spec in specs
        for k in ((None,) if spec.method.name == "dense" else (120, 140) if spec.method.name == "sparq" else (120,))
    ]
    return [found[row] for row in batch_order(found, FACTS)]


@torch.inference_mode()
def steps_of(batch: BranchBatch, steps: int, device: str = "cpu") -> list[Tensor]:
    """Outputs of all layers of some steps, in which the scores outgrow their room and branches seal a block."""
    generator = torch.Generator().manual_seed(7)
    rows, dtype = len(batch.branches), batch.prefix.layers[0].keys.dtype
    shape = (LAYERS, rows, HEADS, steps, CHANNELS)
    keys, values = (torch.randn(shape, generator=generator).to(device, dtype) for _ in range(2))
    queries = torch.randn(steps, LAYERS, rows, HEADS, GROUP, CHANNELS, generator=generator).to(device, dtype)
    return [
        batch.attend(layer, queries[step, layer], keys[layer][:, :, : step + 1], values[layer][:, :, : step + 1], 0.25).cpu()
        for step in range(steps)
        for layer in range(LAYERS)
    ]


def same(one: BranchBatch, other: BranchBatch) -> None:
    for name, values in vars(one.counts).items():
        assert torch.equal(getattr(other.counts, name).nan_to_num(-1), values.nan_to_num(-1)), name


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-5)


def test_replayed_scans_give_what_launched_ones_do() -> None:
    prefix, branches, recorder = prefix_on("cpu"), branches_of(), Again()
    launched, replayed = (BranchBatch(prefix, branches, FACTS) for _ in range(2))
    replayed._graphs = ScanGraphs(recorder)
    expected, found = (steps_of(batch, STEPS) for batch in (launched, replayed))
    assert not launched.failures
    assert not replayed.failures
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    same(launched, replayed)
    # Recorded after the prefill, where the scores moved, and after the sealing.
    assert recorder.recorded == 3 * LAYERS
    assert recorder.replayed == (STEPS - 3) * LAYERS


def test_what_cannot_be_recorded_is_launched_and_fails_nothing() -> None:
    prefix, branches = prefix_on("cpu"), branches_of()
    launched, other = (BranchBatch(prefix, branches, FACTS) for _ in range(2))
    other._graphs = ScanGraphs(Broken())
    expected, found = (steps_of(batch, 5) for batch in (launched, other))
    assert not other.failures
    assert not other._graphs.recording
    assert other._graphs.failure == "RuntimeError: operation not permitted when stream is capturing"
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, expected, strict=True))
    same(launched, other)


def test_a_pool_of_a_recording_that_failed_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stream:
        def wait_stream(self, other: Any) -> None:
            pass

    @contextlib.contextmanager
    def recording(graph: Any, stream: Any, pool: Any, mode: str) -> Any:
        used.append((pool, mode))
        yield

    used: list[Any] = []
    pools = iter(((0, 7), (0, 8)))
    monkeypatch.setattr("fathom_eval.branch_graphs.recording", recording)
    monkeypatch.setattr("fathom_eval.branch_graphs._side_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Broken)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: next(pools))
    monkeypatch.setattr(Broken, "replay", None, raising=False)
    recorder, device = Recorder(), torch.device("cuda", 1)
    for work in (lambda: 1, lambda: 2, lambda: 1 / 0, lambda: 3):
        with contextlib.suppress(ZeroDivisionError):
            recorder.record(device, work)
    assert used == [((0, 7), "thread_local")] * 3 + [((0, 8), "thread_local")]


def test_a_method_that_fails_at_recording_is_not_blamed_for_it() -> None:
    calls = []

    class Third(Again):
        def record(self, device: torch.device, work: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
            calls.append(1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Loki, "plan", lambda self, query, index: 1 / 0)
                return super().record(device, work)

    batch = BranchBatch(prefix_on("cpu"), branches_of(), FACTS)
    batch._graphs = ScanGraphs(Third())
    steps_of(batch, 4)
    assert calls == [1]
    assert not batch.failures


def test_a_method_that_fails_after_it_was_recorded_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    plan, sealing = Loki.plan, 23  # 249 tokens, 16 of them in the window: the next block is full at 272

    def failing(self: Loki, query: Tensor, index: Any) -> Tensor | None:
        return 1 / 0 if step[0] >= sealing else plan(self, query, index)  # type: ignore[return-value]

    monkeypatch.setattr(Loki, "plan", failing)
    prefix, branches, recorder, outputs, batches = prefix_on("cpu"), branches_of(), Again(), [], []
    for graphs in (None, ScanGraphs(recorder)):
        batch, step = BranchBatch(prefix, branches, FACTS), [0]
        batch._graphs = graphs
        attend = batch.attend

        def counted(layer: int, query: Tensor, keys: Tensor, values: Tensor, scaling: float) -> Tensor:
            step[0] = keys.shape[2]  # noqa: B023 - called in this round alone
            return attend(layer, query, keys, values, scaling)  # noqa: B023

        monkeypatch.setattr(batch, "attend", counted)
        outputs.append(steps_of(batch, STEPS))
        batches.append(batch)
    launched, replayed = batches
    [loki] = [row for row, branch in enumerate(branches) if branch.spec.method.name == "loki"]
    assert launched.failures == replayed.failures
    assert set(launched.failures) == {loki}
    assert launched.failures[loki].startswith("layer 0: ZeroDivisionError: division by zero (test_branch_graphs.py, line ")
    others = [row for row in range(len(branches)) if row != loki]
    assert all(torch.equal(mine[others], theirs[others]) for mine, theirs in zip(*outputs, strict=True))
    same(launched, replayed)
    assert recorder.replayed > (STEPS - 8) * LAYERS


def test_only_what_is_known_to_be_steady_is_recorded() -> None:
    class Theirs(SparQ):
        name: ClassVar[str] = "theirs"

    batch = BranchBatch(prefix_on("cpu"), branches_of(extra=(MethodSpec(Theirs(), Policy(local=16)),)), FACTS)
    found = {method.spec.method.name: scan.steady for scan in batch._scans for method in scan.methods}
    assert not found["theirs"]
    assert found["sparq"]
    assert not found["kivi"]
    assert not found["streaming_llm"]


class _Launches(TorchDispatchMode):
    """Counts operations, and names those that wait for the device."""

    WAITING = ("_local_scalar_dense", "is_nonzero", "nonzero", "masked_select", "unique", "index.Tensor", "index_put", "_to_copy", "item")

    def __init__(self) -> None:
        super().__init__()
        self.count, self.waits = 0, list[str]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function).removeprefix("aten.")
        self.count += 1
        moves = name.startswith("_to_copy") and (kwargs or {}).get("device") is not None
        if name.startswith(self.WAITING) and (moves or not name.startswith("_to_copy")):
            self.waits.append(name)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "text", ["fathom", "fathom:budget=80:basis=raw", "fathom:codes=8bit:basis=raw", "fathom:codes=allocated:basis=raw"]
)
def test_a_depth_plan_is_a_few_operations_that_wait_for_nothing(text: str) -> None:
    [spec] = parse_methods(text)
    method, layer, query = spec.method, prefix_on("cpu").layers[0], torch.randn(30, HEADS, GROUP, CHANNELS)
    index = method.index(layer, FACTS)
    expected = method.plan(query, index)
    with _Launches() as launches:
        found = method.plan(query, index)
    assert torch.equal(found, expected)
    assert launches.waits == []
    assert launches.count <= 40


def test_depth_plans_of_several_methods_are_one_plan_that_waits_for_nothing() -> None:
    layer, query = prefix_on("cpu").layers[0], torch.randn(6, HEADS, GROUP, CHANNELS)
    members = [(method, method.index(layer, FACTS), 2) for method in (Fathom(budget=budget, basis="klt") for budget in (24, 48, 96))]
    Fathom.plan_together(query, members)
    with _Launches() as launches:
        together = Fathom.plan_together(query, members)
    assert launches.waits == []
    assert launches.count <= 30
    assert torch.equal(together[2:4], members[1][0].plan(query[2:4], members[1][1]))


def test_a_wait_would_be_noticed() -> None:
    with _Launches() as launches:
        bool((read_depths(torch.rand(2, 4), 3) > 0).any())
    assert any(name.startswith(("_local_scalar_dense", "is_nonzero")) for name in launches.waits)


@pytest.mark.parametrize("inner", [1024, 2048, 3000, 500])
def test_a_product_by_pieces_is_the_product(inner: int) -> None:
    generator = torch.Generator().manual_seed(inner)
    left = torch.randn(9, 2, inner, generator=generator, dtype=torch.float64).transpose(0, 1)
    right = torch.randn(2, inner + 7, 5, generator=generator, dtype=torch.float64)[:, :inner]
    torch.testing.assert_close(pieced(left, right), left @ right)


@ON_GPUS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_graphs_on_a_gpu(device: str, dtype: torch.dtype) -> None:
    assert torch.cuda.current_device() == 0
    prefix, branches = prefix_on(device, dtype), branches_of()
    launched, replayed = (BranchBatch(prefix, branches, FACTS) for _ in range(2))
    launched._graphs = None
    expected, found = (steps_of(batch, STEPS, device) for batch in (launched, replayed))
    assert not replayed.failures
    assert replayed._graphs is not None
    assert replayed._graphs.failure is None
    assert replayed._graphs.active
    close(found, expected)
    same(launched, replayed)
    assert torch.cuda.current_device() == 0


@ON_GPUS
def test_a_scan_that_no_gpu_can_record_is_launched_and_spoils_no_later_one(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Loki.plan

    def waiting(self: Loki, query: Tensor, index: Any) -> Tensor | None:
        query.sum().item()  # forbidden while a graph is recorded
        return plan(self, query, index)

    monkeypatch.setattr(Loki, "plan", waiting)
    prefix, branches = prefix_on(device), branches_of()
    launched, other = (BranchBatch(prefix, branches, FACTS) for _ in range(2))
    launched._graphs = None
    expected = steps_of(launched, STEPS, device)
    with pytest.warns(RuntimeWarning, match="scans are launched one by one"):
        found = steps_of(other, STEPS, device)
    assert other._graphs is not None
    assert other._graphs.failure is not None
    assert not other._graphs.active
    assert not other._graphs.recording
    assert not other.failures
    close(found, expected)
    same(launched, other)

    torch.cuda.empty_cache()
    before, size = torch.cuda.memory_reserved(device), 2**28
    large = torch.zeros(size, dtype=torch.uint8, device=device)
    assert torch.cuda.memory_reserved(device) >= before + size
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved(device) <= before

    monkeypatch.undo()
    again = BranchBatch(prefix, branches, FACTS)
    found = steps_of(again, STEPS, device)
    assert again._graphs is not None
    assert again._graphs.failure is None
    assert again._graphs.active
    close(found, expected)
    same(launched, again)
    assert torch.rand(3, device=device).isfinite().all(), "random numbers have left the capture that failed"


@ON_GPUS
def test_the_memory_of_a_capture_that_failed_is_given_back(device: str) -> None:
    size, place, recorder = 2**28, torch.device(device), Recorder()

    def waiting() -> float:
        return torch.ones(size, dtype=torch.uint8, device=place)[0].item()

    def reserved() -> int:
        gc.collect()
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(place)

    waiting()  # so that its kernels are loaded
    before, failed = reserved(), False
    try:
        recorder.record(place, waiting)
    except RuntimeError:  # kept no longer than this: it holds the frames of the work
        failed = True
    assert failed
    assert reserved() < before + size // 2
    replay, result = recorder.record(place, lambda: torch.ones(3, device=place) * 2)
    replay()
    assert result.tolist() == [2, 2, 2]


@GPU
def test_a_depth_plan_waits_for_no_gpu() -> None:
    layer, query = prefix_on("cuda").layers[0], torch.randn(30, HEADS, GROUP, CHANNELS, device="cuda")
    for spec in parse_methods("fathom,fathom:budget=80:basis=raw,fathom:depths=measured:basis=raw,sparq,loki,double_sparsity"):
        index = spec.method.index(layer, FACTS)
        expected = spec.method.plan(query, index)
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = spec.method.plan(query, index)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(found, expected)
