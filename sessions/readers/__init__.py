"""Readers of trajectory formats, one module a format.

Each has ``NAME``, ``KEYS``, ``matches(row)`` and ``read(row, source, condensed=…)``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, cast

from fathom_eval.errors import UserError, did_you_mean
from fathom_eval.sessions.readers import openhands_2024, openhands_v0, openhands_v1, swe_gym, swe_rebench
from fathom_eval.sessions.steps import FormatName, Trajectory


class Reader(Protocol):
    """What a reader module offers."""

    NAME: FormatName
    KEYS: str

    def matches(self, row: Mapping[str, Any]) -> bool:
        """Whether the row looks like one of this format."""

    def read(self, row: Mapping[str, Any], source: str, *, condensed: bool) -> Trajectory:
        """The row's trajectory. Raises UnusableRowError where the row holds none."""


READERS: dict[str, Reader] = {
    module.NAME: cast("Reader", module) for module in (swe_rebench, swe_gym, openhands_v0, openhands_v1, openhands_2024)
}


def reader_named(name: str) -> Reader:
    """The reader of this format. Raises UserError for an unknown one."""
    if name not in READERS:
        raise UserError(f"unknown trajectory format '{name}'; {did_you_mean(name, READERS)}")
    return READERS[name]


def detect(row: Mapping[str, Any]) -> Reader | None:
    """The reader whose format the row has, or None."""
    return next((reader for reader in READERS.values() if reader.matches(row)), None)
