from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom_eval.kernels.pack import block_scales, pack_planes, quantise, unpack_plane
from fathom_eval.kernels.scan import prefix_values, scan_planes


def direct_quantiser(keys: torch.Tensor, depth: int) -> torch.Tensor:
    """A t-bit mid-rise quantiser over [-a, a] written from its definition: 2^t cells, each key to its cell's centre."""
    a = keys.abs().amax(0).half().float()
    cells = 2**depth
    width = 2 * a / cells
    cell = torch.where(a > 0, torch.floor((keys + a) / torch.where(a > 0, width, 1.0)), 0.0).clamp(0, cells - 1)
    return torch.where(a > 0, -a + (cell + 0.5) * width, 0.0)


def block(kind: str, seed: int) -> torch.Tensor:
    noise = torch.randn(64, 5, generator=torch.Generator().manual_seed(seed))
    return {
        "random": noise,
        "one-signed": noise.abs() + 0.1,
        "negative": -noise.abs() - 0.1,
        "constant": torch.full((64, 5), 0.75),
        "zero": torch.zeros(64, 5),
        "huge": noise.clamp(-3, 3) * 2e4,
        "tiny": noise * 1e-6,
        "one outlier": torch.cat([noise[:63] * 0.1 + 0.5, torch.full((1, 5), 100.0)]),
    }[kind]


@pytest.mark.parametrize("kind", ["random", "one-signed", "negative", "constant", "zero", "huge", "tiny", "one outlier"])
@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_a_plane_prefix_is_the_direct_quantiser(kind: str, depth: int) -> None:
    keys = block(kind, seed=depth)
    scales = block_scales(keys)
    planes = pack_planes(quantise(keys, scales))
    found = prefix_values(planes, scales, torch.full((5,), depth)).T
    expected = direct_quantiser(keys, depth)
    # A key within float noise of a cell's edge may fall to either side in the two ways of writing the division.
    width = 2 * keys.abs().amax(0).half().float() / 2**depth
    position = torch.where(width > 0, keys / torch.where(width > 0, width, 1.0), 0.5)
    on_edge = ((position - position.round()).abs() < 1e-5) & (position.abs() < 2 ** (depth - 1) - 0.5)
    torch.testing.assert_close(found[~on_edge], expected[~on_edge], rtol=1e-6, atol=1e-12)
    assert on_edge.float().mean() < 0.1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([1e-4, 1.0, 300.0]), st.integers(1, 4))
def test_prefix_property_on_random_keys(seed: int, scale: float, depth: int) -> None:
    keys = torch.randn(128, 3, generator=torch.Generator().manual_seed(seed)) * scale
    scales = block_scales(keys)
    planes = pack_planes(quantise(keys, scales))
    found = prefix_values(planes, scales, torch.full((3,), depth)).T
    expected = torch.cat([direct_quantiser(keys[:64], depth), direct_quantiser(keys[64:], depth)])
    width = 2 * scales.float().T.repeat_interleave(64, 0) / 2**depth
    clear = ((keys / width) - (keys / width).round()).abs() > 1e-5
    torch.testing.assert_close(found[clear], expected[clear], rtol=1e-6, atol=0)
    # Mid-rise cells: nothing is further from its value than half a cell, but for the fp16 rounding of the scale.
    assert ((found - keys).abs() <= width * 0.5 * 1.01 + scales.float().T.repeat_interleave(64, 0) * 1e-3).all()


def test_a_key_on_the_positive_edge_is_clipped_to_the_last_cell() -> None:
    keys = torch.zeros(64, 1)
    keys[3], keys[5] = 2.0, -2.0
    codes = quantise(keys, block_scales(keys))[0]
    assert codes[3] == 15
    assert codes[5] == 0
    assert codes[0] == 8


def test_a_scale_that_rounds_to_zero_gives_middle_codes() -> None:
    keys = torch.full((64, 1), 1e-9)
    scales = block_scales(keys)
    assert scales.item() == 0
    assert quantise(keys, scales).unique().tolist() == [8]
    assert prefix_values(pack_planes(quantise(keys, scales)), scales, torch.tensor([4])).abs().max() == 0


def test_words_hold_one_bit_a_token_most_significant_plane_first() -> None:
    codes = torch.zeros(1, 64, dtype=torch.uint8)
    codes[0, 0], codes[0, 63] = 0b1000, 0b0001
    planes = pack_planes(codes)
    assert planes.shape == (1, 4, 1)
    assert planes[0, :, 0].tolist() == [1, 0, 0, -(2**63)]


@pytest.mark.parametrize("planes", [1, 2, 4, 8])
def test_packing_round_trips(planes: int) -> None:
    codes = torch.randint(0, 2**planes, (2, 3, 192), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    words = pack_planes(codes, planes)
    assert words.shape == (2, 3, planes, 3)
    back = sum(unpack_plane(words[..., p, :]).long() << (planes - 1 - p) for p in range(planes))
    assert torch.equal(torch.as_tensor(back), codes.long())


@pytest.mark.parametrize(
    ("value", "message"), [(torch.nan, "not finite in KV head 1"), (torch.inf, "not finite in KV head 1"), (7e4, "above 65,504")]
)
def test_keys_that_cannot_be_stored_name_their_head(value: float, message: str) -> None:
    keys = torch.zeros(2, 64, 4)
    keys[1, 5, 2] = value
    with pytest.raises(ValueError, match=message):
        block_scales(keys)


def test_partial_blocks_are_refused() -> None:
    with pytest.raises(ValueError, match="65 tokens are not whole blocks of 64"):
        block_scales(torch.zeros(65, 4))


def test_scan_scores_are_the_query_times_the_prefix_values() -> None:
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(2, 128, 8, generator=generator)
    scales = block_scales(keys)
    planes = pack_planes(quantise(keys, scales))
    depths = torch.randint(0, 5, (2, 8), generator=generator)
    query = torch.randn(2, 3, 8, generator=generator)
    values = prefix_values(planes, scales, depths)
    assert (values[depths == 0] == 0).all()
    torch.testing.assert_close(scan_planes(query, depths, planes, scales), torch.einsum("hgd,hdn->hgn", query, values))
