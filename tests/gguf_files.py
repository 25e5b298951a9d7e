"""A tiny GGUF file with random weights and a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import gguf
import numpy as np
import torch

from tests.tiny import tiny_model


def write_tiny_gguf(path: Path, *, value: float | None = None, end_of_turn: str | None = None, add_bos: bool = False) -> torch.Tensor:
    """Write a two-layer llama as GGUF (float32) and return its token embedding.

    Args:
        path: the file.
        value: put into the middle of the embedding, e.g. NaN.
        end_of_turn: token that ends a turn, beside the end of the text.
        add_bos: what the file says of its tokenizer.
    """
    loaded = tiny_model("llama", tie_word_embeddings=True)
    config, state = loaded.model.config, loaded.model.state_dict()
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q4_1)
    rules = json.loads(loaded.tokenizer.backend_tokenizer.to_str())["model"]
    tokens = sorted(rules["vocab"], key=rules["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if index < 2 else 1 for index in range(len(tokens))])
    writer.add_token_merges([" ".join(pair) for pair in rules["merges"]])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(add_bos)
    if end_of_turn is not None:
        writer.add_eot_token_id(tokens.index(end_of_turn))
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    embedding = state["model.embed_tokens.weight"]
    if value is not None:
        embedding[7, 3] = value
    for name, tensor in state.items():
        if name != "lm_head.weight":
            writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), np.ascontiguousarray(tensor.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return embedding
