"""Runs that are killed at random moments end as undisturbed ones do. ``scripts/kill_test.py`` is the long version."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kill_test.py"


@pytest.mark.slow
def test_killed_runs_resume_to_the_same_records_and_tables(tmp_path: Path) -> None:
    # A process of its own: it forks, which one with the threads of a test session must not.
    command = [sys.executable, "-P", str(SCRIPT), "--kills=2", "--kinds=ruler,sessions", f"--folder={tmp_path}", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    for kind, result in zip(("ruler", "sessions"), json.loads(done.stdout), strict=True):
        assert result["kills"] == 2
        assert result["records_equal"]
        assert {"results.csv", "samples.csv" if kind == "ruler" else "steps.csv"} <= set(result["tables_equal"])
        assert result["computed_again"] <= 2
        assert result["computed"] == result["units"] + result["computed_again"]
