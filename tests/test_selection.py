from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom_eval.errors import UserError
from fathom_eval.selection import Policy, candidate_range, distinct_rows, select, top_indices, union_of_group


def by_sorting(row: list[float], count: int) -> list[int]:
    return sorted(sorted(range(len(row)), key=lambda i: (-row[i], i))[:count])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.integers(-3, 3).map(float), min_size=12, max_size=12), min_size=1, max_size=4), st.integers(1, 12))
def test_top_indices_prefers_the_higher_score_then_the_lower_index(rows: list[list[float]], count: int) -> None:
    found = top_indices(torch.tensor(rows), count)
    assert [sorted(row) for row in found.tolist()] == [by_sorting(row, count) for row in rows]


def scores(tokens: int = 100, seed: int = 0) -> torch.Tensor:
    return torch.randn(2, 3, 4, tokens, generator=torch.Generator().manual_seed(seed))


def test_sink_and_local_do_not_compete() -> None:
    values = scores()
    values[..., :4] = 1e6  # sinks that would win anyway must not use up a candidate's place
    candidates = candidate_range(100, Policy(), sealed=64)
    assert candidates == (4, 68)
    indices = select(values, 14, Policy(), candidates)
    assert indices.min() >= 4
    assert indices.max() < 68
    expected = top_indices(values[..., 4:68], 14) + 4
    assert torch.equal(indices.sort(-1).values, expected.sort(-1).values)


@pytest.mark.parametrize(("tokens", "expected"), [(20, (0, 0)), (33, (1, 1)), (36, (4, 4)), (38, (4, 6)), (100, (4, 68))])
def test_context_shorter_than_the_window(tokens: int, expected: tuple[int, int]) -> None:
    assert candidate_range(tokens, Policy(), sealed=0) == expected


def test_keep_tail_takes_unsealed_tokens_out_of_the_contest() -> None:
    assert candidate_range(200, Policy(keep_tail=True), sealed=128) == (4, 128)
    assert candidate_range(200, Policy(), sealed=128) == (4, 168)


@pytest.mark.parametrize("share", ["group_sum", "group_max"])
def test_a_shared_set_is_one_for_the_group_and_ranks_by_the_groups_scores(share: str) -> None:
    values = scores()
    indices = select(values, 4, Policy(share=share), (4, 68))  # type: ignore[arg-type]
    pooled = values.sum(2) if share == "group_sum" else values.amax(2)
    expected = (top_indices(pooled[..., 4:68], 4) + 4).sort(-1).values
    for head in range(4):
        assert torch.equal(indices[:, :, head].sort(-1).values, expected)


def test_union_holds_every_index_of_the_group_once() -> None:
    indices = select(scores(), 14, Policy(), (4, 68))
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
        (Policy(rerank=float("inf")), 128, "at most 1000"),
        (Policy(rerank=float("nan")), 128, "at most 1000"),
        (Policy(local=0), 128, "local at least 1"),
    ],
)
def test_policies_that_cannot_work(policy: Policy, k: int, message: str) -> None:
    with pytest.raises(UserError, match=message):
        policy.check(k, "sparq")
