from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

import pytest

from fathom_eval.tasks.haystack import Haystack
from tests.tiny import tiny_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

WORDS = "the river old boats grey book green grass wrote counted names sun sky yellow small long walked here again text"


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Wants one BOS before a text."""
    return tiny_tokenizer()


@pytest.fixture(scope="session")
def prose() -> Haystack:
    """A haystack of 1,500 made-up sentences, some of them starting a paragraph."""
    rng = Random(1)
    sentences = []
    for number in range(1500):
        words = " ".join(rng.choice(WORDS.split()) for _ in range(rng.randrange(3, 25)))
        sentences.append(f"{'' if not number else rng.choice(['  ', ' ', ' ', chr(10)])[-1]}{words.capitalize()}.")
    return Haystack.of("file", "prose.txt", sentences)
