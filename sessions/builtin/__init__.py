"""Trajectories that come with the package, so that sessions can be tried without any other data.

A scripted agent made them: what it says was written beforehand, but its commands and edits really ran on small repositories, and what they
printed was recorded (``scripts/record_builtin_trajectories.py``). No model wrote a word of them. They are good for trying things out, not
for results.
"""

from __future__ import annotations

from pathlib import Path

PATH = Path(__file__).parent / "trajectories.jsonl.gz"
"""The rows, in the format of nebius/SWE-rebench-openhands-trajectories."""
TITLE = "built-in, scripted"
SESSION_TOKENS = 12_000
"""What sessions are scaled down to for models that hold more: a repository of the set has little more text."""
