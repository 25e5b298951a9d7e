"""Score fewer things: one mean key for every few tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from fathom_eval.kernels.landmark import reference
from fathom_eval.kernels.landmark.reference import landmark_means
from fathom_eval.kernels.segments import SegmentTable

__all__ = ["landmark_means", "scan_landmarks"]


def scan_landmarks(
    query: Tensor,
    means: SegmentTable,
    size: int,
    blocks: Tensor,
    scores: Tensor,
    maxima: Tensor,
    scaling: float = 1.0,
) -> None:
    """Score every landmark of the sealed keys. A token scores as its landmark does; nothing expands the scores to tokens.

    As :func:`fathom_eval.kernels.scan.scan_segments`, with:

    Args:
        means: Segments fp16 ``[H, B·64 / size, D]`` from :func:`landmark_means`.
        size: Tokens a landmark; a power of two that divides 64.
        scores: fp16 or fp32 ``[R, H, G, S·B·64 / size]``.
    """
    if query.is_cuda:
        from fathom_eval.kernels.landmark import triton as kernel

        kernel.scan_landmarks(query, means, size, blocks, scores, maxima, scaling)
        return
    for row, count in enumerate(blocks.tolist()):
        if not count:
            continue
        used = count * 64 // size
        found = reference.scan_landmarks(query[row], torch.cat(means.segments[row], dim=-2)[..., :used, :]) * scaling
        scores[row, ..., :used] = found
        maxima[row, ..., :count] = found.unflatten(-1, (count, 64 // size)).amax(-1)
