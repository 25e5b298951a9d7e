"""The benchmark of a whole agent session: what it tells of the parts, and what it does not give as measured."""

from __future__ import annotations

import dataclasses
import json

import pytest

from fathom_eval.methods.sparq import SparQ
from fathom_eval.models import LoadedModel
from fathom_eval.session_data import SessionData
from tests.survival.conftest import Arguments
from tests.survival.scripts import script


def of_a_session(arguments: list[str]) -> list[str]:
    """Arguments for a short session, of those of a run."""
    kept = [one for one in arguments if one.startswith(("--model=", "--offline", "--trajectories=", "--session-tokens=", "--k="))]
    return [*kept, "--methods=sparq:r=D/8,landmark", "--max-new-tokens=6", "--repeats=2", "--json"]


def test_a_timed_session_is_told_by_its_parts(sessions: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    module = script("agent_session", "benchmarks")
    assert module.main(of_a_session(sessions())) == 0
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert found["methods"] == ["dense", "exact", "sparq r=D/8", "landmark size=8"]
    assert (found["branches"], found["branches_of_the_noise_floor"], found["new_tokens"], found["k"]) == (4, 2, 6, [400])
    assert 500 <= found["prompt_tokens"] <= 700
    turns = found["turns"]
    assert len(turns) == 2
    assert printed.err.count("\nturn ") == 2
    for turn in turns:
        parts = [turn[f"{name}_seconds"] for name in ("prefill", "stores", "decode", "noise_floor", "other")]
        assert sum(parts) == pytest.approx(turn["seconds"], abs=1e-3)
        assert sum(parts) - turn["noise_floor_seconds"] == pytest.approx(turn["without_noise_floor_seconds"], abs=1e-3)
        assert min(turn["prefill_seconds"], turn["decode_seconds"], turn["other_seconds"]) > 0
        assert turn["decode_seconds"] == pytest.approx(6 * turn["lockstep_ms_a_step"] / 1000, abs=1e-3)
        assert turn["ratio"] == pytest.approx(turn["lockstep_ms_a_step"] / turn["dense_ms_a_step"], rel=0.01)
        assert 0 < turn["dense_decoding_seconds"] < turn["noise_floor_seconds"]
        assert turn["peak_gpu_gib"] is None or turn["peak_gpu_gib"] > 0
    seconds = [turn["seconds"] for turn in turns]
    assert (found["all"]["seconds"]["low"], found["all"]["seconds"]["high"]) == (min(seconds), max(seconds))
    assert found["after_the_first"]["seconds"]["median"] == seconds[1]


def test_a_session_that_ends_early_or_fails_is_not_given_as_measured(
    sessions: Arguments, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, arguments = script("agent_session", "benchmarks"), of_a_session(sessions())
    with monkeypatch.context() as patch:
        patch.setattr(SparQ, "plan", lambda self, query, index: 1 / 0)
        assert module.main(arguments) == 1
    printed = capsys.readouterr()
    assert "not measured: sparq r=D/8 at k 400 failed: " in printed.err
    assert not printed.out

    def ending(loaded: LoadedModel, data: SessionData) -> tuple[LoadedModel, SessionData]:
        facts = dataclasses.replace(loaded.facts, eos_token_ids=tuple(range(len(loaded.tokenizer))))
        return dataclasses.replace(loaded, facts=facts), data

    monkeypatch.setattr(module, "never_ending", ending)
    assert module.main(arguments) == 1
    assert "not measured: dense at k None ended after 1 of 6 tokens (eos)" in capsys.readouterr().err
    assert module.main([*arguments, "--max-new-tokens=2"]) == 2
    assert "error: --max-new-tokens 2 must be at least 3" in capsys.readouterr().err
