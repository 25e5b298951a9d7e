"""The runtime on a GPU: the evaluator's tokens from a CUDA graph over pinned memory, pipelined or not, and no memory that stays."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

from fathom_eval.branches import Branch
from fathom_eval.decode import decode
from fathom_eval.errors import UserError
from fathom_eval.kernels import handover
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.kernels.rows import GroupRows, fetch_rows
from fathom_eval.kernels.segments import SegmentTable
from fathom_eval.methods import parse_method
from fathom_eval.offload.arena import Arena, SegmentShape, device_view, release_pinned
from fathom_eval.offload.cache import TieredCache, fill_segment, lanes_of
from fathom_eval.offload.gatherer import Box
from fathom_eval.offload.generate import generate
from fathom_eval.offload.pinned import huge_pages_offered
from fathom_eval.offload.scans import scan_of_prefix
from fathom_eval.offload.step import DecodeStep, launch_together
from fathom_eval.offload.weights import weights_of
from fathom_eval.prefill import prefill
from tests.offload.made_steps import Way, prompt, run_alike, steps_by, tiny_on

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize(
    "text", ["fathom", "fathom:basis=klt", "sparq:r=D/8", "double_sparsity", "loki", "thumbnail", "landmark", "sparq:rerank=2"]
)
@pytest.mark.parametrize(("index", "lanes"), [("host", 1), ("host", 2), ("hbm", 1)])
def test_same_tokens_as_the_evaluator(text: str, index: str, lanes: int) -> None:
    loaded = tiny_on("cuda")
    prefix = prefill(loaded, prompt(700))
    branch = Branch(parse_method(text), 60)
    expected = decode(loaded, prefix, [branch], 90)[0]
    found = generate(loaded, prefix, branch, 90, index=index, lanes=lanes, score_dtype=torch.float32, segment_blocks=4)
    assert found.token_ids == expected.token_ids


def test_a_view_of_pinned_memory_is_the_same_memory() -> None:
    host = torch.zeros(4, 6, dtype=torch.bfloat16, pin_memory=True)
    device_view(host, torch.device("cuda"))[1:3] = 2
    torch.cuda.synchronize()
    assert host.sum() == 24


@pytest.mark.parametrize("host_pages", ["small", "huge"])
def test_segments_are_what_the_device_wrote(host_pages: str) -> None:
    if host_pages == "huge" and not huge_pages_offered():
        pytest.skip("there are no huge pages here")
    shape = SegmentShape(2, 64, 16, torch.float16, ("planes", "nibbles", "landmarks"))
    device = torch.device("cuda")
    with Arena(shape, device, host_pages=host_pages) as arena:
        (segment, other) = arena.grow(2)
        flags = torch.zeros(2, dtype=torch.int32, device=device)
        keys, values = (torch.randn(2, 1024, 64, device=device).half() for _ in range(2))
        fill_segment(segment, keys, values, 0, arena, None, flags)
        fill_segment(other, values, keys, 0, arena, None, flags)
        torch.cuda.synchronize()
        assert arena.host_pages == host_pages
        assert all(tensor.is_pinned() for tensor in segment.tensors.values())
        assert torch.equal(segment.tensors["rows"], torch.stack((keys, values), 2).cpu())
        assert torch.equal(other.tensors["rows"], torch.stack((values, keys), 2).cpu())
        held = segment.tensors["rows"]
        table = SegmentTable.of([held], device)
        union = GroupRows.allocate(1, 2, 1, 3, 0, 0, 1, device)
        union.rows.copy_(torch.tensor([5, 700, 1023], device=device))
        union.counts.fill_(3)
        out = torch.empty(2, 1, 2, 3, 64, dtype=torch.float16, device=device)
        fetch_rows(table, union, out)
        assert torch.equal(out[0, 0], keys[:, [5, 700, 1023]])
        assert torch.equal(out[1, 0], values[:, [5, 700, 1023]])
    assert not held.is_pinned() or host_pages == "small"


WAYS: list[Way] = [("gpu", 1, None), ("gpu", 2, None), ("cpu", 1, None), ("cpu", 2, None), ("both", 2, None)]
RERANKED = ["fathom:rerank=1.5", "fathom:rerank=2", "fathom:rerank=1.5:attend=union", "fathom:rerank=2:attend=union"]


def test_rows_of_the_cpu_are_those_of_the_gpu_bit_for_bit() -> None:
    """Over blocks that are sealed and segments that come while decoding; the same launches otherwise, so that nothing may differ."""
    with steps_by(WAYS) as steps:
        run_alike(steps, 3 * BLOCK)


@pytest.mark.parametrize("text", RERANKED)
def test_reranked_rows_of_the_cpu_are_those_of_the_gpu_bit_for_bit(text: str) -> None:
    """The CPU brings the values of all candidates at once, the GPU those of the winners when these are known."""
    with steps_by(WAYS, text) as steps:
        run_alike(steps, 2 * BLOCK)


@pytest.mark.parametrize("text", ["fathom", *RERANKED])
@pytest.mark.parametrize("rows_by", ["cpu", "both"])
def test_same_tokens_as_the_evaluator_with_rows_of_the_cpu(rows_by: str, text: str) -> None:
    loaded = tiny_on("cuda")
    prefix = prefill(loaded, prompt(700))
    branch = Branch(parse_method(text), 60)
    expected = decode(loaded, prefix, [branch], 90)[0]
    for graph in (True, False):
        found = generate(
            loaded, prefix, branch, 90, lanes=2, score_dtype=torch.float32, segment_blocks=4, graph=graph, rows_by=rows_by, gather_threads=2
        )
        assert found.token_ids == expected.token_ids


@pytest.mark.parametrize("basis", ["klt", "raw"])
@pytest.mark.parametrize("count", [2, 4])
def test_steps_side_by_side_give_what_each_gives_alone(count: int, basis: str) -> None:
    """Each over a prompt of its own, so that a step that worked in another's memory would give something else."""
    ways: list[Way] = [("gpu", 2, None)] * count
    with steps_by(ways * 2, f"fathom:basis={basis}", seeds=[*range(count)] * 2) as steps:
        alone, together = steps[:count], steps[count:]
        assert len({step._captured_on for step in steps}) == len(steps)
        streams = [torch.cuda.Stream() for _ in together]
        for _ in range(100):
            for step in alone:
                step.run()
                torch.cuda.synchronize()
            for step in together:
                step.cache.advance()
            launch_together(together, streams)
            torch.cuda.synchronize()
            for one, other in zip(alone, together, strict=True):
                assert torch.equal(one.token_ids, other.token_ids)
                assert torch.equal(one.logits, other.logits)
        assert not torch.equal(together[0].logits, together[1].logits)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("text", ["fathom:basis=raw", "fathom:basis=klt:rerank=2"])
def test_a_step_runs_on_another_gpu_than_the_current_one(text: str) -> None:
    def tokens_on(device: str) -> list[list[int]]:
        # Pinned memory that is used again would be viewed from the GPU that it was pinned for.
        gc.collect()
        release_pinned()
        with steps_by([("gpu", 2, None), ("both", 2, None)], text, device=device) as steps:
            found: list[list[int]] = []
            for step in steps:
                assert step.weights.device == torch.device(device)
                for segment in step.cache.arena.segments:
                    assert all(segment.views[name].data_ptr() == tensor.data_ptr() for name, tensor in segment.tensors.items())
                found.append([])
                for _ in range(100):
                    step.run()
                    found[-1].append(int(step.token_ids[0]))
                step.check()
            assert torch.cuda.current_device() == 0
        return found

    one, other = tokens_on("cuda:0"), tokens_on("cuda:1")
    assert other == one
    assert one[0] == one[1]


def test_a_thousand_replays_in_a_row_neither_hang_nor_leak() -> None:
    """The host runs far ahead of the device: nothing but the flags keeps the gatherer and the graph together."""
    with steps_by(WAYS[3:], positions=8192) as steps:
        for step in steps:
            step.run()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0], threading.active_count()
        for number in range(1000):
            for step in steps:
                step.replay()
                step.cache.tokens.sub_(1)
            if number % 250 == 249:
                torch.cuda.synchronize()
        after = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0], threading.active_count()
        assert (after[0], after[2]) == (before[0], before[2])
        assert abs(after[1] - before[1]) <= 2**24
        layers = steps[0].layers
        for step in steps:
            step.check()
            boxes = [work.box for work in step._work if work.box is not None]
            # The check before the graph, the step, and the replays.
            assert [int(box.mailbox.ticket) for box in boxes] == [1002 * layers] * len(boxes)
            assert [box.flags[handover.DONE * handover.LINE] for box in boxes] == [1002 * layers] * len(boxes)
    assert all(thread.name != "row gatherer" for thread in threading.enumerate())


def test_a_gatherer_that_fails_lets_the_gpu_go_on_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(box: Box) -> None:
        raise RuntimeError("no more")

    with steps_by(WAYS[3:]) as steps:
        monkeypatch.setattr(Box, "gather", fail)
        for step in steps:
            step.replay()
        torch.cuda.synchronize()
        for step in steps:
            with pytest.raises(UserError, match="could not gather rows: no more"):
                step.check()


def test_leaving_with_steps_in_flight_neither_hangs_nor_faults() -> None:
    def leave() -> None:
        with steps_by(WAYS[3:]) as steps:
            for _ in range(5):
                for step in steps:
                    step.replay()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        leave()
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum() == 3


def test_a_gatherer_that_does_not_answer_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "PATIENCE", 200_000)
    with steps_by(WAYS[4:]) as (step,):
        monkeypatch.setattr(Box, "gather", lambda box: None)
        for _ in range(3):
            step.replay()
        torch.cuda.synchronize()
        with pytest.raises(UserError, match="waited in vain"):
            step.check()


def test_nothing_leaks_over_a_thousand_steps() -> None:
    loaded = tiny_on("cuda", max_positions=2048)
    prefix = prefill(loaded, prompt(400))
    spec = parse_method("fathom")
    weights = weights_of(loaded, prefix.tokens, 1100)
    scan = scan_of_prefix(spec, loaded.facts, prefix.layers)
    shape = SegmentShape(loaded.facts.kv_heads, loaded.facts.head_dim, 8, prefix.layers[0].keys.dtype, ("planes",))
    with Arena(shape, weights.device) as arena, torch.inference_mode():
        cache = TieredCache.allocate(arena, loaded.facts.layers, 1, lanes_of(1, loaded.facts.kv_heads, 2), 1600, spec.policy.local)
        for number, layer in enumerate(prefix.layers):
            cache.load(number, 0, layer.keys, layer.values)
        cache.set_length(0, prefix.tokens)
        # All segments that the steps will need are there before memory is looked at.
        for number in range(loaded.facts.layers):
            cache._ensure(number, 0, 1500)
        step = DecodeStep(weights, cache, scan, 60, spec.policy)
        step.capture()
        for _ in range(2 * BLOCK):
            step.run()
        torch.cuda.synchronize()
        gc.collect()
        before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0], len(arena.segments)
        for _ in range(1000 - 2 * BLOCK):
            step.run()
        torch.cuda.synchronize()
        gc.collect()
        after = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0], len(arena.segments)
        assert after[0] == before[0]
        assert abs(after[1] - before[1]) <= 2**24
        assert after[2] == before[2]
        step.release()
    assert not arena.segments
