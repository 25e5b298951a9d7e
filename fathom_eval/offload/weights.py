"""Weights of a decoder in the form that a decode step reads: from a transformers model, or random in the shape of a known one."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fathom_eval.errors import UserError

if TYPE_CHECKING:
    from fathom_eval.models import LoadedModel, ModelFacts

MODEL_TYPES = ("llama", "qwen2", "qwen3")
"""Architectures whose layer this runtime computes itself."""

_ROPE_BY_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings whose frequencies change with the length: a step's angles are made once, for all of its positions."""


@dataclass(frozen=True)
class LayerWeights:
    """One layer; matrices ``[outputs, inputs]``, contiguous, joined where they read the same input.

    Attributes:
        projections: Queries, keys and values.
        gate_and_up: Both halves of the gated MLP.
    """

    input_norm: Tensor
    projections: Tensor
    projection_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    post_norm: Tensor
    gate_and_up: Tensor
    gate_and_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None


@dataclass(frozen=True)
class DecoderWeights:
    """A decoder.

    Attributes:
        heads, group, head_dim: KV heads, query heads a KV head, D.
        scaling: Of q·k before the softmax.
        cosines, sines: fp32 ``[P, D / 2]`` of the positions from ``first_position`` on.
    """

    embedding: Tensor
    layers: list[LayerWeights]
    norm: Tensor
    head: Tensor
    heads: int
    group: int
    head_dim: int
    epsilon: float
    scaling: float
    cosines: Tensor
    sines: Tensor
    first_position: int

    @property
    def dtype(self) -> torch.dtype:
        return self.head.dtype

    @property
    def device(self) -> torch.device:
        return self.head.device

    @property
    def bytes_read(self) -> int:
        """Bytes of the weights that one step reads: all but the embedding's other rows."""
        total = self.head.nbytes + self.norm.nbytes
        for layer in self.layers:
            total += sum(part.nbytes for part in vars(layer).values() if part is not None)
        return total


def check_model(loaded: LoadedModel) -> None:
    """Raise :class:`UserError` for a model whose layers this runtime does not compute."""
    facts, config = loaded.facts, loaded.model.config
    if facts.model_type not in MODEL_TYPES:
        raise UserError(f"the host-resident runtime computes {', '.join(MODEL_TYPES)} models, not '{facts.model_type}' ({facts.name})")
    if config.hidden_act != "silu":
        raise UserError(f"the host-resident runtime has no activation '{config.hidden_act}' ({facts.name})")
    for layer in loaded.model.model.layers:
        for module in (*layer.self_attn.children(), *layer.mlp.children()):
            if hasattr(module, "in_features") and type(module) is not torch.nn.Linear:
                raise UserError(f"the host-resident runtime computes plain linear layers, not {type(module).__name__} ({facts.name})")
    _check_weights(loaded)
    _check_hooks(loaded)
    rope = getattr(loaded.model.model.rotary_emb, "rope_type", "default")
    if rope in _ROPE_BY_LENGTH:
        raise UserError(f"the host-resident runtime has no rotary embedding that depends on the length, '{rope}' ({facts.name})")


def _check_weights(loaded: LoadedModel) -> None:
    parts = dict(loaded.model.named_parameters())
    for name, part in parts.items():
        if type(part) not in (Tensor, torch.nn.Parameter):
            raise UserError(f"the host-resident runtime computes with plain tensors, and {name} is a {type(part).__name__}{_of(loaded)}")
        if not part.is_contiguous():
            raise UserError(f"the host-resident runtime computes with contiguous weights, and {name} is not{_of(loaded)}")
    for what, kinds in (("dtype", {part.dtype for part in parts.values()}), ("device", {part.device for part in parts.values()})):
        if len(kinds) > 1:
            found = " and ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
            raise UserError(f"the host-resident runtime computes with weights of one {what}, not of {found}{_of(loaded)}")


def _check_hooks(loaded: LoadedModel) -> None:
    for name, module in loaded.model.named_modules():
        hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
        # Those of transformers collect outputs where they are asked for.
        if hasattr(module, "_hf_hook") or any(not _module_of(hook).startswith("transformers.") for hook in hooks):
            raise UserError(f"the host-resident runtime does not call {name or 'the model'}, on which there is a hook{_of(loaded)}")


def _module_of(hook: Any) -> str:
    return str(getattr(hook, "__module__", ""))


def _of(loaded: LoadedModel) -> str:
    return f" ({loaded.facts.name})"


def weights_of(loaded: LoadedModel, first_position: int, positions: int, *, in_place: bool = False) -> DecoderWeights:
    """The weights of a loaded model, with rotary angles for ``positions`` positions from ``first_position`` on.

    Args:
        in_place: Let the model's own matrices be the rows of the joined ones (queries, keys and values; gate and up), which otherwise are
            copies: more than half of a model a second time. The model computes what it did before. Those that lie joined already are
            taken as they are, so that this can be done again.

    Raises:
        UserError: The architecture is not one of :data:`MODEL_TYPES`, or differs from its plain form.
    """
    check_model(loaded)
    facts, model = loaded.facts, loaded.model
    inner = model.model
    cosines, sines = _angles(loaded, first_position, positions)
    return DecoderWeights(
        embedding=inner.embed_tokens.weight,
        layers=[_layer(layer, in_place) for layer in inner.layers],
        norm=inner.norm.weight,
        head=model.lm_head.weight,
        heads=facts.kv_heads,
        group=facts.group,
        head_dim=facts.head_dim,
        epsilon=model.config.rms_norm_eps,
        scaling=float(inner.layers[0].self_attn.scaling),
        cosines=cosines,
        sines=sines,
        first_position=first_position,
    )


def moved_to(weights: DecoderWeights, loaded: LoadedModel, first_position: int, positions: int) -> DecoderWeights:
    """The same weights with the rotary angles of other positions."""
    cosines, sines = _angles(loaded, first_position, positions)
    return dataclasses.replace(weights, cosines=cosines, sines=sines, first_position=first_position)


def check_joined(weights: DecoderWeights, loaded: LoadedModel) -> None:
    """Raise :class:`UserError` where the model's matrices are no longer those that were joined in place: decoding would not notice it."""
    inner = loaded.model.model
    pairs = [("lm_head", loaded.model.lm_head.weight, weights.head), ("embed_tokens", inner.embed_tokens.weight, weights.embedding)]
    for number, (layer, held) in enumerate(zip(inner.layers, weights.layers, strict=True)):
        attention, mlp = layer.self_attn, layer.mlp
        for names, owner, joined in (
            (("q_proj", "k_proj", "v_proj"), attention, held.projections),
            (("o_proj",), attention, held.output),
            (("gate_proj", "up_proj"), mlp, held.gate_and_up),
            (("down_proj",), mlp, held.down),
        ):
            start = 0
            for name in names:
                weight = getattr(owner, name).weight
                pairs.append((f"{name} of layer {number}", weight, joined[start : start + len(weight)]))
                start += len(weight)
    for name, weight, part in pairs:
        if weight.data_ptr() != part.data_ptr() or (weight.shape, weight.dtype) != (part.shape, part.dtype):
            raise UserError(f"the weights of {name} were replaced since the runtime took them: make a new one{_of(loaded)}")


def _angles(loaded: LoadedModel, first_position: int, positions: int) -> tuple[Tensor, Tensor]:
    """As the model has them: rounded to its dtype."""
    model = loaded.model
    probe = torch.empty(1, device=model.device, dtype=model.lm_head.weight.dtype)
    place = torch.arange(first_position, first_position + positions, device=model.device).unsqueeze(0)
    cosines, sines = (part[0, :, : loaded.facts.head_dim // 2].float().contiguous() for part in model.model.rotary_emb(probe, place))
    return cosines, sines


def _layer(layer: Any, in_place: bool) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        projections=_joined(projections, in_place),
        projection_bias=_biases(*projections),
        query_norm=_weight(attention, "q_norm"),
        key_norm=_weight(attention, "k_norm"),
        output=attention.o_proj.weight,
        output_bias=_biases(attention.o_proj),
        post_norm=layer.post_attention_layernorm.weight,
        gate_and_up=_joined((mlp.gate_proj, mlp.up_proj), in_place),
        gate_and_up_bias=_biases(mlp.gate_proj, mlp.up_proj),
        down=mlp.down_proj.weight,
        down_bias=_biases(mlp.down_proj),
    )


def _joined(modules: Sequence[Any], in_place: bool) -> Tensor:
    """The matrices of modules below each other."""
    # Tensors made in inference mode are no weights that a model could be trained with.
    with torch.inference_mode(False), torch.no_grad():
        matrices = [module.weight.detach() for module in modules]
        first: Tensor = matrices[0]
        if _lie_joined(matrices):
            return first.as_strided((sum(len(matrix) for matrix in matrices), first.shape[1]), first.stride())
        joined = torch.cat(matrices)
        if in_place:
            ends = itertools.accumulate((len(matrix) for matrix in matrices), initial=0)
            for module, (start, stop) in zip(modules, itertools.pairwise(ends), strict=True):
                module.weight.data = joined[start:stop]
    return joined


def _lie_joined(matrices: Sequence[Tensor]) -> bool:
    """Whether matrices are consecutive rows of one piece of memory."""
    at, first = matrices[0].storage_offset(), matrices[0].untyped_storage().data_ptr()
    for matrix in matrices:
        if not matrix.is_contiguous() or matrix.untyped_storage().data_ptr() != first or matrix.storage_offset() != at:
            return False
        at += matrix.numel()
    return True


def _biases(*modules: Any) -> Tensor | None:
    biases = [module.bias for module in modules]
    return None if biases[0] is None else torch.cat(biases)


def _weight(module: Any, name: str) -> Tensor | None:
    found = getattr(module, name, None)
    return None if found is None else found.weight


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder with QK-norm, for random weights."""

    name: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int
    vocabulary: int
    rope_theta: float = 1e6

    @property
    def matrix_elements(self) -> int:
        """Elements of the matrices that a step reads."""
        rows = (2 * self.query_heads + 2 * self.kv_heads) * self.head_dim
        return self.hidden * (self.layers * (rows + 3 * self.intermediate) + self.vocabulary)

    def facts(self, device: torch.device, dtype: torch.dtype, most_positions: int) -> ModelFacts:
        """Facts as a loaded model has them; nothing here was trained."""
        from fathom_eval.models import ModelFacts

        return ModelFacts(
            name=self.name,
            model_type="qwen3",
            layers=self.layers,
            query_heads=self.query_heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            qk_norm=True,
            max_positions=most_positions,
            eos_token_ids=(),
            dtype=str(dtype).removeprefix("torch."),
            device=str(device),
            model_fingerprint=f"random weights, shape of {self.name}",
            tokenizer_fingerprint="none",
        )


SHAPES = {
    "qwen3-8b-shape": ModelShape("qwen3-8b-shape", 36, 32, 8, 128, 4096, 12288, 151936),
    "tiny-shape": ModelShape("tiny-shape", 2, 4, 2, 32, 64, 128, 256),
}
"""Shapes that random weights are made for; ``tiny-shape`` is for trying the commands out."""


def random_weights(
    shape: ModelShape, device: torch.device, dtype: torch.dtype, first_position: int, positions: int, seed: int = 0
) -> DecoderWeights:
    """Random weights on the device, scaled so that activations keep their size through the layers.

    Raises:
        UserError: The device's memory does not hold them.
    """
    generator = torch.Generator(device).manual_seed(seed)
    rows = (shape.query_heads + 2 * shape.kv_heads) * shape.head_dim

    def matrix(outputs: int, inputs: int, gain: float = 1.0) -> Tensor:
        return torch.empty(outputs, inputs, device=device, dtype=dtype).normal_(0, gain * inputs**-0.5, generator=generator)

    def ones(size: int) -> Tensor:
        return torch.ones(size, device=device, dtype=dtype)

    # Each layer adds to the residual stream; the sum of all should be no larger than the stream itself.
    gain = (2 * shape.layers) ** -0.5
    try:
        layers = [
            LayerWeights(
                input_norm=ones(shape.hidden),
                projections=matrix(rows, shape.hidden),
                projection_bias=None,
                query_norm=ones(shape.head_dim),
                key_norm=ones(shape.head_dim),
                output=matrix(shape.hidden, shape.query_heads * shape.head_dim, gain),
                output_bias=None,
                post_norm=ones(shape.hidden),
                gate_and_up=matrix(2 * shape.intermediate, shape.hidden),
                gate_and_up_bias=None,
                down=matrix(shape.hidden, shape.intermediate, gain),
                down_bias=None,
            )
            for _ in range(shape.layers)
        ]
        embedding, head = matrix(shape.vocabulary, shape.hidden, shape.hidden**0.5), matrix(shape.vocabulary, shape.hidden)
    except torch.OutOfMemoryError:
        free, total = torch.cuda.mem_get_info(device)
        raise UserError(f"random weights of {shape.name} do not fit: {free / 2**30:.0f} of {total / 2**30:.0f} GiB are free") from None
    cosines, sines = rotary_angles(shape.head_dim, shape.rope_theta, first_position, positions, device)
    return DecoderWeights(
        embedding=embedding,
        layers=layers,
        norm=ones(shape.hidden),
        head=head,
        heads=shape.kv_heads,
        group=shape.query_heads // shape.kv_heads,
        head_dim=shape.head_dim,
        epsilon=1e-6,
        scaling=shape.head_dim**-0.5,
        cosines=cosines,
        sines=sines,
        first_position=first_position,
    )


def rotary_angles(head_dim: int, theta: float, first: int, count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines fp32 ``[count, D / 2]`` of positions from ``first`` on, computed in fp64."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim)
    angles = torch.arange(first, first + count, device=device, dtype=torch.float64).unsqueeze(-1) * frequencies
    return angles.cos().float(), angles.sin().float()
