"""MagicPIG: the probability that a key is sampled, and importance weights that make up for it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method
from fathom_eval.methods.magicpig import log_sampling_probability
from fathom_eval.methods.step import Step
from tests.extended_toys import FACTS, LSH, Nothing, attend, toy
from tests.method_matrix import facts_of, layer_prefix, step


def test_weights_of_a_sample_need_the_head_that_drew_it() -> None:
    for switch in ("share=group_sum", "share=group_max", "attend=union"):
        with pytest.raises(UserError, match="each head weighs what it has sampled itself"):
            parse_method(f"magicpig:{switch}").check(FACTS, [60])
    parse_method("magicpig").check(FACTS, [60])


def test_weights_make_sums_over_the_samples_unbiased() -> None:
    """Over many draws of the hashes, every key is counted once: 1/u as often as u."""
    prefix, facts = layer_prefix(1, 64, 300, torch.float32), facts_of(1, 64)
    query, layer = step(1, 64, 1, torch.float32)[0], prefix.layers[0]
    draws, total, squares = 400, torch.zeros(2, 1, 256), torch.zeros(2, 1, 256)
    for seed in range(draws):
        method = parse_method(f"magicpig:bits=3:tables=12:seed={seed}").method
        spec = method.store(facts)
        assert spec is not None
        store = spec.build(layer, 256)
        found, _ = store.scan(query, query, None)
        weights = method.log_weights(Step(0, None, 60, 0.125, 301, torch.tensor([301]), query, None, (store,), {}))
        counted = torch.where(found > -torch.inf, weights, -torch.inf).exp()[0]
        total += counted
        squares += counted.square()
    mean, deviation = total / draws, (squares / draws - (total / draws).square()).clamp_min(0).sqrt() / draws**0.5
    common = log_sampling_probability(store.cosine(query), 3, 12)[0] > -3  # others are seen too seldom to say anything
    assert common.float().mean() > 0.5
    assert ((mean - 1).abs() <= 5 * deviation + 1e-3)[common].all()
    assert (mean[common] - 1).abs().mean() < 0.1


def test_the_probability_that_a_key_is_sampled() -> None:
    cosine = torch.tensor([1 + 1e-6, 1.0, 0.9, 0.0, -1.0, -1 - 1e-6])
    found = log_sampling_probability(cosine, 10, 150)
    assert torch.isfinite(found).all(), "acos of a cosine above 1 is not a number"
    p = (1 - cosine.double().clamp(-1, 1).acos() / torch.pi) ** 10
    expected = 1 - (1 - p) ** 150 - 150 * p * (1 - p) ** 149
    torch.testing.assert_close(found[:4].double().exp(), expected[:4], rtol=1e-4, atol=1e-9)
    assert found[0] == found[1] == 0


def test_keys_are_centred_by_the_mean_of_those_that_can_be_sampled() -> None:
    """As the authors do: neither the sink's keys nor those of the window have a part in it, and nothing else changes with them."""
    layer = layer_prefix(3, 64, 300, torch.float32).layers[0]
    keys = layer.keys.clone()
    keys[:, :4], keys[:, 256:] = 1e3, -1e3
    changed = dataclasses.replace(layer, keys=keys, _stores={})
    query, spec = step(3, 64, 2, torch.float32)[0], parse_method(LSH).method.store(FACTS)
    assert spec is not None
    before, after = (spec.build(one, 256).scan(query, query, None)[0] for one in (layer, changed))
    assert torch.equal(before[..., 4:], after[..., 4:])
    none_sealed, query = spec.build(layer, 0), layer.keys[:, 280:281].mean(1).view(1, 2, 1, 64)
    none_sealed.append(layer.keys[:, :64])
    torch.testing.assert_close(none_sealed.cosine(query)[0, :, 0, 9], cosine(query, layer.keys[:, 9] - layer.keys.mean(1)))  # type: ignore[attr-defined]


def cosine(query: Tensor, keys: Tensor) -> Tensor:
    return torch.nn.functional.cosine_similarity(query[0, :, 0], keys, dim=-1)


def test_the_published_weights_have_a_ceiling() -> None:
    """−log(u + 10⁻⁴), as in the authors' code; the paper's −log u has none."""
    assert parse_method("magicpig_published").method.version == parse_method("magicpig").method.version == 2
    layer, query = layer_prefix(3, 64, 300, torch.float32).layers[0], step(3, 64, 2, torch.float32)[0]
    weights = []
    for name in ("magicpig", "magicpig_published"):
        method = parse_method(name).method
        store = method.store(FACTS).build(layer, 256)  # type: ignore[union-attr]
        weights.append(method.log_weights(Step(0, None, 60, 0.125, 301, torch.tensor([301]), query, None, (store,), {})))
    plain, published = weights
    torch.testing.assert_close((-published).double().exp(), (-plain).double().exp() + 1e-4, rtol=1e-5, atol=1e-9)
    assert published.max() <= 4 * 2.302586
    assert plain.max() > published.max()


def test_a_query_that_is_a_centred_key_finds_it_for_sure() -> None:
    prefix = layer_prefix(1, 64, 300, torch.float32)
    layer = prefix.layers[0]
    method = parse_method("magicpig").method
    store = method.store(FACTS).build(layer, 256)  # type: ignore[union-attr]
    query = (layer.keys[:, 7] - layer.keys[:, 4:256].mean(1)).view(1, 2, 1, 64)
    scores, reads = store.scan(query, query, None)
    assert (scores[..., 7] == 0).all()
    assert (reads.bits >= 150 * 32).all()
    assert ((scores > -torch.inf).sum() < 256).all()
    log_weights = method.log_weights(Step(0, None, 60, 0.125, 301, torch.tensor([301]), query, None, (store,), {}))
    assert log_weights[..., 7].abs().max() < 1e-5


def test_bits_as_touched_are_those_of_the_buckets() -> None:
    layer = layer_prefix(3, 64, 300, torch.float32).layers[0]
    store = parse_method(LSH).method.store(FACTS).build(layer, 256)  # type: ignore[union-attr]
    query = step(3, 64, 2, torch.float32)[0]
    _, reads = store.scan(query, query, None)
    centred = layer.keys[:, :256] - layer.keys[:, 4:256].mean(1, keepdim=True)
    signs = [(part @ store._projections).unflatten(-1, (20, 4)) > 0 for part in (query, centred)]  # type: ignore[attr-defined]
    same = (signs[0].unsqueeze(3) == signs[1].unsqueeze(1).unsqueeze(0)).all(-1)  # [R, H, G, n, L]
    assert torch.equal(reads.bits, same.any(2).sum((-1, -2)) * 32)


def test_weights_of_tokens_that_are_always_kept_stay_one() -> None:
    """Sink tokens are sealed too, but they are not sampled."""
    prefix, facts = layer_prefix(3, 64, 300, torch.float32), FACTS

    @dataclass(frozen=True)
    class Kept(Nothing):
        def log_weights(self, step: Step) -> Tensor:
            return torch.linspace(0, 50, 256).expand(*step.query.shape[:3], 256)

    _, output = attend(prefix, [Branch(toy(Kept()), 60), Branch(toy(Nothing()), 60)], facts)
    torch.testing.assert_close(output[0], output[1])
