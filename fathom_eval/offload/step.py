"""One decode step over a host-resident cache: the same launches for every method, which differs in its plan and its scan alone.

On a GPU a step is one CUDA graph. With more than one lane, what follows a lane's scan runs on a second stream behind the scan of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from weakref import WeakSet

import torch
from torch import Tensor

from fathom_eval.captures import CaptureError, give_stream, recording, take_stream
from fathom_eval.devices import current
from fathom_eval.errors import UserError
from fathom_eval.gguf_models import one_line
from fathom_eval.kernels.attend import attend_rows, workspace_size
from fathom_eval.kernels.gate import silu_gate
from fathom_eval.kernels.handover import await_rows, list_rows, take_rows
from fathom_eval.kernels.linear import MOST_ROWS, linear
from fathom_eval.kernels.norm import add_norm
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.kernels.rerank import keep_best, ordered_size
from fathom_eval.kernels.rotary import rotate_heads
from fathom_eval.kernels.rows import GroupRows, fetch_rows, union_rows
from fathom_eval.kernels.scan import score_tail
from fathom_eval.kernels.topk import scratch_size, top_tokens
from fathom_eval.offload.cache import Lane, LaneTables, TieredCache
from fathom_eval.offload.gatherer import Box, RowGatherer, check_gathered
from fathom_eval.offload.pacing import fetch_programs
from fathom_eval.offload.scans import Scan
from fathom_eval.offload.weights import DecoderWeights
from fathom_eval.selection import Policy

_CAPTURED: WeakSet[DecodeStep] = WeakSet()
"""Steps that hold a graph, whose streams are not to be captured on."""


@dataclass(frozen=True)
class LaneWork:
    """What one lane writes between its scan and its output, reused in every layer.

    Attributes:
        unions: Of every layer, the rows of each group; candidates, where the step reranks.
        kept: The same lists with the masks of what is attended to.
        box: Through which the CPU hands over the rows, None where the device fetches them.
        programs: That fetch the rows at most, None where no scan shares the link with them.
    """

    lane: Lane
    scores: Tensor
    maxima: Tensor
    scratch: Tensor
    indices: Tensor
    unions: list[GroupRows]
    kept: list[GroupRows]
    fetched: Tensor
    workspace: Tensor
    ordered: Tensor
    box: Box | None
    programs: int | None


class DecodeStep:
    """A decode step of R sessions.

    Args:
        weights: Of the model.
        cache: With one table a lane; its lanes are this step's.
        scan: The method; its buffers are made here.
        k: Tokens that a query head attends to, sink and window included.
        policy: ``sink``, ``local``, ``rerank`` and ``attend`` are heeded.
        score_dtype: Of the scores, by default :func:`timed_score_dtype`; fp32 equals the evaluator's.
        rows_by: Who brings the K/V rows, one of :data:`~fathom_eval.offload.gatherer.GATHERERS`.
        gatherer: Needed where that is not the GPU alone; it must run whenever the step does.

    Attributes:
        token_ids: int64 ``[R]``, the token that a step reads and then the one it gave.
        logits: fp32 ``[R, vocabulary]`` of the last step.
        union_counts: int32 ``[L, R, H]``, rows that the last step's groups attended to (candidates, where it reranks).
        query, mixed: ``[R, H, G, D]``, queries and attention outputs of the layer computed last.
        tail_scores: ``[R, H, G, T]``, exact scores of the unsealed tokens there.
        score_scaling: What scores are multiplied by.
        layers: Layers that a step computes.
        observer: Called with the layer and the work of each lane once it is done. Set before :meth:`capture`, its launches become part of
            the graph: they must be the same in every step.

    Raises:
        UserError: More sessions than one step takes, or rows that the CPU cannot gather.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        cache: TieredCache,
        scan: Scan,
        k: int,
        policy: Policy,
        *,
        score_dtype: torch.dtype | None = None,
        rows_by: str = "gpu",
        gatherer: RowGatherer | None = None,
    ) -> None:
        rows, heads, group, head_dim, device = cache.rows, weights.heads, weights.group, weights.head_dim, weights.device
        if rows > MOST_ROWS:
            raise UserError(f"{rows} sessions are more than the {MOST_ROWS} that one step takes")
        self.weights, self.cache, self.scan, self.policy = weights, cache, scan, policy
        self.layers = len(weights.layers)
        check_gathered(rows_by, cache.arena.shape, len(cache.lanes))
        assert (gatherer is None) == (rows_by == "gpu"), "a gatherer is for rows that the CPU brings"
        self.rows_by, self._gatherer = rows_by, gatherer
        self.observer: Callable[[int, LaneWork], None] | None = None
        most = cache.capacity_blocks * BLOCK + cache.tail.shape[-2]
        self._count, self._candidates = min(k - policy.sink - policy.local, most), candidates_of(k, policy, most)
        dtype = score_dtype or timed_score_dtype(device)
        # In fp16 the softmax's own scale keeps scores far from the largest number; in fp32 none is needed.
        self.score_scaling = weights.scaling if dtype == torch.float16 else 1.0
        hidden, wide = weights.norm.shape[0], weights.layers[0].down.shape[1]

        def empty(*shape: int, kind: torch.dtype = weights.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        self.token_ids = empty(rows, kind=torch.int64)
        self.logits = empty(rows, weights.head.shape[0], kind=torch.float32)
        self.union_counts = empty(self.layers, rows, heads, kind=torch.int32)
        self._residual, self._normed, self._delta = (empty(rows, hidden) for _ in range(3))
        self._projected = empty(rows, weights.layers[0].projections.shape[0])
        self.query = empty(rows, heads, group, head_dim)
        self.mixed = empty(rows, heads, group, head_dim)
        self._both, self._gated = empty(rows, 2 * wide), empty(rows, wide)
        self.tail_scores = empty(rows, heads, group, cache.tail.shape[-2], kind=dtype)
        scan.allocate(self.layers, rows, heads, head_dim, device)
        self._work = [self._lane_work(lane, dtype) for lane in cache.lanes]
        self._side = torch.cuda.Stream(device) if device.type == "cuda" and len(cache.lanes) > 1 else None
        self._graph: torch.cuda.CUDAGraph | None = None
        self._captured_on: torch.cuda.Stream | None = None

    def run(self) -> None:
        """Decode one token of every session: seal what left the windows, then the step itself (as a graph, once it is captured).

        Raises:
            UserError: Rows of an earlier step were not gathered; :meth:`check` tells of this one once the device was waited for.
        """
        self.check()
        with current(self.weights.device):
            self.cache.advance()
            if self._graph is not None:
                self._graph.replay()
            else:
                self._forward()

    def capture(self) -> None:
        """Record the step as one CUDA graph. Kernels are compiled by a first pass over the current state, which is left as it was.

        After a :class:`~fathom_eval.captures.CaptureError` the step can still be run, launch by launch.

        torch keeps a workspace of cuBLAS for every stream, and a graph goes on using that of the stream it was captured on. So that steps
        can be replayed side by side, each is captured on a stream of its own, which no other has until :meth:`release`.

        Raises:
            CaptureError: The first pass went well, and the recording did not.
            UserError: Rows were not gathered.
        """
        if self.weights.device.type != "cuda":
            return
        with current(self.weights.device):
            before = self.token_ids.clone()
            tokens = self.cache.tokens.clone()
            stream = take_stream(self.weights.device, {self._side, *(step._captured_on for step in _CAPTURED)})
            try:
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    self._forward()
                torch.cuda.current_stream().wait_stream(stream)
                self._restore(before, tokens)
                torch.cuda.synchronize()
                self.check()
                try:
                    graph = self._recorded(stream)
                finally:
                    self._restore(before, tokens)
            except BaseException:
                give_stream(stream)
                raise
            self._graph, self._captured_on = graph, stream
            _CAPTURED.add(self)

    def _recorded(self, stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
        torch.cuda.empty_cache()  # a graph has memory of its own
        graph = torch.cuda.CUDAGraph()
        try:
            with recording(graph, stream, torch.cuda.graph_pool_handle()):
                self._forward()
        except Exception as error:
            raise CaptureError(f"the step could not be recorded: {type(error).__name__}: {one_line(error)}") from error
        return graph

    def replay(self) -> None:
        """Launch the captured graph again without moving on: the host neither seals nor counts."""
        assert self._graph is not None, "capture first"
        self._graph.replay()

    def check(self) -> None:
        """Raise :class:`UserError` if rows were not gathered, or too late, in any step that the device has finished. Waits for nothing."""
        if self._gatherer is not None:
            self._gatherer.check()

    def release(self) -> None:
        """Drop the graph and its memory, the observer, and what the CPU gathers into. Waits for the device where there is a graph."""
        self.observer = None  # which may hold the step
        try:
            if self._graph is not None:  # it may be running
                torch.cuda.synchronize(self.weights.device)
        finally:
            self._graph = None
            # Not before the graph is gone: with it torch may free the workspace of this stream.
            if self._captured_on is not None:
                give_stream(self._captured_on)
            self._captured_on = None
            _CAPTURED.discard(self)
            if self._gatherer is not None:
                self._gatherer.drop([work.box for work in self._work if work.box is not None])

    def gathered(self, lane: Lane) -> bool:
        """Whether the CPU brings the rows of a lane; key and value then cross the link together, also where the step reranks."""
        return self.rows_by == "cpu" or (self.rows_by == "both" and lane is not self.cache.lanes[-1])

    def _restore(self, token_ids: Tensor, tokens: Tensor) -> None:
        self.token_ids.copy_(token_ids)
        self.cache.tokens.copy_(tokens)

    def _lane_work(self, lane: Lane, dtype: torch.dtype) -> LaneWork:
        cache, policy, device = self.cache, self.policy, self.weights.device
        rows, heads, group, head_dim = lane.row_count, lane.head_count, self.weights.group, self.weights.head_dim
        tail, capacity = cache.tail.shape[-2], cache.capacity_blocks
        union = GroupRows.allocate(rows, heads, group, self._candidates, policy.sink, policy.local, tail, device)
        slots = union.rows.shape[-1]
        unions = self._a_layer(union, lane)

        def zeros(*shape: int, kind: torch.dtype) -> Tensor:
            return torch.zeros(*shape, dtype=kind, device=device)

        accesses = 1 + policy.rerank if policy.rerank > 1 else 1  # keys of candidates, then values of winners, as dear as rows
        box = None
        if self._gatherer is not None and self.gathered(lane):
            box = self._gatherer.box(rows * heads * slots, 2, head_dim, cache.tail.dtype)
        return LaneWork(
            lane=lane,
            box=box,
            programs=fetch_programs(cache, lane, self.scan, group * self._count * accesses),
            scores=zeros(rows, heads, group, capacity * BLOCK // self.scan.span, kind=dtype),
            maxima=zeros(rows, heads, group, capacity, kind=dtype),
            scratch=zeros(rows, heads, group, scratch_size(self._candidates, tail), kind=torch.int32),
            indices=zeros(rows, heads, group, self._candidates, kind=torch.int32),
            unions=unions,
            kept=self._a_layer(union.with_own_masks(), lane) if policy.rerank > 1 else unions,
            fetched=zeros(2, rows, heads, slots, head_dim, kind=cache.tail.dtype),
            workspace=zeros(workspace_size(rows, heads, group, head_dim, slots, tail), kind=torch.float32),
            ordered=zeros(ordered_size(rows, heads, group, slots, tail) if policy.rerank > 1 else 0, kind=torch.int32),
        )

    def _a_layer(self, union: GroupRows, lane: Lane) -> list[GroupRows]:
        """The lists with a count of their own in every layer, so that what a step read can be told afterwards."""
        counts = [lane.part(layer) for layer in self.union_counts]
        return [GroupRows(union.rows, union.members, count, union.tail_members) for count in counts]

    def _forward(self) -> None:
        weights = self.weights
        self.cache.tokens.add_(1)
        torch.index_select(weights.embedding, 0, self.token_ids, out=self._residual)
        delta: Tensor | None = None
        for number in range(self.layers):
            layer = weights.layers[number]
            add_norm(self._residual, delta, layer.input_norm, weights.epsilon, self._normed)
            linear(self._normed, layer.projections, layer.projection_bias, self._projected)
            self._attend(number)
            linear(self.mixed.view(self.cache.rows, -1), layer.output, layer.output_bias, self._delta)
            add_norm(self._residual, self._delta, layer.post_norm, weights.epsilon, self._normed)
            linear(self._normed, layer.gate_and_up, layer.gate_and_up_bias, self._both)
            silu_gate(self._both, self._gated)
            linear(self._gated, layer.down, layer.down_bias, self._delta)
            delta = self._delta
        add_norm(self._residual, delta, weights.norm, weights.epsilon, self._normed)
        linear(self._normed, weights.head, None, self.logits)
        torch.argmax(self.logits, dim=-1, out=self.token_ids)

    def _attend(self, number: int) -> None:
        weights, cache, layer = self.weights, self.cache, self.weights.layers[number]
        keys, values = cache.tail[number, 0], cache.tail[number, 1]
        rotate_heads(
            self._projected,
            layer.query_norm,
            layer.key_norm,
            weights.epsilon,
            weights.cosines,
            weights.sines,
            weights.first_position,
            cache.blocks,
            cache.tokens,
            self.query,
            keys,
            values,
        )
        query, offset = self.project(number)
        self.scan.plan(number, query)
        score_tail(self.query, keys, offset, cache.blocks, cache.tokens, self.tail_scores, self.score_scaling)
        lanes = list(zip(self._work, cache.layers[number].lanes, strict=True))
        if self._side is None:
            for work, tables in lanes:
                self._scan_lane(number, work, tables, query)
                self._finish_lane(number, work, tables)
            return
        for work, tables in lanes[:-1]:
            self._scan_lane(number, work, tables, query)
            self._side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._side):
                self._finish_lane(number, work, tables)
        work, tables = lanes[-1]
        self._scan_lane(number, work, tables, query)
        self._finish_lane(number, work, tables)
        torch.cuda.current_stream().wait_stream(self._side)

    def project(self, number: int) -> tuple[Tensor, Tensor | None]:
        """The query in the store's basis, and what a tail key's exact score lacks of the centred store's."""
        basis = self.cache.layers[number].basis
        if basis is None:
            return self.query, None
        wide = self.query.float()
        return (wide @ basis.vectors).contiguous(), (wide @ basis.mean.unsqueeze(-1)).squeeze(-1).contiguous()

    def _scan_lane(self, number: int, work: LaneWork, tables: LaneTables, query: Tensor) -> None:
        blocks = self.cache.blocks[work.lane.rows]
        self.scan.scan(number, work.lane, work.lane.part(query), tables, blocks, work.scores, work.maxima, self.score_scaling)

    def _finish_lane(self, number: int, work: LaneWork, tables: LaneTables) -> None:
        """Top-k, union, fetch of rows and attention of one lane.

        A step that reranks has the GPU fetch the candidates' keys and then the winners' values. The CPU brings both of every candidate at
        once, since a second handover would wait for it again; the lists of what is kept name the same places.
        """
        cache, policy, lane, union, kept = self.cache, self.policy, work.lane, work.unions[number], work.kept[number]
        blocks, tokens = cache.blocks[lane.rows], cache.tokens[lane.rows]
        query, out = lane.part(self.query), lane.part(self.mixed)
        keys, values = lane.part(cache.tail[number, 0]), lane.part(cache.tail[number, 1])
        limits = (policy.sink, policy.local)
        shared = policy.attend == "union"
        top_tokens(work.scores, work.maxima, lane.part(self.tail_scores), blocks, tokens, *limits, work.scratch, work.indices)
        reranks = policy.rerank > 1
        union_rows(work.indices, blocks, tokens, *limits, union, shared=shared and not reranks)
        if work.box is not None:
            list_rows(tables["rows"], union, work.box.mailbox)
            await_rows(work.box.mailbox)
            take_rows(work.box.mailbox, union, work.fetched)
        else:
            fetch_rows(tables["rows"], union, work.fetched[:1] if reranks else work.fetched, programs=work.programs)
        if reranks:
            keep_best(query, work.fetched[0], keys, blocks, tokens, *limits, self._count, union, kept, work.ordered, shared=shared)
            if work.box is None:
                fetch_rows(tables["rows"], kept, work.fetched[1:], first_part=1, members_only=True, programs=work.programs)
        attend_rows(query, work.fetched[0], work.fetched[1], kept, keys, values, work.workspace, out, self.weights.scaling)
        if self.observer is not None:
            self.observer(number, work)


def timed_score_dtype(device: torch.device) -> torch.dtype:
    """Of the scores of the step that is timed: fp16 on a GPU, where it halves what top-k reads, fp32 on a CPU."""
    return torch.float16 if device.type == "cuda" else torch.float32


def candidates_of(k: int, policy: Policy, most: int) -> int:
    """Tokens that a query head's scores select, no more than the ``most`` that there are; some of them are dropped where it reranks."""
    return min(int((k - policy.sink - policy.local) * policy.rerank), most)


def launch_together(steps: Sequence[DecodeStep], streams: Sequence[torch.cuda.Stream]) -> None:
    """Replay several captured steps side by side, one stream each, and let the current stream wait for all: sessions pipelined.

    Args:
        streams: Each of its step's device, whose current stream is meant.
    """
    for step, stream in zip(steps, streams, strict=True):
        stream.wait_stream(torch.cuda.current_stream(stream.device))
        with torch.cuda.stream(stream):
            step.replay()
    for stream in streams:
        torch.cuda.current_stream(stream.device).wait_stream(stream)
