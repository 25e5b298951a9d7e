"""Samples of the RULER-style tasks: the registry of tasks and the builder that makes any sample of any length.

Task definitions: the paper's Appendix B, after RULER (Hsieh et al., 2024).
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from fathom_eval.errors import UserError, did_you_mean
from fathom_eval.tasks import needles, prompts, tracking, words
from fathom_eval.tasks.context import Context, Filler, HaystackFiller, TokenizedHaystack, WordFiller
from fathom_eval.tasks.draft import Draft, Surroundings
from fathom_eval.tasks.encoding import PromptEncoder
from fathom_eval.tasks.haystack import Haystack

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FULLNESS = 0.97
"""A prompt takes at least this share of the asked length."""
_ATTEMPTS = 8
_SHORT = 1024
_SUGGESTION, _SUGGESTION_GROWTH, _LONGEST_SUGGESTION = 32, 1.25, 32768


@dataclass(frozen=True)
class TaskSpec:
    """A task: how its samples are drafted, and how many tokens a model may answer with."""

    name: str
    description: str
    max_new_tokens: int
    draft: Callable[[Random, Surroundings], Draft]


TASKS: dict[str, TaskSpec] = {
    spec.name: spec
    for spec in (
        TaskSpec("niah_single", "one number hidden in the text", 12, needles.niah_single),
        TaskSpec("niah_multikey", "one number asked for among decoys with other keys", 12, needles.niah_multikey),
        TaskSpec("niah_multivalue", "all four numbers of one key", 40, needles.niah_multivalue),
        TaskSpec("niah_multiquery", "the numbers of four keys", 40, needles.niah_multiquery),
        TaskSpec("vt", "the variables that a value was handed on to, with a decoy chain", 40, tracking.variable_tracking),
        TaskSpec("fwe", "the three most frequent of many synthetic words", 24, words.frequent_words),
    )
}


class _TooShortError(UserError):
    """A context has no room for a task."""


@dataclass(frozen=True)
class Sample:
    """One prompt with what a right answer holds.

    Attributes:
        context: The asked length in tokens; ``len(prompt_ids)`` is at most that and at least ``FULLNESS`` of it.
        prompt: The text that was encoded; ``prompt_ids`` may add BOS before it.
        gold: The strings that the answer must hold.
        max_new_tokens: How many tokens may be generated.
        depths: For every needle, those that hold gold first, the share of the haystack window before it.
        seed: Of this sample alone, from the run's seed, task, context and index.
    """

    task: str
    context: int
    index: int
    prompt_ids: tuple[int, ...]
    prompt: str
    gold: tuple[str, ...]
    max_new_tokens: int
    depths: tuple[float, ...]
    seed: int


def sample_seed(seed: int, task: str, context: int, index: int) -> int:
    """The seed of one sample: a hash, so that it depends on nothing that was built before."""
    digest = hashlib.sha256(f"{seed}\n{task}\n{context}\n{index}".encode()).digest()
    return int.from_bytes(digest[:8], "big")


def find_task(name: str) -> TaskSpec:
    """The task of this name. Raises ``UserError`` with a suggestion for an unknown one."""
    if name not in TASKS:
        raise UserError(f"unknown task '{name}'; {did_you_mean(name, TASKS)}")
    return TASKS[name]


class SampleBuilder:
    """Builds samples for one tokenizer and one haystack, which it tokenises once."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        haystack: Haystack,
        *,
        seed: int = 0,
        decoys: int = 7,
        chat_template: bool = False,
    ) -> None:
        """Raises ``UserError`` for a tokenizer or haystack that cannot be used, and for a negative number of decoys."""
        if decoys < 0:
            raise UserError(f"the number of decoys is {decoys}; it must be 0 or more")
        self._encoder = PromptEncoder(tokenizer, chat_template=chat_template)
        for token in self._encoder.special_tokens:
            if token in haystack.text:
                raise UserError(f"haystack {haystack.origin} holds '{token}', a special token of the tokenizer; remove it from the text")
        self._haystack = TokenizedHaystack(haystack, self._encoder)
        # Keys, numbers and variable names hold a hyphen or two digits and no space: one that occurs lies within such a word.
        suspects = " ".join(re.findall(r"\S*(?:-|\d\d)\S*", haystack.text))
        self._surroundings = Surroundings(decoys, suspects.__contains__)
        self._seed = seed
        self.identity: dict[str, object] = {
            "prompts": prompts.VERSION,
            "haystack": haystack.sha256,
            "seed": seed,
            "decoys": decoys,
            "chat_template": chat_template,
        }

    def check(self, tasks: Sequence[str], contexts: Sequence[int], max_positions: int, samples: int = 1) -> None:
        """Find what would go wrong with these tasks and lengths, before any model work.

        Args:
            tasks: Names of tasks.
            contexts: Prompt lengths in tokens.
            max_positions: The most tokens the model takes, prompt and generation together.
            samples: How many samples of each will be built. The answers of all are checked against the generation limit.

        Raises:
            UserError: An unknown task; a context beyond the model's limit, longer than the haystack or too short for the
                task; an answer that the tokenizer loses or that does not fit the generation limit.
        """
        specs = [find_task(name) for name in tasks]
        for context in contexts:
            for spec in specs:
                if context + spec.max_new_tokens > max_positions:
                    raise UserError(
                        f"context {context} and {spec.max_new_tokens} generated tokens of {spec.name} exceed the model's limit of "
                        f"{max_positions} tokens; the longest possible context is {max_positions - spec.max_new_tokens}"
                    )
        for context in contexts:
            for spec in specs:
                drafts = [self._draft(spec, context, index)[0] for index in range(samples)]
                self._encoder.check_answers(drafts, spec.max_new_tokens, spec.name)
                # A short window may lack room for the needles of one sample and not of another; a long one does not.
                try:
                    self._build_all(spec.name, context, samples)
                except _TooShortError as error:
                    enough = self._enough(spec, context, max_positions, samples)
                    raise UserError(f"{error}; {enough} tokens are enough" if enough else str(error)) from None

    def _build_all(self, task: str, context: int, samples: int) -> None:
        for index in range(samples if context < _SHORT else 1):
            self.build(task, context, index)

    def _enough(self, spec: TaskSpec, too_short: int, max_positions: int, samples: int) -> int | None:
        """A multiple of 32 tokens, not much above the least, in which all samples have room; None where model or haystack allow none."""
        context = max(too_short, 0)
        while True:
            context = _SUGGESTION * math.ceil(max(context + 1, context * _SUGGESTION_GROWTH) / _SUGGESTION)
            if context + spec.max_new_tokens > min(max_positions, _LONGEST_SUGGESTION):
                return None
            with contextlib.suppress(UserError):
                self._build_all(spec.name, context, samples)
                return context

    def build(self, task: str, context: int, index: int) -> Sample:
        """The sample of this task, length and index; always the same one.

        Raises ``UserError`` for an unknown task, a length that cannot be filled, or an answer beyond the generation limit.
        """
        spec = find_task(task)
        draft, rng, seed = self._draft(spec, context, index)
        self._encoder.check_answers([draft], spec.max_new_tokens, task)
        filler: Filler = WordFiller(draft, self._encoder, rng) if draft.vocabulary else HaystackFiller(self._haystack, draft, rng)
        prompt, ids, filled = self._fit(task, draft, filler, context)
        return Sample(task, context, index, tuple(ids), prompt, draft.gold, spec.max_new_tokens, filled.depths, seed)

    def _draft(self, spec: TaskSpec, context: int, index: int) -> tuple[Draft, Random, int]:
        seed = sample_seed(self._seed, spec.name, context, index)
        rng = Random(seed)
        return spec.draft(rng, self._surroundings), rng, seed

    def _fit(self, task: str, draft: Draft, filler: Filler, context: int) -> tuple[str, list[int], Context]:
        """Fill the prompt to the asked length.

        Counts of separately encoded pieces may differ a little from those of the whole prompt, so the whole is encoded and
        the budget corrected by what was off, a bounded number of times.
        """
        render = partial(self._encoder.render, draft)
        fixed = len(self._encoder.encode(render(""))) + sum(self._encoder.count([f" {needle}" for needle in draft.needles]))
        budget, best, slack = context - fixed, None, max(4, context // 200)
        if not draft.vocabulary and budget > self._haystack.tokens:
            raise UserError(
                f"context {context} is longer than the haystack, which has {self._haystack.tokens} tokens; "
                f"the longest possible context of {task} is {self._haystack.tokens + fixed}"
            )
        for _ in range(_ATTEMPTS):
            filled = filler.fill(budget) if budget > 0 else None
            if filled is None:
                break
            prompt = render(filled.text)
            ids = self._encoder.encode(prompt)
            missing = context - len(ids)
            if missing >= 0 and (best is None or len(ids) > len(best[1])):
                best = prompt, ids, filled
            if 0 <= missing <= slack or filled.tokens + missing == budget:
                break
            budget = filled.tokens + missing
        if best is None:
            raise _TooShortError(
                f"context {context} is too short for {task}: question and needles take {fixed} tokens, and the text around them needs room"
            )
        if len(best[1]) < FULLNESS * context:
            raise UserError(f"context {context} of {task} cannot be filled: the nearest length is {len(best[1])} tokens")
        return best
