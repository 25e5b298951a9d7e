"""Which models are supported, and the shape of their attention.

Supported are models whose every layer attends causally to all earlier tokens through the attention interface of transformers: no sliding
or chunked window, no score cap, no learned attention sink, no latent (MLA) or linear attention. Anything else is refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fathom_eval import compat
from fathom_eval.errors import UserError

_QK_NORMS = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"), ("query_layernorm", "key_layernorm"))


@dataclass(frozen=True)
class AttentionFacts:
    """Shape of a supported model's attention; see :class:`ModelFacts`."""

    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    max_positions: int


def attention_facts_or_error(config: Any) -> AttentionFacts:
    """Shape of the attention that a transformers configuration describes.

    Raises:
        UserError: some layer is not full causal attention; the message names it.
    """
    text = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise _refusal(config, "it is an encoder-decoder model")
    layers, query_heads = getattr(text, "num_hidden_layers", None), getattr(text, "num_attention_heads", None)
    if not isinstance(layers, int) or not isinstance(query_heads, int):
        raise _refusal(text, "the configuration states no layers and attention heads")
    kv_heads = getattr(text, "num_key_value_heads", None) or query_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // query_heads
    max_positions = position_limit(text)
    if problem := _unsupported(text, max_positions):
        raise _refusal(text, f"{problem}; every layer must be full causal attention")
    if query_heads % kv_heads:
        raise _refusal(text, f"{query_heads} query heads cannot share {kv_heads} KV heads evenly")
    return AttentionFacts(layers, query_heads, kv_heads, head_dim, max_positions)


def position_limit(text: Any) -> int:
    """Tokens that a text configuration allows, after rope scaling. Raises UserError if it states none."""
    positions = getattr(text, "max_position_embeddings", None)
    if not isinstance(positions, int) or positions < 1:
        raise _refusal(text, "the configuration states no max_position_embeddings")
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "yarn" and rope.get("factor") and rope.get("original_max_position_embeddings"):
        # Some checkpoints turn YaRN on and leave the unscaled limit in place.
        positions = max(positions, int(rope["factor"] * rope["original_max_position_embeddings"]))
    return positions


def _unsupported(text: Any, max_positions: int) -> str | None:
    """What in the configuration is no full causal attention, in words; None if nothing is."""
    if getattr(text, "kv_lora_rank", None):
        return "it has multi-head latent attention (kv_lora_rank)"
    window = getattr(text, "sliding_window", None)
    # A window that no sequence outgrows changes nothing.
    harmless = {"full_attention", "attention"} | ({"sliding_attention"} if window and window >= max_positions else set())
    layer_types = getattr(text, "layer_types", None)
    for index, layer_type in enumerate(layer_types or ()):
        if layer_type not in harmless:
            return f"layer {index} is '{layer_type}'"
    if not layer_types and window and window < max_positions:
        return f"its layers are 'sliding_attention' (window {window})"
    for field in ("attn_logit_softcapping", "attention_logit_cap", "attn_logit_cap"):
        if getattr(text, field, None):
            return f"its attention scores are capped ({field})"
    if getattr(text, "alibi", False):
        return "it adds position biases to the scores (ALiBi)"
    if getattr(text, "num_kv_shared_layers", 0):
        return "some of its layers share their keys and values (num_kv_shared_layers)"
    return None


def check_model(model: Any, attention: AttentionFacts) -> None:
    """See on the model itself what its configuration claims; two tokens run through it.

    Raises:
        UserError: a layer has learned sinks or is not causal, the model goes round the attention interface, two tokens do not leave keys
            and values of the stated shape in every layer, or the logits are not finite.
    """
    text = model.config.get_text_config(decoder=True)
    for module in _attention_modules(model):
        if getattr(module, "sinks", None) is not None:
            raise _refusal(text, f"layer {module.layer_idx} has learned attention sinks")
        if not module.is_causal:
            raise _refusal(text, f"layer {module.layer_idx} is not causal")
    if not _takes_attention_interface(model):
        raise _refusal(text, "its layers do not use the attention interface of transformers")
    shapes, finite = _probe(model)
    if len(shapes) != attention.layers:
        raise _refusal(text, f"{len(shapes)} of {attention.layers} layers keep keys and values")
    expected = (1, attention.kv_heads, 2, attention.head_dim)
    for index, (keys, values) in enumerate(shapes):
        if keys != expected or values != expected:
            raise _refusal(text, f"layer {index} keeps keys {keys} and values {values} of two tokens, expected {expected}")
    if not finite:
        raise UserError("the model gives outputs that are not finite: its weights are damaged, or the dtype is too narrow for them")


def has_qk_norm(model: Any) -> bool:
    """Whether the model normalises queries and keys before the rotary embedding."""
    return any(
        getattr(module, query, None) is not None and getattr(module, key, None) is not None
        for module in _attention_modules(model)
        for query, key in _QK_NORMS
    )


def layer_devices(model: Any) -> tuple[str, ...]:
    """The device of every layer's attention, in their order; empty where all are on that of the embedding."""
    modules = sorted(_attention_modules(model), key=lambda module: int(module.layer_idx))
    found = tuple(str(next(module.parameters()).device) for module in modules)
    return found if {*found} - {str(next(model.parameters()).device)} else ()


def _refusal(text: Any, problem: str) -> UserError:
    return UserError(f"models of type '{text.model_type}' are not supported here: {problem}")


def _attention_modules(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "layer_idx") and hasattr(module, "is_causal")]


def _takes_attention_interface(model: Any) -> bool:
    """Whether the model can be switched to another attention implementation; it is switched back."""
    before = model.config._attn_implementation
    other = "sdpa" if before == "eager" else "eager"
    with compat.quiet_transformers():
        model.set_attn_implementation(other)
        switched = bool(model.config._attn_implementation == other)
        model.set_attn_implementation(before)
    return switched


def _probe(model: Any) -> tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], bool]:
    """Shapes of the keys and values that two tokens leave in each layer, and whether the logits are finite."""
    import torch
    from transformers import DynamicCache

    cache: Any = DynamicCache()
    with torch.inference_mode():
        tokens = torch.zeros((1, 2), dtype=torch.long, device=next(model.parameters()).device)
        logits = model(tokens, use_cache=True, **{compat.cache_argument(model): cache}).logits
    kept = [layer for layer in cache.layers if getattr(layer, "keys", None) is not None]
    return [(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in kept], bool(torch.isfinite(logits).all())
