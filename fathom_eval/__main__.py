"""``python -m fathom_eval`` runs the command line."""

from __future__ import annotations

import sys

from fathom_eval.cli import main

if __name__ == "__main__":
    sys.exit(main())
