"""The cache of tokenised trajectories."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest

from fathom_eval.errors import UserError
from fathom_eval.sessions.encoded_cache import EncodedCache, EncodedTrajectory, TokenTarget
from fathom_eval.sessions.encoding import TrajectoryEncoder
from fathom_eval.sessions.rendering import choose_renderer
from fathom_eval.sessions.report import ReadReport
from tests.sessions.rows import chat_messages, read_all, rebench_row, write_jsonl
from tests.sessions.templates import WITH_TOOLS, tokenizer_with

KEY = "ab" * 32
ENTRY = EncodedTrajectory(np.arange(50, dtype=np.int32), "text é\x00", (TokenTarget(2, 5, 10, 3, 7, "thought é"),), 1)


def same(one: EncodedTrajectory | None, other: EncodedTrajectory) -> bool:
    return (
        one is not None
        and (one.ids == other.ids).all()
        and (one.text, one.targets, one.refused) == (other.text, other.targets, other.refused)
    )


def test_entry_comes_back(tmp_path: Path) -> None:
    cache = EncodedCache(tmp_path / "cache")
    assert cache.load(KEY) is None
    cache.save(KEY, ENTRY)
    assert same(EncodedCache(tmp_path / "cache").load(KEY), ENTRY)
    assert [path.name for path in (tmp_path / "cache").rglob("*") if path.is_file()] == [f"{KEY}.npz"]


def test_any_damage_counts_as_missing(tmp_path: Path) -> None:
    cache = EncodedCache(tmp_path)
    cache.save(KEY, ENTRY)
    path = tmp_path / "ab" / f"{KEY}.npz"
    whole = path.read_bytes()
    for length in range(0, len(whole), 97):
        path.write_bytes(whole[:length])
        assert cache.load(KEY) is None
    for position in range(0, len(whole), 41):
        content = bytearray(whole)
        content[position] ^= 0xFF
        path.write_bytes(bytes(content))
        # A flipped bit of a time stamp in the archive does no harm; what is loaded is what was saved.
        loaded = cache.load(KEY)
        assert loaded is None or same(loaded, ENTRY)


def test_entry_under_another_name_and_pickles_are_not_used(tmp_path: Path) -> None:
    cache = EncodedCache(tmp_path)
    cache.save(KEY, ENTRY)
    other = "ab" + "cd" * 31
    (tmp_path / "ab" / f"{KEY}.npz").rename(tmp_path / "ab" / f"{other}.npz")
    assert cache.load(other) is None
    pickled = io.BytesIO()
    np.savez(pickled, header=np.array([{"key": KEY}], dtype=object), ids=ENTRY.ids, text=ENTRY.ids, targets=ENTRY.ids)
    (tmp_path / "ab" / f"{KEY}.npz").write_bytes(pickled.getvalue())
    assert cache.load(KEY) is None


def test_unwritable_folder_gets_a_stand_in(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cache = EncodedCache(tmp_path / "file" / "cache")
    assert cache.temporary
    cache.save(KEY, ENTRY)
    assert same(cache.load(KEY), ENTRY)


def test_default_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "own"))
    assert EncodedCache().folder == tmp_path / "own" / "trajectories"


def encoder(folder: Path, template: str | None = None, choice: str = "auto") -> TrajectoryEncoder:
    tokenizer = tokenizer_with(template)
    return TrajectoryEncoder(tokenizer, choose_renderer(tokenizer, choice)[0], EncodedCache(folder / "cache"))


def test_each_trajectory_is_tokenised_once(tmp_path: Path) -> None:
    rows = [rebench_row(chat_messages(turns), trajectory_id=f"../../{turns}") for turns in (1, 2, 3)]
    trajectories, _ = read_all(write_jsonl(tmp_path / "rows.jsonl", rows))
    first = encoder(tmp_path)
    candidates = list(first.candidates(trajectories, ReadReport()))
    assert first.computed == 3
    again = encoder(tmp_path)
    assert list(again.candidates(trajectories, ReadReport())) == candidates
    assert again.computed == 0
    # Ids name no files.
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cache", "rows.jsonl"]
    other = encoder(tmp_path, WITH_TOOLS)
    assert len(list(other.candidates(trajectories, ReadReport()))) == other.computed == 3
    plain = encoder(tmp_path, WITH_TOOLS, "plain")
    assert len({tokens.key(trajectories[0]) for tokens in (first, other, plain)}) == 3


def test_lost_entry_is_said(tmp_path: Path) -> None:
    trajectories, _ = read_all(write_jsonl(tmp_path / "rows.jsonl", [rebench_row()]))
    tokens = encoder(tmp_path)
    [candidate] = tokens.candidates(trajectories, ReadReport())
    next((tmp_path / "cache").rglob("*.npz")).unlink()
    with pytest.raises(UserError, match="lost an entry"):
        tokens.load(candidate)
