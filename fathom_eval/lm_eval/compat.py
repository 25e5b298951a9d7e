"""Every difference between the versions of lm-eval that this package supports, in one place."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version

from fathom_eval.compat import version_numbers
from fathom_eval.errors import UserError

MINIMUM = (0, 4, 10)
MODEL_NAME = "fathom"
_TARGET = "fathom_eval.lm_eval.model:FathomLM"


def require_lm_eval() -> None:
    """Raise UserError unless lm-eval is installed in a supported version."""
    wanted = f"pip install 'fathom-eval[lm-eval]' (lm-eval {'.'.join(map(str, MINIMUM))} or newer)"
    try:
        installed = version("lm_eval")
    except PackageNotFoundError:
        raise UserError(f"lm-eval is not installed: {wanted}") from None
    if version_numbers(installed) < MINIMUM:
        raise UserError(f"lm-eval {installed} is too old: {wanted}")


def register() -> None:
    """Make the model known to lm-eval. Versions that read entry points know it already."""
    from lm_eval.api.registry import model_registry

    if MODEL_NAME not in model_registry:
        model_registry.register(MODEL_NAME, target=_TARGET)


@contextlib.contextmanager
def quiet_model_in_memory() -> Iterator[None]:
    """Hold back what HFLM says of models that are in memory already: that their other arguments are ignored, which is not so here."""
    logger = logging.getLogger("lm_eval.models.huggingface")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
