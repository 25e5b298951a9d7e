"""Whole runs on a GPU whose methods the timed step decodes: the tokens of lock-step decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fathom_eval.cli import main
from fathom_eval.offload.arena import release_pinned
from fathom_eval.run import Run
from tests.tiny import save_tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

METHODS = "fathom:basis=raw,fathom:basis=klt:rerank=2,sparq,sparq:rerank=1.5:attend=union,loki,thumbnail,landmark,quest"


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("runs")
    model = save_tiny(folder / "model", "qwen3", layers=2, query_heads=4, kv_heads=2, head_dim=64, max_positions=4096)
    prose = folder / "prose.txt"
    lines = (f"The boat number {number} left the old harbour early. Nobody saw it go." for number in range(400))
    prose.write_text("\n".join(lines), encoding="utf-8")
    settings = {
        "model": model,
        "haystack": prose,
        "context": 900,
        "k": "60,90",
        "tasks": "niah_single,vt",
        "methods": METHODS,
        "limit": 1,
        "device": "cuda",
        "dtype": "float32",
    }
    return ["ruler", "--offline", *(f"--{name}={value}" for name, value in settings.items())]


def records(folder: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    return {(record["task"], record["label"], record["k"]): record for record in Run.load(folder).records()}


@pytest.mark.parametrize("index", ["host", "hbm"])
def test_a_run_by_the_timed_step_gives_the_tokens_of_lock_step_decoding(command: list[str], tmp_path: Path, index: str) -> None:
    assert main([*command, f"--output={tmp_path / 'lock-step'}"]) == 0
    assert main([*command, f"--output={tmp_path / 'step'}", f"--runtime={index}"]) == 0
    expected, found = records(tmp_path / "lock-step"), records(tmp_path / "step")
    assert found.keys() == expected.keys()
    for key, record in found.items():
        other = expected[key]
        assert record["decoded_by"] == ("lock-step" if record["method"] in ("dense", "exact", "quest") else "runtime"), key
        for name in ("token_ids", "finish", "error", "score", "steps", "fired"):
            assert record[name] == other[name], (key, name)
        # Queries are rounded otherwise, which can turn a near tie of channels or rows; what is declared is read all the same.
        assert record["bits"] == record["declared_bits"], key
        for name in ("bits", "active_channels", "rows"):
            assert record[name] == (None if other[name] is None else pytest.approx(other[name], rel=0.01)), (key, name)
        assert record["candidate_rows"] == pytest.approx(other["candidate_rows"], rel=0.05, abs=0.5), key


def test_no_memory_stays(command: list[str], tmp_path: Path) -> None:
    assert main([*command, f"--output={tmp_path / 'first'}", "--runtime=host"]) == 0
    release_pinned()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    assert main([*command, f"--output={tmp_path / 'second'}", "--runtime=host"]) == 0
    release_pinned()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    after = torch.cuda.memory_allocated(), torch.cuda.mem_get_info()[0]
    assert after[0] <= before[0] + 2**20
    assert abs(after[1] - before[1]) <= 2**25
