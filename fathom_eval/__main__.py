"""``python -m fathom_eval`` runs the command line."""

from __future__ import annotations

import sys

from fathom_eval.cli import main

if __name__ == "__main__":
    if not sys.flags.safe_path:
        # From the repository root, the folder `kernels` would hide the Hugging Face package that transformers imports where installed.
        sys.path.append(sys.path.pop(0))
    sys.exit(main())
