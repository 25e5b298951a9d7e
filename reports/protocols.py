"""Which rows of a table may be set against each other: those that select and attend by one policy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_POLICY = ("sink", "local", "share", "dense_layers", "dense_every", "reallocate", "rerank", "attend", "keep_tail")
"""Options of a record that belong to the selection policy; it holds those that differ from the paper's protocol."""
_ALONG_A_LINE = ("budget", "basis", "r", "c", "size", "page", "depth", "bits")
"""Options that lead along a line of a plot, and Fathom's basis, which is in its name."""


def protocol(options: Mapping[str, Any]) -> tuple[str, ...]:
    """What of a record's policy differs from the paper's protocol, in words; empty for the protocol itself."""
    return tuple(f"{name}={options[name]}" for name in _POLICY if name in options)


def line_of(record: Mapping[str, Any]) -> str:
    """The line of a plot that a record's method is a point of: its family, apart for every variant that no budget leads to."""
    options = record["options"]
    words = [str(record.get("family") or record["label"])]
    if record["method"] == "fathom":
        words.append(str(options.get("basis", "auto")))
    words += [f"{name}={value}" for name, value in sorted(options.items()) if name not in _ALONG_A_LINE]
    return " ".join(words)
