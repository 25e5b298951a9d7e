"""A trained model on a GPU with its cache and index in host memory: the tokens that the evaluator gives."""

from __future__ import annotations

import pytest
import torch

from fathom_eval.branches import Branch
from fathom_eval.decode import decode
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method
from fathom_eval.models import LoadedModel, load_model
from fathom_eval.offload.generate import generate
from fathom_eval.prefill import Prefix, prefill
from fathom_eval.tasks.haystack import load_haystack

pytestmark = [
    pytest.mark.model,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

METHODS = (
    "fathom:basis=raw",
    "fathom:basis=klt",
    "fathom:budget=24:basis=klt:attend=union",
    "fathom:budget=32:basis=klt:rerank=2",
    "sparq:r=D/8",
    "sparq:r=D/8:rerank=2",
    "double_sparsity:c=D/4",
    "loki:r=D/4",
    "thumbnail",
    "full",
    "landmark",
)
K, NEW = 128, 80  # long enough that a block is sealed while decoding


@pytest.fixture(scope="module")
def model() -> LoadedModel:
    try:
        return load_model("smollm2", dtype="float32", device="cuda", offline=True)
    except UserError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def prefix(model: LoadedModel) -> Prefix:
    text = load_haystack("python-docs").text[:8000]
    return prefill(model, model.tokenizer(text).input_ids[:1500])


@pytest.mark.parametrize(("index", "lanes", "rows_by"), [("host", 1, "gpu"), ("host", 3, "both"), ("hbm", 1, "gpu")])
@pytest.mark.parametrize("text", METHODS)
def test_same_tokens_as_the_evaluator(model: LoadedModel, prefix: Prefix, text: str, index: str, lanes: int, rows_by: str) -> None:
    branch = Branch(parse_method(text), K)
    [expected] = decode(model, prefix, [branch], NEW)
    assert expected.error is None
    found = generate(
        model, prefix, branch, NEW, index=index, lanes=lanes, rows_by=rows_by, gather_threads=2, score_dtype=torch.float32, segment_blocks=8
    )
    assert found.token_ids == expected.token_ids
    assert found.bits == pytest.approx(expected.bits, rel=0.05)
