"""Short hashes that identify a model and a tokenizer by their content."""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# What a configuration says about where it was made, not about what it computes.
_NOT_IDENTITY = frozenset({"transformers_version", "dtype", "torch_dtype", "architectures", "use_cache", "initializer_range"})
_SAMPLE_RUNS = 16
_SAMPLE_LENGTH = 64


def fingerprint_model(model: Any) -> str:
    """Short hash (16 hex digits) of what the model computes.

    It covers the configuration (without what only tells where it was made), the name and shape of every tensor, and 16 evenly spaced
    runs of 64 values of each tensor as float32, its ends among them. So it is the same for any packaging of the same weights (shards,
    folder, hub), for every device, and for any dtype that holds the values exactly; it differs for another fine-tune of the same shape
    and for another rope scaling. A change of single weights between the samples goes unseen.
    """
    import torch

    digest = hashlib.sha256(_stable_json(_identity(model.config.to_dict())))
    state = model.state_dict()
    samples = []
    for name in sorted(state):
        tensor = state[name].detach()
        digest.update(f"{name} {tuple(tensor.shape)}\n".encode())
        samples.append(_sample(tensor.reshape(-1)).float())
    digest.update(torch.cat([sample.cpu() for sample in samples]).numpy().tobytes())
    return digest.hexdigest()[:16]


def _sample(values: torch.Tensor) -> torch.Tensor:
    """Evenly spaced runs of a flat tensor, or all of a short one. Scattered values would touch every page of a mapped file."""
    import torch

    count = values.numel()
    if count <= _SAMPLE_RUNS * _SAMPLE_LENGTH:
        return values
    starts = [run * (count - _SAMPLE_LENGTH) // (_SAMPLE_RUNS - 1) for run in range(_SAMPLE_RUNS)]
    return torch.cat([values[start : start + _SAMPLE_LENGTH] for start in starts])


def _identity(value: Any) -> Any:
    """The configuration's dictionary, at any depth, without nulls, private fields and what tells only where it was made."""
    if not isinstance(value, dict):
        return value
    kept = {str(key): item for key, item in value.items() if item is not None and key not in _NOT_IDENTITY}
    return {key: _identity(item) for key, item in kept.items() if not key.startswith("_")}


def _stable_json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()


def fingerprint_tokenizer(tokenizer: Any) -> str:
    """Short hash (16 hex digits) of the tokenizer: vocabulary and all steps of the encoding, special tokens and chat template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        rules = json.loads(backend.to_str())
        # State of the last call, not part of the tokenizer.
        rules.pop("padding", None)
        rules.pop("truncation", None)
    else:
        rules = {"class": type(tokenizer).__name__, "vocabulary": tokenizer.get_vocab()}
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    return hashlib.sha256(_stable_json([rules, special, tokenizer.chat_template])).hexdigest()[:16]
