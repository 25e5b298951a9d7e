"""Where timed steps get their segments and weights from: real prefixes, and pools of synthetic keys."""

from __future__ import annotations

import pytest
import torch

from fathom_eval.methods import parse_method, parse_methods
from fathom_eval.offload.bench.sources import PrefixSource, SyntheticSource, closing
from fathom_eval.offload.step import DecodeStep
from fathom_eval.offload.weights import SHAPES
from fathom_eval.prefill import prefill
from tests.tiny import tiny_model, token_ids

SIZES = [1, 2, 4, 8, 16, 32, 64]


@pytest.mark.parametrize("size", SIZES)
def test_landmarks_of_every_size_over_a_prefix(size: int) -> None:
    loaded = tiny_model("llama", head_dim=16)
    spec = parse_method(f"landmark:size={size}")
    with (
        closing(PrefixSource(loaded, lambda context: prefill(loaded, token_ids(loaded, context)), "host")) as source,
        torch.inference_mode(),
    ):
        source.open(200)
        cache, scan = source.prepare(spec, 1, 1)
        assert cache.arena.shape.landmark == size
        step = DecodeStep(source.weights(), cache, scan, 60, spec.policy)
        step.run()
        assert step.logits.isfinite().all()


@pytest.mark.parametrize("size", SIZES)
def test_landmarks_of_every_size_in_a_pool(size: int) -> None:
    specs = parse_methods(f"fathom:basis=raw,landmark:size={size}")
    shape, device = SHAPES["tiny-shape"], torch.device("cpu")
    source = SyntheticSource(
        shape, specs, [4096], 1, device=device, index="host", spread=1.0, host_limit=2**26, say=lambda line: None, host_pages="small"
    )
    assert source.arena.shape.landmark == size


def test_contexts_share_the_models_matrices() -> None:
    loaded = tiny_model("llama", head_dim=16, seed=12)
    with closing(PrefixSource(loaded, lambda context: prefill(loaded, token_ids(loaded, context)), "host")) as source:
        places = []
        for context in (130, 200):
            source.open(context)
            weights = source.weights()
            assert weights.first_position == context - 1
            places.append([layer.projections.data_ptr() for layer in weights.layers])
        assert places[0] == places[1] == [layer.self_attn.q_proj.weight.data_ptr() for layer in loaded.model.model.layers]
