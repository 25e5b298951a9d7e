"""Rows of nebius/SWE-rebench-openhands-trajectories: chat messages under ``trajectory``, null-padded tool schemas under ``tools``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fathom_eval.sessions.readers.chat_rows import holds_messages, read_messages
from fathom_eval.sessions.steps import FormatName, Trajectory

NAME: FormatName = "swe-rebench"
KEYS = "trajectory of messages"


def matches(row: Mapping[str, Any]) -> bool:
    """Whether the row looks like one of this format."""
    return holds_messages(row.get("trajectory"))


def read(row: Mapping[str, Any], source: str, *, condensed: bool) -> Trajectory:
    """The row's trajectory. Raises UnusableRowError where it has no messages. There is nothing to condense."""
    return read_messages(row, source, key="trajectory", format_name=NAME)
