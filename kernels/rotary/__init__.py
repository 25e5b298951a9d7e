"""From a step's projections to the query that scans and the key and value that join the tail."""

from __future__ import annotations

from torch import Tensor

from fathom_eval.kernels.rotary import reference

__all__ = ["rotate_heads"]


def rotate_heads(
    projected: Tensor,
    query_norm: Tensor | None,
    key_norm: Tensor | None,
    epsilon: float,
    cosines: Tensor,
    sines: Tensor,
    first_position: int,
    blocks: Tensor,
    tokens: Tensor,
    query: Tensor,
    tail_keys: Tensor,
    tail_values: Tensor,
) -> None:
    """Normalise (QK-norm) and rotate the current token's queries and keys, and put its K/V behind the unsealed tokens.

    The arithmetic is fp32, rounded once; nothing waits for the device.

    Args:
        projected: ``[R, (G·H + 2·H)·D]``: queries, keys, values.
        query_norm, key_norm: RMSNorm weights ``[D]`` of models with QK-norm, or None.
        cosines, sines: fp32 ``[P, D / 2]`` of the positions from ``first_position`` on.
        blocks, tokens: int32 ``[R]``, sealed blocks, and tokens with the current one, which stands at position ``tokens - 1``.
        query: ``[R, H, G, D]``, contiguous, written.
        tail_keys, tail_values: ``[R, H, T, D]``, contiguous, written at ``tokens - 1 - 64 · blocks``.
    """
    if projected.is_cuda:
        from fathom_eval.kernels.rotary import triton as kernel

        kernel.rotate_heads(
            projected, query_norm, key_norm, epsilon, cosines, sines, first_position, blocks, tokens, query, tail_keys, tail_values
        )
        return
    rows, heads, group, head_dim = query.shape
    queries, keys, values = projected.unflatten(-1, (-1, head_dim)).split([heads * group, heads, heads], dim=1)
    place = tokens.long() - 1
    angles = (cosines[place - first_position].unsqueeze(1), sines[place - first_position].unsqueeze(1))
    query.copy_(reference.rotate(queries, query_norm, epsilon, *angles).view(rows, heads, group, head_dim))
    rotated = reference.rotate(keys, key_norm, epsilon, *angles)
    for row, slot in enumerate((place - 64 * blocks.long()).tolist()):
        tail_keys[row, :, slot] = rotated[row]
        tail_values[row, :, slot] = values[row]
