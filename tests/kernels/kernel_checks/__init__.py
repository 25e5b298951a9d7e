"""Checks of the Triton kernels against their torch references, for any device.

Triton decides on import whether its kernels are interpreted, and only the interpreter runs them on a CPU. The variable that says so would
reach every later test of a process, so ``test_triton.py`` runs this package as a program of its own (``python -m kernel_checks``) and
calls the same checks directly on a GPU.

Every output is poisoned first, so that a place nobody wrote, or wrote without need, is seen.
"""

from __future__ import annotations

from kernel_checks import branches, handover, layer, selection, stores
from kernel_checks.registry import CHECKS, case_name

__all__ = ["CHECKS", "branches", "case_name", "handover", "layer", "selection", "stores"]
