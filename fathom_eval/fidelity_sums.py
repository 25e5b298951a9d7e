"""Sums of what a fidelity run finds: gathered on the device layer by layer, checked and kept on the host."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

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
_READS = ("scan_bits", "declared_bits", "scan_tokens", "scans", "channels", "differing", "negative", "astray", "excessive", "broken")

# The order of an outcome's vector: real numbers, integers of the device, and what is known without it.
_ORDER = (
    *(*_PER_QUERY, "scan_bits", "declared_bits", "channels"),
    *(*_PER_KV, "near_ties", "differing", "negative", "astray", "excessive", "broken"),
    *("query_heads", "kv_heads", "scan_tokens", "scans"),
)

MOST_BITS = 1024
"""Of a channel of one token: a scan that reports more is not counted right. Hash tables read hundreds of entries a token."""


def outcome_sums(outcome: Outcome) -> Tensor:
    """All sums of an outcome as one fp64 vector on the device, so that a layer's results cross over in one transfer."""
    errors = torch.stack([outcome.dense_error, outcome.exact_error, outcome.oracle_error]).double()
    device, scan = errors.device, outcome.scan
    counts = [outcome.rows.sum(), outcome.candidate_rows.sum(), outcome.near_ties.sum()]
    if scan is None or scan.reads is None:
        tokens = scans = 0
        read = torch.zeros(3, dtype=torch.float64, device=device)
        counts += [*[_number(0, device)] * 4, _number(0, device) if scan is None else scan.broken.long()]
    else:
        head_dim, channels, bits = outcome.output.shape[-1], scan.reads.channels, scan.reads.bits.double()
        tokens, scans = scan.reads.tokens, bits.numel()
        stated = bits if scan.declared_bits is None else scan.declared_bits * tokens
        read = torch.stack([bits.sum(), stated.sum(), channels.sum().double()])
        counts += [(bits != stated).sum(), (bits < 0).sum(), ((channels < 0) | (channels > head_dim)).sum()]
        counts += [(bits > MOST_BITS * head_dim * tokens).sum(), scan.broken.long()]
    known = [_number(number, device) for number in (outcome.recall.numel(), outcome.rows.numel(), tokens * scans, scans)]
    parts = (errors.sum((1, 2, 3)), errors.square().sum((1, 2, 3)), outcome.recall.sum(dtype=torch.float64).view(1), read)
    return torch.cat([*parts, torch.stack([*counts, *known]).double()])


@lru_cache(maxsize=256)
def _number(value: int, device: torch.device) -> Tensor:
    """An int64 scalar on the device, made by filling it, which does not wait as a copy does."""
    return torch.full((), value, dtype=torch.int64, device=device)


def settle(number: int, sums: dict[Branch, Tensor], totals: dict[Branch, Totals], failures: dict[MethodSpec, str]) -> None:
    """Take a layer's sums to the host, refuse what cannot be, and keep the rest."""
    if not sums:
        return
    for branch, values in zip(sums, torch.stack(list(sums.values())).tolist(), strict=True):
        found = dict(zip(_ORDER, values, strict=True))
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
