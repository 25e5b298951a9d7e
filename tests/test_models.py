"""Loading models: what is accepted, what is refused and how, and the facts about a loaded model."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from fathom_eval import cli
from fathom_eval.compat import cache_argument, quiet_transformers, version_numbers
from fathom_eval.errors import UserError
from fathom_eval.models import LoadedModel, _torch_dtype, attention_facts_or_error, describe_model, load_model
from tests.tiny import save_tiny, tiny_config, tiny_model, tiny_tokenizer


@pytest.fixture(autouse=True)
def _own_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    if "smollm2" not in request.fixturenames:
        monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete model folder; tests that change it copy it first."""
    return save_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    target = tmp_path / "copy"
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    return target


def edit_config(folder: Path, **values: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.mark.parametrize(("family", "qk_norm"), [("llama", False), ("qwen2", False), ("qwen3", True)])
def test_facts_of_a_local_folder(tmp_path: Path, family: str, qk_norm: bool) -> None:
    original = tiny_model(family, layers=3, query_heads=6, kv_heads=2, head_dim=8, max_positions=512)
    path = save_tiny(tmp_path / "model", family, layers=3, query_heads=6, kv_heads=2, head_dim=8, max_positions=512)
    loaded = load_model(str(path))
    facts = loaded.facts
    assert (facts.name, facts.model_type, facts.layers, facts.query_heads, facts.kv_heads) == ("model", family, 3, 6, 2)
    assert (facts.head_dim, facts.group, facts.max_positions, facts.qk_norm) == (8, 3, 512, qk_norm)
    assert (facts.dtype, facts.device) == ("float32", "cpu")
    assert facts.model_fingerprint == original.facts.model_fingerprint
    # transformers gives every qwen2 folder the steps of its own tokenizer.
    assert family == "qwen2" or facts.tokenizer_fingerprint == original.facts.tokenizer_fingerprint
    assert loaded.model.config._attn_implementation == "sdpa"
    assert not loaded.model.training
    assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
    tokens = torch.tensor([[0, 5, 6, 7]])
    with torch.inference_mode():
        assert torch.allclose(loaded.model(tokens).logits, original.model(tokens).logits, atol=1e-4)


def test_every_eos_id_is_found(copy: Path) -> None:
    path = copy / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [7, 9]}))
    edit_config(copy, eos_token_id=11)
    assert load_model(str(copy)).facts.eos_token_ids == (1, 7, 9, 11)


def test_dtype_auto_is_float32_on_a_cpu(copy: Path) -> None:
    weights = {name: tensor.bfloat16() for name, tensor in load_file(copy / "model.safetensors").items()}
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    edit_config(copy, dtype="bfloat16")
    automatic, own = load_model(str(copy)), load_model(str(copy), dtype="bfloat16")
    assert (automatic.facts.dtype, own.facts.dtype) == ("float32", "bfloat16")
    # bfloat16 weights are the same numbers in float32.
    assert automatic.facts.model_fingerprint == own.facts.model_fingerprint


@pytest.mark.parametrize(
    ("asked", "device", "own", "expected"),
    [
        ("auto", "cuda:0", torch.bfloat16, torch.bfloat16),
        ("auto", "cuda:0", None, torch.float32),
        ("auto", "cpu", torch.bfloat16, torch.float32),
        ("float16", "cuda:0", torch.bfloat16, torch.float16),
    ],
)
def test_which_dtype_is_loaded(asked: str, device: str, own: torch.dtype | None, expected: torch.dtype) -> None:
    assert _torch_dtype(asked, torch.device(device), tiny_config(dtype=own)) == expected


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (lambda: tiny_config("qwen2", use_sliding_window=True, sliding_window=64, max_window_layers=1), "layer 1 is 'sliding_attention'"),
        (lambda: tiny_config("mistral", sliding_window=64), "'sliding_attention' (window 64)"),
        (lambda: tiny_config("gemma2", max_positions=8192), "layer 0 is 'sliding_attention'"),
        (lambda: tiny_config("gemma2", layer_types=["full_attention"] * 2), "attn_logit_softcapping"),
        (lambda: tiny_config("gpt_oss"), "layer 0 is 'sliding_attention'"),
        (lambda: tiny_config("llama", layer_types=["full_attention", "linear_attention"]), "layer 1 is 'linear_attention'"),
        (lambda: AutoConfig.for_model("deepseek_v3"), "multi-head latent attention"),
        (lambda: AutoConfig.for_model("falcon", alibi=True), "ALiBi"),
        (lambda: AutoConfig.for_model("t5"), "encoder-decoder"),
        (lambda: AutoConfig.for_model("mamba"), "states no layers and attention heads"),
        (lambda: tiny_config("llama", query_heads=4, kv_heads=3, hidden_size=64), "cannot share 3 KV heads"),
    ],
)
def test_unsupported_attention_is_named(config: Any, words: str) -> None:
    made = config()
    with pytest.raises(UserError) as caught:
        attention_facts_or_error(made)
    assert words in str(caught.value)
    assert f"'{made.model_type}'" in str(caught.value)


def test_a_window_that_no_sequence_outgrows_is_full_attention() -> None:
    assert attention_facts_or_error(tiny_config("mistral", sliding_window=4096, max_positions=4096)).max_positions == 4096


@pytest.mark.parametrize(
    ("family", "options", "words"),
    [
        ("gpt_oss", {"layer_types": ["full_attention"] * 2, "num_local_experts": 2, "num_experts_per_tok": 1}, "learned attention sinks"),
        ("bloom", {"n_layer": 2, "n_head": 4, "seq_length": 64}, "attention interface"),
    ],
)
def test_what_only_the_model_shows_is_refused(family: str, options: dict[str, Any], words: str) -> None:
    if family == "bloom":
        config = AutoConfig.for_model(family, hidden_size=64, vocab_size=400, max_position_embeddings=64, **options)
    else:
        config = tiny_config(family, **options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with pytest.raises(UserError, match=words):
        describe_model(model.eval(), tiny_tokenizer(), family)


def test_keys_of_another_shape_than_the_configuration_says_are_refused() -> None:
    model = tiny_model("llama").model
    model.config.num_key_value_heads = 4
    with pytest.raises(UserError, match=r"layer 0 keeps keys \(1, 2, 2, 16\)"):
        describe_model(model, tiny_tokenizer(), "changed")


def test_yarn_lengthens_the_context(folder: Path) -> None:
    plain, scaled = load_model(str(folder)), load_model(str(folder), rope_scaling="yarn:4")
    assert (plain.facts.max_positions, scaled.facts.max_positions) == (4096, 16384)
    assert plain.facts.model_fingerprint != scaled.facts.model_fingerprint
    rotary = scaled.model.model.rotary_emb
    config = tiny_config(
        rope_parameters={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0},
        max_positions=16384,
    )
    expected, factor = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    assert torch.allclose(rotary.inv_freq, expected)
    assert rotary.attention_scaling == pytest.approx(factor)
    assert not torch.allclose(rotary.inv_freq, plain.model.model.rotary_emb.inv_freq)


def test_yarn_in_the_checkpoint_counts_and_is_not_scaled_again(copy: Path) -> None:
    rope = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 4096, "rope_theta": 10000.0}
    edit_config(copy, rope_parameters=rope)
    assert load_model(str(copy)).facts.max_positions == 8192
    with pytest.raises(UserError, match="scaled already"):
        load_model(str(copy), rope_scaling="yarn:4")


@pytest.mark.parametrize("text", ["linear:2", "yarn", "yarn:", "yarn:x", "yarn:0.5", "yarn:nan", "4"])
def test_rope_scaling_of_another_form_is_refused(folder: Path, text: str) -> None:
    with pytest.raises(UserError, match="yarn:4"):
        load_model(str(folder), rope_scaling=text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"dtype": "float33"}, "did you mean 'float32'"),
        ({"device": "tpu"}, "unknown device 'tpu'"),
        ({"device": "cpu:1"}, "unknown device"),
        ({"device": "cuda:99"}, "is not available"),
        ({"revision": "main"}, "revision is for hub models"),
    ],
)
def test_bad_settings(folder: Path, arguments: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        load_model(str(folder), **arguments)


def test_a_name_that_is_nothing_says_what_was_tried(tmp_path: Path, folder: Path) -> None:
    cases = {
        "smolm2": "did you mean 'smollm2'",
        "SmolLM2": "did you mean 'smollm2'",
        "": "empty",
        "./nothing/here": "no model folder or file",
        "a/b/c": "no model folder or file",
        str(folder.with_name("tinny")): "did you mean",
        "missing.gguf": "no model folder or file",
        "x" * 5000: "cannot be a model",
        "nobody/nothing": "no bundled model (smollm2), no local folder or file; the model hub is not asked (offline), and what was fetched",
        "qwen3-8b-shape": "'qwen3-8b-shape' is no model but a shape for random weights, which only 'fathom-eval bench step' takes",
        "nobody/tiny-shape": "the model hub is not asked",
        "qwen3-8b-shap": "did you mean 'qwen3-8b-shape'?",
        "tiny-shap": "unknown model 'tiny-shap'; did you mean 'tiny-shape'?",
    }
    for spec, words in cases.items():
        start = time.perf_counter()
        with pytest.raises(UserError) as caught:
            load_model(spec, offline=True)
        assert words in str(caught.value)
        assert "\n" not in str(caught.value)
        assert time.perf_counter() - start < 5
    text_file = tmp_path / "notes.txt"
    text_file.write_text("hello")
    with pytest.raises(UserError, match="no GGUF file"):
        load_model(str(text_file))


def test_a_cached_hub_model_loads_without_a_network(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    repository, commit = tmp_path / "hub" / "models--someone--tiny", "0123456789abcdef0123456789abcdef01234567"
    shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for revision in (None, "main", commit):
        facts = load_model("someone/tiny", offline=True, revision=revision).facts
        assert (facts.name, facts.model_fingerprint) == ("someone/tiny", tiny_model().facts.model_fingerprint)
    with pytest.raises(UserError, match="revision 'v2' of it"):
        load_model("someone/tiny", offline=True, revision="v2")
    (repository / "snapshots" / commit / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"someone/tiny is incomplete: model\.safetensors is missing"):
        load_model("someone/tiny", offline=True)


def _remove_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    del weights["model.layers.1.self_attn.k_proj.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _spoil_weight(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _truncate(folder: Path) -> None:
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[: len(content) // 2])


def _only_pickle(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def _missing_shard(folder: Path) -> None:
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")


def _adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


def _no_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def _broken_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text('{"model": ')


def _small_vocabulary(folder: Path) -> None:
    edit_config(folder, vocab_size=20)


def _no_config(folder: Path) -> None:
    (folder / "config.json").unlink()


def _broken_config(folder: Path) -> None:
    (folder / "config.json").write_text("{")


def _unknown_type(folder: Path) -> None:
    edit_config(folder, model_type="no_such_model")


def _other_shape(folder: Path) -> None:
    edit_config(folder, intermediate_size=48)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_remove_weight, "lacks weights: model.layers.1.self_attn.k_proj.weight"),
        (_spoil_weight, "not finite"),
        (_truncate, "cannot be loaded"),
        (_only_pickle, "pickled weights are never loaded"),
        (_missing_shard, "model-00002-of-00002.safetensors is missing"),
        (_adapter, "is an adapter"),
        (_no_tokenizer, "no usable tokenizer"),
        (_broken_tokenizer, "no usable tokenizer"),
        (_small_vocabulary, "no usable tokenizer: it gives token"),
        (_no_config, "has no config.json"),
        (_broken_config, "no usable configuration"),
        (_unknown_type, "no usable configuration"),
        (_other_shape, "cannot be loaded"),
    ],
)
def test_a_damaged_folder_is_one_clear_line(copy: Path, damage: Any, words: str) -> None:
    damage(copy)
    with pytest.raises(UserError) as caught:
        load_model(str(copy))
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_fingerprint_tells_weights_and_not_packaging(folder: Path, tmp_path: Path) -> None:
    one = tiny_model("llama", seed=0)
    assert one.facts.model_fingerprint != tiny_model("llama", seed=1).facts.model_fingerprint
    assert one.facts.model_fingerprint != tiny_model("llama", max_positions=8192).facts.model_fingerprint
    with quiet_transformers():
        one.model.save_pretrained(tmp_path / "shards", max_shard_size="50KB")
        one.tokenizer.save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    assert load_model(str(tmp_path / "shards")).facts.model_fingerprint == one.facts.model_fingerprint
    changed = tiny_model("llama", seed=0)
    changed.model.lm_head.weight.data[-1, -1] += 1
    assert describe_model(changed.model, changed.tokenizer, "x").facts.model_fingerprint != one.facts.model_fingerprint


def test_the_tokenizer_fingerprint_tells_the_encoding() -> None:
    one = tiny_model("llama")
    assert one.facts.tokenizer_fingerprint != tiny_model("llama", add_bos=False).facts.tokenizer_fingerprint
    one.tokenizer("some text", truncation=True, max_length=3)
    assert describe_model(one.model, one.tokenizer, "x").facts.tokenizer_fingerprint == one.facts.tokenizer_fingerprint


def test_the_cache_argument_is_read_from_the_signature() -> None:
    class Old:
        def forward(self, input_ids: Any, past_key_values: Any = None) -> None: ...

    class New:
        def forward(self, input_ids: Any, cache: Any = None) -> None: ...

    assert cache_argument(Old()) == "past_key_values"
    assert cache_argument(New()) == "cache"


def test_versions_compare_as_numbers() -> None:
    assert version_numbers("5.24.0.dev0") == (5, 24, 0)
    assert version_numbers("2.13.0+cpu") == (2, 13, 0)
    assert version_numbers("5.10") > version_numbers("5.8.1")


@pytest.mark.model
def test_the_bundled_model(smollm2: LoadedModel) -> None:
    facts = smollm2.facts
    assert (facts.model_type, facts.layers, facts.query_heads, facts.kv_heads, facts.head_dim) == ("llama", 30, 9, 3, 64)
    assert (facts.qk_norm, facts.max_positions, facts.eos_token_ids) == (False, 8192, (2,))
    # One token a digit, and no token before the text.
    assert len(smollm2.tokenizer("7351942").input_ids) == 7
    tokens = smollm2.tokenizer("The capital of France is", return_tensors="pt")
    answer = smollm2.model.generate(**tokens, max_new_tokens=2, do_sample=False)
    assert smollm2.tokenizer.decode(answer[0]).startswith("The capital of France is Paris")


@pytest.mark.parametrize("command", ["ruler", "fidelity"])
def test_a_model_that_is_nowhere_is_refused_before_a_text_is_loaded(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_text(*args: object, **options: object) -> None:
        raise AssertionError("a text was loaded")

    monkeypatch.setattr("fathom_eval.tasks.haystack.load_haystack", no_text)
    assert cli.main([command, f"--model={tmp_path / 'absent.gguf'}", f"--output={tmp_path / 'run'}"]) == 2
    assert f"there is no model folder or file '{tmp_path / 'absent.gguf'}'" in capsys.readouterr().err
