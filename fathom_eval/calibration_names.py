"""What calibrations are called, and where they lie. Needs no torch."""

from __future__ import annotations

import re
from pathlib import Path

from fathom_eval.errors import UserError
from fathom_eval.gguf_models import cache_root

SESSION = "session"
"""Stands for the statistics of a prefix's own keys and queries."""
SUFFIX = ".safetensors"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def calibrations_folder() -> Path:
    """Where calibrations are kept by name."""
    return cache_root() / "calibrations"


def calibration_path(name: str) -> Path:
    """The file of a name. Raises :class:`UserError` for a name that the syntax of methods could not hold."""
    if name == SESSION or not _NAME.fullmatch(name):
        raise UserError(f"'{name}' cannot name a calibration: take letters, digits, '.', '_' and '-', and not '{SESSION}'")
    return calibrations_folder() / f"{name}{SUFFIX}"


def stored_names() -> list[str]:
    """Names of the calibrations in the cache."""
    folder = calibrations_folder()
    return sorted(path.stem for path in folder.glob(f"*{SUFFIX}")) if folder.is_dir() else []
