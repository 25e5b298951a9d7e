"""Every error that a fidelity run reports, against an independent computation of it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from fathom_eval.branches import Branch
from fathom_eval.fidelity import Unit, evaluate
from fathom_eval.fidelity_capture import capture
from fathom_eval.fidelity_chunk import Outcome
from fathom_eval.rehearsal import Rehearsal
from tests import reference_attention
from tests.made_windows import FixedWindows, branch, compare
from tests.tiny import tiny_model, token_ids

REFERENCE_NAMES = {
    "exact": "exact",
    "fathom:basis=raw": "fathom-raw",
    "fathom:basis=klt": "fathom-klt",
    "sparq": "sparq",
    "loki": "loki",
    "double_sparsity": "double_sparsity",
    "thumbnail": "thumbnail",
    "full": "full",
    "landmark": "landmark",
    "quest": "quest",
    "streaming_llm": "streaming",
    "sparq:per_head=true": "sparq-per-head",
    "uniform_depth:basis=raw": "uniform-depth",
    "loki:bits=16": "loki-fp16",
    "loki_published": "loki-published",
    "quest_published:dense_layers=none": "quest",
    "infinigen": "infinigen-previous",
    "infinigen:query=rehearsed": "infinigen-rehearsed",
    "infinigen_published:dense_layers=none": "infinigen-published",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A method that the reference computes too."""

    text: str
    k: int
    rerank: float = 1.0
    union: bool = False

    @property
    def branch(self) -> Branch:
        return branch(f"{self.text}:rerank={self.rerank}:attend={'union' if self.union else 'own'}", self.k)


VARIANTS = ((60,), (60, 2.0), (100,), (60, 1.0, True))
CASES = [
    Case(text, k, *options) for number, text in enumerate(REFERENCE_NAMES) for k, *options in (VARIANTS if number < 9 else VARIANTS[:1])
]


def test_every_reported_error_agrees_with_an_independent_computation() -> None:
    loaded = tiny_model("llama", layers=2, query_heads=4, kv_heads=2, head_dim=64)
    tokens, positions = 302, 16  # blocks are sealed within the evaluated positions
    ids = token_ids(loaded, tokens)
    branches = [case.branch for case in CASES]
    [records] = evaluate(loaded, FixedWindows(ids), [Unit(tokens, 0, tuple(branches))], positions=positions, full_window=False)
    unsure: list[str] = []
    everywhere, evaluated = (Rehearsal(loaded.model, 2, first=first) for first in (0, tokens - positions))
    layers, whole = capture(loaded, ids, positions, rehearsal=evaluated), capture(loaded, ids, tokens, rehearsal=everywhere)
    for number, layer in enumerate(layers):
        queries = whole[number].queries
        ahead = {"previous": whole[max(number - 1, 0)].queries, "rehearsed": everywhere.query(number) if number else queries}
        heads = [
            reference_attention.head_data(
                layer.keys[h],
                layer.values[h],
                queries[:, h].transpose(0, 1),
                layer.scaling,
                tokens - positions,
                {name: other[:, h].transpose(0, 1) for name, other in ahead.items() if other is not None},
            )
            for h in range(2)
        ]
        previous = layers[number - 1].queries if number else None
        outcomes = compare(layer, branches, loaded.facts, number, previous_queries=previous, rehearsal=evaluated)
        for case, record in zip(CASES, records, strict=True):
            expected = expected_errors(case, heads, outcomes[case.branch], f"{case} layer {number}", unsure)
            for name, value in expected.items():
                assert record["layers"][name][number] == pytest.approx(value, rel=1e-3, abs=1e-6), f"{case} layer {number}: {name}"
    rows = 2 * len(CASES) * positions * 4
    print(f"{len(unsure)} of {rows} rows rest on float noise and are listed apart:", *unsure, sep="\n  ")
    assert len(unsure) < 0.1 * rows, "a comparison that leaves so much out says nothing"


def expected_errors(
    case: Case, heads: list[reference_attention.HeadData], outcome: Outcome, where: str, unsure: list[str]
) -> dict[str, float]:
    """Check every row of an outcome, and give the means that must be reported. Rows that rest on float noise are taken as found."""
    names = ("dense_error", "exact_error", "oracle_error", "recall")
    found = {name: getattr(outcome, name).double().clone() for name in names}
    positions = len(outcome.output)
    for p in range(positions):
        for h, head in enumerate(heads):
            sizes = case.branch.spec.policy.sink, case.branch.spec.policy.local
            rows = reference_attention.evaluate(head, head.first + p, REFERENCE_NAMES[case.text], case.k, case.rerank, case.union, *sizes)
            for g, row in enumerate(rows):
                at = f"{where} KV head {h} query head {g} position {head.first + p}"
                if not row.sure:
                    unsure.append(at)
                    continue
                for name in names:
                    assert found[name][p, h, g].item() == pytest.approx(getattr(row, name), rel=1e-3, abs=1e-6), f"{at}: {name}"
                    found[name][p, h, g] = getattr(row, name)
                distance = (outcome.output[p, h, g].double() - torch.from_numpy(row.output)).norm() / torch.from_numpy(row.output).norm()
                assert distance < 1e-4, at
            if all(row.sure for row in rows):
                assert outcome.rows[p, h] == rows[0].union, where
                if rows[0].bits is not None and outcome.scan is not None and p < len(outcome.scan.declared_bits):
                    assert outcome.scan.declared_bits[p, h] == rows[0].bits, where
    dense, exact, oracle, recall = (found[name] for name in names)
    means = {
        "error_dense": dense,
        "error_exact": exact,
        "excess": dense - oracle,
        "squared_error_dense": dense.square(),
        "squared_error_exact": exact.square(),
        "squared_excess": dense.square() - oracle.square(),
        "recall": recall,
    }
    return {name: value.mean().item() for name, value in means.items()}
