"""Rows in the style of SWE-Gym: chat messages under ``messages``, beside ``instance_id``, ``run_id``, ``resolved`` and ``tools``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fathom_eval.sessions.readers.chat_rows import holds_messages, read_messages
from fathom_eval.sessions.steps import FormatName, Trajectory

NAME: FormatName = "swe-gym"
KEYS = "messages"


def matches(row: Mapping[str, Any]) -> bool:
    """Whether the row looks like one of this format."""
    return holds_messages(row.get("messages"))


def read(row: Mapping[str, Any], source: str, *, condensed: bool) -> Trajectory:
    """The row's trajectory. Raises UnusableRowError where it has no messages. There is nothing to condense."""
    return read_messages(row, source, key="messages", format_name=NAME)
