"""Quantise keys to block-scaled integer codes and pack the codes as channel-major bit planes."""

from __future__ import annotations

from fathom_eval.kernels.pack.reference import BLOCK, block_scales, pack_planes, quantise, unpack_plane

__all__ = ["BLOCK", "block_scales", "pack_planes", "quantise", "unpack_plane"]
