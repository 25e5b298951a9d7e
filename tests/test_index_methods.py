"""Methods that index the prefix (clusters, representatives, landmarks with outliers, vector indexes) or rank ahead of the query."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from fathom_eval.branches import Branch, BranchBatch
from fathom_eval.clusters import ClusterSpec, ClusterStore, spherical_kmeans
from fathom_eval.errors import UserError
from fathom_eval.fidelity_layer import LayerComparison, WindowLayer
from fathom_eval.methods import EVERY, PAPER, MethodSpec, parse_method, parse_methods
from fathom_eval.methods.fathom import ratio_bits
from fathom_eval.methods.possible import Possible
from fathom_eval.observations import LayerObservers, RecentQueries, needed_observations
from fathom_eval.outliers import outlier_tokens
from fathom_eval.pair_graph import linked
from fathom_eval.prefill import Prefix, PrefixLayer
from fathom_eval.skewed import skewed_basis
from fathom_eval.store_sizes import store_bytes
from fathom_eval.waterfill import read_depths
from tests.key_layers import CHANNELS, FACTS, GROUP, TOKENS, attention, facts_of, one_layer_output, queries, real_layer, scanned

LOCAL = 32
needs_faiss = pytest.mark.skipif(importlib.util.find_spec("faiss") is None, reason="faiss is not installed")


def observed_layer(*texts: str, tokens: int = TOKENS) -> PrefixLayer:
    """The layer of the other tests with what these methods ask of its prefill."""
    layer = real_layer(tokens)
    prompt = torch.randn(2, GROUP, tokens, CHANNELS, generator=torch.Generator().manual_seed(11))
    observers = LayerObservers(needed_observations((parse_method(text).method for text in texts), FACTS), 1)
    observers.add(0, prompt, layer.keys, CHANNELS**-0.5)
    return dataclasses.replace(layer, observations={**layer.observations, **observers.results(0)}, _stores={})


def errors(texts: list[str], k: int = 90) -> list[float]:
    """Mean error against exact top-k at 40 positions of a window."""
    layer = observed_layer(*texts, tokens=400)
    query = torch.randn(40, 2, GROUP, CHANNELS, generator=torch.Generator().manual_seed(6))
    window = WindowLayer(layer.keys, layer.values, query, layer.query_statistics, CHANNELS**-0.5, layer.observations)
    branches, failures = [Branch(parse_method(text), k) for text in texts], dict[Any, str]()
    found: dict[Branch, list[Tensor]] = {}
    for _, branch, outcome in LayerComparison(window, 0, branches, FACTS, full_window=False, failures=failures).outcomes():
        found.setdefault(branch, []).append(outcome.exact_error)
    assert not failures
    return [torch.cat(found[branch]).mean().item() for branch in branches]


# Clusters


def objective(directions: Tensor, labels: Tensor, count: int) -> float:
    return sum(float(directions[labels == number].sum(0).norm()) for number in range(count))


def test_clusters_are_as_good_as_those_of_scikit_learn() -> None:
    cluster = pytest.importorskip("sklearn.cluster")
    keys = real_layer().keys
    centred = keys - keys.mean(1, keepdim=True)
    labels = spherical_kmeans(centred, 20)
    for head in range(2):
        directions = torch.nn.functional.normalize(centred[head], dim=-1)
        # Of unit vectors, the nearest centre and the one of largest cosine are the same up to the centres' lengths.
        reference = cluster.KMeans(20, n_init=5, random_state=0).fit(directions.numpy()).labels_
        assert objective(directions, labels[head], 20) > 0.97 * objective(directions, torch.from_numpy(reference), 20)
        assert objective(directions, labels[head], 20) > 1.2 * objective(directions, torch.arange(TOKENS) // 16, 20)


def test_labels_are_those_of_the_nearest_directions_and_no_cluster_is_lost() -> None:
    blobs = torch.nn.functional.normalize(torch.randn(6, 16, generator=torch.Generator().manual_seed(1)), dim=-1)
    points = blobs.repeat_interleave(40, dim=0) * torch.linspace(0.5, 3, 240).unsqueeze(-1)
    labels = spherical_kmeans(points, 6)
    assert all(len(labels[start : start + 40].unique()) == 1 for start in range(0, 240, 40))
    assert len(labels.unique()) == 6, "size does not matter, direction does"
    same = spherical_kmeans(torch.ones(64, 16), 4)
    assert (same == 0).all()
    assert (spherical_kmeans(torch.zeros(64, 16), 4) == 0).all()
    distinct = torch.randn(64, 16, generator=torch.Generator().manual_seed(2))
    assert spherical_kmeans(distinct, 64).tolist() == list(range(64))


def test_a_token_scores_as_the_mean_key_of_its_cluster() -> None:
    layer, query = real_layer(), queries()
    scores, reads = scanned("retroinfer")
    centred = layer.keys - layer.keys.mean(1, keepdim=True)
    labels = spherical_kmeans(centred, TOKENS // 16)
    for head in range(2):
        for token in range(0, TOKENS, 37):
            mean = layer.keys[head][labels[head] == labels[head, token]].mean(0).half().float()
            torch.testing.assert_close(scores[:, head, :, token], query[:, head] @ mean, rtol=1e-4, atol=1e-3)
    assert reads.bits.unique().tolist() == [CHANNELS * TOKENS]
    assert parse_method("retroinfer").method.typical_bits(128) == "128"


def test_segments_and_blocks_are_clustered_on_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fathom_eval.clusters.SEGMENT_TOKENS", 128)
    layer = real_layer()
    store, whole = ClusterSpec().build(layer, 256), ClusterSpec().build(layer, 128)
    assert isinstance(store, ClusterStore)
    assert isinstance(whole, ClusterStore)
    assert torch.equal(store.labels[:, :128], whole.labels)
    assert (store.labels[:, 128:] >= 8).all()
    before = store.centroids.clone()
    store.seal(layer.keys[:, 256:], layer.values[:, 256:])
    assert torch.equal(store.centroids[:, :16], before), "nothing sealed is rewritten"
    assert store.clusters == 20
    assert (store.labels[:, 256:] >= 16).all()
    assert torch.equal(store.sizes.sum(-1), torch.tensor([TOKENS, TOKENS]))
    own = whole.empty(3)
    own.seal(layer.keys[None, :, 256:].expand(3, -1, -1, -1), layer.values[None, :, 256:].expand(3, -1, -1, -1))
    assert isinstance(own, ClusterStore)
    torch.testing.assert_close(own.centroids[1], store.centroids[:, 16:])
    with pytest.raises(TypeError, match="seal keys and values together"):
        own.append(layer.keys)


def test_the_published_estimate_is_that_of_a_plain_computation() -> None:
    text = "retroinfer_published:retrieve=0.2:estimate=0.5"
    output, query, keys, values = one_layer_output(text, 100)
    sealed, total = 256, len(keys[0])
    scaling, layer = CHANNELS**-0.5, real_layer()
    store = ClusterSpec().build(layer, sealed)
    assert isinstance(store, ClusterStore)
    labels = store.labels
    expected = torch.empty_like(output)
    for head in range(2):
        members = [(labels[head] == number).nonzero().flatten() for number in range(16)]
        used = [number for number in range(16) if len(members[number])]
        centroids = torch.stack([layer.keys[head, members[number]].mean(0).half().float() for number in used])
        mass = (query[head] @ centroids.T * scaling).softmax(-1).sum(0)
        order = [used[at] for at in mass.argsort(descending=True).tolist()]
        retrieved, estimated = order[: round(0.2 * 16)], order[round(0.2 * 16) : round(0.2 * 16) + round(0.5 * 16)]
        inside = sorted({0, 1, 2, 3, *range(sealed, total), *(int(token) for number in retrieved for token in members[number])})
        for member in range(GROUP):
            q = query[head, member]
            logits = [float(q @ keys[head, token] * scaling) for token in inside]
            rows = [values[head, token] for token in inside]
            for number in estimated:
                left = [token for token in members[number].tolist() if token not in inside]
                if left:
                    logits.append(float(q @ centroids[used.index(number)] * scaling) + math.log(len(left)))
                    rows.append(layer.values[head, members[number]].mean(0))
            expected[head, member] = torch.tensor(logits).softmax(-1) @ torch.stack(rows)
    torch.testing.assert_close(output, expected, rtol=1e-3, atol=1e-4)


def test_an_estimate_of_the_rest_comes_nearer_to_dense_attention() -> None:
    layer = real_layer()
    _, query, keys, values = one_layer_output("retroinfer_published", 100)
    dense = attention(query, keys, values, torch.ones(len(keys[0]), dtype=torch.bool))
    found = [(one_layer_output(f"retroinfer_published:retrieve=0.1:estimate={share}", 100)[0] - dense).norm() for share in (0.0, 0.3, 0.9)]
    assert found[0] > found[1] > found[2]
    assert layer.keys.shape[1] == TOKENS


def test_bits_of_an_estimate_are_the_values_and_numbers_of_its_clusters() -> None:
    store = ClusterSpec(estimated=0.5).build(real_layer(), TOKENS)
    _, reads = store.scan(queries(), queries(), None)
    assert reads.bits.unique().tolist() == [16 * CHANNELS * 20 + 10 * 16 * (CHANNELS + 1)]
    with pytest.raises(UserError, match=r"estimate=0\.9 must lie in 0\.\.0\.8"):
        parse_method("retroinfer_published:retrieve=0.2:estimate=0.9").check(FACTS, [128])
    with pytest.raises(UserError, match="size=24 must divide 64"):
        parse_method("retroinfer:size=24").check(FACTS, [128])


# InfLLM


def test_a_block_is_its_most_attended_keys_and_the_layer_has_one_set() -> None:
    layer = observed_layer("infllm")
    method = parse_method("infllm").method
    spec = method.store(FACTS)
    assert spec is not None
    store, query = spec.build(layer, TOKENS), queries()
    scores, reads = store.scan(query, query, None)
    received = layer.observations[method.observes(FACTS)[0]].sum(1)
    for start, stop, count in ((0, 128, 4), (128, 256, 4), (256, 320, 2)):
        for head in range(2):
            best = received[head, start:stop].topk(count).indices + start
            expected = (query[:, head] @ layer.keys[head, best].half().float().T).mean(-1)
            torch.testing.assert_close(scores[:, head, :, start:stop], expected.unsqueeze(-1).expand(-1, -1, stop - start))
    assert reads.bits.unique().tolist() == [10 * 16 * CHANNELS]
    assert method.typical_bits(128) == "64"

    output, query, keys, values = one_layer_output("infllm", 180, layer)
    sealed = 256
    exact = query @ keys.transpose(-1, -2)
    summed = torch.cat([spec.build(layer, sealed).scan(query.unsqueeze(0), query.unsqueeze(0), None)[0][0], exact[..., sealed:]], -1)
    best = summed.sum((0, 1))[4:-LOCAL].sort(descending=True, stable=True).indices[: 180 - 36] + 4
    inside = torch.zeros(len(keys[0]), dtype=torch.bool)
    inside[:4] = inside[-LOCAL:] = True
    inside[best] = True
    torch.testing.assert_close(output, attention(query[0:2], keys, values, inside), rtol=1e-4, atol=1e-5)


def test_a_decoded_block_is_the_keys_that_the_last_queries_point_at() -> None:
    layer = observed_layer("infllm")
    method = parse_method("infllm").method
    store = method.store(FACTS).build(layer, 192)  # type: ignore[union-attr]
    recent = layer.observations[method.observes(FACTS)[1]].mean((1, 2))
    query = queries()
    before = store.scan(query, query, None)[0]
    own = store.empty(2)
    for grown, keys in ((store, layer.keys[:, 192:256]), (own, layer.keys[None, :, 192:256].expand(2, -1, -1, -1))):
        grown.append(keys)
        scores = grown.scan(query, query, None)[0][..., -64:]
        for head in range(2):
            best = (layer.keys[head, 192:256] @ recent[head]).topk(2).indices + 192
            expected = (query[:, head] @ layer.keys[head, best].half().float().T).mean(-1)
            torch.testing.assert_close(scores[:, head], expected.unsqueeze(-1).expand(-1, -1, 64))
    torch.testing.assert_close(store.scan(query, query, None)[0][..., :192], before)


def test_infllm_as_published_says_how_large_k_must_be() -> None:
    with pytest.raises(UserError, match=r"k=4224 leaves nothing to select; it must be above sink \+ local = 4224"):
        parse_method("infllm_published").check(FACTS, [4224])
    parse_method("infllm_published").check(FACTS, [4225])
    for text, message in (
        ("infllm:block=96", "block=96 must be a multiple of 64"),
        ("infllm:representatives=3", "representatives=3 must be a multiple of 2 up to block=128"),
        ("infllm:window=0", "window=0 must be at least 1"),
    ):
        with pytest.raises(UserError, match=message):
            parse_method(text).check(FACTS, [128])


# ShadowKV


def test_outliers_are_the_chunks_that_a_mean_key_describes_worst() -> None:
    keys = real_layer().keys
    found = outlier_tokens(keys, 8, 5)
    for head in range(2):
        chunks = keys[head].unflatten(0, (-1, 8))
        worst = torch.stack([torch.nn.functional.cosine_similarity(chunk, chunk.mean(0), dim=-1).min() for chunk in chunks])
        assert found[head].view(-1, 8).all(-1).nonzero().flatten().tolist() == sorted(worst.topk(5, largest=False).indices.tolist())
    assert outlier_tokens(keys, 8, 1000).all()
    assert not outlier_tokens(keys, 8, 0).any()


def test_shadowkv_takes_outliers_and_the_largest_softmax_of_the_group() -> None:
    output, query, keys, values = one_layer_output("shadowkv:outlier=3", 120)
    sealed, total, scaling = 256, len(keys[0]), CHANNELS**-0.5
    outliers = outlier_tokens(keys[:, :sealed], 8, 3)
    expected = torch.empty_like(output)
    for head in range(2):
        landmarks = keys[head, :sealed].unflatten(0, (-1, 8)).mean(1).half().float()
        kept = [chunk for chunk in range(sealed // 8) if not outliers[head, chunk * 8]]
        # Chunks that are not outliers, and tokens that are not sealed but compete, each once.
        things = [(landmarks[chunk], range(chunk * 8, chunk * 8 + 8)) for chunk in kept]
        things += [(keys[head, token], range(token, token + 1)) for token in range(sealed, total - LOCAL)]
        logits = query[head] @ torch.stack([key for key, _ in things]).T * scaling
        best = logits.softmax(-1).amax(0)
        ranked = sorted(((-float(best[at]), token) for at, (_, tokens) in enumerate(things) for token in tokens))
        chosen = [token for _, token in ranked[: 120 - LOCAL - 24]]
        inside = outliers[head].nonzero().flatten().tolist() + chosen + list(range(total - LOCAL, total))
        weights = (query[head] @ keys[head, inside].T * scaling).softmax(-1)
        expected[head] = weights @ values[head, inside]
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-5)


def test_outliers_are_part_of_k() -> None:
    spec = parse_method("shadowkv")
    with pytest.raises(UserError, match=r"k=416 leaves nothing .* sink \+ local \+ the 384 tokens that are always taken = 416"):
        spec.check(FACTS, [416])
    spec.check(FACTS, [417])
    parse_method("shadowkv:outlier=4").check(FACTS, [65])
    with pytest.raises(UserError, match="outlier=-1 must be at least 0"):
        parse_method("shadowkv:outlier=-1").check(FACTS, [128])
    assert spec.policy.sink == 0


# RetrievalAttention


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


# InfiniGen


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


# Budget by ratio


def test_the_budget_follows_the_share_of_the_tokens() -> None:
    tokens = torch.tensor([4000, 8000, 1000, 500_000, 2000])
    assert ratio_bits(48, tokens, 64, 128).tolist() == [48, 56, 32, 104, 40]
    assert ratio_bits(48, tokens, 64, 64).tolist() == [24, 28, 16, 52, 20]
    assert ratio_bits(48, torch.tensor([100, 10**9]), 64, 128).tolist() == [24, 128]


def test_each_row_is_planned_with_its_own_budget() -> None:
    importance = torch.rand(5, 2, 32, generator=torch.Generator().manual_seed(3)).exp()
    importance[1] = 1.0  # ties
    budgets = torch.tensor([0, 7, 30, 128, 500])
    limits = torch.randint(0, 5, (2, 32), generator=torch.Generator().manual_seed(4))
    for limit in (None, limits):
        found = read_depths(importance, budgets.unsqueeze(-1), limits=limit)
        for row, budget in enumerate(budgets.tolist()):
            assert torch.equal(found[row], read_depths(importance[row], budget, limits=limit))
    spec = parse_method("fathom:by_ratio=true:basis=raw:budget=100")
    layer = real_layer()
    batch = BranchBatch(Prefix(tuple(range(TOKENS + 1)), (layer,)), [Branch(spec, k) for k in (40, 300)], FACTS)
    own = torch.zeros(2, 2, 2, 1, CHANNELS)
    batch.attend(0, queries(), own[0], own[1], 0.125)
    expected = [int(ratio_bits(100, torch.tensor(TOKENS + 1), k, CHANNELS)) for k in (40, 300)]
    assert expected[0] > expected[1]
    assert torch.equal(batch.counts.scan_bits.double(), batch.counts.declared_bits)
    spent = (batch.counts.scan_bits - batch.counts.channels * 16 * 4) / batch.counts.scan_tokens
    assert spent.tolist() == expected
    assert not parse_method("fathom").method.extended
    assert spec.method.line() == "Fathom raw by ratio"
    assert "by_ratio" not in parse_method("fathom").label
    assert "by_ratio=True" in spec.label


@pytest.mark.parametrize("text", ["fathom:by_ratio=true:depths=measured", "uniform_depth:by_ratio=true"])
def test_a_budget_by_ratio_needs_a_budget_that_is_free(text: str) -> None:
    with pytest.raises(UserError, match=r"by_ratio (takes the budget|does nothing)"):
        parse_method(text).check(FACTS, [128])


# Families


@pytest.mark.parametrize(
    "family",
    [
        [f"retroinfer:size={size}" for size in (64, 16, 4, 1)],
        [f"infinigen:query=own:r=D/{divisor}" for divisor in (16, 8, 4, 2)],
        [f"infinigen_skewed:query=own:dense_layers=none:r=D/{divisor}" for divisor in (8, 4, 2)],
        pytest.param([f"retrieval_attention:size=20:probes={share}" for share in (0.1, 0.3, 0.6)], marks=needs_faiss),
        [f"fathom:by_ratio=true:budget={budget}" for budget in (40, 80, 160)],
    ],
    ids=lambda family: family[0].partition(":")[0],
)
def test_error_falls_with_bits_within_a_family(family: list[str]) -> None:
    found = errors(family)
    assert found == sorted(found, reverse=True)
    assert found[-1] < 0.8 * found[0]


# The whole list


def test_all_is_a_list_of_distinct_methods_of_which_those_that_cannot_run_are_left_out() -> None:
    specs = parse_methods("all")
    assert len(specs) == len(EVERY) == len({spec.label for spec in specs})
    assert len(specs) >= 40
    assert all(spec.optional for spec in specs)
    assert set(PAPER) < set(EVERY)
    said: list[str] = []
    facts = facts_of(layers=3)
    possible = Possible(specs)
    possible.keep([128], lambda spec, at: spec.check(facts, at), said.append)
    kept = possible.specs
    assert {spec.method.name for spec in specs} - {spec.method.name for spec in kept} <= {
        "infllm_published",
        "retrieval_attention_published",
    }
    assert len(kept) + len(said) == len(specs)
    assert any("shadowkv" in line and "384 tokens" in line for line in said)
    assert any("infllm_published" in line and "4224" in line for line in said)


def test_a_method_that_is_named_beside_all_must_run() -> None:
    [named] = [spec for spec in parse_methods("all,infllm_published") if spec.method.name == "infllm_published"]
    assert not named.optional
    assert named == parse_method("infllm_published")
    with pytest.raises(UserError, match="k=128 leaves nothing"):
        Possible([named]).keep([128], MethodSpec.check_k, lambda line: None)
    assert parse_methods("infllm_published,all")[0].optional is False


def test_every_built_in_method_is_in_the_list() -> None:
    from fathom_eval.methods import BUILT_IN

    assert {spec.method.name for spec in parse_methods("all")} == {method.name for method in BUILT_IN}


@pytest.mark.parametrize("text", [text for text in EVERY if text != "dense"])
def test_the_estimated_size_of_a_store_is_what_it_takes(text: str) -> None:
    if text.startswith("retrieval_attention"):
        pytest.importorskip("faiss")
    method = parse_method(text).method
    spec = method.store(FACTS)
    assert spec is not None
    layer = observed_layer("infllm", text)
    store = spec.build(layer, TOKENS)
    projected = store.project(queries())
    plan = None if text == "h2o" else method.plan(projected, method.index(layer, FACTS))
    store.scan(queries(), projected, plan)
    assert store_bytes(spec, FACTS, TOKENS + 40, 4) == pytest.approx(store.bytes, rel=0.02)
