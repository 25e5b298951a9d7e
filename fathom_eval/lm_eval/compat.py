"""Every difference between the versions of lm-eval that this package supports, in one place."""

from __future__ import annotations

import contextlib
import difflib
import logging
import re
from collections.abc import Iterator, Sequence
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


def unknown_tasks(error: ValueError) -> list[str]:
    """The tasks that lm-eval says it does not know; none where the error is another one."""
    found = re.match(r"Tasks? (?:were )?not found: (.+?)(?:\.? Try |\.?\s*$)", str(error), re.DOTALL)
    return [name.strip() for name in found[1].split(",") if name.strip()] if found else []


def unknown_task_message(names: Sequence[str], folders: Sequence[str]) -> str:
    """One line on tasks that there are not, with the nearest one that there is.

    Args:
        names: The tasks.
        folders: The include paths in which lm-eval looked besides its own.
    """
    from lm_eval.tasks import TaskManager

    known = sorted(TaskManager(include_path=list(folders) or None).all_tasks)
    name = names[0]
    # The tasks of this package first: its own names are what somebody who runs it most likely meant.
    own = [task for task in known if task.startswith("fathom_")]
    near = [match for choices in (own, known) for match in difflib.get_close_matches(name, choices, n=1, cutoff=0.75)]
    suggestion = f"did you mean '{near[0]}'?" if near else "'lm_eval ls tasks' and 'lm_eval ls groups' list them"
    listed = ", ".join(f"'{one}'" for one in names)
    return f"unknown task{'s' if len(names) > 1 else ''} {listed} in --tasks; {suggestion}"


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
