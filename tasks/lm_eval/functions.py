"""What the YAML files beside this one name. lm-eval runs this file by its path, so all it does is to import."""

from __future__ import annotations

from fathom_eval.tasks.lm_eval.ruler import ruler_documents, score_ruler
from fathom_eval.tasks.lm_eval.sessions import score_session, session_documents

__all__ = ["ruler_documents", "score_ruler", "score_session", "session_documents"]
