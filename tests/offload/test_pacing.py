"""How many programs fetch rows behind a scan: what was timed to be best, and all of them where nothing shares the link."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fathom_eval.kernels.pack import BLOCK
from fathom_eval.offload import step as module
from fathom_eval.offload.cache import default_lanes, lanes_of
from fathom_eval.offload.pacing import fetch_programs
from fathom_eval.offload.scans import Landmarks, WaterFilling
from tests.offload.made_steps import steps_by

HEADS, GROUP, K = 8, 4, 512 - 36
ALL = 132  # of the kernel, which needs Triton: tests/test_runtime_document.py reads it there
SWEEP = Path(__file__).parents[2] / "reports/published/step-h200-paced/pacing.jsonl"


def programs(
    tokens: int, bits: float = 48, *, lanes: Any = None, index: str = "host", rows: float = GROUP * K, batch: int = 1, hides: bool = True
) -> list[Any]:
    """Of every lane of a step of the Qwen3-8B shape."""
    parts = lanes_of(batch, HEADS, *(lanes or default_lanes(batch, HEADS, tokens, index)))
    arena = SimpleNamespace(index=index, shape=SimpleNamespace(head_dim=128))
    tail = torch.empty(0, dtype=torch.bfloat16)
    cache: Any = SimpleNamespace(lanes=parts, arena=arena, capacity_blocks=tokens // BLOCK, tail=tail)
    scan: Any = SimpleNamespace(code_bits=bits, hides_rows=hides)
    return [fetch_programs(cache, lane, scan, rows) for lane in parts]


def test_as_few_as_were_fastest() -> None:
    """16 at 1M, that is four a KV head, and in proportion at shorter contexts: all of the 132 at 128k."""
    assert programs(2**20) == [17, 17, None]
    assert programs(2**19) == [34, 34, None]
    assert programs(2**18) == [68, None]
    assert programs(2**17) == [136, None]


def test_deeper_scans_take_no_fewer_and_shallower_ones_more() -> None:
    assert programs(2**20, 64) == programs(2**20, 512) == programs(2**20)
    assert programs(2**20, 24) == [34, 34, None]
    assert programs(2**20, rows=GROUP * K * 3) == [51, 51, None]


def test_a_scan_that_hides_no_slow_fetch_has_all() -> None:
    """Landmarks, whose top-k is slow beside their scan, and budgets below 24: both were timed to be slower at its pace."""
    assert programs(2**20, 23) == programs(2**20, 256, hides=False) == [None, None, None]
    assert (Landmarks(8).hides_rows, WaterFilling([], [48]).hides_rows) == (False, True)


def test_a_lane_much_larger_than_the_next_takes_more() -> None:
    assert programs(2**20, lanes=(2, 1)) == [40, None]
    assert programs(2**20, lanes=(4, None), batch=4) == [17, 17, 17, None]


@pytest.mark.parametrize("batch", [1, 2, 4])
@pytest.mark.parametrize("lanes", [2, 4])
def test_at_128k_tokens_nothing_is_held_back(batch: int, lanes: int) -> None:
    assert all(most is None or most >= ALL for most in programs(2**17, lanes=(lanes, None), batch=batch))


def test_rows_that_share_no_link_with_a_scan_take_all() -> None:
    assert programs(2**20, index="hbm") == [None, None]
    assert programs(2**20, lanes=(1, None)) == [None]


def test_there_is_always_one() -> None:
    assert programs(2**26)[0] == 1


@pytest.mark.parametrize(("text", "fetches"), [("fathom", 1), ("fathom:rerank=2", 2)])
def test_a_step_fetches_so(text: str, fetches: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    fetch = module.fetch_rows

    def watched(*args: Any, programs: int | None, **options: Any) -> None:
        asked.append(programs)
        fetch(*args, programs=programs, **options)

    monkeypatch.setattr(module, "fetch_rows", watched)
    with steps_by([("gpu", 2, None)], text, device="cpu") as (step,):
        asked.clear()
        step.run()
        first, last = (work.programs for work in step._work)
        assert (first is not None, last) == (True, None)
        assert first == fetch_programs(step.cache, step.cache.lanes[0], step.scan, step.weights.group * step._count * (1, 3)[fetches - 1])
        assert asked == [programs for _ in range(step.layers) for programs in (first, last) for _ in range(fetches)]


def test_the_rule_is_the_best_setting_of_the_recorded_sweep() -> None:
    """At 1M tokens: fewer programs and more are slower, for SparQ too."""
    lines = [json.loads(line) for line in SWEEP.read_text(encoding="utf-8").splitlines()]
    swept: dict[str, dict[int, float]] = {}
    for line in lines:
        if (
            line["label"] in ("fathom budget=48 basis=raw", "sparq r=16")
            and (line["start"], line["context"], line["lanes"]) == (2, 2**20, 3)
            and set(line["setting"]) <= {"fetch_programs"}
        ):
            times = swept.setdefault(line["label"], {})
            programs_of = line["setting"].get("fetch_programs", 132)
            times[programs_of] = min(line["gpu_ms"], times.get(programs_of, line["gpu_ms"]))
    assert len(swept) == 2
    for times in swept.values():
        assert len(times) >= 5
        # The lane that hides has four KV heads, each with as many programs.
        assert min(times, key=times.__getitem__) // 4 == programs(2**20)[0] // 4
