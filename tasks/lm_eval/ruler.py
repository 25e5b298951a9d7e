"""The RULER-style tasks for lm-eval: the samples of ``fathom-eval ruler``, made one by one as lm-eval asks for them."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from fathom_eval.errors import UserError
from fathom_eval.scoring import hit_rate
from fathom_eval.tasks.encoding import TEMPLATE_DATE
from fathom_eval.tasks.lm_eval.documents import Document, Documents
from fathom_eval.tasks.lm_eval.metadata import RULER_KEYS, check_keys, lengths, position_limit, switch, text, tokenizer_name, whole_number
from fathom_eval.tasks.samples import Sample, SampleBuilder, find_task

SAMPLES = 500
"""Of each length, as RULER has; ``--limit`` or the metadata's ``samples`` take fewer."""
_FIELDS = ("input", "gen_prefix", "outputs", "task", "max_length", "prompt_tokens", "index", "depths", "seed")
_USER = "\N{OBJECT REPLACEMENT CHARACTER}"


def ruler_documents(*, ruler_task: str, **metadata: Any) -> dict[str, Documents]:
    """The test split of a task.

    With several lengths the documents go round them, so that any ``--limit`` takes from all.

    Args:
        ruler_task: Its name in :data:`fathom_eval.tasks.samples.TASKS`.
        metadata: Of lm-eval; :data:`~fathom_eval.tasks.lm_eval.metadata.RULER_KEYS` are read.

    Raises:
        UserError: No tokenizer or length is given, a value is unusable, or the model cannot hold a prompt and its generation.
    """
    check_keys(metadata, RULER_KEYS)
    contexts, samples = lengths(metadata), whole_number(metadata, "samples", SAMPLES, least=1)
    limit, longest = position_limit(metadata), max(contexts)
    room = find_task(ruler_task).max_new_tokens
    if limit is not None and longest + room > limit:
        raise UserError(
            f"max_seq_lengths: {longest} tokens and {room} generated ones of {ruler_task} exceed the model's {limit}: lm-eval would cut "
            f"the beginning of the prompt, and needles with it; the longest possible length is {limit - room}"
        )
    chat_template = switch(metadata, "chat_template")
    builder, tokenizer = _builder(
        tokenizer_name(metadata),
        text(metadata, "haystack") or "auto",
        whole_number(metadata, "seed", 0),
        whole_number(metadata, "decoys", 7),
        chat_template,
    )

    def make(position: int) -> Document:
        sample = builder.build(ruler_task, contexts[position % len(contexts)], position // len(contexts))
        return _document(sample, tokenizer if chat_template else None)

    return {"test": Documents(samples * len(contexts), make, _FIELDS)}


@lru_cache(maxsize=2)
def _builder(tokenizer: str, haystack: str, seed: int, decoys: int, chat_template: bool) -> tuple[SampleBuilder, Any]:
    """One builder for all tasks of a run: it tokenises the haystack once."""
    from fathom_eval.sessions.tokenizers import load_tokenizer
    from fathom_eval.tasks.haystack import load_haystack

    loaded = load_tokenizer(tokenizer)
    return SampleBuilder(loaded, load_haystack(haystack), seed=seed, decoys=decoys, chat_template=chat_template), loaded


def _document(sample: Sample, tokenizer: Any | None) -> Document:
    """A sample as lm-eval takes it: the user's turn, and the beginning of the answer.

    lm-eval joins both by a line break, or with ``--apply_chat_template`` by what its template writes between the turns.

    Args:
        tokenizer: Of a sample that was built with the chat template; None for a plain one.
    """
    if tokenizer is None:
        user, _, answer_prefix = sample.prompt.rpartition("\n")
    else:
        turn = tokenizer.apply_chat_template(
            [{"role": "user", "content": _USER}], tokenize=False, add_generation_prompt=True, date_string=TEMPLATE_DATE
        )
        before, after = str(turn).split(_USER)
        user, _, answer_prefix = sample.prompt.removeprefix(before).rpartition(after)
    return {
        "input": user,
        "gen_prefix": answer_prefix,
        "outputs": list(sample.gold),
        "task": sample.task,
        "max_length": sample.context,
        "prompt_tokens": len(sample.prompt_ids),
        "index": sample.index,
        "depths": list(sample.depths),
        "seed": sample.seed,
    }


def score_ruler(doc: Document, results: list[str]) -> dict[str, float]:
    """The share of gold strings in the generation: over all documents, and over those of its length."""
    found = hit_rate(results[0], doc["outputs"])
    return {"hit_rate": found, f"hit_rate_{doc['max_length']}": found}
