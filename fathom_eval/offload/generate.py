"""Generation through the host-resident runtime: a prefix's K/V and index move to host memory, and every token is decoded from there.

In fp32, scores included, the same prefix, method and k give the same tokens as :func:`fathom_eval.decode.decode`, which is the control of
this runtime. In fp16 and bf16 the two round differently: the model's layers between their operations, the runtime's kernels at their ends.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fathom_eval.decode import DecodeProgress
from fathom_eval.devices import current
from fathom_eval.errors import UserError
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.kernels.segments import SEGMENT_BLOCKS
from fathom_eval.kernels.topk import LARGEST_CAPACITY
from fathom_eval.offload.arena import Arena, SegmentShape, segments_for
from fathom_eval.offload.cache import TieredCache, lanes_of
from fathom_eval.offload.gatherer import RowGatherer, check_gathered
from fathom_eval.offload.scans import Landmarks, Scan, check_size, check_spec, scan_of_prefix
from fathom_eval.offload.step import DecodeStep
from fathom_eval.offload.step_reads import StepReads
from fathom_eval.offload.weights import DecoderWeights, weights_of

if TYPE_CHECKING:
    from fathom_eval.branches import Branch
    from fathom_eval.models import LoadedModel, ModelFacts
    from fathom_eval.prefill import Prefix
    from fathom_eval.stop_strings import StopStrings


@dataclass(frozen=True)
class Generation:
    """What the runtime generated.

    Attributes:
        token_ids: Generated tokens, an end token included.
        bits, channels, rows: As :class:`fathom_eval.decode.BranchResult` has them; the first two are None where nothing was scanned.
    """

    token_ids: tuple[int, ...]
    bits: float | None
    channels: float | None
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
    """Greedily decode one branch with K/V rows in host memory. The model's joined matrices are copies, but for those that lie joined.

    Args:
        index: Where the scan index lies, ``host`` or ``hbm``.
        lanes: Parts of the KV heads that are pipelined.
        score_dtype: Of the scores; fp32 equals the evaluator's. By default as the step is timed: fp16 on a GPU, fp32 on a CPU.
        segment_blocks: Blocks of a segment; by default up to :data:`~fathom_eval.kernels.segments.SEGMENT_BLOCKS`.
        graph: Decode from a CUDA graph where there is a GPU.
        rows_by: Who brings the K/V rows, one of :data:`~fathom_eval.offload.gatherer.GATHERERS`.
        gather_threads: Threads of the CPU that gather rows; by default half of the cores, and no more than eight.

    Raises:
        UserError: The runtime has no step for the method or the model, the sequence exceeds the model's positions or the memory, k exceeds
            what the kernels hold, or a step gives what is not a number.
        CaptureError: The step could not be recorded as a CUDA graph.
    """
    facts, spec = loaded.facts, branch.spec
    check_spec(spec, facts)
    check_positions(prefix, max_new_tokens, facts)
    assert branch.k is not None
    spec.policy.check(branch.k, spec.label)
    check_size(spec, branch.k, facts)
    weights = weights_of(loaded, prefix.tokens, max_new_tokens + 1)
    opened = open_step(
        weights,
        facts,
        prefix,
        branch,
        scan_of_prefix(spec, facts, prefix.layers),
        max_new_tokens,
        index=index,
        lanes=lanes,
        score_dtype=score_dtype,
        segment_blocks=segment_blocks,
        rows_by=rows_by,
        gather_threads=gather_threads,
    )
    with opened as step:
        reads = StepReads(step, spec, facts)
        if graph:
            step.capture()
        found = decode_greedily(reads, max_new_tokens, facts.eos_token_ids)
        if found.problem is not None:
            raise UserError(found.problem)
        counts = reads.counts()
        return Generation(found.token_ids, counts["bits"], counts["channels"], counts["rows"])


def check_positions(prefix: Prefix, max_new_tokens: int, facts: ModelFacts) -> None:
    """Raise :class:`UserError` where prompt and generation exceed the model's positions."""
    if prefix.tokens + 1 + max_new_tokens > facts.max_positions:
        raise UserError(
            f"{prefix.tokens + 1} prompt tokens and {max_new_tokens} to generate exceed the {facts.max_positions} of {facts.name}"
        )


@contextlib.contextmanager
def open_step(
    weights: DecoderWeights,
    facts: ModelFacts,
    prefix: Prefix,
    branch: Branch,
    scan: Scan,
    max_new_tokens: int,
    *,
    index: str,
    lanes: int = 1,
    score_dtype: torch.dtype | None = None,
    segment_blocks: int | None = None,
    rows_by: str = "gpu",
    gather_threads: int | None = None,
) -> Iterator[DecodeStep]:
    """A step over a copy of the prefix's K/V in host memory, not captured yet, whose next token is the first after the prompt.

    Leaving it, also by an error, gives all of its memory back.

    Args:
        scan: The branch's, of this prefix. All others as :func:`generate`'s.

    Raises:
        UserError: The memory does not suffice, there are too many tokens, a key cannot be stored, or the CPU cannot gather the rows.
    """
    spec = branch.spec
    assert branch.k is not None
    most = prefix.tokens + 1 + max_new_tokens
    shape = segment_shape(facts, scan.store, scan.span, most, prefix.layers[0].keys.dtype, segment_blocks)
    segments = segments_for(most, shape.blocks)
    if segments * shape.blocks > LARGEST_CAPACITY:
        raise UserError(f"{most:,} tokens are more than the {BLOCK * LARGEST_CAPACITY:,} that the runtime ranks")
    check_gathered(rows_by, shape, lanes)
    with contextlib.ExitStack() as stack:
        stack.enter_context(current(weights.device))
        arena = stack.enter_context(Arena(shape, weights.device, index))
        gatherer = None if rows_by == "gpu" else stack.enter_context(RowGatherer(weights.device, gather_threads))
        arena.check(facts.layers * segments)
        cache = TieredCache.allocate(arena, facts.layers, 1, lanes_of(1, facts.kv_heads, lanes), most, spec.policy.local, scan.bases)
        # Whoever still holds the step holds no segment then, so that their memory can go.
        stack.callback(cache.layers.clear)
        for number, layer in enumerate(prefix.layers):
            cache.load(number, 0, layer.keys, layer.values)
        cache.set_length(0, prefix.tokens)
        cache.check_flags()
        step = DecodeStep(weights, cache, scan, branch.k, spec.policy, score_dtype=score_dtype, rows_by=rows_by, gatherer=gatherer)
        stack.callback(step.release)
        step.token_ids.fill_(prefix.token_ids[-1])
        yield step


def segment_shape(facts: ModelFacts, store: str, span: int, most: int, dtype: torch.dtype, blocks: int | None = None) -> SegmentShape:
    """The segments of one branch of at most ``most`` tokens, or of rows that decode together.

    Args:
        store, span: Of the scan.
        blocks: Of a segment; by default what ``most`` takes, up to :data:`~fathom_eval.kernels.segments.SEGMENT_BLOCKS`.
    """
    blocks = blocks or min(SEGMENT_BLOCKS, max(2, 1 << (-(-most // 64) - 1).bit_length()))
    return SegmentShape(facts.kv_heads, facts.head_dim, blocks, dtype, (store,), span if store == Landmarks.store else 8)


@dataclass(frozen=True)
class Decoded:
    """A greedy generation.

    Attributes:
        token_ids: Generated tokens, an end token included; without the token of a step that gave none.
        finish: ``eos``, ``stop``, ``length`` or ``error``.
        problem: Why the last step gave no token.
    """

    token_ids: tuple[int, ...]
    finish: str
    problem: str | None = None


def decode_greedily(
    reads: StepReads,
    max_new_tokens: int,
    ends: Collection[int],
    stops: StopStrings | None = None,
    progress: Callable[[DecodeProgress], None] | None = None,
) -> Decoded:
    """Take steps until a token or the text ends the generation, a step gives no token, or there are enough.

    Args:
        progress: Called after every step that gave a token.

    Raises:
        UserError: As :meth:`StepReads.run`.
    """
    tokens: list[int] = []
    for _ in range(max_new_tokens):
        outcome = reads.run()
        if outcome.problem is not None:
            return Decoded(tuple(tokens), "error", outcome.problem)
        tokens.append(outcome.token)
        if progress is not None:
            progress(DecodeProgress(len(tokens), 1))
        stopped = stops is not None and stops.add(tokens[-1:], [True])[0]
        if outcome.token in ends:
            return Decoded(tuple(tokens), "eos")
        if stopped:
            return Decoded(tuple(tokens), "stop")
    return Decoded(tuple(tokens), "length")
