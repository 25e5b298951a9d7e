"""InfiniGen, which ranks ahead of a layer's own query, and its skewed basis."""

from __future__ import annotations

import dataclasses

import torch

from fathom_eval.branches import Branch, BranchBatch
from fathom_eval.methods import parse_method
from fathom_eval.prefill import Prefix
from fathom_eval.skewed import skewed_basis
from tests.key_layers import CHANNELS, FACTS, GROUP, LOCAL, TOKENS, attention, facts_of, real_layer, scanned


def test_infinigen_ranks_with_the_query_of_the_layer_before() -> None:
    facts = facts_of(layers=2)
    layers = (real_layer(), dataclasses.replace(real_layer(seed=3), number=1))
    branches = [Branch(parse_method(text), 90) for text in ("infinigen:r=8", "sparq:r=8", "infinigen:r=8:query=own")]
    batch = BranchBatch(Prefix(tuple(range(TOKENS + 1)), layers), branches, facts)
    own = torch.randn(2, 1, 2, 1, CHANNELS, generator=torch.Generator().manual_seed(4)).expand(-1, 3, -1, -1, -1)
    generator = torch.Generator().manual_seed(5)
    first, second = (torch.randn(1, 2, GROUP, CHANNELS, generator=generator).expand(3, -1, -1, -1) for _ in range(2))
    ahead, plain, ideal = batch.attend(0, first, own[0], own[1], CHANNELS**-0.5)
    torch.testing.assert_close(ahead, plain)  # there is no layer before
    torch.testing.assert_close(ideal, plain)
    ahead, plain, ideal = batch.attend(1, second, own[0], own[1], CHANNELS**-0.5)
    torch.testing.assert_close(ideal, plain)
    keys, values = (torch.cat([part, one[0]], dim=1) for part, one in ((layers[1].keys, own[0]), (layers[1].values, own[1])))
    read = torch.zeros(2, CHANNELS).scatter_(-1, first[0].abs().sum(1).topk(8).indices, 1.0).unsqueeze(1)
    spec = parse_method("infinigen:r=8").method.store(facts)
    assert spec is not None
    scores = spec.build(layers[1], 256).scan(first[:1], first[:1], read.squeeze(1).long().unsqueeze(0) * 4)[0][0]
    scores = torch.cat([scores, first[0] @ keys[:, 256:].transpose(-1, -2)], dim=-1)
    inside = torch.zeros_like(scores, dtype=torch.bool)
    inside[..., :4] = inside[..., -LOCAL:] = True
    inside.scatter_(-1, scores[..., 4:-LOCAL].topk(90 - 36).indices + 4, True)
    torch.testing.assert_close(ahead, attention(second[0], keys, values, inside), rtol=1e-4, atol=1e-5)


def test_skewing_keeps_products_and_gathers_the_queries_in_few_columns() -> None:
    generator = torch.Generator().manual_seed(8)
    mixed = torch.randn(2, CHANNELS, CHANNELS, generator=generator)
    prompt = (torch.randn(2, GROUP * 200, CHANNELS, generator=generator) * torch.logspace(0.5, -2, CHANNELS)) @ mixed
    layer = real_layer()
    statistics = type(layer.query_statistics)()
    statistics.add(prompt.unflatten(1, (GROUP, 200)))
    layer = dataclasses.replace(layer, query_statistics=statistics, _stores={})
    basis = skewed_basis(layer)
    _, values, vectors = torch.linalg.svd(prompt.double(), full_matrices=False)
    torch.testing.assert_close(basis.variance.double() * prompt.shape[1], values.square(), rtol=1e-3, atol=1e-2)
    along = (basis.vectors.double() * vectors.transpose(-1, -2)).sum(-2).abs()[:, :8]
    torch.testing.assert_close(along, torch.ones_like(along), atol=1e-3, rtol=0)
    query = prompt[:, : 2 * GROUP].unflatten(1, (2, GROUP)).transpose(0, 1).contiguous()
    exact = query @ layer.keys.transpose(-1, -2)
    full, reads = scanned("infinigen_skewed:r=64", layer, query)
    torch.testing.assert_close(full, exact, rtol=1e-2, atol=1e-2 * exact.abs().max().item())
    assert reads.bits.unique().tolist() == [16 * 64 * TOKENS]

    def off(text: str) -> float:
        found = scanned(text, layer, query)[0]
        return float((found - exact - (found - exact).mean(-1, keepdim=True)).norm())

    assert off("infinigen_skewed:r=8") < 0.5 * off("sparq_published:r=8")
    assert parse_method("infinigen_skewed").policy.dense_layers == (0,)
    assert not parse_method("infinigen_skewed").method.published, "the authors use another query"
    assert parse_method("infinigen_published").method.store(FACTS) == parse_method("infinigen_skewed").method.store(FACTS)
