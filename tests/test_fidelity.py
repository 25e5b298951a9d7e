"""Attention-output fidelity: against decoding, and what must hold of any method."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import fathom_eval.fidelity_layer as layer_module
from fathom_eval.branches import Branch, BranchBatch, batch_order
from fathom_eval.calibration import QueryStatistics
from fathom_eval.fidelity import Unit, evaluate
from fathom_eval.fidelity_capture import capture
from fathom_eval.fidelity_layer import WindowLayer
from fathom_eval.methods import MethodSpec, parse_method, parse_methods
from fathom_eval.methods.sparq import SparQ
from fathom_eval.models import ModelFacts
from fathom_eval.prefill import prefill
from fathom_eval.ruler import all_branches
from fathom_eval.selection import top_indices, top_mask
from tests.made_windows import FACTS, SCANS, SWITCHED, FixedWindows, branch, compare, structured_layer
from tests.tiny import tiny_model, token_ids

# Decoding


def test_a_position_gives_what_decoding_gives_there() -> None:
    """Prefix of the tokens before the first evaluated position, then the window's own tokens as the branch's tail."""
    loaded = tiny_model("qwen2", layers=2, query_heads=6, kv_heads=2, head_dim=16)
    ids, first = token_ids(loaded, 330), 240
    branches = all_branches(parse_methods(f"paper,{SWITCHED}"), (110, 150, 1000), loaded.facts)
    prefix, layers = prefill(loaded, ids[: first + 1]), capture(loaded, ids, 330 - first)
    order = batch_order(branches, loaded.facts)
    for number, layer in enumerate(layers):
        outcomes = compare(layer, branches, loaded.facts, number)
        for position in (first, 255, 286, 287, 329):
            batch = BranchBatch(prefix, [branches[row] for row in order], loaded.facts)
            rows = len(branches)
            query = layer.queries[position - first].expand(rows, -1, -1, -1)
            keys, values = (part[None, :, first : position + 1].expand(rows, -1, -1, -1) for part in (layer.keys, layer.values))
            expected = batch.attend(number, query, keys, values, layer.scaling)
            for at, row in enumerate(order):
                outcome, label = outcomes[branches[row]], branches[row].spec.label
                found = outcome.output[position - first]
                torch.testing.assert_close(found, expected[at], rtol=1e-5, atol=1e-5, msg=lambda text, label=label: f"{label}: {text}")
                assert outcome.rows[position - first].sum() == batch.counts.rows[at]
                assert outcome.candidate_rows[position - first].sum() == batch.counts.candidates[at]


def test_scan_bits_are_those_that_decoding_counts() -> None:
    loaded = tiny_model("qwen2", layers=2, query_heads=6, kv_heads=2, head_dim=16)
    ids = token_ids(loaded, 300)
    branches = [branch(text, 60) for text in ("fathom:basis=raw", "sparq:per_head=true", "landmark", "loki")]
    [records] = evaluate(loaded, FixedWindows(ids), [Unit(300, 0, tuple(branches))], positions=1, full_window=False)
    prefix = prefill(loaded, ids)
    batch = BranchBatch(prefix, branches, loaded.facts)
    for number, layer in enumerate(capture(loaded, ids, 1)):
        tail = (part[None, :, -1:].expand(4, -1, -1, -1) for part in (layer.keys, layer.values))
        batch.attend(number, layer.queries.expand(4, -1, -1, -1), *tail, layer.scaling)
    for at, record in enumerate(records):
        assert record["bits"] == record["declared_bits"] == (batch.counts.scan_bits[at] / batch.counts.scan_tokens[at]).item()
        assert record["active_channels"] == batch.counts.channels[at].item() / 4


def test_the_capture_is_what_the_model_computes() -> None:
    """Recorded through an attention function of the test's own, in one pass; the capture runs in chunks."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    seen: list[tuple[Tensor, Tensor, Tensor, float]] = []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, **options: Any) -> Any:
        seen.append((query[0], key[0], value[0], options["scaling"]))
        return sdpa_attention_forward(module, query, key, value, mask, **options)

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", sdpa_mask)
    loaded = tiny_model("granite", layers=2, query_heads=6, kv_heads=2, head_dim=16, attention_multiplier=0.1)
    ids = token_ids(loaded, 150)
    loaded.model.set_attn_implementation("spy")
    with torch.inference_mode():
        loaded.model(input_ids=torch.tensor([ids]))
    for full_window, known in ((False, 120), (True, 150)):
        for layer, (query, key, value, scaling) in zip(capture(loaded, ids, 30, full_window=full_window, chunk=37), seen, strict=True):
            grouped = query.view(2, 3, 150, 16)
            torch.testing.assert_close(layer.keys, key, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(layer.values, value, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(layer.queries, grouped[:, :, 120:].permute(2, 0, 1, 3), rtol=1e-4, atol=1e-5)
            expected = grouped[:, :, :known].abs().mean((1, 2))
            torch.testing.assert_close(layer.query_statistics.mean_magnitude, expected, rtol=1e-4, atol=1e-5)
            assert layer.scaling == scaling == 0.1


# What must hold of any method


def test_the_oracles_excess_is_exactly_zero_and_k_of_all_tokens_is_dense_attention() -> None:
    specs = parse_methods(f"exact,{SCANS},exact:attend=union,exact:share=group_sum,exact:keep_tail=true,exact:rerank=2,{SWITCHED}")
    specs = [spec for spec in specs if not spec.policy.dense_layers and not (spec.policy.reallocate and spec.policy.keep_tail)]
    outcomes = compare(structured_layer(), [Branch(spec, k) for spec in specs for k in (110, 10**6)], FACTS)
    for this, outcome in outcomes.items():
        if this.k == 10**6:
            assert outcome.dense_error.max() < 1e-5, this.spec.label
            assert (outcome.recall == 1).all()
        elif this.spec.method.name == "exact":
            assert torch.equal(outcome.dense_error, outcome.oracle_error), this.spec.label
            assert (outcome.exact_error == 0).all()
            assert (outcome.recall == 1).all()
        else:
            assert 0.2 < outcome.recall.mean() < 1, this.spec.label
            assert outcome.dense_error.mean() > outcome.oracle_error.mean()


@pytest.mark.parametrize(
    "family",
    [
        [f"fathom:basis=raw:budget={budget}" for budget in (24, 48, 96, 192)],
        [f"fathom:basis=klt:budget={budget}" for budget in (24, 48, 96, 192)],
        [f"sparq:r=D/{divisor}" for divisor in (16, 8, 4, 2)],
        [f"double_sparsity:c=D/{divisor}" for divisor in (16, 8, 4, 2)],
        [f"loki:r=D/{divisor}" for divisor in (16, 8, 4, 2)],
        [f"thumbnail:depth={depth}" for depth in (1, 2, 3, 4)],
        [f"landmark:size={size}" for size in (8, 4, 2, 1)],
    ],
    ids=lambda family: family[0].partition("=")[0],
)
def test_error_falls_with_bits_within_a_family(family: list[str]) -> None:
    outcomes = compare(structured_layer(), [branch(text, 80) for text in family], FACTS)
    for metric in ("dense_error", "exact_error"):
        errors = [getattr(outcomes[branch(text, 80)], metric).mean().item() for text in family]
        assert errors == sorted(errors, reverse=True)
        assert errors[-1] < 0.8 * errors[0]
    assert outcomes[branch(family[-1], 80)].recall.mean() > outcomes[branch(family[0], 80)].recall.mean()


def test_the_switches_help_as_they_should() -> None:
    outcomes = compare(structured_layer(), [branch(f"sparq{text}", 80) for text in ("", ":rerank=2", ":attend=union")], FACTS)
    plain, rerank, union = outcomes.values()
    assert rerank.dense_error.mean() < plain.dense_error.mean()
    assert rerank.recall.mean() > plain.recall.mean()
    assert union.dense_error.mean() < plain.dense_error.mean()
    assert torch.equal(union.rows, plain.rows), "the union's rows are those that were fetched anyway"
    assert union.oracle_error.mean() < plain.oracle_error.mean(), "the union has its own oracle"
    assert (rerank.candidate_rows > 0).all()
    assert (plain.candidate_rows == 0).all()


def test_nothing_after_a_position_reaches_it() -> None:
    """Change keys, values and queries after position p: everything up to p stays, bit for bit. Over the whole window it does not."""
    layer, specs = structured_layer(), parse_methods(f"dense,exact,{SCANS},{SWITCHED}")
    branches = [Branch(spec, 110 if spec.method.name != "dense" else None) for spec in specs]
    kept = 20  # positions up to the 20th evaluated one
    keys, values, queries = layer.keys.clone(), layer.values.clone(), layer.queries.clone()
    keys[:, -kept:] *= -3
    values[:, -kept:] += 2
    queries[-kept:] *= 2
    other = WindowLayer(keys, values, queries, layer.query_statistics, layer.scaling)
    before, after = compare(layer, branches, FACTS), compare(other, branches, FACTS)
    past = len(layer.queries) - kept
    for this, outcome in before.items():
        torch.testing.assert_close(after[this].output[:past], outcome.output[:past], rtol=0, atol=0)
        torch.testing.assert_close(after[this].exact_error[:past], outcome.exact_error[:past], rtol=0, atol=0)
        assert torch.equal(after[this].rows[:past], outcome.rows[:past])
        assert not torch.allclose(after[this].output[past:], outcome.output[past:])


def test_over_the_whole_window_later_keys_do_reach_a_position() -> None:
    """The block of tokens 320 to 383 is sealed at the window's end, so its scales hold keys that position 370 has not seen."""
    layer = structured_layer(positions=90, tokens=460)
    keys = layer.keys.clone()
    keys[:, 376:] *= -3
    other = dataclasses.replace(layer, keys=keys)
    this = branch("thumbnail", 110)
    for full_window in (False, True):
        before, after = (compare(one, [this], FACTS, full_window=full_window)[this].output[:6] for one in (layer, other))
        assert torch.equal(before, after) != full_window


def test_over_the_whole_window_statistics_and_sealed_blocks_are_those_of_its_end() -> None:
    layer = structured_layer()  # positions 360 to 399; block 5 (320 to 383) is not sealed before position 415
    longer = structured_layer(tokens=460, positions=60)  # but here at position 415, of 400 to 459
    known: list[int] = []

    class Watching(SparQ):
        name: ClassVar[str] = "watching"

        def index(self, layer: Any, facts: ModelFacts) -> Any:
            known.append(layer.keys.shape[1])
            return super().index(layer, facts)

    this = Branch(MethodSpec(Watching(), parse_method("sparq").policy), 80)
    thumbnail = branch("thumbnail", 80)
    for one, statistics in ((layer, 360), (longer, 400)):
        asof, whole = (compare(one, [this, thumbnail], FACTS, full_window=full) for full in (False, True))
        assert known[-2:] == [statistics, one.keys.shape[1]]
        differs = (asof[thumbnail].output - whole[thumbnail].output).abs().amax((1, 2, 3)) > 1e-5
        assert differs.tolist() == ([False] * 40 if one is layer else [True] * 15 + [False] * 45)


def test_small_chunks_and_many_chunks_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    branches = all_branches(parse_methods(f"dense,exact,{SCANS},{SWITCHED}"), (110,), FACTS)
    layer = structured_layer(positions=90)
    whole = compare(layer, branches, FACTS)
    monkeypatch.setattr(layer_module, "SCORE_ELEMENTS", 7 * 6 * 400)
    parts = compare(layer, branches, FACTS)
    for this in branches:
        torch.testing.assert_close(parts[this].output, whole[this].output, rtol=1e-4, atol=1e-5)
        assert torch.equal(parts[this].rows, whole[this].rows)


def test_dense_layers_have_no_error() -> None:
    loaded = tiny_model("llama", layers=3, query_heads=4, kv_heads=2, head_dim=16)
    [[record]] = evaluate(
        loaded,
        FixedWindows(token_ids(loaded, 200)),
        [Unit(200, 0, (branch("sparq:dense_layers=0+2", 60),))],
        positions=8,
        full_window=False,
    )
    zero, positive, also_zero = record["layers"]["error_dense"]
    assert zero == also_zero == 0 < positive
    assert record["error_dense"] == pytest.approx(positive / 3)
    assert record["bits"] == 2 * 4.25, "bits a scanned token"


def test_top_mask_takes_the_lower_of_equal_scores() -> None:
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 6, (5, 2, 3, 50), generator=generator).float()
    competing = (torch.arange(50) >= 3).view(1, 1, 1, 50) & (torch.arange(50) < torch.tensor([20, 30, 40, 45, 3]).view(5, 1, 1, 1))
    counts = [17, 1, 20, 0, 0]
    found = top_mask(scores, competing, counts)
    for row, count in enumerate(counts):
        for h in range(2):
            for g in range(3):
                allowed = competing[row, 0, 0].nonzero().flatten()
                expected = allowed[top_indices(scores[row, h, g, allowed], count)] if count else allowed[:0]
                assert found[row, h, g].nonzero().flatten().tolist() == sorted(expected.tolist())


@pytest.mark.parametrize("text", ["sparq:r=8", "landmark", "sparq_published:r=8"])
def test_reallocation_goes_by_the_models_own_scaling(text: str) -> None:
    """α of a plain computation: scores times the scaling, those of sealed tokens over √coverage."""
    layer = dataclasses.replace(structured_layer(positions=3, tokens=230), scaling=0.3)
    plain, given = branch(f"{text}:reallocate=false", 60), branch(f"{text}:reallocate=true", 60)
    outcomes = compare(layer, [plain, given], FACTS)
    means = torch.stack([layer.values[:, : 228 + row].mean(1) for row in range(3)]).unsqueeze(2)
    apart = means - outcomes[plain].output
    missed = ((outcomes[given].output - outcomes[plain].output) * apart).sum(-1) / apart.square().sum(-1)
    scan = outcomes[plain].scan
    assert scan is not None
    assert text == "landmark" or (scan.coverage < 0.7).all()
    local = plain.spec.policy.local
    logits = scan.scores * 0.3
    logits[..., : (228 - local) // 64 * 64] /= scan.coverage.sqrt().unsqueeze(-1)
    for row in range(3):
        weights = logits[row, ..., : 228 + row].softmax(-1)
        if text == "sparq_published:r=8":
            ranked = logits[row, ..., : 228 + row].sum(1, keepdim=True).expand_as(weights)
        else:
            ranked = scan.scores[row, ..., : 228 + row]
        sink = plain.spec.policy.sink
        best = ranked[..., sink:-local].topk(60 - sink - local).indices + sink
        left = weights[..., sink:-local].sum(-1) - weights.gather(-1, best).sum(-1)
        torch.testing.assert_close(missed[row], left, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_what_the_cpu_gives() -> None:
    branches = all_branches(parse_methods(f"dense,exact,{SCANS},{SWITCHED}"), (110,), FACTS)
    layer = structured_layer(positions=90)
    statistics = QueryStatistics()
    statistics.add(torch.randn(2, 3, 50, 64, generator=torch.Generator().manual_seed(1)).cuda())
    moved = WindowLayer(layer.keys.cuda(), layer.values.cuda(), layer.queries.cuda(), statistics, layer.scaling)
    cpu = QueryStatistics()
    cpu.add(torch.randn(2, 3, 50, 64, generator=torch.Generator().manual_seed(1)))
    here = compare(dataclasses.replace(layer, query_statistics=cpu), branches, FACTS)
    for this, outcome in compare(moved, branches, FACTS).items():
        assert outcome.dense_error.mean().item() == pytest.approx(here[this].dense_error.mean().item(), rel=1e-2, abs=1e-5)
