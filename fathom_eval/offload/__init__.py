"""The host-resident runtime: K/V rows and the scan index in pinned host memory, weights in GPU memory, one CUDA graph a decode step."""

from __future__ import annotations
