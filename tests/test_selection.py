from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom_eval.errors import UserError
from fathom_eval.selection import Policy, distinct_rows, select, top_indices, union_of_group


def by_sorting(row: list[float], count: int) -> list[int]:
    return sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:count])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(-3, 3).map(float), min_size=12, max_size=12), min_size=1, max_size=4), st.integers(1, 12))
def test_top_indices_prefers_the_higher_score_then_the_lower_index(rows: list[list[float]], count: int) -> None:
    found = top_indices(torch.tensor(rows), count)
    assert [sorted(row) for row in found.tolist()] == [by_sorting(row, count) for row in rows]


def scores(tokens: int = 100, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, 4, tokens, generator=torch.Generator().manual_seed(seed))


def test_sink_and_local_are_kept_and_do_not_compete() -> None:
    values = scores()
    values[..., :4] = 1e6  # sinks that would win anyway must not use up a candidate's place
    indices = select(values, 50, Policy(), sealed=64)
    assert indices.shape == (2, 3, 4, 50)
    for row in indices.flatten(0, -2).tolist():
        assert len(set(row)) == 50
        assert {0, 1, 2, 3, *range(68, 100)} <= set(row)
    expected = top_indices(values[..., 4:68], 14) + 4
    assert torch.equal(indices[..., :14].sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize("k", [100, 101, 5000])
def test_k_of_all_tokens_or_more_selects_everything(k: int) -> None:
    assert select(scores(), k, Policy(), sealed=64)[1, 2, 3].tolist() == list(range(100))


def test_context_shorter_than_the_window() -> None:
    assert select(scores(20), 37, Policy(), sealed=0)[0, 0, 0].tolist() == list(range(20))
    indices = select(scores(38), 37, Policy(), sealed=0)
    assert indices.shape[-1] == 37
    assert {0, 1, 2, 3, *range(6, 38)} <= set(indices[0, 0, 0].tolist())


@pytest.mark.parametrize("share", ["group_sum", "group_max"])
def test_a_shared_set_is_one_for_the_group_and_ranks_by_the_groups_scores(share: str) -> None:
    values = scores()
    indices = select(values, 40, Policy(share=share), sealed=64)  # type: ignore[arg-type]
    pooled = values.sum(2) if share == "group_sum" else values.amax(2)
    expected = (top_indices(pooled[..., 4:68], 4) + 4).sort(-1).values
    for head in range(4):
        assert torch.equal(indices[:, :, head, :4].sort(-1).values, expected)


def test_keep_tail_takes_unsealed_tokens_out_of_the_contest() -> None:
    indices = select(scores(200), 120, Policy(keep_tail=True), sealed=128)
    for row in indices.flatten(0, -2).tolist():
        assert {0, 1, 2, 3, *range(128, 200)} <= set(row)
        assert len(set(row)) == 120


def test_rerank_widens_the_candidates() -> None:
    assert select(scores(), 40, Policy(rerank=2.5), sealed=64).shape[-1] == 36 + 10
    assert select(scores(), 60, Policy(rerank=9), sealed=64).shape[-1] == 100


def test_union_holds_every_index_of_the_group_once() -> None:
    indices = select(scores(), 50, Policy(), sealed=64)
    union, mask = union_of_group(indices)
    for row in range(2):
        for head in range(3):
            expected = set(indices[row, head].flatten().tolist())
            for group in range(4):
                kept = union[row, head, group][mask[row, head, group]].tolist()
                assert len(kept) == len(set(kept))
                assert set(kept) == expected
    assert torch.equal(distinct_rows(indices, 100), mask[:, :, 0].sum(-1))


@pytest.mark.parametrize(
    ("policy", "k", "message"),
    [
        (Policy(), 36, "k=36 leaves nothing to select; it must be above sink \\+ local = 36"),
        (Policy(keep_tail=True), 99, "the unsealed tail = 99"),
        (Policy(rerank=0.5), 128, "rerank=0.5 must be at least 1"),
        (Policy(local=0), 128, "local at least 1"),
    ],
)
def test_policies_that_cannot_work(policy: Policy, k: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        policy.check(k, "sparq")
