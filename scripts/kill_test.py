"""Kill RULER and sessions runs with SIGKILL at random moments, resume them, and compare with undisturbed runs: a table, or ``--json``."""

from __future__ import annotations

import sys
from pathlib import Path

# At the end, so that the folder `kernels` of the repository passes for no installed package.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.survival.kills import main

if __name__ == "__main__":
    sys.exit(main())
