"""Stores that keep keys as codes and scales, and score what the codes stand for.

Shapes: R branches, H KV heads, G query heads a KV head, D channels, n tokens.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from fathom_eval.reads import Reads
from fathom_eval.stores import Store, batched_scores

SEGMENT_TOKENS = 2**15
"""Tokens that are encoded, kept and decoded in one piece."""

DECODED_LIMIT = 80 * 2**20
"""Bytes up to which a segment keeps its decoded keys, as the plane store does."""

HALF_LIMIT = 65504
"""The largest finite fp16 number."""


@dataclass(frozen=True)
class Part:
    """What one of a store's tensors holds.

    Attributes:
        bits: Of one entry, as it is read. A tensor in memory may take more: codes are kept a byte each.
        kind: Where its bits are counted.
    """

    bits: int
    kind: Literal["code", "scale", "other"]


HALF_SCALE = Part(16, "scale")


@dataclass
class _Segment:
    parts: tuple[Tensor, ...]
    tokens: int
    decoded: Tensor | None = field(default=None, repr=False)


class CodedStore(Store):
    """Keys as codes. A subclass says what a run of keys becomes and what a query is multiplied with.

    Every scan reads all that :meth:`encode` gives, so the bits are counted from those tensors. What a layer has once and not for every
    token (a rotation, a codebook, a mean) is not counted, as a Karhunen–Loève basis is not.

    Args:
        lead: Leading dimensions of the keys, ``(H,)`` shared or ``(R, H)`` for blocks that branches sealed themselves.
        channels: D.
    """

    parts: tuple[Part, ...]
    run: int = 1  # tokens of one scored entry

    def __init__(self, lead: tuple[int, ...], channels: int) -> None:
        self.lead = lead
        self.channels = channels
        self.segments: list[_Segment] = []

    @abstractmethod
    def encode(self, keys: Tensor) -> tuple[Tensor, ...]:
        """Keys ``[…, n, D]``, n a multiple of 64, as one tensor for each of ``parts``; each grows along its last dimension but one."""

    @abstractmethod
    def decode(self, parts: tuple[Tensor, ...]) -> Tensor:
        """What an operand is multiplied with, fp32 ``[…, n / run, C]``."""

    def operand(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> Tensor:
        """What the decoded keys are multiplied with, fp32 ``[R, H, G, C]``."""
        return projected

    def offset(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> Tensor | None:
        """What is added to all scores of a query, ``[R, H, G, 1]``: its product with what the codes leave out of every key alike."""
        return None

    @property
    def bytes(self) -> int:
        return sum(
            sum(part.nbytes for part in segment.parts) + (segment.decoded.nbytes if segment.decoded is not None else 0)
            for segment in self.segments
        )

    def append(self, keys: Tensor) -> None:
        """Seal keys ``[…, 64·b, D]``.

        Raises:
            ValueError: A key is not finite, or a scale overflows fp16; the message names the KV heads.
        """
        for chunk in keys.split(SEGMENT_TOKENS, dim=-2):
            _check_finite(torch.isfinite(chunk), -3, "keys that are not finite")
            parts, tokens = self.encode(chunk), chunk.shape[-2]
            if tokens == 0:
                continue
            last = self.segments[-1] if self.segments else None
            if last is not None and last.tokens + tokens <= SEGMENT_TOKENS:
                joined = tuple(torch.cat(pair, dim=-2) for pair in zip(last.parts, parts, strict=True))
                self.segments[-1] = _Segment(joined, last.tokens + tokens)
            else:
                self.segments.append(_Segment(parts, tokens))
            self.tokens += tokens

    def project(self, query: Tensor) -> Tensor:
        return query.float()

    def scan(self, query: Tensor, projected: Tensor, plan: Tensor | None) -> tuple[Tensor, Reads]:
        operand = self.operand(query, projected, plan)
        scores = torch.cat([self.score(operand, self._decoded(segment)) for segment in self.segments], dim=-1)
        offset = self.offset(query, projected, plan)
        if offset is not None:
            scores = scores + offset
        if self.run > 1:
            scores = scores.repeat_interleave(self.run, dim=-1)
        return scores, self.reads(query, plan)

    def score(self, operand: Tensor, decoded: Tensor) -> Tensor:
        """Scores of one segment, ``[R, H, G, n / run]``."""
        return batched_scores(operand, decoded.transpose(-1, -2))

    def reads(self, query: Tensor, plan: Tensor | None) -> Reads:
        """What one scan touches: every entry of every tensor."""
        bits = {"code": 0, "scale": 0, "other": 0}
        for segment in self.segments:
            for part, values in zip(self.parts, segment.parts, strict=True):
                bits[part.kind] += part.bits * (values.numel() // math.prod(self.lead))
        zero = torch.zeros(query.shape[:2], dtype=torch.int64, device=query.device)
        return Reads(zero + bits["code"], zero + bits["scale"], zero + bits["other"], zero + self.channels, self.tokens)

    def _decoded(self, segment: _Segment) -> Tensor:
        if segment.decoded is not None:
            return segment.decoded
        decoded = self.decode(segment.parts)
        if decoded.nbytes <= DECODED_LIMIT:
            segment.decoded = decoded
        return decoded


def half(values: Tensor, head: int = -3) -> Tensor:
    """Scales, offsets or coordinates as fp16.

    Args:
        values: ``[…, H, m, C]``.
        head: The dimension of the KV heads.

    Raises:
        ValueError: One overflows fp16; the message names the KV heads.
    """
    rounded = values.to(torch.float16)
    _check_finite(torch.isfinite(rounded), head, f"keys above {HALF_LIMIT:,}, which fp16 cannot hold")
    return rounded


def _check_finite(finite: Tensor, head: int, what: str) -> None:
    if not finite.all():
        bad = (~finite).movedim(head, 0).flatten(1).any(-1)
        raise ValueError(f"{what} in KV head {', '.join(str(number) for number in bad.nonzero().flatten().tolist())}")
