"""Tiny random models with a real tokenizer, made in code: no file, no network, a few milliseconds."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from fathom_eval.compat import quiet_transformers
from fathom_eval.models import LoadedModel, describe_model

BOS, EOS = "<s>", "</s>"
# Prose without digits, so that a number stays one token a digit.
_SENTENCES = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.",
    "One of the special magic numbers for the old harbour is hidden in the long text that follows.",
    "What is the special magic number mentioned in the provided text? Read it once and answer with the number.",
    "She walked along the river, counted the boats, and wrote the names of all of them into a small grey book.",
)


@functools.cache
def _backend() -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=[BOS, EOS], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    tokenizer.train_from_iterator(_SENTENCES, trainer)
    return tokenizer.to_str()


def tiny_tokenizer(*, add_bos: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: any text comes back as it was. ``<s>`` (id 0) leads every text unless ``add_bos`` is false."""
    backend = Tokenizer.from_str(_backend())
    if add_bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, backend.token_to_id(BOS))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, clean_up_tokenization_spaces=False)


def tiny_config(
    family: str = "llama",
    *,
    layers: int = 2,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab: int | None = None,
    max_positions: int = 4096,
    **options: Any,
) -> Any:
    """Configuration of a tiny model of any transformers family (``llama``, ``qwen2``, ``qwen3``, …); ``options`` go into it as they are."""
    tokenizer = tiny_tokenizer()
    settings: dict[str, Any] = {
        "num_hidden_layers": layers,
        "num_attention_heads": query_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_size": query_heads * head_dim,
        "intermediate_size": 2 * query_heads * head_dim,
        "vocab_size": len(tokenizer) if vocab is None else vocab,
        "max_position_embeddings": max_positions,
        # Wide enough for attention that prefers some tokens: at the usual 0.02 every score is about the same.
        "initializer_range": 0.2,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "tie_word_embeddings": False,
    }
    return AutoConfig.for_model(family, **{**settings, **options})


def tiny_model(
    family: str = "llama",
    layers: int = 2,
    query_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    vocab: int | None = None,
    max_positions: int = 4096,
    seed: int = 0,
    *,
    add_bos: bool = True,
    attention: str = "eager",
    **options: Any,
) -> LoadedModel:
    """A model with random float32 weights on the CPU, its tokenizer and facts. The same arguments give the same weights.

    ``vocab`` is the size of the tokenizer unless given. The caller's random state is left as it was.
    """
    config = tiny_config(
        family,
        layers=layers,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab=vocab,
        max_positions=max_positions,
        **options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            # transformers starts biases at 0 and norms at 1, where a test could not tell whether they are applied.
            if parameter.ndim == 1:
                torch.nn.init.uniform_(parameter, *((-0.5, 0.5) if name.endswith("bias") else (0.5, 1.5)))
    return describe_model(model.eval().requires_grad_(False), tiny_tokenizer(add_bos=add_bos), f"tiny-{family}")


def save_tiny(folder: Path, family: str = "llama", **options: Any) -> Path:
    """Write a complete local model folder (config, safetensors, tokenizer) and return it; ``options`` as in :func:`tiny_model`.

    transformers splits the text of any qwen2 folder by the rules of that family, so its token ids may differ from the tokenizer's here.
    """
    loaded = tiny_model(family, **options)
    with quiet_transformers():
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)
    return folder


def token_ids(loaded: LoadedModel, count: int) -> list[int]:
    """Random tokens of a model's vocabulary; the same for the same count."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(2, len(loaded.tokenizer), (count,), generator=generator).tolist()
