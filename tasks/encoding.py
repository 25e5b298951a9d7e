"""How a prompt becomes token ids: the model's own tokenizer, its chat template on request, exactly one BOS where it wants one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fathom_eval.errors import UserError
from fathom_eval.tasks import prompts
from fathom_eval.tasks.draft import Draft

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TEMPLATE_DATE = "26 Jul 2024"
"""Some chat templates write a date into the prompt, today's unless told: a fixed one keeps samples reproducible."""


class PromptEncoder:
    """Renders drafts and encodes text. Raises ``UserError`` for a tokenizer without what is needed."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, *, chat_template: bool) -> None:
        if tokenizer is None or not callable(tokenizer):
            raise UserError("the model has no tokenizer; the tasks need one to build prompts")
        if chat_template and not getattr(tokenizer, "chat_template", None):
            raise UserError("the tokenizer has no chat template; run without --chat-template")
        self._tokenizer = tokenizer
        self._chat_template = chat_template
        self._prefix = self._special_prefix()
        self.special_tokens = tuple(token for token in tokenizer.all_special_tokens if token)

    def _special_prefix(self) -> list[int]:
        """The ids that the tokenizer puts before any text: BOS, in most cases, or nothing."""
        bare = self.encode_many(["a"])[0]
        full = list(self._tokenizer("a", verbose=False).input_ids)
        for start in range(len(full) - len(bare) + 1):
            if bare and full[start : start + len(bare)] == bare:
                return full[:start]
        raise UserError("the tokenizer encodes text differently with and without special tokens; it cannot be used here")

    def render(self, draft: Draft, context: str) -> str:
        """The prompt of a draft around ``context``, up to the answer."""
        user = prompts.LAYOUT.format(instruction=draft.instruction, context=context, question=draft.question)
        if not self._chat_template:
            return f"{user}\n{draft.answer_prefix}"
        turn = self._tokenizer.apply_chat_template(
            [{"role": "user", "content": user}], tokenize=False, add_generation_prompt=True, date_string=TEMPLATE_DATE
        )
        return f"{turn}{draft.answer_prefix}"

    def encode(self, prompt: str) -> list[int]:
        """The ids of a whole prompt. A chat template that writes BOS itself gets no second one."""
        bos = self._tokenizer.bos_token
        ids = self.encode_many([prompt])[0]
        return ids if bos and prompt.startswith(bos) else self._prefix + ids

    def encode_many(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of each text, without special tokens."""
        if not texts:
            return []  # the library fails on an empty batch
        return [list(ids) for ids in self._tokenizer(list(texts), add_special_tokens=False, verbose=False).input_ids]

    def count(self, texts: Sequence[str]) -> list[int]:
        """The number of tokens of each text, without special tokens."""
        return [len(ids) for ids in self.encode_many(texts)]

    def check_answers(self, drafts: Sequence[Draft], limit: int, task: str) -> None:
        """Every gold answer survives the tokenizer, and fits into ``limit`` generated tokens after its prefix.

        Raises ``UserError`` otherwise.
        """
        prefixes = [draft.answer_prefix for draft in drafts]
        answers = [f"{draft.answer_prefix} {draft.answer}" for draft in drafts]
        encoded = self.encode_many(prefixes + answers)
        for draft, prefix, answer in zip(drafts, encoded, encoded[len(drafts) :], strict=False):
            decoded = self._tokenizer.decode(answer)
            lost = [gold for gold in draft.gold if gold not in decoded]
            if lost:
                raise UserError(f"the tokenizer loses '{lost[0]}' of task {task}: it decodes to '{decoded}'")
            needed = len(answer) - len(prefix)
            if needed > limit:
                raise UserError(
                    f"task {task}: the answer '{draft.answer}' takes {needed} tokens, over its limit of {limit} generated tokens"
                )
