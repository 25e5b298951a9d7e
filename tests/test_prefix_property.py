"""Which stores keep the prefix property."""

from __future__ import annotations

import pytest
import torch

from fathom_eval.codebooks import merged_levels
from fathom_eval.prefix_property import measure_prefixes
from tests.key_layers import real_layer


def test_only_bit_planes_are_exactly_the_shorter_quantiser() -> None:
    reads = {(read.store, read.read): read for read in measure_prefixes(real_layer(), 4)}
    assert len(reads) == 4 * 3
    for (store, depth), read in reads.items():
        assert read.identical == (store == "fathom"), (store, depth)
        if store == "fathom":
            assert read.ratio == pytest.approx(1, abs=1e-5)
    # A sign is a sign: half of a symmetric distribution has one mean, however finely it is coded.
    assert reads["turboquant", 1].ratio == pytest.approx(1, abs=1e-3)
    # Merged cells of a normal distribution's levels are nearly its own coarser levels; those learnt from heavy tails are not.
    assert 1 < reads["turboquant", 2].ratio < 1.1
    assert reads["kvquant", 2].ratio > 1.15
    assert reads["kvquant", 1].ratio > reads["turboquant", 1].ratio
    # KIVI's outer levels lie on the extremes, where only half a cell needs them: merged cells waste less of the range.
    assert reads["kivi", 1].ratio < 1


def test_a_prefix_of_all_bits_is_the_code_itself() -> None:
    levels = torch.tensor([[-2.0, -0.5, 0.5, 3.0]])
    assert torch.equal(merged_levels(levels, 2), levels)
    assert merged_levels(levels, 1).tolist() == [[-1.25, -1.25, 1.75, 1.75]]
    assert merged_levels(levels, 1, torch.tensor([[0.25, 0.75, 1.0, 0.0]])).tolist() == [[-0.875, -0.875, 0.5, 0.5]]
