"""Agent sessions for lm-eval: the model goes on where a recorded step began, and its step is compared with the recorded one.

``fathom-eval sessions`` compares every method with exact top-k from one prefill. lm-eval runs one model at a time, so that comparison needs
two runs: one with ``method=exact`` and ``--log_samples``, and another whose metadata names the file of samples as ``reference``.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any, cast

from fathom_eval.errors import UserError
from fathom_eval.models import LoadedModel, ModelFacts
from fathom_eval.scoring import step_agreement
from fathom_eval.session_data import PreparedSession, SessionData, SourceSettings, prepare_sessions
from fathom_eval.sessions import builtin
from fathom_eval.sessions.assembly import parse_session_tokens
from fathom_eval.sessions.reading import CONDENSATIONS
from fathom_eval.sessions.rendering import RENDERINGS
from fathom_eval.tasks.encoding import PromptEncoder
from fathom_eval.tasks.lm_eval.documents import Document, Documents
from fathom_eval.tasks.lm_eval.metadata import (
    SESSION_KEYS,
    Metadata,
    check_keys,
    choice,
    position_limit,
    text,
    tokenizer_name,
    whole_number,
)

SESSIONS = 8
MAX_NEW_TOKENS = 256
"""As in the task's YAML file."""
_FIELDS = ("input", "target", "session_id", "repo", "prompt_tokens", "target_step", "reference")

_log = logging.getLogger(__name__)


def session_documents(**metadata: Any) -> dict[str, Documents]:
    """The test split of ``fathom_sessions``.

    Args:
        metadata: Of lm-eval; :data:`~fathom_eval.tasks.lm_eval.metadata.SESSION_KEYS` are read.

    Raises:
        UserError: A value is unusable, sessions cannot be made, or none survives the way through text.
    """
    from fathom_eval.sessions.tokenizers import load_tokenizer

    check_keys(metadata, SESSION_KEYS)
    settings = _settings(metadata)
    references = _references(text(metadata, "reference"))
    tokenizer = load_tokenizer(tokenizer_name(metadata))
    # Only the tokenizer of a model is needed to make sessions.
    data = prepare_sessions(LoadedModel(None, tokenizer, cast(ModelFacts, None)), settings, say=_log.info)
    for note in data.notes:
        _log.warning(note)
    documents = [_document(session, prompt, references) for session, prompt in _as_text(data, tokenizer)]
    if references is not None and all(document["reference"] is None for document in documents):
        raise UserError("the reference holds none of these sessions: it must be a run of the same trajectories, tokenizer and lengths")
    return {"test": Documents(len(documents), documents.__getitem__, _FIELDS)}


def _settings(metadata: Metadata) -> SourceSettings:
    low, high = _bounds(metadata)
    return SourceSettings(
        trajectories=text(metadata, "trajectories"),
        rendering=choice(metadata, "rendering", RENDERINGS),
        sessions=whole_number(metadata, "sessions", SESSIONS, least=1),
        low=low,
        high=high,
        seed=whole_number(metadata, "seed", 0),
        format_name=text(metadata, "format"),
        repo=text(metadata, "repo"),
        default_repo=text(metadata, "default_repo") or "",
        condensation=choice(metadata, "condensation", CONDENSATIONS),
        revision=text(metadata, "trajectories_revision"),
    )


def _bounds(metadata: Metadata) -> tuple[int, int]:
    limit, asked = position_limit(metadata), text(metadata, "session_tokens")
    if asked is None:
        if text(metadata, "trajectories") is not None:
            raise UserError("""the length of sessions is not given; give --metadata '{"session_tokens": "80000:100000", …}'""")
        high = builtin.SESSION_TOKENS if limit is None else min(builtin.SESSION_TOKENS, limit - MAX_NEW_TOKENS)
        high = high // 500 * 500 or high
        low = high * 4 // 5
    else:
        low, high = parse_session_tokens(asked)
    if low < 1 or (limit is not None and high + MAX_NEW_TOKENS > limit):
        raise UserError(
            f"session_tokens: {high} tokens and {MAX_NEW_TOKENS} generated ones exceed the model's {limit}: lm-eval would cut "
            "the beginning of the session"
        )
    return low, high


def _as_text(data: SessionData, tokenizer: Any) -> list[tuple[PreparedSession, str]]:
    """The sessions with their prompts as text, which is how lm-eval hands them over.

    A text that the tokenizer turns into other tokens is another prompt: such a session is left out.
    """
    encoder = PromptEncoder(tokenizer, chat_template=False)
    kept = []
    for session in data.sessions:
        prompt = str(tokenizer.decode(session.prompt_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if encoder.encode(prompt) == session.prompt_ids:
            kept.append((session, prompt))
    if not kept:
        raise UserError("no session survives the way through text with this tokenizer: use fathom-eval sessions")
    if len(kept) < len(data.sessions):
        _log.warning(
            "%d of %d sessions are left out: their text encodes to other tokens", len(data.sessions) - len(kept), len(data.sessions)
        )
    return kept


def _document(session: PreparedSession, prompt: str, references: dict[str, str] | None) -> Document:
    return {
        "input": prompt,
        "target": session.target_text,
        "session_id": session.id,
        "repo": session.repo,
        "prompt_tokens": len(session.prompt_ids),
        "target_step": session.target_step,
        "reference": (references or {}).get(session.id),
    }


def _references(path: str | None) -> dict[str, str] | None:
    """The steps of an earlier run by session id, from the file that lm-eval's ``--log_samples`` wrote."""
    if path is None:
        return None
    try:
        lines = Path(path).expanduser().read_text(encoding="utf-8").split("\n")
        rows = [json.loads(line) for line in lines if line.strip()]
        return {row["doc"]["session_id"]: str(row["filtered_resps"][0]) for row in rows}
    except OSError as error:
        raise UserError(f"the reference '{path}' cannot be read: {error.strerror or error}") from None
    except (ValueError, KeyError, TypeError, IndexError):
        raise UserError(f"the reference '{path}' is no file of samples that --log_samples wrote for fathom_sessions") from None


def score_session(doc: Document, results: list[str]) -> dict[str, float]:
    """Agreement with the recorded step, and with the step of the reference where there is one."""
    scores = {"agreement_recorded": step_agreement(doc["target"], results[0])}
    if doc["reference"] is not None:
        scores["agreement_reference"] = step_agreement(doc["reference"], results[0])
    return scores
