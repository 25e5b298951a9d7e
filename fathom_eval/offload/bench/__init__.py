"""Measurements of the host-resident runtime: the link, the kernels, whole decode steps."""

from __future__ import annotations
