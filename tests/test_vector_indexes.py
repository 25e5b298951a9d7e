"""RetrievalAttention: inverted lists, graphs and graphs of pairs, what they find and what they touch for it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method
from fathom_eval.observations import RecentQueries
from fathom_eval.pair_graph import linked
from fathom_eval.prefill import PrefixLayer
from tests.key_layers import CHANNELS, FACTS, GROUP, TOKENS, needs_faiss, queries, real_layer, scanned


@needs_faiss
def test_inverted_lists_find_what_faiss_finds() -> None:
    import faiss

    layer, query = real_layer(), queries()
    text = "retrieval_attention:size=40:probes=0.25"
    scores, reads = scanned(text)
    touched = torch.zeros(2, 2, dtype=torch.int64)
    for head in range(2):
        centred = (layer.keys[head] - layer.keys[head].mean(0)).contiguous().numpy()
        quantizer = faiss.IndexFlatIP(CHANNELS)
        index = faiss.IndexIVFFlat(quantizer, CHANNELS, TOKENS // 40, faiss.METRIC_INNER_PRODUCT)
        index.cp.min_points_per_centroid = 1
        index.train(centred)
        index.add(centred)
        index.nprobe = 2
        for row in range(2):
            products, tokens = index.search(query[row, head].contiguous().numpy(), TOKENS)
            for member in range(GROUP):
                listed = sorted(tokens[member][tokens[member] >= 0].tolist())
                assert (scores[row, head, member] > -torch.inf).nonzero().flatten().tolist() == listed
            touched[row, head] = len({token for member in tokens for token in member.tolist() if token >= 0})
    exact = query @ layer.keys.transpose(-1, -2)
    found = scores > -torch.inf
    torch.testing.assert_close(scores[found], exact[found])
    assert torch.equal(reads.bits, (touched + TOKENS // 40) * 16 * CHANNELS)
    assert len(products) == GROUP


@needs_faiss
def test_centroids_are_read_once_and_later_keys_go_into_their_lists() -> None:
    layer = real_layer()
    spec = parse_method("retrieval_attention:size=32:probes=0.3").method.store(FACTS)
    assert spec is not None
    store, query = spec.build(layer, 256), queries()
    before, plain = store.scan(query, query, None)
    own = store.empty(2)
    own.append(layer.keys[None, :, 256:].expand(2, -1, -1, -1))
    apart, own_reads = own.scan(query, query, None)
    store.append(layer.keys[:, 256:])
    together, reads = store.scan(query, query, None)
    torch.testing.assert_close(together, torch.cat([before, apart], dim=-1))
    assert torch.equal(reads.bits, plain.bits + own_reads.bits)


@needs_faiss
def test_a_graph_finds_most_of_the_best_and_counts_what_it_looked_at() -> None:
    layer, query = real_layer(2048), queries()
    method = parse_method("retrieval_attention:kind=hnsw:candidates=64").method
    spec = method.store(FACTS)
    assert spec is not None
    store = spec.build(layer, 1984)
    scores, reads = store.scan(query, query, None)
    exact = query @ layer.keys[:, :1984].transpose(-1, -2)
    found = scores > -torch.inf
    assert (found.sum(-1) <= 64).all()
    torch.testing.assert_close(scores[found], exact[found], rtol=1e-3, atol=1e-3)
    best = torch.zeros_like(found).scatter_(-1, exact.topk(32).indices, True)
    assert (found & best).sum() > 0.8 * best.sum()
    looked = reads.bits / (16 * CHANNELS)
    assert (looked >= 64).all()
    assert (looked < GROUP * 1984).all()
    store.append(layer.keys[:, 1984:])
    later, more = store.scan(query, query, None)
    torch.testing.assert_close(later[..., 1984:], query @ layer.keys[:, 1984:].transpose(-1, -2))
    assert torch.equal(more.bits - reads.bits, torch.full((2, 2), 64 * 16 * CHANNELS))


@needs_faiss
def test_a_graph_reads_a_key_once_for_a_group() -> None:
    layer, query = real_layer(), queries()
    spec = parse_method("retrieval_attention:kind=hnsw:candidates=320").method.store(FACTS)
    assert spec is not None
    _, reads = spec.build(layer, TOKENS).scan(query, query, None)
    assert reads.bits.unique().tolist() == [16 * CHANNELS * TOKENS], "every head looks at every key"


@needs_faiss
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kind=hnsw:probes=0.2", "probes does nothing with kind=hnsw"),
        ("kind=hnsw:size=32", "size does nothing with kind=hnsw"),
        ("candidates=300", "candidates does nothing with kind=ivf"),
        ("kind=hnsw:candidates=127", "candidates=127 must be at least k=128"),
        ("kind=pairs:candidates=127", "candidates=127 must be at least k=128"),
        ("kind=pairs:size=32", "size does nothing with kind=pairs"),
    ],
)
def test_options_of_an_index_that_cannot_matter_or_starve_k_are_errors(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse_method(f"retrieval_attention:{text}").check(FACTS, [128])
    parse_method("retrieval_attention:kind=hnsw").check(FACTS, [256])


def layer_of_queries(apart: float, tokens: int = 2048) -> tuple[PrefixLayer, torch.Tensor]:
    """Keys whose prompt had queries that lie elsewhere, by so much, and two rows of queries like those."""
    layer, generator = real_layer(tokens), torch.Generator().manual_seed(3)
    elsewhere = torch.randn(2, GROUP, 1, CHANNELS, generator=generator) * apart
    prompt = torch.randn(2, GROUP, tokens, CHANNELS, generator=generator) + elsewhere
    asked = torch.randn(2, 2, GROUP, CHANNELS, generator=generator) + elsewhere.squeeze(2)
    return dataclasses.replace(layer, observations={RecentQueries(2048): prompt}, _stores={}), asked


@pytest.mark.parametrize("apart", [0.0, 2.0])
def test_a_graph_of_pairs_finds_most_of_the_best_and_counts_what_it_met(apart: float) -> None:
    layer, query = layer_of_queries(apart)
    spec = parse_method("retrieval_attention:kind=pairs:candidates=128").method.store(FACTS)
    assert spec is not None
    store = spec.build(layer, 1984)
    scores, reads = store.scan(query, query, None)
    exact, found = query @ layer.keys[:, :1984].transpose(-1, -2), scores > -torch.inf
    assert (found.sum(-1) == 128).all()
    torch.testing.assert_close(scores[found], exact[found], rtol=1e-4, atol=1e-4)
    best = torch.zeros_like(found).scatter_(-1, exact.topk(32).indices, True)
    assert (found & best).sum() > 0.85 * best.sum()
    looked = reads.bits / (16 * CHANNELS)
    assert (looked >= found.any(2).sum(-1)).all()
    assert (looked < 0.7 * 1984).all()
    torch.testing.assert_close(torch.cat([store.scan(row, row, None)[0] for row in query.split(1)]), scores, msg="rows are apart")
    store.append(layer.keys[:, 1984:])
    later, more = store.scan(query, query, None)
    assert torch.equal(later[..., :1984], scores)
    torch.testing.assert_close(later[..., 1984:], query @ layer.keys[:, 1984:].transpose(-1, -2))
    assert torch.equal(more.bits - reads.bits, torch.full((2, 2), 64 * 16 * CHANNELS))
    own = store.empty(2)
    own.append(layer.keys[None, :, 1984:].expand(2, -1, -1, -1))
    torch.testing.assert_close(own.scan(query, query, None)[0], later[..., 1984:])


def test_small_pieces_of_a_search_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    layer, query = layer_of_queries(1.0, 640)
    spec = parse_method("retrieval_attention:kind=pairs:candidates=64").method.store(FACTS)
    assert spec is not None
    whole = spec.build(layer, 640).scan(query, query, None)
    monkeypatch.setattr("fathom_eval.pair_graph._ELEMENTS", 2 * 640 * 5)
    parts = spec.build(layer, 640).scan(query, query, None)
    torch.testing.assert_close(parts[0], whole[0])
    assert torch.equal(parts[1].bits, whole[1].bits)


def test_keys_are_linked_by_the_queries_that_have_both() -> None:
    near = torch.tensor([[0, 1, 2], [0, 2, 5], [7, 2, 1]])
    made: dict[tuple[int, int], int] = {}
    for nearest, *others in near.tolist():
        for one, other in [*((nearest, other) for other in others), *zip([nearest, *others[:-1]], others, strict=True)]:
            for pair in ((one, other), (other, one)):
                made[pair] = made.get(pair, 0) + 1
    graph = linked(near, 9, 4)
    for token in range(9):
        linked_to = sorted((-count, other) for (one, other), count in made.items() if one == token)
        kept = [other for _, other in linked_to[:2]]
        assert graph[token].tolist() == [*kept, *[-1] * (2 - len(kept)), token - 1 if token else -1, token + 1 if token < 8 else -1]


def test_a_graph_of_pairs_needs_no_faiss_and_the_published_one_keeps_640_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    parse_method("retrieval_attention:kind=pairs").check(FACTS, [128])
    spec = parse_method("retrieval_attention_published")
    assert (spec.policy.sink, spec.policy.local, spec.line) == (128, 512, "RetrievalAttention as published")
    spec.check(FACTS, [641])
    with pytest.raises(UserError, match="k=640 leaves nothing to select"):
        spec.check(FACTS, [640])
    assert spec.method.published


def test_a_missing_faiss_is_said_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"the package faiss is not installed; pip install 'fathom-eval\[faiss\]'"):
        parse_method("retrieval_attention").check(FACTS, [128])
