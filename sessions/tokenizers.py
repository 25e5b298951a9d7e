"""A model's tokenizer without its weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fathom_eval import compat
from fathom_eval.bundled import BUNDLED
from fathom_eval.errors import UserError
from fathom_eval.gguf_models import one_line
from fathom_eval.sessions.safe_text import visible


def load_tokenizer(spec: str, *, offline: bool = False) -> Any:
    """The tokenizer of a bundled model, a local folder or a hub model.

    Raises:
        UserError: there is none, or it is not at hand: a bundled model is not fetched for its tokenizer alone.
    """
    compat.require_transformers()
    place = spec
    if spec in BUNDLED:
        folder = BUNDLED[spec].cached()
        if folder is None:
            raise UserError(f"the tokenizer of '{spec}' is not in the cache: run 'fathom-eval models fetch {spec}' first")
        place = str(folder)
    elif Path(spec).expanduser().is_dir():
        place = str(Path(spec).expanduser())
    elif "/" not in spec or spec.startswith((".", "/", "~")):
        raise UserError(f"there is no tokenizer '{visible(spec, 200)}': give a bundled model ({', '.join(BUNDLED)}), a folder or a hub id")
    from transformers import AutoTokenizer

    with compat.quiet_transformers():
        try:
            return AutoTokenizer.from_pretrained(place, local_files_only=offline or place != spec)
        # Missing files, broken JSON, no network: each tokenizer class and the hub have errors of their own.
        except Exception as error:
            raise UserError(f"the tokenizer of '{visible(spec, 200)}' cannot be loaded: {visible(one_line(error), 200)}") from None
