"""The weights that the runtime takes from a model: joined in place once, noticed when replaced, refused where they are not of its kind."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch

from fathom_eval.branches import Branch
from fathom_eval.decode import decode
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method
from fathom_eval.models import LoadedModel, describe_model
from fathom_eval.offload.branches import RuntimeDecoder, check_runtime, runtime_of
from fathom_eval.offload.step import DecodeStep
from fathom_eval.offload.weights import weights_of
from fathom_eval.prefill import prefill
from tests.offload.test_branches import branch, compare
from tests.tiny import tiny_model, token_ids


def test_weights_that_were_replaced_are_noticed() -> None:
    loaded = tiny_model("qwen2", seed=6)
    prefix = prefill(loaded, token_ids(loaded, 150))
    runtime = RuntimeDecoder(loaded, "host")
    first = runtime.decode(prefix, branch("sparq"), 2)
    for name in ("mlp.up_proj", "self_attn.k_proj", "mlp.down_proj"):
        module = loaded.model.model.layers[1].get_submodule(name)
        module.weight = torch.nn.Parameter(module.weight.detach().clone())
        with pytest.raises(UserError, match=f"weights of {name.split('.')[1]} of layer 1 were replaced since the runtime took them"):
            runtime.decode(prefix, branch("sparq"), 2)
        runtime = RuntimeDecoder(loaded, "host")
        assert runtime.decode(prefix, branch("sparq"), 2) == first
    loaded.model.to(torch.float64)
    with pytest.raises(UserError, match="weights of q_proj of layer 0 were replaced"):
        runtime.decode(prefix, branch("sparq"), 2)


def test_weights_that_lie_joined_are_joined_no_more() -> None:
    loaded = tiny_model("llama", seed=8)
    one = RuntimeDecoder(loaded, "host")._weights
    places = {name: part.data_ptr() for name, part in loaded.model.named_parameters()}
    for other in (RuntimeDecoder(loaded, "hbm")._weights, weights_of(loaded, 0, 1), weights_of(loaded, 5, 9, in_place=True)):
        for mine, theirs in zip(one.layers, other.layers, strict=True):
            assert mine.projections.data_ptr() == theirs.projections.data_ptr()
            assert mine.gate_and_up.data_ptr() == theirs.gate_and_up.data_ptr()
            assert torch.equal(mine.projections, theirs.projections)
    assert {name: part.data_ptr() for name, part in loaded.model.named_parameters()} == places
    assert not any(part.is_inference() for part in loaded.model.parameters())


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.04), (torch.float16, 0.01)])
def test_in_half_precision_the_two_round_differently_and_agree(dtype: torch.dtype, tolerance: float) -> None:
    """Logits of the first step differ by less than ``tolerance`` of their norm, and most tokens are the same.

    Logits are compared where every token is selected: where some are not, a near tie may be settled otherwise.
    """
    loaded = tiny_model("llama", head_dim=16, seed=4)
    loaded = describe_model(loaded.model.to(dtype), loaded.tokenizer, "tiny-llama")
    prefix = prefill(loaded, token_ids(loaded, 330))
    run, agreed, total = DecodeStep.run, 0, 0
    for text, k in itertools.product(("fathom", "sparq", "landmark", "full"), (500, 90)):
        expected_logits, logits = list[torch.Tensor](), list[torch.Tensor]()
        one, head = branch(text, k), loaded.model.lm_head
        handle = head.register_forward_hook(lambda *call, kept=expected_logits: kept.append(call[-1].float().flatten()))
        [expected] = decode(loaded, prefix, [one], 12)
        handle.remove()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(DecodeStep, "run", lambda step, kept=logits: (run(step), kept.append(step.logits.flatten().clone()))[0])
            found = RuntimeDecoder(loaded, "host").decode(prefix, one, 12)
        assert (found.error, found.steps, found.fired) == (None, 12, expected.fired)
        if k == 500:
            assert (logits[0] - expected_logits[0]).norm() < tolerance * expected_logits[0].norm(), text
        agreed += sum(mine == theirs for mine, theirs in zip(found.token_ids, expected.token_ids, strict=True))
        total += len(expected.token_ids)
    assert agreed > total / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_angles_are_the_models_own(dtype: torch.dtype) -> None:
    loaded = tiny_model("llama", seed=4)
    loaded = describe_model(loaded.model.to(dtype), loaded.tokenizer, "tiny-llama")
    weights = weights_of(loaded, 700, 3)
    cosines, _ = loaded.model.model.rotary_emb(torch.empty(1, dtype=dtype), torch.arange(700, 703).unsqueeze(0))
    assert weights.cosines.dtype == torch.float32
    assert torch.equal(weights.cosines.to(dtype), cosines[0, :, : weights.cosines.shape[1]])
    assert torch.equal(weights.cosines, weights.cosines.to(dtype).float())


def test_the_weights_are_held_once() -> None:
    loaded = tiny_model("qwen2", seed=5)
    prefix = prefill(loaded, token_ids(loaded, 150))
    kept = {name: tensor.clone() for name, tensor in loaded.model.state_dict().items()}
    dense = decode(loaded, prefix, [Branch(parse_method("dense"), None)], 8)

    def held() -> int:
        return sum({part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in loaded.model.parameters()}.values())

    before = held()
    runtime = RuntimeDecoder(loaded, "hbm")
    assert held() == before
    model = {part.untyped_storage().data_ptr() for part in loaded.model.parameters()}
    for layer in runtime._weights.layers:
        matrices = (layer.projections, layer.output, layer.gate_and_up, layer.down)
        assert {matrix.untyped_storage().data_ptr() for matrix in matrices} <= model
    assert all(torch.equal(tensor, kept[name]) for name, tensor in loaded.model.state_dict().items())
    assert decode(loaded, prefix, [Branch(parse_method("dense"), None)], 8) == dense
    assert runtime_of(loaded, None) is None


def test_models_that_it_does_not_compute_are_refused(loaded: LoadedModel) -> None:
    class Packed(torch.nn.Linear):
        pass

    spread = dataclasses.replace(loaded, facts=dataclasses.replace(loaded.facts, layer_devices=("cpu", "cuda:1")))
    with pytest.raises(UserError, match=r"one device, and tiny-llama is spread over cpu\+cuda:1"):
        check_runtime(spread, "host")
    with pytest.raises(UserError, match="llama, qwen2, qwen3"):
        RuntimeDecoder(tiny_model("mistral", sliding_window=None), "host")
    with pytest.raises(UserError, match="not in 'disk'"):
        check_runtime(loaded, "disk")
    with pytest.raises(UserError, match="pieces of 16 bytes, and a key of tiny-llama has 24"):
        check_runtime(dataclasses.replace(loaded, facts=dataclasses.replace(loaded.facts, head_dim=6)), "host")
    with pytest.raises(UserError, match="up to 31 query heads a KV head; tiny-llama has 32"):
        check_runtime(dataclasses.replace(loaded, facts=dataclasses.replace(loaded.facts, query_heads=64)), "host")
    packed = tiny_model("llama", seed=7)
    packed.model.model.layers[1].mlp.up_proj = Packed(64, 128, bias=False)
    with pytest.raises(UserError, match="plain linear layers, not Packed"):
        check_runtime(packed, "host")


def refused(loaded: LoadedModel, match: str) -> None:
    with pytest.raises(UserError, match=match) as caught:
        check_runtime(loaded, "host")
    assert "\n" not in str(caught.value)


def test_weights_that_it_does_not_compute_with_are_refused() -> None:
    class Coded(torch.Tensor):
        pass

    for name in ("lm_head", "model.embed_tokens", "model.layers.1.self_attn.q_proj", "model.norm"):
        loaded = tiny_model("llama", seed=9)
        module = loaded.model.get_submodule(name)
        weight = module.weight.detach()
        module.weight = torch.nn.Parameter(weight.half())
        refused(loaded, r"weights of one dtype, not of float16 and float32 \(tiny-llama\)")
        module.weight = torch.nn.Parameter(weight.to("meta"))
        refused(loaded, "weights of one device, not of cpu and meta")
        module._parameters["weight"] = torch.nn.Parameter(weight.as_subclass(Coded))
        refused(loaded, rf"plain tensors, and {name}.weight is a Coded")
        if weight.dim() == 2:
            module.weight = torch.nn.Parameter(weight.t().contiguous().t())
            refused(loaded, f"contiguous weights, and {name}.weight is not")
        module.weight = torch.nn.Parameter(weight)
        check_runtime(loaded, "host")


def test_modules_that_do_more_than_their_weights_are_refused() -> None:
    loaded = tiny_model("llama", seed=10)
    loaded.model(input_ids=torch.tensor([[1, 2]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in loaded.model.modules()), "those of transformers do no harm"
    check_runtime(loaded, "host")
    for name in ("", "model.layers.1.mlp.up_proj", "lm_head"):
        module = loaded.model.get_submodule(name)
        for register in (module.register_forward_hook, module.register_forward_pre_hook):
            handle = register(lambda *_: None)
            refused(loaded, f"does not call {name or 'the model'}, on which there is a hook")
            handle.remove()
        module._hf_hook = object()
        refused(loaded, f"does not call {name or 'the model'}, on which there is a hook")
        del module._hf_hook
    check_runtime(loaded, "host")


def test_angles_that_depend_on_the_length_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    refused(tiny_model("llama", rope_parameters=rope), "rotary embedding that depends on the length, 'dynamic'")
    linear = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    loaded = tiny_model("llama", rope_parameters=linear)
    compare(loaded, prefill(loaded, token_ids(loaded, 200)), branch("sparq"), 4)
