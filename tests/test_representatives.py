"""Methods that scan representatives of the prefix: mean keys of clusters, the most attended keys of blocks, chunks with outliers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fathom_eval.clusters import ClusterSpec, ClusterStore, spherical_kmeans
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method
from fathom_eval.outliers import outlier_tokens
from tests.key_layers import (
    CHANNELS,
    FACTS,
    GROUP,
    LOCAL,
    TOKENS,
    attention,
    observed_layer,
    one_layer_output,
    queries,
    real_layer,
    scanned,
)

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
