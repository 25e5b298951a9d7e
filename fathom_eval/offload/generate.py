"""Generation through the host-resident runtime: a prefix's K/V and index move to host memory, and every token is decoded from there.

The same prefix, method and k give the same tokens as :func:`fathom_eval.decode.decode`, which is the control of this runtime.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fathom_eval.devices import current
from fathom_eval.errors import UserError
from fathom_eval.kernels.segments import SEGMENT_BLOCKS
from fathom_eval.offload.arena import Arena, SegmentShape, segments_for
from fathom_eval.offload.cache import TieredCache, lanes_of, sealed_tokens
from fathom_eval.offload.gatherer import RowGatherer, check_gathered
from fathom_eval.offload.scans import check_spec, scan_of_prefix
from fathom_eval.offload.step import DecodeStep
from fathom_eval.offload.weights import weights_of

if TYPE_CHECKING:
    from fathom_eval.branches import Branch
    from fathom_eval.models import LoadedModel
    from fathom_eval.prefill import Prefix


@dataclass(frozen=True)
class Generation:
    """What the runtime generated.

    Attributes:
        token_ids: Generated tokens, an end token included.
        bits, channels, rows: Of the last step, means over layers and KV heads, as the evaluator counts them.
    """

    token_ids: tuple[int, ...]
    bits: float
    channels: float
    rows: float


@torch.inference_mode()
def generate(
    loaded: LoadedModel,
    prefix: Prefix,
    branch: Branch,
    max_new_tokens: int,
    *,
    index: str = "host",
    lanes: int = 1,
    score_dtype: torch.dtype | None = None,
    segment_blocks: int | None = None,
    graph: bool = True,
    rows_by: str = "gpu",
    gather_threads: int | None = None,
) -> Generation:
    """Greedily decode one branch with K/V rows in host memory.

    Args:
        index: Where the scan index lies, ``host`` or ``hbm``.
        lanes: Parts of the KV heads that are pipelined.
        score_dtype: Of the scores; fp32 equals the evaluator's, fp16 is what a GPU takes unless told otherwise.
        segment_blocks: Blocks of a segment; by default up to :data:`~fathom_eval.kernels.segments.SEGMENT_BLOCKS`.
        graph: Decode from a CUDA graph where there is a GPU.
        rows_by: Who brings the K/V rows, one of :data:`~fathom_eval.offload.gatherer.GATHERERS`.
        gather_threads: Threads of the CPU that gather rows; by default half of the cores, and no more than eight.

    Raises:
        UserError: The runtime has no step for the method or the model, or the sequence exceeds the model's positions or the memory.
    """
    facts, spec = loaded.facts, branch.spec
    check_spec(spec, facts)
    most = prefix.tokens + 1 + max_new_tokens
    if most > facts.max_positions:
        raise UserError(
            f"{prefix.tokens + 1} prompt tokens and {max_new_tokens} to generate exceed the {facts.max_positions} of {facts.name}"
        )
    assert branch.k is not None
    spec.policy.check(branch.k, spec.label)
    weights = weights_of(loaded, prefix.tokens, max_new_tokens + 1)
    scan = scan_of_prefix(spec, facts, prefix.layers)
    blocks = segment_blocks or min(SEGMENT_BLOCKS, max(2, 1 << (-(-most // 64) - 1).bit_length()))
    shape = SegmentShape(
        facts.kv_heads, facts.head_dim, blocks, prefix.layers[0].keys.dtype, (scan.store,), scan.span if scan.span > 1 else 8
    )
    check_gathered(rows_by, shape, lanes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(current(weights.device))
        arena = stack.enter_context(Arena(shape, weights.device, index))
        gatherer = None if rows_by == "gpu" else stack.enter_context(RowGatherer(weights.device, gather_threads))
        arena.check(facts.layers * segments_for(most, blocks))
        cache = TieredCache.allocate(arena, facts.layers, 1, lanes_of(1, facts.kv_heads, lanes), most, spec.policy.local, scan.bases)
        for number, layer in enumerate(prefix.layers):
            cache.load(number, 0, layer.keys, layer.values)
        cache.set_length(0, prefix.tokens)
        cache.check_flags()
        step = DecodeStep(weights, cache, scan, branch.k, spec.policy, score_dtype=score_dtype, rows_by=rows_by, gatherer=gatherer)
        stack.callback(step.release)
        step.token_ids.fill_(prefix.token_ids[-1])
        if graph:
            step.capture()
        tokens: list[int] = []
        for _ in range(max_new_tokens):
            step.run()
            tokens.append(int(step.token_ids[0]))
            step.check()
            if tokens[-1] in facts.eos_token_ids:
                break
        cache.check_flags()
        late = cache.lengths[0] - sealed_tokens(cache.lengths[0], cache.local)
        scanned = cache.lengths[0] > late
        rows = step.union_counts.double().mean().item()
        return Generation(
            tuple(tokens),
            scan.bits().mean().item() if scanned else 0.0,
            scan.channels().mean().item() if scanned else 0.0,
            rows,
        )
