"""``--model fathom`` beside lm-eval's own ``hf``: what it generates, and what it refuses."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'fathom-eval[lm-eval]'")

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from fathom_eval.branches import Branch
from fathom_eval.decode import decode
from fathom_eval.errors import UserError
from fathom_eval.lm_eval import FathomLM
from fathom_eval.methods import parse_method
from fathom_eval.models import LoadedModel
from fathom_eval.prefill import prefill
from tests.tiny import save_tiny, tiny_model

PROSE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."


def generations(prompts: Sequence[str], **arguments: Any) -> list[Instance]:
    return [Instance("generate_until", {}, (prompt, dict(arguments)), position) for position, prompt in enumerate(prompts)]


def test_a_method_answers_as_in_our_own_evaluation(loaded: LoadedModel) -> None:
    branch = Branch(parse_method("fathom:budget=24:sink=2"), 40)
    lm = FathomLM(loaded, "fathom", 40, budget=24, sink=2)
    assert lm.branch == branch == FathomLM(loaded, "fathom:sink=2", 40, budget=24).branch
    prompt = " ".join([PROSE] * 12)
    [answer] = lm.generate_until(generations([prompt], max_gen_toks=8, until=[]), disable_tqdm=True)
    token_ids = loaded.tokenizer(prompt).input_ids
    [expected] = decode(loaded, prefill(loaded, token_ids), [branch], 8)
    [dense] = decode(loaded, prefill(loaded, token_ids), [Branch(parse_method("dense"), None)], 8)
    assert answer == loaded.tokenizer.decode(expected.token_ids, skip_special_tokens=True)
    assert lm.results == [expected]
    assert expected.token_ids != dense.token_ids
    info = lm.get_model_info()
    assert info["scan_bits_per_token"] == expected.bits
    assert (info["generations"], info["fired"], info["k"]) == (1, 1.0, 40)
    assert info["method"] == branch.spec.label


@pytest.mark.parametrize("method", ["h2o", "infllm", "double_sparsity_published:dense_layers=none"])
def test_a_method_that_watches_the_prefill_answers_too(method: str, loaded: LoadedModel) -> None:
    lm = FathomLM(loaded, method, 40)
    lm.generate_until(generations([" ".join([PROSE] * 12)], max_gen_toks=4, until=[]), disable_tqdm=True)
    assert lm.results[0].finish in ("length", "eos")


def test_prompts_of_a_batch_do_not_touch_each_other(loaded: LoadedModel) -> None:
    prompts = [" ".join([PROSE] * count) for count in (3, 9, 5, 7)]
    alone, together = FathomLM(loaded, "sparq", 48), FathomLM(loaded, "sparq", 48, batch_size=3)
    wanted = alone.generate_until(generations(prompts, max_gen_toks=6), disable_tqdm=True)
    assert together.generate_until(generations(prompts, max_gen_toks=6), disable_tqdm=True) == wanted
    assert len(set(wanted)) > 1


def test_stop_strings_end_an_answer_where_hf_ends_it(loaded: LoadedModel, hf: HFLM) -> None:
    lm = FathomLM(loaded, "dense")
    [whole] = lm.generate_until(generations([PROSE], max_gen_toks=24, until=[]), disable_tqdm=True)
    assert len(whole) > 8
    stop, steps = whole[5:7], lm.results[-1].steps
    for prompt in (PROSE, f"{PROSE}\n"):
        asked = {"max_gen_toks": 24, "until": [stop, "\n\n"]}
        [ours] = lm.generate_until(generations([prompt], **asked), disable_tqdm=True)
        [theirs] = hf.generate_until(generations([prompt], **asked), disable_tqdm=True)
        assert ours == theirs
    [cut] = lm.generate_until(generations([PROSE], max_gen_toks=24, until=[stop]), disable_tqdm=True)
    assert cut == whole.split(stop)[0]
    assert lm.results[-1].steps < steps


def test_a_stop_string_that_began_in_the_prompt_ends_nothing(loaded: LoadedModel, hf: HFLM) -> None:
    lm = FathomLM(loaded, "dense")
    [whole] = lm.generate_until(generations([PROSE], max_gen_toks=24, until=[]), disable_tqdm=True)
    stop = PROSE[-1] + whole[:2]
    asked = {"max_gen_toks": 24, "until": [stop]}
    assert stop not in whole
    assert lm.generate_until(generations([PROSE], **asked), disable_tqdm=True) == [whole]
    assert hf.generate_until(generations([PROSE], **asked), disable_tqdm=True) == [whole]


def test_every_end_token_ends_an_answer() -> None:
    """A tokenizer whose end token is not the one that the model's configuration names, as ``<|eot_id|>`` is not."""
    plain = tiny_model()
    prompt = " ".join([PROSE] * 3)
    [free] = decode(plain, prefill(plain, plain.tokenizer(prompt).input_ids), [Branch(parse_method("dense"), None)], 12)
    end = free.token_ids[4]
    assert end not in free.token_ids[:4]
    ending = tiny_model(eos_token_id=[end, plain.tokenizer.convert_tokens_to_ids("<s>")])
    assert end != ending.tokenizer.eos_token_id
    lm = FathomLM(ending, "dense", batch_size=2)
    lm.generate_until(generations([prompt, PROSE], max_gen_toks=12), disable_tqdm=True)
    [ended] = [result for result in lm.results if result.token_ids[:4] == free.token_ids[:4]]
    assert (ended.finish, ended.token_ids) == ("eos", free.token_ids[:5])


def test_chat_templates_are_those_of_hf(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "chat")
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}{% if add_generation_prompt %}[assistant]{{ mark }}{% endif %}"
    )
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    messages = [{"role": "user", "content": "hello"}]
    lm, hf = FathomLM(str(folder), "dense", device="cpu"), HFLM(pretrained=str(folder), device="cpu")
    assert lm.apply_chat_template(messages) == hf.apply_chat_template(messages) == "[user] hello [assistant]"
    marked = FathomLM(str(folder), "dense", device="cpu", chat_template_args={"mark": "!"})
    assert marked.apply_chat_template(messages) == "[user] hello [assistant]!"
    assert lm.chat_template(True) == hf.chat_template(True) == template
    assert lm.tokenizer_name == hf.tokenizer_name


def test_log_likelihoods_are_dense_and_the_log_says_so(loaded: LoadedModel, hf: HFLM, caplog: pytest.LogCaptureFixture) -> None:
    pairs = [(PROSE, " She walked along"), ("", "The grass"), (f"{PROSE} {PROSE}", " the river")]
    asked = [Instance("loglikelihood", {}, pair, position) for position, pair in enumerate(pairs)]
    lm = FathomLM(loaded, "fathom", 64, batch_size=2)
    lm.generate_until(generations([PROSE], max_gen_toks=2), disable_tqdm=True)  # leaves the model with the attention of the scans
    with caplog.at_level(logging.WARNING):
        ours = lm.loglikelihood(asked, disable_tqdm=True)
        lm.loglikelihood(asked, disable_tqdm=True)
    theirs = hf.loglikelihood(asked, disable_tqdm=True)
    assert [greedy for _, greedy in ours] == [greedy for _, greedy in theirs]
    assert [value for value, _ in ours] == pytest.approx([value for value, _ in theirs], abs=1e-4)
    assert sum("dense attention answers them" in line for line in caplog.messages) == 1
    rolling = [Instance("loglikelihood_rolling", {}, (PROSE,), 0)]
    assert lm.loglikelihood_rolling(rolling, disable_tqdm=True) == pytest.approx(
        hf.loglikelihood_rolling(rolling, disable_tqdm=True), abs=1e-3
    )


def test_a_model_must_be_named() -> None:
    with pytest.raises(UserError, match="name no model: give pretrained="):
        FathomLM(method="fathom", k=64)


def test_log_likelihoods_can_be_refused(loaded: LoadedModel) -> None:
    lm = FathomLM(loaded, "fathom", 64, loglikelihood="refuse")
    with pytest.raises(UserError, match="no decode step that a method could change"):
        lm.loglikelihood([Instance("loglikelihood", {}, (PROSE, " a"), 0)], disable_tqdm=True)
    with pytest.raises(UserError, match="no decode step"):
        lm.loglikelihood_rolling([Instance("loglikelihood_rolling", {}, (PROSE,), 0)], disable_tqdm=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"method": "fathm", "k": 64}, "unknown method 'fathm' in model_args; did you mean 'fathom'?"),
        ({"k": 64, "buget": 48}, "unknown argument 'buget' in model_args for method 'fathom'; did you mean 'budget'?"),
        ({"k": 64, "dtpye": "auto"}, "did you mean 'dtype'?"),
        ({"k": 64, "pretraned": "x"}, "did you mean 'pretrained'?"),
        ({"k": 64, "budget": "many"}, "'many' is not a whole number"),
        ({"k": 64, "method": "fathom:budget=32", "budget": 48}, "gives the option 'budget' twice"),
        ({"method": "fathom"}, "give k in model_args, for example k=512"),
        ({"method": "dense", "k": 64}, "so k=64 in model_args does nothing: leave it out"),
        ({"method": "dense", "rerank": 2}, "rerank=2.0 does nothing"),
        ({"k": 20}, "k=20 leaves nothing to select"),
        ({"k": "64"}, "k=64 in model_args is not a whole number"),
        ({"k": True}, "k=True in model_args is not a whole number"),
        ({"k": 64, "dense_layers": [0, 9]}, "dense layer 9 is not in 0..1"),
        ({"k": 64, "loglikelihood": "no"}, "unknown loglikelihood 'no'"),
        ({"k": 64, "max_length": 10**6}, "max_length=1000000 in model_args must be"),
        ({"k": 64, "batch_size": "auto"}, "batch_size 'auto': the model searches for no batch size"),
        ({"k": 64, "max_batch_size": 8}, "max_batch_size 8"),
        ({"k": 64, "device": "cuda:7"}, "is not available"),
    ],
)
def test_unusable_arguments_are_refused(arguments: dict[str, Any], message: str, loaded: LoadedModel, model: Path) -> None:
    given: Any = str(model) if "device" in arguments else loaded
    with pytest.raises(UserError) as error:
        FathomLM.create_from_arg_obj({"pretrained": given, **arguments})
    assert message in str(error.value)


def test_arguments_as_the_command_line_gives_them(model: Path) -> None:
    text = f"pretrained={model},method=landmark,k=64,rerank=2,share=group_sum,dense_layers=0+1,dtype=float32"
    lm = FathomLM.create_from_arg_string(text, {"batch_size": "2", "max_batch_size": None, "device": "cuda:0"})
    assert lm.branch == Branch(parse_method("landmark:rerank=2:share=group_sum:dense_layers=0+1"), 64)
    assert lm.batch_size == 2
    listed = FathomLM.create_from_arg_obj(
        {"pretrained": str(model), "method": "landmark", "k": 64, "dense_layers": [0, 1]}, {"device": "cpu"}
    )
    assert listed.branch.spec.policy.dense_layers == (0, 1)


def test_a_prompt_whose_beginning_would_be_cut_is_refused(loaded: LoadedModel) -> None:
    lm = FathomLM(loaded, "dense", max_length=60)
    words = loaded.tokenizer(PROSE).input_ids
    with pytest.raises(UserError, match=rf"a prompt has {len(words)} tokens and 40 are to be generated, but .* holds 60"):
        lm.generate_until(generations(["The sky", PROSE], max_gen_toks=40), disable_tqdm=True)
    assert not lm.results


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"do_sample": True, "temperature": 0.7}, "methods are decoded greedily"),
        ({"repetition_penalty": 1.2}, "repetition_penalty=1.2 cannot be followed"),
        ({"num_beams": 4}, "num_beams=4 cannot be followed"),
        ({"max_length": 2}, "leaves nothing to generate"),
    ],
)
def test_generation_arguments_that_cannot_be_followed_are_refused(arguments: dict[str, Any], message: str, loaded: LoadedModel) -> None:
    with pytest.raises(UserError, match=message):
        FathomLM(loaded, "dense").generate_until(generations([PROSE], **arguments), disable_tqdm=True)
    harmless = {"do_sample": False, "temperature": 0.0, "top_p": 0.9, "max_gen_toks": 2}
    assert FathomLM(loaded, "dense").generate_until(generations([PROSE], **harmless), disable_tqdm=True)


def test_a_k_that_selects_everything_is_said_once(loaded: LoadedModel, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        FathomLM(loaded, "fathom", 1000).generate_until(generations([PROSE, "The sky is"], max_gen_toks=3), disable_tqdm=True)
    assert sum("k=1000 selects every token" in line for line in caplog.messages) == 1


def test_a_cache_of_answers_belongs_to_one_method(loaded: LoadedModel, tmp_path: Path) -> None:
    from lm_eval.api.model import CachingLM

    path = str(tmp_path / "answers.db")
    first = CachingLM(FathomLM(loaded, "fathom", 64), path)
    answers = first.generate_until(generations([PROSE], max_gen_toks=3))
    again = FathomLM(loaded, "fathom", 64)
    assert CachingLM(again, path).generate_until(generations([PROSE], max_gen_toks=3)) == answers
    assert not again.results  # all from the cache
    with pytest.raises(UserError, match=r"holds answers of tiny .* at k=64, version 1, this is .* at k=65"):
        CachingLM(FathomLM(loaded, "fathom", 65), path)
    other = CachingLM(HFLM(pretrained=loaded.model, tokenizer=loaded.tokenizer), str(tmp_path / "other.db"))
    other.generate_until(generations([PROSE], max_gen_toks=3))
    with pytest.raises(UserError, match="holds answers of another model"):
        CachingLM(FathomLM(loaded, "dense"), str(tmp_path / "other.db"))
