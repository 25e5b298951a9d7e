"""The folders of the published steps and kernels, and the labels of their methods."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
PUBLISHED = ROOT / "reports/published/step-h200"
KERNELS = ROOT / "reports/published/kernels-h200"
EQUAL = ROOT / "reports/published/equal-error-h200"
PACED = ROOT / "reports/published/step-h200-paced"
PACED_EQUAL = ROOT / "reports/published/equal-error-h200-paced"
LONG = 2**20
FATHOM, SPARQ, DOUBLE = "fathom budget=48 basis=raw", "sparq r=16", "double_sparsity c=32"
LANDMARK, THUMBNAIL, FULL = "landmark size=8", "thumbnail depth=2", "full 4-bit"
DOUBLE_4, SPARQ_4, LOKI_4 = "double_sparsity c=D/4", "sparq r=D/4", "loki r=D/4"
"""The scans of 136 bits, as the run of equal errors and the fidelity runs name them."""
