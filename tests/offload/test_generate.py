"""The control of the host-resident runtime: it generates the tokens that the evaluator generates."""

from __future__ import annotations

import gc

import pytest
import torch

from fathom_eval.branches import Branch
from fathom_eval.decode import decode
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method
from fathom_eval.models import LoadedModel
from fathom_eval.offload.gatherer import Box
from fathom_eval.offload.generate import generate, segment_shape
from fathom_eval.prefill import Prefix, prefill
from tests.tiny import tiny_model, token_ids

METHODS = (
    "fathom:budget=48:basis=raw",
    "fathom:budget=48:basis=klt",
    "sparq:r=D/8",
    "double_sparsity",
    "loki",
    "thumbnail",
    "full",
    "landmark",
    "sparq:r=D/8:rerank=2",
    "landmark:rerank=1.5:attend=union",
    "fathom:attend=union",
    "fathom:sink=0:local=40",
)


def both(loaded: LoadedModel, prefix: Prefix, text: str, k: int, new: int, **options: object) -> tuple[tuple[int, ...], tuple[int, ...]]:
    branch = Branch(parse_method(text), k)
    expected = decode(loaded, prefix, [branch], new)[0]
    assert expected.error is None
    return generate(loaded, prefix, branch, new, segment_blocks=2, **options).token_ids, expected.token_ids


@pytest.mark.parametrize("text", METHODS)
def test_same_tokens_as_the_evaluator(text: str) -> None:
    """Long enough that blocks are sealed while decoding, and into a segment that did not exist before."""
    loaded = tiny_model("llama", head_dim=16)
    prefix = prefill(loaded, token_ids(loaded, 330))
    found, expected = both(loaded, prefix, text, 60, 90)
    assert found == expected


@pytest.mark.parametrize(
    ("family", "options"), [("qwen2", {}), ("qwen3", {"head_dim": 32}), ("llama", {"kv_heads": 4}), ("llama", {"kv_heads": 1})]
)
def test_same_tokens_in_every_architecture(family: str, options: dict[str, int]) -> None:
    loaded = tiny_model(family, layers=3, **options)
    prefix = prefill(loaded, token_ids(loaded, 200))
    found, expected = both(loaded, prefix, "fathom", 50, 40)
    assert found == expected


@pytest.mark.parametrize("tokens", [4, 40, 96, 97, 160, 161])
def test_prompts_shorter_than_the_window_or_a_block(tokens: int) -> None:
    loaded = tiny_model("llama")
    prefix = prefill(loaded, token_ids(loaded, tokens))
    found, expected = both(loaded, prefix, "sparq:r=D/4", 44, 8)
    assert found == expected


@pytest.mark.parametrize("lanes", [1, 2])
def test_lanes_change_nothing(lanes: int) -> None:
    loaded = tiny_model("llama")
    prefix = prefill(loaded, token_ids(loaded, 250))
    found, expected = both(loaded, prefix, "fathom:rerank=2", 44, 30, lanes=lanes)
    assert found == expected


@pytest.mark.parametrize(("rows_by", "lanes"), [("cpu", 1), ("cpu", 2), ("both", 2)])
def test_who_brings_the_rows_changes_nothing(rows_by: str, lanes: int) -> None:
    """Into segments that did not exist before, and after a prompt of which nothing is sealed."""
    loaded = tiny_model("llama", head_dim=16)
    for tokens in (40, 330):
        prefix = prefill(loaded, token_ids(loaded, tokens))
        for text, new in (("fathom:budget=48:basis=raw", 90), ("sparq:r=D/8:rerank=2", 20)):
            found, expected = both(loaded, prefix, text, 60, new, lanes=lanes, rows_by=rows_by, gather_threads=1)
            assert found == expected


def test_rows_that_nobody_gathers_end_the_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model("llama", head_dim=16)
    prefix = prefill(loaded, token_ids(loaded, 330))
    monkeypatch.setattr(Box, "gather", lambda box: 1 / 0)
    with pytest.raises(UserError, match="the CPU could not gather rows: division by zero"):
        generate(loaded, prefix, Branch(parse_method("fathom:basis=raw"), 60), 4, rows_by="cpu", gather_threads=1)


def test_what_the_step_reads_is_what_the_evaluator_counts() -> None:
    loaded = tiny_model("llama")
    prefix = prefill(loaded, token_ids(loaded, 300))
    for text in METHODS[:8]:
        branch = Branch(parse_method(text), 44)
        # Over a block that is sealed meanwhile.
        found, expected = generate(loaded, prefix, branch, 30, segment_blocks=2), decode(loaded, prefix, [branch], 30)[0]
        assert (found.bits, found.channels, found.rows) == (expected.bits, expected.channels, expected.rows), text


def test_where_nothing_is_scanned_there_are_no_bits() -> None:
    loaded = tiny_model("llama")
    found = generate(loaded, prefill(loaded, token_ids(loaded, 20)), Branch(parse_method("sparq"), 44), 2)
    assert (found.bits, found.channels) == (None, None)
    assert found.rows > 0


@pytest.mark.parametrize("size", [1, 2, 4, 8, 16, 32, 64])
def test_landmarks_of_every_size(size: int) -> None:
    loaded = tiny_model("llama", head_dim=16)
    found, expected = both(loaded, prefill(loaded, token_ids(loaded, 330)), f"landmark:size={size}", 60, 12)
    assert found == expected
    shape = segment_shape(loaded.facts, "landmarks", size, 330, torch.float32)
    assert shape.landmark == size
    assert segment_shape(loaded.facts, "planes", 1, 330, torch.float32).landmark == 8


def test_more_tokens_than_can_be_ranked_are_refused_before_any_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = tiny_model("llama")
    prefix = prefill(loaded, token_ids(loaded, 200))
    monkeypatch.setattr("fathom_eval.offload.generate.LARGEST_CAPACITY", 2)
    monkeypatch.setattr("fathom_eval.offload.arena.Arena.grow", lambda *_: pytest.fail("memory was taken"))
    with pytest.raises(UserError, match="204 tokens are more than the 128 that the runtime ranks"):
        generate(loaded, prefix, Branch(parse_method("fathom"), 44), 4)


def test_the_prefix_is_not_written() -> None:
    loaded = tiny_model("llama")
    prefix = prefill(loaded, token_ids(loaded, 200))
    before = prefix.checksum()
    generate(loaded, prefix, Branch(parse_method("fathom"), 44), 70, segment_blocks=2)
    assert prefix.checksum() == before


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("dense", "would read every key"),
        ("exact", "would read every key"),
        ("sparq:per_head=true", "no step for this method"),
        ("h2o", "no step for this method"),
        ("fathom:reallocate=true", "the switch reallocate"),
        ("landmark:bits=4", "no step for this method"),
    ],
)
def test_what_the_runtime_does_not_have_is_refused(text: str, reason: str) -> None:
    loaded = tiny_model("llama")
    prefix = prefill(loaded, token_ids(loaded, 100))
    with pytest.raises(UserError, match=reason):
        generate(loaded, prefix, Branch(parse_method(text), 44), 4)


def test_more_positions_than_the_model_has_are_refused() -> None:
    loaded = tiny_model("llama", max_positions=128)
    prefix = prefill(loaded, token_ids(loaded, 100))
    with pytest.raises(UserError, match="exceed the 128"):
        generate(loaded, prefix, Branch(parse_method("fathom"), 44), 40)


def test_another_architecture_is_refused() -> None:
    loaded = tiny_model("mistral", sliding_window=None)
    prefix = prefill(loaded, token_ids(loaded, 100))
    with pytest.raises(UserError, match="llama, qwen2, qwen3"):
        generate(loaded, prefix, Branch(parse_method("sparq"), 44), 4)


def test_nothing_is_held_after_a_generation() -> None:
    loaded = tiny_model("llama")
    prefix = prefill(loaded, token_ids(loaded, 200))
    branch = Branch(parse_method("fathom:basis=raw"), 44)

    def tensors() -> int:
        gc.collect()
        return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())

    generate(loaded, prefix, branch, 5, segment_blocks=2)
    before = tensors()
    for _ in range(3):
        generate(loaded, prefix, branch, 5, segment_blocks=2)
    assert tensors() == before


@pytest.mark.model
@pytest.mark.slow
def test_the_bundled_model_gives_the_same_tokens(smollm2: LoadedModel) -> None:
    text = "The harbour was quiet. She counted the boats and wrote their names into a small grey book. " * 12
    ids = smollm2.tokenizer(text).input_ids[:220]
    prefix = prefill(smollm2, ids)
    for method in ("fathom", "sparq:r=D/8"):
        found, expected = both(smollm2, prefix, method, 64, 12)
        assert found == expected, method
