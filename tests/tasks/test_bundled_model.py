"""The tasks with the bundled model's tokenizer, and on the real WikiText file where it is at hand."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fathom_eval.errors import UserError
from fathom_eval.tasks.haystack import load_haystack
from fathom_eval.tasks.samples import FULLNESS, TASKS, SampleBuilder

if TYPE_CHECKING:
    from fathom_eval.models import LoadedModel

WIKITEXT_FILE = Path(__file__).resolve().parents[3] / "shared" / "data" / "wikitext" / "wiki.test.raw"

pytestmark = pytest.mark.model


@pytest.mark.parametrize("chat_template", [False, True])
def test_answers_fit_and_prompts_fill(smollm2: LoadedModel, chat_template: bool):
    tokenizer = smollm2.tokenizer
    builder = SampleBuilder(tokenizer, load_haystack("python-docs"), chat_template=chat_template)
    builder.check(list(TASKS), [1024, 2048], smollm2.facts.max_positions, samples=50)
    for task in TASKS:
        sample = builder.build(task, 2048, 7)
        assert FULLNESS * 2048 <= len(sample.prompt_ids) <= 2048
        assert tokenizer.decode(sample.prompt_ids) == sample.prompt
        # This tokenizer adds no BOS; its chat template starts with one and opens every later turn with the same token.
        assert (sample.prompt_ids[0] == tokenizer.bos_token_id) == chat_template
        assert sample.prompt_ids[1] != tokenizer.bos_token_id


def test_context_beyond_the_model(smollm2: LoadedModel):
    builder = SampleBuilder(smollm2.tokenizer, load_haystack("python-docs"))
    with pytest.raises(UserError, match="the longest possible context is 8180"):
        builder.check(["niah_single"], [8192], smollm2.facts.max_positions)


@pytest.mark.skipif(not WIKITEXT_FILE.is_file(), reason="the WikiText test file is not here")
def test_128k_tokens_of_wikitext(smollm2: LoadedModel):
    builder = SampleBuilder(smollm2.tokenizer, load_haystack(str(WIKITEXT_FILE)))
    for task in ("niah_multikey", "vt", "fwe"):
        sample = builder.build(task, 131_072, 0)
        assert FULLNESS * 131_072 <= len(sample.prompt_ids) <= 131_072
    with pytest.raises(UserError, match="longest possible context of vt is 28"):
        builder.build("vt", 300_000, 0)
