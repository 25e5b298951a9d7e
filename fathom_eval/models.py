"""Load a causal language model, and say what the evaluator and the methods may know of it.

Which models are supported stands in :mod:`fathom_eval.model_support`, what a model may be called in :mod:`fathom_eval.checkpoints`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fathom_eval import compat
from fathom_eval.checkpoints import Checkpoint, open_checkpoint
from fathom_eval.devices import SEVERAL, resolve_devices
from fathom_eval.errors import UserError, did_you_mean
from fathom_eval.fingerprints import fingerprint_model, fingerprint_tokenizer
from fathom_eval.gguf_models import one_line
from fathom_eval.model_support import attention_facts_or_error, check_model, has_qk_norm, layer_devices, position_limit

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "LoadedModel", "ModelFacts", "attention_facts_or_error", "describe_model", "load_model"]

DTYPES = ("auto", "float32", "bfloat16", "float16")
_PROBE_TEXT = "The answer is 7351942."


@dataclass(frozen=True)
class ModelFacts:
    """What the evaluator and the methods may know of a model.

    Attributes:
        name: what the user called the model.
        model_type: architecture, as transformers names it.
        layers: number of layers, each with attention.
        query_heads: query heads a layer.
        kv_heads: key/value heads a layer; query head ``h`` reads KV head ``h // group``.
        head_dim: channels of a head.
        qk_norm: whether queries and keys are normalised before the rotary embedding.
        max_positions: tokens of prompt and generation that the model takes, after rope scaling.
        eos_token_ids: every id that ends a generation: of the generation config, the config and the tokenizer. Sorted.
        dtype: of the weights, e.g. ``float32``.
        device: e.g. ``cpu`` or ``cuda:0``.
        model_fingerprint: see :func:`fingerprint_model`.
        tokenizer_fingerprint: see :func:`fingerprint_tokenizer`.
        layer_devices: of every layer, where the model is spread over several devices; ``device`` is then where tokens go in.
    """

    name: str
    model_type: str
    layers: int
    query_heads: int
    kv_heads: int
    head_dim: int
    qk_norm: bool
    max_positions: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    device: str
    model_fingerprint: str
    tokenizer_fingerprint: str
    layer_devices: tuple[str, ...] = ()

    @property
    def devices(self) -> dict[str, float]:
        """The devices and what share of the layers each has."""
        found = dict.fromkeys((self.device, *self.layer_devices), 0.0)
        for device in self.layer_devices or (self.device,):
            found[device] += 1 / max(len(self.layer_devices), 1)
        return found

    @property
    def place(self) -> str:
        """The devices in one word, as ``--device`` takes them."""
        return SEVERAL.join(self.devices)

    @property
    def group(self) -> int:
        """Query heads that share one KV head."""
        return self.query_heads // self.kv_heads


@dataclass(frozen=True)
class LoadedModel:
    """A transformers causal language model in evaluation mode, its tokenizer, and the facts about both."""

    model: Any
    tokenizer: Any
    facts: ModelFacts


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def load_model(
    spec: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    offline: bool = False,
    revision: str | None = None,
    trust_remote_code: bool = False,
    rope_scaling: str | None = None,
    say: Callable[[str], None] = _say,
) -> LoadedModel:
    """Load a model and check that it is supported; what is wrong is found before weights are read where possible.

    Args:
        spec: bundled name (``smollm2``), local folder, GGUF file or hub id.
        dtype: one of :data:`DTYPES`; ``auto`` is float32 on a CPU and the checkpoint's own on a GPU.
        device: ``auto`` (a GPU if there is one), ``cpu``, ``cuda`` or ``cuda:N``; ``cuda:N+cuda:M`` spreads the layers evenly over these
            GPUs, ``cuda:all`` over all.
        offline: never touch the network.
        revision: branch, tag or commit of a hub model.
        trust_remote_code: run model code that comes with the checkpoint.
        rope_scaling: ``yarn:FACTOR`` lengthens the context by the factor (YaRN, Peng et al. 2023), else the checkpoint's own.
        say: takes one line of progress.

    Raises:
        UserError: unknown model, unusable files or tokenizer, unsupported attention, unknown dtype or device, no memory.
    """
    compat.require_transformers()
    places = resolve_devices(device)
    check_dtype(dtype)
    factor = None if rope_scaling is None else parse_rope_scaling(rope_scaling)
    with (
        open_checkpoint(spec, say=say, offline=offline, revision=revision, trust_remote_code=trust_remote_code) as checkpoint,
        compat.quiet_transformers(),
    ):
        config = _config(checkpoint, trust_remote_code)
        if factor is not None:
            apply_yarn(config, factor)
        attention_facts_or_error(config)
        tokenizer = _tokenizer(checkpoint, config, trust_remote_code)
        model = _weights(checkpoint, config, _torch_dtype(dtype, places[0], config), places, trust_remote_code)
        return describe_model(model, tokenizer, checkpoint.name)


def describe_model(model: Any, tokenizer: Any, name: str) -> LoadedModel:
    """Check a model that is in memory already and put the facts about it together.

    Runs two tokens through the model, so that what the configuration claims (heads, layers, cache) is seen and not believed.

    Raises:
        UserError: its attention is not supported, or its outputs are not finite.
    """
    attention = attention_facts_or_error(model.config)
    check_model(model, attention)
    parameter = next(model.parameters())
    facts = ModelFacts(
        name=name,
        model_type=model.config.get_text_config(decoder=True).model_type,
        layers=attention.layers,
        query_heads=attention.query_heads,
        kv_heads=attention.kv_heads,
        head_dim=attention.head_dim,
        qk_norm=has_qk_norm(model),
        max_positions=attention.max_positions,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        dtype=str(parameter.dtype).removeprefix("torch."),
        device=str(parameter.device),
        model_fingerprint=fingerprint_model(model),
        tokenizer_fingerprint=fingerprint_tokenizer(tokenizer),
        layer_devices=layer_devices(model),
    )
    return LoadedModel(model, tokenizer, facts)


def _eos_token_ids(model: Any, tokenizer: Any) -> tuple[int, ...]:
    found: set[int] = set()
    text = model.config.get_text_config(decoder=True)
    for source in (getattr(model, "generation_config", None), model.config, text, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update(ids if isinstance(ids, (list, tuple)) else [] if ids is None else [ids])
    return tuple(sorted(found))


def check_dtype(dtype: str) -> None:
    """Raise UserError unless it is one of :data:`DTYPES`."""
    if dtype not in DTYPES:
        raise UserError(f"unknown dtype '{dtype}'; {did_you_mean(dtype, DTYPES)}")


def parse_rope_scaling(text: str) -> float:
    """The factor of ``yarn:FACTOR``. Raises UserError for anything else."""
    kind, _, number = text.partition(":")
    if kind != "yarn":
        raise UserError(f"unknown rope scaling '{text}'; the form is yarn:FACTOR, e.g. yarn:4")
    try:
        factor = float(number)
    except ValueError:
        factor = 0.0
    if not 1 < factor <= 1024:
        raise UserError(f"the factor of rope scaling '{text}' must be a number above 1, e.g. yarn:4")
    return factor


def apply_yarn(config: Any, factor: float) -> None:
    """Set YaRN scaling in a configuration whose rotary embedding is not scaled yet; its position limit grows by the factor.

    Raises UserError if the model has no plain rotary embedding.
    """
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None)
    if not rope or "rope_theta" not in rope:
        raise UserError(f"models of type '{text.model_type}' take no rope scaling: they have no single rotary embedding")
    if rope.get("rope_type", "default") != "default":
        raise UserError(f"the model's rotary embedding is scaled already ({rope['rope_type']}): leave the rope scaling out")
    original = position_limit(text)
    text.rope_parameters = {**rope, "rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    text.max_position_embeddings = int(original * factor)


def _torch_dtype(dtype: str, device: torch.device, config: Any) -> torch.dtype:
    import torch

    if dtype != "auto":
        return getattr(torch, dtype)  # type: ignore[no-any-return]
    own = getattr(config, "dtype", None) or getattr(config.get_text_config(decoder=True), "dtype", None)
    return own if device.type == "cuda" and isinstance(own, torch.dtype) else torch.float32


def _config(checkpoint: Checkpoint, trust_remote_code: bool) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code, local_files_only=True)
    # A damaged file, an unknown architecture or code that is not trusted: transformers has a type of error for each.
    except Exception as error:
        raise UserError(f"the model '{checkpoint.name}' has no usable configuration: {one_line(error)}") from None


def _tokenizer(checkpoint: Checkpoint, config: Any, trust_remote_code: bool) -> Any:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(checkpoint.folder, trust_remote_code=trust_remote_code, local_files_only=True)
        problem = _tokenizer_problem(tokenizer, config.get_text_config(decoder=True).vocab_size)
    # From missing files to broken JSON, each tokenizer class fails in its own way.
    except Exception as error:
        problem = one_line(error)
    if problem:
        raise UserError(f"the model at {_place(checkpoint)} has no usable tokenizer: {problem}")
    return tokenizer


def _place(checkpoint: Checkpoint) -> str:
    return checkpoint.name if "/" in checkpoint.name else str(checkpoint.folder)


def _tokenizer_problem(tokenizer: Any, vocabulary: int) -> str | None:
    ids = tokenizer.encode(_PROBE_TEXT, add_special_tokens=False)
    back = tokenizer.decode(ids, skip_special_tokens=True)
    if "".join(back.split()) != "".join(_PROBE_TEXT.split()):
        return f"'{_PROBE_TEXT}' comes back as '{back}'"
    if max(ids) >= vocabulary:
        return f"it gives token {max(ids)}, the model has {vocabulary}"
    return None


def _weights(checkpoint: Checkpoint, config: Any, dtype: torch.dtype, devices: list[torch.device], trust_remote_code: bool) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    auto_model: Any = AutoModelForCausalLM
    names = ", ".join(map(str, devices))
    try:
        model, info = auto_model.from_pretrained(
            checkpoint.folder,
            config=config,
            dtype=dtype,
            attn_implementation="sdpa",
            use_safetensors=True,
            trust_remote_code=trust_remote_code,
            local_files_only=True,
            output_loading_info=True,
            **_spread(devices),
        )
        if info["missing_keys"]:
            raise UserError(f"the model '{checkpoint.name}' lacks weights: {', '.join(sorted(info['missing_keys'])[:3])}")
        if len(devices) == 1:
            model = model.to(devices[0])
        elif elsewhere := {"cpu", "disk"} & {str(place) for place in model.hf_device_map.values()}:
            raise UserError(f"the model '{checkpoint.name}' in {dtype} does not fit on {names}: a part went to {elsewhere.pop()}")
        return model.eval().requires_grad_(False)
    except UserError:
        raise
    except torch.OutOfMemoryError:
        free, total = (sum(sizes) / 2**30 for sizes in zip(*map(torch.cuda.mem_get_info, devices), strict=True))
        raise UserError(
            f"the model '{checkpoint.name}' in {dtype} does not fit on {names}: {free:.0f} of {total:.0f} GiB are free"
        ) from None
    # Truncated safetensors, wrong shapes, an architecture without sdpa or without a causal head: no common type of error.
    except Exception as error:
        raise UserError(f"the weights of '{checkpoint.name}' cannot be loaded: {one_line(error)}") from None


def _spread(devices: list[torch.device]) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that spread whole layers over several GPUs, in their order; none for one device."""
    import torch

    if len(devices) == 1:
        return {}
    return {"device_map": "balanced", "max_memory": {device.index: torch.cuda.mem_get_info(device)[0] for device in devices}}
