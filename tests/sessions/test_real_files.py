"""Real files, where they are at hand: a folder with ``openhands/``, named by FATHOM_EVAL_TEST_DATA or beside the repository."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from fathom_eval.errors import UserError
from fathom_eval.sessions.assembly import build_sessions, plan_sessions
from fathom_eval.sessions.encoded_cache import EncodedCache
from fathom_eval.sessions.encoding import TrajectoryEncoder
from fathom_eval.sessions.rendering import choose_renderer
from fathom_eval.sessions.steps import Assistant, Trajectory
from fathom_eval.sessions.tokenizers import load_tokenizer
from tests.sessions.rows import read_all


@pytest.fixture(scope="module")
def folder() -> Path:
    named = os.environ.get("FATHOM_EVAL_TEST_DATA")
    data = Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"
    if not (data / "openhands").is_dir():
        pytest.skip(f"no real files: {data / 'openhands'} is not there; FATHOM_EVAL_TEST_DATA names another folder")
    return data / "openhands"


def by_id(path: Path, **options: str) -> dict[str, Trajectory]:
    trajectories, report = read_all(path, **options)
    assert report.lines() == []
    return {trajectory.id: trajectory for trajectory in trajectories}


def test_excerpt(folder: Path) -> None:
    [trajectory] = by_id(folder / "swe_rebench_excerpt.json").values()
    assert (trajectory.format, trajectory.repo, trajectory.resolved) == ("swe-rebench", "tianocore/edk2-pytool-library", True)
    assert (len(trajectory.steps), trajectory.targets, trajectory.ending) == (7, (2,), "open call")
    assert trajectory.tools[0]["function"]["parameters"]["properties"] == {
        "thought": {"description": "The thought to log.", "type": "string"}
    }


def test_v0(folder: Path) -> None:
    ponyc = by_id(folder / "v0_output_ponyc.jsonl.gz")
    assert {name: (len(one.steps), len(one.targets), one.ending) for name, one in ponyc.items()} == {
        "ponylang__ponyc-4595": (47, 23, "finish"),
        "ponylang__ponyc-4593": (68, 33, "finish"),
        "ponylang__ponyc-4588": (101, 49, "tool result"),
    }
    rejected = [
        step.content for step in ponyc["ponylang__ponyc-4593"].steps if step.content.endswith("[Error occurred in processing last action]")
    ]
    assert len(rejected) == 1
    java = by_id(folder / "v0_output_spotbugs_mapstruct.jsonl.gz")
    assert Counter(one.repo for one in java.values()) == {"spotbugs/spotbugs": 3, "mapstruct/mapstruct": 1}
    # The longest output has 915,248 characters in the file, of which the model saw 30,000: its next prompt had 34,280 tokens.
    [fastjson] = by_id(folder / "v0_output_fastjson2.jsonl.gz").values()
    assert max(len(step.content) for step in fastjson.steps) < 31_000
    assert fastjson.targets == ()


def test_flat_form(folder: Path) -> None:
    trajectories = by_id(folder / "v0_legacy_output.jsonl")
    assert {name: len(one.steps) for name, one in trajectories.items()} == {"neubig/pr-viewer#5": 8, "neubig/pr-viewer#1": 44}


def test_v1(folder: Path) -> None:
    full = by_id(folder / "v1_conversations.jsonl.gz")
    assert Counter(one.repo for one in full.values()) == {
        "astropy": 19,
        "sympy": 4,
        "sphinx": 3,
        "pylint": 3,
        "matplotlib": 3,
        "requests": 2,
        "pytest": 2,
    }
    assert sum(len(one.targets) for one in full.values()) == 1_580
    assert sum(isinstance(step, Assistant) for one in full.values() for step in one.steps) == 2_393
    condensed = by_id(folder / "v1_conversations.jsonl.gz", condensation="condensed")
    assert sum(len(one.steps) for one in condensed.values()) < sum(len(one.steps) for one in full.values()) / 2


@pytest.mark.model
@pytest.mark.slow
def test_sessions_of_the_v1_file(folder: Path, tmp_path: Path) -> None:
    try:
        tokenizer = load_tokenizer("smollm2", offline=True)
    except UserError as error:
        pytest.skip(str(error))
    encoder = TrajectoryEncoder(tokenizer, choose_renderer(tokenizer)[0], EncodedCache(tmp_path))
    trajectories, report = read_all(folder / "v1_conversations.jsonl.gz")
    candidates = list(encoder.candidates(trajectories, report))
    sessions, notes = build_sessions(plan_sessions(candidates, low=80_000, high=100_000), candidates, encoder)
    assert notes == []
    assert len(sessions) == 21
    assert len({session.repo for session in sessions}) == 7
    assert all(80_000 <= len(session.prompt_ids) <= 100_000 for session in sessions)
    used = [source.trajectory for session in sessions for source in session.sources]
    assert len(used) == len(set(used))
