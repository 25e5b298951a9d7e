"""Runs on a GPU whose methods the timed step decodes: the tokens of lock-step decoding, but for what fp16 scores settle otherwise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fathom_eval.branches import Branch
from fathom_eval.cli import main
from fathom_eval.decode import decode
from fathom_eval.methods import parse_method
from fathom_eval.models import LoadedModel
from fathom_eval.offload.arena import release_pinned
from fathom_eval.offload.branches import RuntimeDecoder
from fathom_eval.offload.step import DecodeStep
from fathom_eval.prefill import Prefix, prefill
from fathom_eval.run import Run
from tests.offload.made_steps import prompt, tiny_on
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


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny_on("cuda", max_positions=4096)


@pytest.fixture(scope="module")
def prefix(loaded: LoadedModel) -> Prefix:
    return prefill(loaded, prompt(900))


@pytest.mark.parametrize("index", ["host", "hbm"])
def test_a_run_by_the_timed_step_agrees_with_lock_step_decoding(
    command: list[str], tmp_path: Path, index: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the scores of the step that is timed, which are fp16: a near tie of two tokens may be settled otherwise."""
    assert main([*command, f"--output={tmp_path / 'lock-step'}"]) == 0
    assert main([*command, f"--output={tmp_path / 'step'}", f"--runtime={index}"]) == 0
    assert "float16 scores" in capsys.readouterr().out
    identities = [Run.load(tmp_path / name).manifest["identity"] for name in ("lock-step", "step")]
    assert identities[1] == {**identities[0], "runtime": index, "runtime_scores": "float16"}
    expected, found = records(tmp_path / "lock-step"), records(tmp_path / "step")
    assert found.keys() == expected.keys()
    agreed = []
    for key, record in found.items():
        other = expected[key]
        ours = record["method"] not in ("dense", "exact", "quest")
        assert record["decoded_by"] == ("runtime" if ours else "lock-step"), key
        assert record["error"] is None, key
        assert record["bits"] == record["declared_bits"], key
        if record["token_ids"] != other["token_ids"]:
            assert ours, key
        if ours:
            agreed += [mine == theirs for mine, theirs in zip(record["token_ids"], other["token_ids"], strict=False)]
    assert sum(agreed) > len(agreed) / 2


@pytest.mark.parametrize("index", ["host", "hbm"])
@pytest.mark.parametrize("text", METHODS.removesuffix(",quest").split(","))
def test_with_scores_in_fp32_the_tokens_are_those_of_lock_step_decoding(loaded: LoadedModel, prefix: Prefix, text: str, index: str) -> None:
    branch = Branch(parse_method(text), 90)
    [other] = decode(loaded, prefix, [branch], 80)
    found = RuntimeDecoder(loaded, index, torch.float32).decode(prefix, branch, 80)
    assert (found.token_ids, found.finish, found.error) == (other.token_ids, other.finish, None)
    assert (found.steps, found.fired) == (other.steps, other.fired)
    # Queries are rounded otherwise, which can turn a near tie of channels or rows; what is declared is read all the same.
    assert found.bits == found.declared_bits
    for name in ("bits", "channels", "rows"):
        assert getattr(found, name) == pytest.approx(getattr(other, name), rel=0.01), name
    assert found.candidate_rows == pytest.approx(other.candidate_rows, rel=0.05, abs=0.5)


def test_scores_in_fp16_select_nearly_the_same(loaded: LoadedModel, prefix: Prefix, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step's logits within 2% of their norm for most methods, and most of all tokens."""
    logits: list[torch.Tensor] = []
    run, distances, agreed = DecodeStep.run, [], []
    monkeypatch.setattr(DecodeStep, "run", lambda step: (run(step), logits.append(step.logits.flatten().clone()))[0])
    for text in METHODS.removesuffix(",quest").split(","):
        branch, expected = Branch(parse_method(text), 90), list[torch.Tensor]()
        handle = loaded.model.lm_head.register_forward_hook(lambda *call, kept=expected: kept.append(call[-1].float().flatten()))
        [other] = decode(loaded, prefix, [branch], 40)
        handle.remove()
        logits.clear()
        found = RuntimeDecoder(loaded, "host").decode(prefix, branch, 40)
        assert found.error is None
        distances.append(((logits[0] - expected[0]).norm() / expected[0].norm()).item())
        agreed += [mine == theirs for mine, theirs in zip(found.token_ids, other.token_ids, strict=False)]
    assert sorted(distances)[len(distances) // 2] < 0.02
    assert sum(agreed) > len(agreed) / 2


def test_a_branch_that_cannot_be_recorded_is_launched_and_spoils_no_later_one(
    loaded: LoadedModel, prefix: Prefix, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime, branch, size = RuntimeDecoder(loaded, "hbm", torch.float32), Branch(parse_method("sparq"), 90), 2**28
    expected = runtime.decode(prefix, branch, 40)
    forward = DecodeStep._forward

    def waiting(step: DecodeStep) -> None:
        forward(step)
        if torch.cuda.is_current_stream_capturing():
            step.logits.sum().item()  # forbidden while a graph is recorded

    monkeypatch.setattr(DecodeStep, "_forward", waiting)
    before = torch.cuda.current_stream()
    with pytest.warns(RuntimeWarning, match="kernel by kernel"):
        assert runtime.decode(prefix, branch, 40) == expected
    assert torch.cuda.current_stream() == before
    monkeypatch.undo()
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    large = torch.zeros(size, dtype=torch.uint8, device="cuda")
    del large
    torch.cuda.empty_cache()
    assert torch.cuda.memory_reserved() <= reserved, "the allocator has left the recording that failed"
    assert runtime.decode(prefix, branch, 40) == expected


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
