"""Feed generated input to the readers, the records, the manifest, the plane store and the command line; a JSON line a target."""

from __future__ import annotations

import sys
from pathlib import Path

# At the end, so that the folder `kernels` of the repository passes for no installed package.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from tests.survival.fuzzing import main

if __name__ == "__main__":
    sys.exit(main())
