"""Quantise keys to block-scaled integer codes and pack the codes as channel-major bit planes."""

from __future__ import annotations

from torch import Tensor

from fathom_eval.kernels.pack.reference import BLOCK, block_scales, pack_planes, quantise, unpack_plane

__all__ = ["BLOCK", "block_scales", "pack_blocks", "pack_planes", "quantise", "unpack_plane"]


def pack_blocks(keys: Tensor, planes: Tensor, scales: Tensor, flags: Tensor, offset: int = 0) -> None:
    """Quantise and pack whole blocks into a segment, beside what it already holds (paper §3.2, Eq. 2).

    Nothing is allocated and nothing waits for the device. Scales and codes are those of :func:`block_scales` and :func:`quantise`, bit
    for bit. Where the destination is pinned host memory and large, packing into a segment on the device and copying that is quicker.

    Args:
        keys: bf16, fp16 or fp32 ``[H, n, D]`` with n a multiple of 64; each head's part is contiguous.
        planes: int64 ``[H, D, P, capacity]``, written at blocks ``offset … offset + n / 64``.
        scales: fp16 ``[H, D, capacity]``, likewise.
        flags: int32 ``[H]``, set to 1 for heads with a key that is not finite or overflows an fp16 scale (above 65,504), and otherwise
            left alone: the caller looks when it next waits for the device.
        offset: Blocks in front of the first one written.

    Raises:
        ValueError: The tokens are not whole blocks, the segment has no room for them, or the keys are not contiguous.
    """
    _, tokens, head_dim = keys.shape
    if tokens % BLOCK:
        raise ValueError(f"{tokens} tokens are not whole blocks of {BLOCK}")
    if offset < 0 or offset + tokens // BLOCK > scales.shape[-1]:
        raise ValueError(f"blocks {offset} to {offset + tokens // BLOCK} do not fit a segment of {scales.shape[-1]}")
    if keys.stride()[1:] != (head_dim, 1):
        raise ValueError("the keys of a head must be contiguous")
    if keys.is_cuda:
        from fathom_eval.kernels.pack import triton as kernel

        kernel.pack_blocks(keys, planes, scales, flags, offset)
        return
    for head, part in enumerate(keys):
        try:
            found = block_scales(part)
        except ValueError:
            flags[head] = 1
            continue
        end = offset + tokens // BLOCK
        scales[head, :, offset:end] = found
        planes[head, :, :, offset:end] = pack_planes(quantise(part, found, planes.shape[-2]), planes.shape[-2])
