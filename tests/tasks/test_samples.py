from __future__ import annotations

import random
import re
from collections import Counter
from typing import TYPE_CHECKING

import numpy as np
import pytest

from fathom_eval.errors import UserError
from fathom_eval.tasks import prompts, samples
from fathom_eval.tasks.haystack import Haystack, load_haystack
from fathom_eval.tasks.samples import FULLNESS, TASKS, SampleBuilder, sample_seed

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

NIAH = ("niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery")


@pytest.fixture(scope="module")
def builder(tokenizer: PreTrainedTokenizerFast, prose: Haystack) -> SampleBuilder:
    return SampleBuilder(tokenizer, prose)


def test_the_six_tasks_and_their_generation_limits():
    limits = {"niah_single": 12, "niah_multikey": 12, "niah_multivalue": 40, "niah_multiquery": 40, "vt": 40, "fwe": 24}
    assert {name: spec.max_new_tokens for name, spec in TASKS.items()} == limits
    assert all(spec.name == name and spec.description for name, spec in TASKS.items())


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("context", [900, 2048, 5000])
def test_a_prompt_fills_its_length_and_holds_every_needle(builder: SampleBuilder, tokenizer, task: str, context: int):
    for index in range(3):
        sample = builder.build(task, context, index)
        assert FULLNESS * context <= len(sample.prompt_ids) <= context
        assert sample.prompt_ids == tuple(tokenizer(sample.prompt).input_ids)
        assert sample.prompt_ids.count(tokenizer.bos_token_id) == 1
        assert sample.prompt_ids[0] == tokenizer.bos_token_id
        draft = TASKS[task].draft(random.Random(sample.seed), builder._surroundings)
        decoded = tokenizer.decode(sample.prompt_ids, skip_special_tokens=True)
        assert decoded == sample.prompt
        assert sample.prompt.endswith(draft.answer_prefix)
        assert all(sample.prompt.count(needle) == 1 for needle in draft.needles)
        assert len(sample.depths) == len(draft.needles)
        assert (sample.task, sample.context, sample.index, sample.gold) == (task, context, index, draft.gold)


@pytest.mark.parametrize("task", [*NIAH, "vt"])
def test_needles_lie_where_the_depths_say(builder: SampleBuilder, task: str):
    for index in range(20):
        sample = builder.build(task, 3000, index)
        assert all(0.05 <= depth <= 0.95 for depth in sample.depths)
        draft = TASKS[task].draft(random.Random(sample.seed), builder._surroundings)
        start, end = len(draft.instruction) + 2, sample.prompt.index(draft.question) - 2
        window = sample.prompt[start:end]
        for depth, needle in zip(sample.depths, draft.needles, strict=True):
            before = window[: window.index(needle)]
            for other in draft.needles:
                before = before.replace(other, "")
            without = len(window) - sum(map(len, draft.needles))
            assert len(before) / without == pytest.approx(depth, abs=0.02)
            after = window[window.index(needle) + len(needle) :]
            assert before.rstrip().endswith(".")
            assert re.match(r"[ \n][A-Z]", after)
        for chain in draft.chains:
            places = [window.index(needle) for needle in chain]
            assert places == sorted(places)


def test_depths_cover_the_window(builder: SampleBuilder):
    depths = [builder.build("niah_single", 2048, index).depths[0] for index in range(60)]
    assert min(depths) < 0.15
    assert max(depths) > 0.85
    assert 0.4 < np.mean(depths) < 0.6


def test_gold_stands_once_in_the_prompt(builder: SampleBuilder):
    for task in NIAH:
        sample = builder.build(task, 2048, 0)
        assert [sample.prompt.count(gold) for gold in sample.gold] == [1] * len(sample.gold)


def test_what_the_haystack_holds_is_not_drawn(tokenizer, prose: Haystack, builder: SampleBuilder):
    """Strings that a first builder drew are put into the haystack, inside other words: a second builder draws others."""
    drawn = {task: TASKS[task].draft(random.Random(0), builder._surroundings) for task in (*NIAH, "vt")}
    golds = {gold for draft in drawn.values() for gold in draft.gold}
    keys = set(re.findall(r"[a-z]+-[a-z]+", " ".join(draft.question for draft in drawn.values())))
    assert len(golds) > 10
    assert len(keys) > 3
    sentences = [*prose.sentences, *(f" The x{word}y, they say." for word in sorted(golds | keys))]
    other = SampleBuilder(tokenizer, Haystack.of("file", "prose.txt", sentences))
    for task in drawn:
        draft = TASKS[task].draft(random.Random(0), other._surroundings)
        assert not golds & set(draft.gold)
        assert not any(key in draft.question for key in keys)


def test_frequent_words_are_the_gold(builder: SampleBuilder):
    for index in range(5):
        sample = builder.build("fwe", 3000, index)
        counted = Counter(re.findall(r"\b[a-z]{6}\b", sample.prompt.split("\n\n")[1])).most_common()
        assert tuple(word for word, _ in counted[:3]) == sample.gold
        assert len({count for _, count in counted[:4]}) == 4
        assert sample.depths == ()
        assert "walked" not in sample.prompt


def test_a_sample_does_not_depend_on_what_ran_before(tokenizer, prose: Haystack, builder: SampleBuilder):
    random.seed(7)
    fresh = SampleBuilder(tokenizer, prose)
    backwards = {(task, index): fresh.build(task, 1500, index) for index in (4, 1, 0) for task in reversed(TASKS)}
    random.seed(8)
    assert backwards == {(task, index): builder.build(task, 1500, index) for task in TASKS for index in (0, 1, 4)}


def test_building_leaves_the_global_generator_alone(builder: SampleBuilder):
    random.seed(3)
    before = random.getstate()
    for task in TASKS:
        builder.build(task, 1200, 0)
    assert random.getstate() == before


def test_samples_differ_by_index_seed_and_length(tokenizer, prose: Haystack, builder: SampleBuilder):
    other = SampleBuilder(tokenizer, prose, seed=1)
    for task in TASKS:
        texts = {built.build(task, context, index).gold for built in (builder, other) for context in (1200, 1500) for index in range(3)}
        assert len(texts) == 12


def test_seed_of_a_sample_is_fixed():
    assert sample_seed(0, "vt", 2048, 3) == 11497597403933404387
    assert len({sample_seed(s, t, c, i) for s in (0, 1) for t in ("vt", "fwe") for c in (1, 11) for i in (0, 1, 10)}) == 24


def test_only_the_samples_asked_for_are_built(tokenizer, prose: Haystack, monkeypatch: pytest.MonkeyPatch):
    """``--limit 6`` must not build 500 samples: the builder makes one when it is asked for it, and keeps none."""
    built: list[str] = []
    builder = SampleBuilder(tokenizer, prose)
    monkeypatch.setattr(builder._encoder, "encode", lambda prompt, encode=builder._encoder.encode: built.append(prompt) or encode(prompt))
    for index in range(6):
        builder.build("vt", 1500, index)
    assert len(built) <= 6 * 4


def test_the_haystack_is_tokenised_once(tokenizer, prose: Haystack):
    texts: list[str] = []

    class Counting:
        def __getattr__(self, name: str) -> object:
            return getattr(tokenizer, name)

        def __call__(self, text, **options):
            texts.extend([text] if isinstance(text, str) else text)
            return tokenizer(text, **options)

    builder = SampleBuilder(Counting(), prose)  # type: ignore[arg-type]
    assert sum(map(len, texts)) < 1.1 * len(prose.text)
    for index in range(3):
        texts.clear()
        builder.build("niah_single", 1500, index)
        assert sum(map(len, texts)) < 5 * 1500 * 4


def test_wrong_names_and_lengths(builder: SampleBuilder):
    with pytest.raises(UserError, match="unknown task 'niah_singel'; did you mean 'niah_single'"):
        builder.build("niah_singel", 1500, 0)
    with pytest.raises(UserError, match="unknown task 'vtt'; did you mean 'vt'"):
        builder.check(["niah_single", "vtt"], [1500], 4096)
    with pytest.raises(UserError, match=r"context 4090 and 12 generated tokens of niah_single exceed .* 4096 .* possible context is 4084"):
        builder.check(["niah_single"], [1500, 4090], 4096)
    builder.check(["niah_single"], [4084], 4096)
    for context in (0, -5, 1, 150):
        with pytest.raises(UserError, match=f"context {context} is too short for niah_multikey"):
            builder.check(["niah_multikey"], [context], 4096)
    with pytest.raises(UserError, match="context 200 is too short for fwe"):
        builder.check(["fwe"], [200], 4096)


@pytest.mark.parametrize("task", TASKS)
def test_too_short_a_context_names_one_that_is_enough_and_not_much_more(builder: SampleBuilder, task: str) -> None:
    with pytest.raises(UserError, match=f"context 40 is too short for {task}") as error:
        builder.check([task], [40], 4096, samples=4)
    enough = int(re.findall(r"; (\d+) tokens are enough$", str(error.value))[0])
    builder.check([task], [enough], 4096, samples=4)
    with pytest.raises(UserError, match="too short"):
        builder.check([task], [enough // 2], 4096, samples=4)
    with pytest.raises(UserError, match=r"needs room$"):
        builder.check([task], [40], enough - 1, samples=4)


def test_any_whole_number_is_a_seed_of_its_own(tokenizer: PreTrainedTokenizerFast, prose: Haystack) -> None:
    prompts = {SampleBuilder(tokenizer, prose, seed=seed).build("niah_single", 500, 0).prompt for seed in (-(10**20), -1, 0, 1)}
    assert len(prompts) == 4


def test_all_is_checked_before_the_first_sample_is_built(builder: SampleBuilder, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(builder, "build", lambda *arguments: pytest.fail("a sample was built before all names and lengths were checked"))
    with pytest.raises(UserError, match="exceed"):
        builder.check(list(TASKS), [1500, 9000], 4096)


def test_too_short_a_haystack_names_the_longest_possible_context(builder: SampleBuilder):
    with pytest.raises(UserError, match="longer than the haystack") as error:
        builder.check(["niah_single"], [200_000], 10**6)
    longest = int(re.findall(r"longest possible context of niah_single is (\d+)", str(error.value))[0])
    assert len(builder.build("niah_single", longest - 50, 0).prompt_ids) >= FULLNESS * (longest - 50)
    with pytest.raises(UserError, match="longer than the haystack"):
        builder.build("niah_single", longest + 50, 0)
    assert builder.build("fwe", 40_000, 0).gold  # needs no haystack


def test_one_sentence_has_no_place_for_a_needle(tokenizer):
    builder = SampleBuilder(tokenizer, Haystack.of("file", "one.txt", ["The river is long " * 200 + "."]))
    with pytest.raises(UserError, match="too short for niah_single"):
        builder.build("niah_single", 600, 0)


def test_fitting_the_length_ends(builder: SampleBuilder, monkeypatch: pytest.MonkeyPatch):
    """A tokenizer whose counts of pieces say nothing about the whole must end in an error, not in a loop."""
    calls: list[int] = []

    def encode(prompt: str) -> list[int]:
        calls.append(len(prompt))
        return [1] * (700 if len(calls) % 2 else 2900)

    monkeypatch.setattr(builder._encoder, "encode", encode)
    with pytest.raises(UserError, match="cannot be filled: the nearest length is 700"):
        builder.build("niah_single", 2000, 0)
    assert len(calls) <= 10


def test_answers_must_fit_the_generation_limit(builder: SampleBuilder, monkeypatch: pytest.MonkeyPatch):
    short = {name: samples.TaskSpec(name, "", 7, spec.draft) for name, spec in TASKS.items()}
    monkeypatch.setattr(samples, "TASKS", short)
    with pytest.raises(UserError, match=r"task niah_single: the answer '\d{7}' takes 8 tokens, over its limit of 7 generated tokens"):
        builder.check(["niah_single"], [1500], 4096)
    with pytest.raises(UserError, match="task vt: the answer"):
        builder.build("vt", 1500, 0)


def test_answers_of_every_sample_to_come_are_checked(builder: SampleBuilder, monkeypatch: pytest.MonkeyPatch):
    checked: list[int] = []
    monkeypatch.setattr(builder._encoder, "check_answers", lambda drafts, limit, task: checked.append(len(drafts)))
    builder.check(["vt"], [1500], 4096, samples=9)
    assert 9 in checked


def test_identity_names_what_can_change_a_sample(tokenizer, prose: Haystack):
    identity = SampleBuilder(tokenizer, prose, seed=3, decoys=2).identity
    assert identity == {"prompts": prompts.VERSION, "haystack": prose.sha256, "seed": 3, "decoys": 2, "chat_template": False}


def test_decoys(tokenizer, prose: Haystack):
    assert len(SampleBuilder(tokenizer, prose, decoys=3).build("niah_multikey", 1500, 0).depths) == 4
    with pytest.raises(UserError, match="decoys is -1"):
        SampleBuilder(tokenizer, prose, decoys=-1)


def test_special_tokens_in_the_haystack_are_refused(tokenizer):
    with pytest.raises(UserError, match="holds '</s>', a special token"):
        SampleBuilder(tokenizer, Haystack.of("file", "page.html", ["Old <b>text</s> here."]))


def test_python_docs_work_as_a_haystack(tokenizer):
    builder = SampleBuilder(tokenizer, load_haystack("python-docs"))
    builder.check(list(TASKS), [2048], 8192)
