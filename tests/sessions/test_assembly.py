"""Encoding, packing and sessions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom_eval.errors import UserError
from fathom_eval.sessions.assembly import Session, build_sessions, gather_candidates, parse_session_tokens, plan_sessions
from fathom_eval.sessions.encoded_cache import EncodedCache
from fathom_eval.sessions.encoding import Candidate, TrajectoryEncoder
from fathom_eval.sessions.packing import Item, pack
from fathom_eval.sessions.rendering import choose_renderer
from fathom_eval.sessions.report import ReadReport
from tests.sessions.rows import chat_call, chat_messages, message, read_all, rebench_row, write_jsonl
from tests.sessions.templates import WITH_TOOLS, tokenizer_with


def varied_rows(count: int, seed: int = 0, repos: Sequence[str] = ("o/a", "o/b")) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        messages = chat_messages(rng.randint(2, 8), words=rng.randint(2, 12))
        messages[1]["content"] = f"Fix bug {number}."
        rows.append(rebench_row(messages, trajectory_id=f"t{number}", repo=rng.choice(list(repos))))
    return rows


def encoder_for(folder: Path, template: str | None = None, *, add_bos: bool = True) -> TrajectoryEncoder:
    tokenizer = tokenizer_with(template, add_bos=add_bos)
    return TrajectoryEncoder(tokenizer, choose_renderer(tokenizer)[0], EncodedCache(folder / "cache"))


def encoded(folder: Path, rows: list[dict[str, Any]], encoder: TrajectoryEncoder) -> tuple[list[Candidate], ReadReport]:
    trajectories, report = read_all(write_jsonl(folder / "rows.jsonl", rows))
    return list(encoder.candidates(trajectories, report)), report


def sessions_of(candidates: list[Candidate], encoder: TrajectoryEncoder, low: int, high: int, **options: Any) -> list[Session]:
    seed = options.get("seed", 0)
    plan = plan_sessions(candidates, low=low, high=high, prefix_tokens=len(encoder.prefix), **options)
    sessions, notes = build_sessions(plan, candidates, encoder, seed=seed)
    assert notes == []
    return sessions


@pytest.mark.parametrize("template", [None, WITH_TOOLS])
@pytest.mark.parametrize("add_bos", [True, False])
def test_sessions_hold_what_they_promise(tmp_path: Path, template: str | None, add_bos: bool) -> None:
    encoder = encoder_for(tmp_path, template, add_bos=add_bos)
    candidates, _ = encoded(tmp_path, varied_rows(24), encoder)
    by_id = {candidate.id: candidate for candidate in candidates}
    sessions = sessions_of(candidates, encoder, 3_000, 4_000)
    assert len(sessions) >= 5
    used = [source.trajectory for session in sessions for source in session.sources]
    assert len(used) == len(set(used))
    for session in sessions:
        assert 3_000 <= len(session.prompt_ids) <= 4_000
        assert session.prompt_ids.dtype == np.int32
        assert {by_id[source.trajectory].repo for source in session.sources} == {session.repo}
        # The whole rendering of all members, tokenised as one text each, starts with the prompt.
        full = [*encoder.prefix]
        for source in session.sources:
            full += encoder.encode([encoder.load(by_id[source.trajectory]).text])[0]
        assert full[: len(session.prompt_ids)] == session.prompt_ids.tolist()
        assert session.prompt_ids.tolist().count(0) == int(add_bos)
        assert session.target_content.strip()
        assert session.target_text.startswith(session.target_content)
        assert "execute_bash" in session.target_text
        assert "<|end|>" not in session.target_text
        assert [source.whole for source in session.sources] == [True] * (len(session.sources) - 1) + [False]
        assert sum(source.tokens for source in session.sources) + len(encoder.prefix) == len(session.prompt_ids)


def test_prompt_ends_where_the_model_goes_on(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path)
    candidates, _ = encoded(tmp_path, varied_rows(6, repos=["o/a"]), encoder)
    tokenizer = tokenizer_with(None)
    for session in sessions_of(candidates, encoder, 2_000, 3_000):
        assert tokenizer.decode(session.prompt_ids).endswith("\n\n### Assistant:\n")


def test_same_seed_same_sessions_in_any_order(tmp_path: Path) -> None:
    rows = varied_rows(20)
    encoder = encoder_for(tmp_path)
    candidates, _ = encoded(tmp_path, rows, encoder)
    first = sessions_of(candidates, encoder, 3_000, 4_000, seed=1)
    random.Random(3).shuffle(candidates)
    again = sessions_of(candidates, encoder, 3_000, 4_000, seed=1)
    assert [session.id for session in first] == [session.id for session in again]
    assert all((one.prompt_ids == other.prompt_ids).all() for one, other in zip(first, again, strict=True))
    other = sessions_of(candidates, encoder, 3_000, 4_000, seed=2)
    assert [session.id for session in first] != [session.id for session in other]


def test_packs_of_a_seed_never_change() -> None:
    # Written down once: the same on any machine, whatever its random state or hash seed.
    items = [Item(f"i{number}", 10 * number, tuple(range(5, 10 * number, 10))) for number in range(1, 9)]
    assert [(one.whole, one.last, one.cuts) for one in pack(items, 80, 100, seed=7)] == GOLDEN


GOLDEN = [(("i1",), "i8", (75,)), (("i6",), "i3", (25,)), (("i7",), "i2", (15,)), (("i5",), "i4", (35,))]


def test_a_trajectory_longer_than_a_session_is_cut(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path)
    rows = [rebench_row(chat_messages(40, words=10), trajectory_id="long", repo="o/a")]
    candidates, _ = encoded(tmp_path, rows, encoder)
    assert candidates[0].length > 3 * 2_000
    [session] = sessions_of(candidates, encoder, 1_500, 2_000)
    assert [source.trajectory for source in session.sources] == ["long"]
    assert session.sources[0].whole is False


def test_a_long_trajectory_without_an_early_target_is_said(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path)
    silent = [
        message("user", "T"),
        *(message("assistant", "", tool_calls=[chat_call(f"c{turn}")]) for turn in range(80)),
        message("assistant", "End."),
    ]
    candidates, _ = encoded(tmp_path, [rebench_row(silent, trajectory_id="silent", repo="o/a"), *varied_rows(8, repos=["o/a"])], encoder)
    plan = plan_sessions(candidates, low=1_500, high=2_000)
    unused = dict(plan.repositories[0].unused)
    assert unused["silent"].startswith("longer than a session (")
    assert plan.repositories[0].sessions >= 3
    assert (plan.repositories[0].late, plan.repositories[0].trajectories) == (1, 9)
    assert plan.repositories[0].earliest_target == candidates[0].targets[0][1] > 2_000


def test_too_little_text_is_said(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path)
    candidates, _ = encoded(tmp_path, varied_rows(2, repos=["o/a"]), encoder)
    plan = plan_sessions(candidates, low=80_000, high=100_000)
    total = sum(candidate.length for candidate in candidates)
    assert plan.packs == ()
    assert [why for _, why in plan.repositories[0].unused] == [f"the repository has {total:,} tokens in all, a session needs 80,000"] * 2


def test_no_two_sessions_have_the_same_prompt(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path)
    messages = chat_messages(12, words=10)
    beginning = rebench_row(messages[:-4], trajectory_id="beginning", repo="o/a")
    candidates, _ = encoded(tmp_path, [rebench_row(messages, trajectory_id="whole", repo="o/a"), beginning], encoder)
    whole, cut = candidates
    assert encoder.load(cut).ids.tolist() == encoder.load(whole).ids[: cut.length].tolist()

    def build(first: int, last: int) -> tuple[list[Session], list[str]]:
        low, high = whole.targets[first][1], whole.targets[last][1]
        plan = plan_sessions(candidates, low=low + len(encoder.prefix), high=high + len(encoder.prefix), prefix_tokens=len(encoder.prefix))
        assert len(plan.packs) == 2
        return build_sessions(plan, candidates, encoder)

    sessions, notes = build(4, 4)
    assert len(sessions) == 1
    assert [note.split(", is ")[1] for note in notes] == ["that of another session"]
    for first in range(2, 6):
        sessions, notes = build(first, first + 1)
        assert notes == [], "the other target is taken"
        assert len({session.prompt_ids.tobytes() for session in sessions}) == 2


def test_copies_and_nameless_repositories_are_left_out(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path)
    rows = varied_rows(3, repos=["o/a"])
    nameless = rebench_row(chat_messages(3), trajectory_id="n", repo=None, instance_id="x")
    candidates, _ = encoded(tmp_path, [*rows, {**rows[0], "trajectory_id": "copy"}, nameless], encoder)
    plan = plan_sessions(candidates, low=100, high=100_000)
    assert [note.split(": ")[1] for note in plan.notes] == ["left out", "left out"]
    assert "(copy) is a copy of another trajectory" in plan.notes[0]
    assert "(n) names no repository" in plan.notes[1]
    assert {name for _, one in plan.packs for name in one.members} <= {candidate.content_hash for candidate in candidates[:3]}


def test_only_the_asked_repository(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path)
    candidates, _ = encoded(tmp_path, varied_rows(20), encoder)
    assert {session.repo for session in sessions_of(candidates, encoder, 2_000, 3_000, repo="o/b")} == {"o/b"}
    with pytest.raises(UserError, match="no trajectory is of repository 'o/c'; did you mean"):
        plan_sessions(candidates, low=1, high=2, repo="o/c")


def test_reading_stops_when_there_is_enough(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path)
    candidates, _ = encoded(tmp_path, varied_rows(40), encoder)
    source = iter(candidates)
    gathered, more = gather_candidates(source, sessions=2, low=2_000, high=3_000)
    assert more
    assert len(gathered) < 20
    assert next(source) == candidates[len(gathered)]
    assert len(plan_sessions(gathered, low=2_000, high=3_000).packs) >= 2
    everything, more = gather_candidates(iter(candidates), sessions=1_000, low=2_000, high=3_000)
    assert (everything, more) == (candidates, False)
    of_one, _ = gather_candidates(iter(candidates), sessions=1, low=2_000, high=3_000, repo="o/b")
    assert any(candidate.repo == "o/b" for candidate in of_one)


def test_a_target_that_merges_with_its_header_is_refused(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # "\n" and "\n" make one token: a response that starts with a line break merges with the line break of the header.
    vocabulary = {token: number for number, token in enumerate([*alphabet, "ĊĊ"])}
    backend = Tokenizer(models.BPE(vocabulary, [("Ċ", "Ċ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend)
    encoder = TrajectoryEncoder(tokenizer, choose_renderer(tokenizer)[0], EncodedCache(tmp_path / "cache"))
    messages = chat_messages(3)
    messages[4]["content"] = "\nstarts with a line break"
    [candidate], _ = encoded(tmp_path, [rebench_row(messages)], encoder)
    assert [step for step, _ in candidate.targets] == [2, 6]
    assert candidate.refused == 1
    loaded = encoder.load(candidate)
    assert all(encoder.is_prefix(loaded, target) for target in loaded.targets)


def test_special_tokens_in_plain_text_stay_text(tmp_path: Path) -> None:
    encoder = encoder_for(tmp_path)
    [candidate], _ = encoded(tmp_path, [rebench_row([message("user", "</s><s>"), message("assistant", "Ok.")])], encoder)
    ids = encoder.load(candidate).ids.tolist()
    assert 0 not in ids
    assert 1 not in ids


def test_trajectory_that_the_template_refuses_is_reported(tmp_path: Path) -> None:
    from tests.sessions.templates import NEEDS_TURNS

    encoder = encoder_for(tmp_path, NEEDS_TURNS)
    refused = rebench_row([*chat_messages(1), message("user", "a"), message("user", "b")], trajectory_id="refused")
    candidates, report = encoded(tmp_path, [refused, rebench_row()], encoder)
    assert [candidate.id for candidate in candidates] == ["t1"]
    assert report.skipped == ["rows.jsonl, line 1 (refused): the chat template refuses it: roles must alternate"]


def test_bounds_of_a_session() -> None:
    assert parse_session_tokens("80_000:100000") == (80_000, 100_000)
    for text in ("", "80000", "0:10", "100:50", "a:b", "1:2:3", "-5:10", "٣:٤", "1:\x1b[31m"):
        with pytest.raises(UserError, match="the form is LOW:HIGH") as caught:
            parse_session_tokens(text)
        assert str(caught.value).isprintable()


ITEMS = st.lists(
    st.builds(
        lambda length, cuts: (length, tuple(sorted({max(1, round(cut * length)) for cut in cuts}))),
        st.integers(1, 300),
        st.lists(st.floats(0, 1), max_size=5),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(ITEMS, st.integers(1, 150), st.integers(0, 60), st.integers(0, 5))
def test_packs_are_valid(sizes: list[tuple[int, tuple[int, ...]]], low: int, room: int, seed: int) -> None:
    items = {f"i{number}": Item(f"i{number}", length, cuts) for number, (length, cuts) in enumerate(sizes)}
    packs = pack(list(items.values()), low, low + room, seed)
    members = [name for one in packs for name in one.members]
    assert len(members) == len(set(members))
    for one in packs:
        before = sum(items[name].length for name in one.whole)
        assert one.cuts
        assert set(one.cuts) <= set(items[one.last].cuts)
        assert all(low <= before + cut <= low + room for cut in one.cuts)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(20, 70), min_size=4, max_size=8), st.integers(0, 3))
def test_packing_is_near_the_best_possible(lengths: list[int], seed: int) -> None:
    items = [Item(f"i{number}", length, tuple(range(5, length, 5))) for number, length in enumerate(lengths)]
    found = len(pack(items, 80, 100, seed))
    assert found >= best_cover([length - 1 for length in lengths], 80) - 1


def best_cover(lengths: list[int], low: int) -> int:
    """Most groups of at least ``low``, by trying everything: an upper bound of what can be packed."""
    if sum(lengths) < low:
        return 0
    first, rest = lengths[0], lengths[1:]
    best = best_cover(rest, low)
    for mask in range(1 << len(rest)):
        chosen = [length for number, length in enumerate(rest) if mask >> number & 1]
        if first + sum(chosen) >= low:
            left = [length for number, length in enumerate(rest) if not mask >> number & 1]
            best = max(best, 1 + best_cover(left, low))
    return best
