"""The methods as a model of lm-eval: ``--model fathom``.

``python -m fathom_eval.lm_eval`` is lm-eval's own command line with that model and this package's tasks in it.
"""

from __future__ import annotations

from fathom_eval.lm_eval.compat import require_lm_eval

require_lm_eval()

from fathom_eval.lm_eval.model import FathomLM  # noqa: E402 - what is missing must be said before it is imported

__all__ = ["FathomLM"]
