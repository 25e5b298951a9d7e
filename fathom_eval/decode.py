"""Lock-step greedy decoding of many branches of one prefix: the model's weights are read once a step for all methods."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from fathom_eval.branches import Branch, BranchBatch, batch_order
from fathom_eval.compat import cache_argument
from fathom_eval.errors import UserError
from fathom_eval.prefill import Prefix, use_attention
from fathom_eval.rehearsal import Rehearsal, needed_rehearsal
from fathom_eval.stop_strings import StopStrings

if TYPE_CHECKING:
    from fathom_eval.models import LoadedModel


@dataclass(frozen=True)
class BranchResult:
    """What one branch generated and what its scan read.

    Attributes:
        token_ids: Generated tokens, an end token included.
        finish: ``eos``, ``stop``, ``length`` or ``error``.
        error: Why the branch failed.
        steps: Decode steps taken.
        fired: Layers' attention that the method decided; ``layers × steps`` unless it silently stopped.
        bits, declared_bits: Scan bits per token, KV head and layer: counted, and what the plans declare; None for controls, and the
            latter for a method that declares none.
        channels: Mean channels read; None for controls.
        rows: Mean distinct K/V rows selected per KV head, layer and step.
        candidate_rows: Mean further K rows fetched for reranking.
    """

    branch: Branch
    token_ids: tuple[int, ...]
    finish: str
    error: str | None
    steps: int
    fired: int
    bits: float | None
    declared_bits: float | None
    channels: float | None
    rows: float
    candidate_rows: float


class DecodeProgress(NamedTuple):
    """How far the branches of a batch are.

    Attributes:
        steps: Taken so far.
        running: Branches that have not ended.
    """

    steps: int
    running: int


class _TailCache(DynamicCache):
    """Holds each branch's own tokens; the prefix before them is counted but not copied."""

    def __init__(self, prefix_tokens: int) -> None:
        super().__init__()
        self._prefix_tokens = prefix_tokens

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._prefix_tokens + super().get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        # A single query token attends to all there is: no mask is wanted, whatever the branches' methods select.
        return self.get_seq_length(layer_idx) + 1, 0


@torch.inference_mode()
def decode(
    loaded: LoadedModel,
    prefix: Prefix,
    branches: Sequence[Branch],
    max_new_tokens: int,
    *,
    stop_strings: tuple[str, ...] = (),
    progress: Callable[[DecodeProgress], None] | None = None,
) -> list[BranchResult]:
    """Greedily decode every branch from the same prefix, one row of a batch each.

    The prompt's last token is the first step of every branch, so every generated token comes from the method's own attention. A method
    that fails, or whose reads cannot be, ends its own branches with the reason; the others go on.

    Args:
        stop_strings: A branch ends with the token that completes one of them in its text, the prompt's end included, as
            ``model.generate(stop_strings=…)`` does. The tokens of the stop string stay in the result.
        progress: Called after every step.

    Raises:
        UserError: Prompt and generation exceed the model's positions.
    """
    facts, model = loaded.facts, loaded.model
    if prefix.tokens + 1 + max_new_tokens > facts.max_positions:
        raise UserError(
            f"{prefix.tokens + 1} prompt tokens and {max_new_tokens} to generate exceed the {facts.max_positions} that {facts.name} holds"
        )
    use_attention(loaded)
    rehearsal = needed_rehearsal((branch.spec.method for branch in branches), model, facts.layers)
    with nullcontext() if rehearsal is None else rehearsal.watching():
        return _decode(loaded, prefix, branches, max_new_tokens, stop_strings, progress, rehearsal)


def _decode(
    loaded: LoadedModel,
    prefix: Prefix,
    branches: Sequence[Branch],
    max_new_tokens: int,
    stop_strings: tuple[str, ...],
    progress: Callable[[DecodeProgress], None] | None,
    rehearsal: Rehearsal | None,
) -> list[BranchResult]:
    facts, model = loaded.facts, loaded.model
    order = batch_order(branches, facts)
    batch = BranchBatch(prefix, [branches[row] for row in order], facts, rehearsal)
    rows = len(branches)
    cache: Cache = _TailCache(prefix.tokens)
    ends = torch.tensor(facts.eos_token_ids, device=model.device, dtype=torch.int64)
    stops = StopStrings(loaded.tokenizer, stop_strings, prefix.token_ids, rows) if stop_strings else None
    current = torch.full((rows, 1), prefix.token_ids[-1], device=model.device)
    tokens: list[Tensor] = []
    lengths = [max_new_tokens] * rows
    finish = ["length"] * rows
    errors: list[str | None] = [None] * rows
    counted: list[dict[str, Any] | None] = [None] * rows
    for step in range(max_new_tokens):
        position = torch.full((rows, 1), prefix.tokens + step, device=model.device)
        output = model(
            input_ids=current, position_ids=position, use_cache=True, logits_to_keep=1, branches=batch, **{cache_argument(model): cache}
        )
        logits = output.logits[:, -1].float()
        current = logits.argmax(-1, keepdim=True)
        tokens.append(current)
        # One wait for the device a step.
        states = (~torch.isfinite(logits).all(-1), torch.isin(current.squeeze(-1), ends), batch.broken(logits.device))
        broken, ended, unwell = torch.stack(states).tolist()
        unwell = [flag and count is None for flag, count in zip(unwell, counted, strict=True)]
        if any(unwell):
            batch.note_broken()
        stopped = [False] * rows if stops is None else stops.add(current.squeeze(-1).tolist(), [count is None for count in counted])
        last = step == max_new_tokens - 1
        if last or any(any(flags) for flags in (broken, ended, unwell, stopped)):
            batch.settle()  # which may find that a method fails
        failed = [batch.failures.get(row) for row in range(rows)]
        counts: dict[str, list[float]] | None = None
        for row in range(rows):
            unusable = broken[row] or failed[row] is not None
            if counted[row] is None and (unusable or ended[row] or stopped[row] or last):
                if unusable:
                    finish[row], errors[row] = "error", failed[row] or f"the logits of step {step} are not finite"
                elif ended[row] or stopped[row]:
                    finish[row] = "eos" if ended[row] else "stop"
                lengths[row] = step if unusable else step + 1
                counts = batch.counts.lists() if counts is None else counts
                reads = counted[row] = _counts(batch, counts, row, step + 1)
                impossible = None if unusable else impossible_reads(batch.branches[row], reads)
                if impossible is not None:
                    finish[row], errors[row] = "error", impossible
        if progress is not None:
            progress(DecodeProgress(step + 1, counted.count(None)))
        if all(count is not None for count in counted):
            break
    generated = torch.cat(tokens, dim=-1).tolist()
    results: list[BranchResult | None] = [None] * rows
    for row, given in enumerate(order):
        ids = tuple(generated[row][: lengths[row]])
        results[given] = BranchResult(branches[given], ids, finish[row], errors[row], **(counted[row] or {}))
    return [result for result in results if result is not None]


def impossible_reads(branch: Branch, counts: dict[str, Any]) -> str | None:
    """What cannot be about the reads that a branch's method reports; None where all is well."""
    bits, declared = counts["bits"], counts["declared_bits"]
    if bits is None:
        return None
    if bits < 0 or counts["channels"] < 0:
        return "it reports reads of less than nothing"
    if branch.spec.method.declares and not math.isclose(bits, declared, rel_tol=1e-9, abs_tol=1e-9):
        return f"it declares {declared:g} bits per token and reads {bits:g}"
    return None


def _counts(batch: BranchBatch, counts: dict[str, list[float]], row: int, steps: int) -> dict[str, Any]:
    """A branch's counters as means, taken at its last step: rows that have finished are carried along but not counted."""
    scanned = counts["scan_tokens"][row]
    attended = batch.facts.layers * batch.facts.kv_heads * steps
    return {
        "steps": steps,
        "fired": counts["fired"][row],
        "bits": counts["scan_bits"][row] / scanned if scanned else None,
        "declared_bits": counts["declared_bits"][row] / scanned if scanned and batch.branches[row].spec.method.declares else None,
        "channels": counts["channels"][row] / (counts["scans"][row] * batch.facts.kv_heads) if scanned else None,
        "rows": counts["rows"][row] / attended,
        "candidate_rows": counts["candidates"][row] / attended,
    }
