"""Every difference between the versions of torch and transformers that this package supports, in one place."""

from __future__ import annotations

import contextlib
import inspect
import io
import sys
from collections.abc import Iterator
from typing import Any

from fathom_eval.errors import UserError

MINIMUM_TRANSFORMERS = (5, 8)


def version_numbers(version: str) -> tuple[int, ...]:
    """The leading numbers of a version, comparable: ``5.24.0.dev1`` gives (5, 24, 0)."""
    numbers = []
    for part in version.split("+")[0].split("."):
        if not part.isdigit():
            break
        numbers.append(int(part))
    return tuple(numbers)


def require_transformers() -> None:
    """Raise UserError unless transformers is installed in a supported version."""
    try:
        from transformers import __version__
    except ImportError as error:
        raise UserError(f"transformers cannot be imported: {error}") from None
    if version_numbers(__version__) < MINIMUM_TRANSFORMERS:
        wanted = ".".join(map(str, MINIMUM_TRANSFORMERS))
        raise UserError(f"transformers {__version__} is too old: install 'transformers>={wanted}'")


def cache_argument(model: Any) -> str:
    """The name under which ``model.forward`` takes the key/value cache.

    transformers renamed ``past_key_values`` to ``cache``; the old name is a deprecated alias on the versions that know the new one.
    """
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def gguf_arguments() -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that give a GGUF file's weights as plain dense tensors.

    Versions with ``GgufConfig`` may otherwise keep them packed; versions without it always unpack.
    """
    import transformers

    config = getattr(transformers, "GgufConfig", None)
    return {} if config is None else {"quantization_config": config(dequantize=True)}


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Hold back warnings and progress bars of transformers within the block, and restore both settings after it."""
    from transformers.utils import logging as transformers_logging

    library: Any = transformers_logging
    verbosity, bars = library.get_verbosity(), library.is_progress_bar_enabled()
    library.set_verbosity_error()
    library.disable_progress_bar()
    try:
        yield
    finally:
        library.set_verbosity(verbosity)
        if bars:
            library.enable_progress_bar()


@contextlib.contextmanager
def bars_for_people_only() -> Iterator[None]:
    """Hold back what is written to standard error within the block unless that is a terminal.

    transformers draws the bar of a GGUF file's conversion whatever its settings are. A person sees it, a log does not.
    """
    with contextlib.nullcontext() if sys.stderr.isatty() else contextlib.redirect_stderr(io.StringIO()):
        yield
