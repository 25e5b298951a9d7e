"""Score all keys of a bit-plane store with a read depth a channel."""

from __future__ import annotations

from fathom_eval.kernels.scan.reference import prefix_values, scan_planes

__all__ = ["prefix_values", "scan_planes"]
