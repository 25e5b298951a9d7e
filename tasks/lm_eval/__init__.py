"""Tasks for lm-eval: the RULER-style tasks and the agent sessions, as a folder that its ``--include_path`` takes."""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).resolve().parent
"""The folder with the YAML files."""
