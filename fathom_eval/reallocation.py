"""SparQ's softmax of approximate scores, by which mass is given to the mean value (arXiv:2312.04985, §3)."""

from __future__ import annotations

from torch import Tensor


def tempered(scores: Tensor, coverage: Tensor, scaling: float, sealed: int) -> Tensor:
    """Logits of approximate scores, sharpened where the scan saw only part of the query's mass.

    A sealed token's is its score times the model's scaling over √coverage: with a scaling of D^−1/2 that is SparQ's temperature
    √(D·‖q̂‖₁/‖q‖₁). Tokens that are not sealed are scored exactly, with all of the query, and so keep their logits.

    Args:
        scores: ``[R, H, G, N]``.
        coverage: ‖q̂‖₁/‖q‖₁ of the scan, ``[R, H, G]``.
        scaling: Of the model's scores, before the softmax.
        sealed: The first tokens, which were scored by the scan.
    """
    logits = scores * scaling
    logits[..., :sealed] /= coverage.clamp_min(1e-6).sqrt().unsqueeze(-1)
    return logits
