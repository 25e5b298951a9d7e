"""fathom-eval: an evaluation harness for key scans of sparse attention over long contexts."""

from __future__ import annotations

__version__ = "0.1.0"
