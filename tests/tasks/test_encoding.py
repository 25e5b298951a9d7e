from __future__ import annotations

import copy
import string
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from fathom_eval.errors import UserError
from fathom_eval.tasks.encoding import PromptEncoder
from fathom_eval.tasks.haystack import Haystack
from fathom_eval.tasks.samples import TASKS, SampleBuilder
from tests.tiny import tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

TEMPLATE = (
    "{{ bos_token if bos else '' }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{{ strftime_now('%d %b %Y') if date_string is not defined else date_string }}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


def with_template(add_bos: bool, template_has_bos: bool) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer(add_bos=add_bos)
    tokenizer.chat_template = TEMPLATE.replace("if bos ", f"if {template_has_bos} ".lower())
    return tokenizer


@pytest.mark.parametrize("add_bos", [True, False])
@pytest.mark.parametrize("template", [None, True, False])
def test_one_bos_where_the_model_wants_one(prose: Haystack, add_bos: bool, template: bool | None):
    """Plain or by a chat template that writes BOS itself or does not: never two, and one wherever one is wanted."""
    tokenizer = with_template(add_bos, bool(template))
    builder = SampleBuilder(tokenizer, prose, chat_template=template is not None)
    sample = builder.build("niah_multikey", 1500, 0)
    wanted = int(add_bos or bool(template))
    assert sample.prompt_ids.count(tokenizer.bos_token_id) == wanted
    assert list(sample.prompt_ids[:1]).count(tokenizer.bos_token_id) == wanted
    assert 0.97 * 1500 <= len(sample.prompt_ids) <= 1500


def test_chat_template_wraps_the_user_turn_and_the_answer_prefix_follows_it(prose: Haystack):
    builder = SampleBuilder(with_template(True, True), prose, chat_template=True)
    plain = SampleBuilder(with_template(True, True), prose)
    assert builder.identity["chat_template"] is True
    for task in TASKS:
        chat, other = builder.build(task, 1500, 0), plain.build(task, 1500, 0)
        prefix = other.prompt.rsplit("\n", 1)[1]
        assert chat.prompt.startswith("<s>[user] Here is")
        assert chat.prompt.endswith(f"\n26 Jul 2024[assistant] {prefix}")
        assert chat.gold == other.gold


def test_tokenizer_that_ends_texts_with_eos_does_not_end_prompts():
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    )
    assert tokenizer("a").input_ids[-1] == tokenizer.eos_token_id
    ids = PromptEncoder(tokenizer, chat_template=False).encode("The sky is blue.")
    assert ids == tokenizer("The sky is blue.").input_ids[:-1]


def test_missing_tokenizer_and_missing_template():
    for missing in (None, {}):
        with pytest.raises(UserError, match="the model has no tokenizer"):
            PromptEncoder(missing, chat_template=False)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no chat template; run without --chat-template"):
        PromptEncoder(tiny_tokenizer(), chat_template=True)


def test_tokenizer_that_loses_gold_is_refused(prose: Haystack):
    """Lower-casing loses the variables of vt; numbers survive it."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    builder = SampleBuilder(tokenizer, prose)
    builder.check(["niah_single"], [1500], 4096)
    with pytest.raises(UserError, match=r"the tokenizer loses '[A-Z]\d\d' of task vt"):
        builder.check(["vt"], [1500], 4096)


def test_word_tokenizer_without_numbers_is_refused(prose: Haystack):
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, "a": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    builder = SampleBuilder(PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="[UNK]"), prose)
    with pytest.raises(UserError, match="the tokenizer loses"):
        builder.check(["niah_single"], [500], 4096)


def test_tokenizer_that_marks_word_starts_fills_the_length_too(prose: Haystack):
    """SentencePiece style: every separately encoded text gets a mark of its own, so counts of pieces do not add up."""
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], initial_alphabet=list(string.printable), show_progress=False)
    backend.train_from_iterator(prose.text.split(), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    assert len(tokenizer("x").input_ids) + len(tokenizer(" y").input_ids) > len(tokenizer("x y").input_ids)
    builder = SampleBuilder(tokenizer, prose)
    builder.check(list(TASKS), [900, 3000], 4096)
    for task in TASKS:
        sample = builder.build(task, 3000, 1)
        assert 0.97 * 3000 <= len(sample.prompt_ids) <= 3000
        assert tokenizer.decode(sample.prompt_ids) == sample.prompt


def test_lengths_are_those_of_the_given_tokenizer(prose: Haystack):
    """Another tokenizer, another window: the same text measured with a coarser tokenizer would overflow."""
    fine = tiny_tokenizer()
    coarse = copy.deepcopy(fine)
    coarse.backend_tokenizer.model = models.BPE(*_merged(fine.backend_tokenizer))
    a, b = (SampleBuilder(tokenizer, prose).build("niah_single", 1500, 0) for tokenizer in (fine, coarse))
    assert all(0.97 * 1500 <= len(sample.prompt_ids) <= 1500 for sample in (a, b))
    assert len(a.prompt) < len(b.prompt)


def _merged(backend: Tokenizer) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """The vocabulary and merges of the tiny tokenizer with one more token for each word of the haystack."""
    import json

    model = json.loads(backend.to_str())["model"]
    vocabulary, merges = dict(model["vocab"]), [tuple(pair) for pair in model["merges"]]
    for word in ("Ġcounted", "Ġyellow", "Ġnames", "Ġbook", "Ġboats", "Ġagain", "Ġwalked"):
        for end in range(2, len(word) + 1):
            left, right = word[: end - 1], word[end - 1]
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((left, right))
    return vocabulary, merges
