"""What only a trained model can show: the bundled model in fp32 against transformers' own generation."""

from __future__ import annotations

import pytest
import torch

from fathom_eval.branches import Branch
from fathom_eval.decode import decode
from fathom_eval.methods import parse_method, parse_methods
from fathom_eval.models import LoadedModel
from fathom_eval.prefill import prefill
from fathom_eval.ruler import all_branches
from fathom_eval.scoring import hit_rate
from fathom_eval.tasks.haystack import load_haystack
from fathom_eval.tasks.samples import Sample, SampleBuilder

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def builder(smollm2: LoadedModel) -> SampleBuilder:
    return SampleBuilder(smollm2.tokenizer, load_haystack("python-docs"))


def generate(loaded: LoadedModel, sample: Sample) -> list[int]:
    loaded.model.set_attn_implementation("sdpa")
    inputs = torch.tensor([sample.prompt_ids])
    output = loaded.model.generate(inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=sample.max_new_tokens, do_sample=False)
    return list(output[0, inputs.shape[1] :].tolist())


@pytest.mark.parametrize(
    ("task", "context"),
    [
        ("niah_single", 1024),
        ("niah_multikey", 1400),
        ("vt", 1800),
        ("niah_multivalue", 2200),
        ("fwe", 2600),
        ("niah_multiquery", 3000),
        ("niah_single", 3500),
        ("vt", 4000),
    ],
)
def test_dense_branch_is_the_models_own_generation_token_for_token(
    smollm2: LoadedModel, builder: SampleBuilder, task: str, context: int
) -> None:
    sample = builder.build(task, context, 0)
    prefix = prefill(smollm2, sample.prompt_ids)
    [dense] = decode(smollm2, prefix, [Branch(parse_method("dense"), None)], sample.max_new_tokens)
    assert list(dense.token_ids) == generate(smollm2, sample)


def test_branches_of_one_prefix(smollm2: LoadedModel, builder: SampleBuilder) -> None:
    """K of all tokens is dense for every method; lock-step is one method at a time; nothing writes the prefix."""
    sample = builder.build("niah_multikey", 1024, 1)
    prefix = prefill(smollm2, sample.prompt_ids)
    before = prefix.checksum()
    branches = all_branches(parse_methods("paper"), (64, 1100), smollm2.facts)
    results = decode(smollm2, prefix, branches, sample.max_new_tokens)
    dense = results[0]
    for branch, result in zip(branches, results, strict=True):
        assert result.fired == result.steps * smollm2.facts.layers
        if branch.k == 1100:
            assert result.token_ids == dense.token_ids, branch.spec.label
        if branch.k == 64:
            [alone] = decode(smollm2, prefix, [branch], sample.max_new_tokens)
            assert alone.token_ids == result.token_ids, branch.spec.label
    assert prefix.checksum() == before
    # The model answers, so that equal tokens above are not equal nonsense.
    assert hit_rate(smollm2.tokenizer.decode(dense.token_ids), sample.gold) == 1
