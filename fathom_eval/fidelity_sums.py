"""Sums of what a fidelity run finds: gathered on the device layer by layer, checked and kept on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from fathom_eval.branches import Branch
from fathom_eval.fidelity_chunk import Outcome
from fathom_eval.methods import MethodSpec


@dataclass
class Totals:
    """Sums of one branch over layers, fp64, and its layers' means."""

    layers: list[dict[str, float]] = field(default_factory=list)
    failure: str | None = None


# What is summed over positions and heads: errors and recall a query head, rows a KV head, reads a KV head and position.
_PER_QUERY = ("error_dense", "error_exact", "oracle_error", "squared_error_dense", "squared_error_exact", "squared_oracle_error", "recall")
_PER_KV = ("rows", "candidate_rows")
_COUNTS = ("near_ties",)
_READS = ("scan_bits", "declared_bits", "scan_tokens", "scans", "channels", "differing", "negative", "astray", "excessive", "broken")

MOST_BITS = 1024
"""Of a channel of one token: a scan that reports more is not counted right. Hash tables read hundreds of entries a token."""


def outcome_sums(outcome: Outcome) -> Tensor:
    """All sums of an outcome as one fp64 vector on the device, so that a layer's results cross over in one transfer."""
    errors = torch.stack([outcome.dense_error, outcome.exact_error, outcome.oracle_error]).double()
    parts = [*errors.sum((1, 2, 3)), *errors.square().sum((1, 2, 3)), outcome.recall.sum(dtype=torch.float64)]
    parts += [outcome.rows.sum(), outcome.candidate_rows.sum(), outcome.near_ties.sum()]
    numbers: list[float] = [outcome.recall.numel(), outcome.rows.numel()]
    scan = outcome.scan
    if scan is None or scan.reads is None:
        reads: list[Tensor | float] = [*[0.0] * (len(_READS) - 1), 0.0 if scan is None else scan.broken]
    else:
        head_dim, channels = outcome.output.shape[-1], scan.reads.channels
        bits, tokens, scans = scan.reads.bits.double(), scan.reads.tokens, scan.reads.bits.numel()
        declared = bits if scan.declared_bits is None else scan.declared_bits * tokens
        reads = [bits.sum(), declared.sum(), tokens * scans, scans, channels.sum()]
        reads += [(bits != declared).sum(), (bits < 0).sum(), ((channels < 0) | (channels > head_dim)).sum()]
        reads += [(bits > MOST_BITS * head_dim * tokens).sum(), scan.broken]
    # A number becomes a tensor by filling one, which does not wait for the device as a copy does.
    return torch.stack(
        [
            part.double() if isinstance(part, Tensor) else torch.full((), float(part), dtype=torch.float64, device=errors.device)
            for part in (*numbers, *parts, *reads)
        ]
    )


def settle(number: int, sums: dict[Branch, Tensor], totals: dict[Branch, Totals], failures: dict[MethodSpec, str]) -> None:
    """Take a layer's sums to the host, refuse what cannot be, and keep the rest."""
    if not sums:
        return
    names = ("query_heads", "kv_heads", *_PER_QUERY, *_PER_KV, *_COUNTS, *_READS)
    for branch, values in zip(sums, torch.stack(list(sums.values())).tolist(), strict=True):
        found = dict(zip(names, values, strict=True))
        for name in _PER_QUERY:
            found[name] /= found["query_heads"]
        for name in _PER_KV:
            found[name] /= found["kv_heads"]
        problem = _impossible(found)
        if problem is not None and branch.spec not in failures:
            failures[branch.spec] = f"layer {number}: {problem}"
        totals[branch].layers.append(found)


def _impossible(found: dict[str, float]) -> str | None:
    if found["broken"]:
        return "scores that are not a number (or −∞, from a method that ranks all tokens, or +∞, from one that forces none)"
    bad = [name for name in (*_PER_QUERY, *_READS) if not math.isfinite(found[name])]
    if bad:
        return f"{bad[0]} is not finite"
    if not 0 <= found["recall"] <= 1 + 1e-9:
        return f"a recall of {found['recall']:g}"
    if found["negative"]:
        return "it reports reads of less than nothing"
    if found["astray"]:
        return "it reports channels read outside 0 to head_dim"
    if found["excessive"]:
        return f"it reports reads of more than {MOST_BITS} bits per token and channel"
    if found["differing"]:
        counted, declared = (found[name] / found["scan_tokens"] for name in ("scan_bits", "declared_bits"))
        return f"it declares {declared:g} bits per token and reads {counted:g}"
    return None
