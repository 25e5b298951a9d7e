"""Where the K/V of a timed step come from: synthetic ones for a model of random weights, or a real prefill of a real model."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from fathom_eval.calibration import Basis
from fathom_eval.errors import UserError
from fathom_eval.kernels.segments import SEGMENT_BLOCKS
from fathom_eval.memory import gib, host_bytes
from fathom_eval.methods import MethodSpec
from fathom_eval.methods.base import channel_count
from fathom_eval.methods.double_sparsity import DoubleSparsity
from fathom_eval.methods.fathom import Fathom
from fathom_eval.methods.loki import Loki
from fathom_eval.offload.arena import Arena, SegmentShape, known_stores, segments_for
from fathom_eval.offload.bench.synthetic import SharedQueries, SyntheticKeys, attach_pool
from fathom_eval.offload.cache import TieredCache, lanes_of
from fathom_eval.offload.generate import segment_shape
from fathom_eval.offload.pinned import huge_bytes
from fathom_eval.offload.scans import FixedChannels, Landmarks, Scan, WaterFilling, check_spec, fixed_scan, scan_of_prefix
from fathom_eval.offload.step import DecodeStep
from fathom_eval.offload.weights import DecoderWeights, ModelShape, random_weights, rotary_angles, weights_of
from fathom_eval.selection import Policy

if TYPE_CHECKING:
    from fathom_eval.models import LoadedModel, ModelFacts
    from fathom_eval.prefill import Prefix

ROOM = 256
"""Tokens that a timed cache has room for beyond its context."""

UNION_A_HEAD = 2.75
"""Distinct rows of a group of four heads over k that Fathom's are fitted to, so that all methods' lie in the paper's 167 to 216 MB."""


class Source(Protocol):
    """Makes what a step runs on."""

    facts: ModelFacts
    index: str
    synthetic: bool

    def build(self) -> None:
        """Take the memory that all contexts share. Before, only ``facts``, ``index`` and ``synthetic`` can be asked for."""

    def open(self, context: int) -> None:
        """Turn to a context: a nominal number of tokens."""

    def weights(self) -> DecoderWeights:
        """Of the model, with rotary angles for the open context."""

    def prepare(
        self, spec: MethodSpec, rows: int, lanes: int, session: int = 0, sessions: int = 1, last_heads: int | None = None
    ) -> tuple[TieredCache, Scan]:
        """A cache of the open context for R rows, and the method's scan over it; for one of the sessions that run side by side."""

    def segment_shape(self) -> SegmentShape:
        """Of the rows, whatever else a segment holds."""

    def reset(self, cache: TieredCache) -> None:
        """Set the lengths back to the context's."""

    def notes(self, cache: TieredCache) -> dict[str, Any]:
        """Fields of a record about where the data come from."""


class SyntheticSource:
    """Random weights and synthetic K/V in one pool of segments that serves every context, layer and session.

    Made, it has checked everything and holds nothing; :meth:`build` pins and fills the pool once.

    Args:
        shape: Of the model.
        contexts: All that will be opened.
        sessions: The most sessions of one measurement.
        index: ``host`` or ``hbm``.
        host_pages: As :class:`~fathom_eval.offload.arena.Arena` has it.
        spread: Standard deviation of the log of the keys' channel scales.
        host_limit: Bytes of host memory to take at most; None for two thirds of what is free.

    Attributes:
        host_bytes: That the pool will take.
        weight_bytes: That a step reads of the weights, without norms.

    Raises:
        UserError: A method cannot be timed, a context is no multiple of a segment, or memory is lacking.
    """

    synthetic = True

    def __init__(
        self,
        shape: ModelShape,
        specs: Sequence[MethodSpec],
        contexts: Sequence[int],
        sessions: int,
        *,
        device: torch.device,
        index: str,
        spread: float,
        host_limit: int | None,
        say: Callable[[str], None],
        host_pages: str = "auto",
    ) -> None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.facts, self.index, self._say = shape.facts(device, dtype, max(contexts) + ROOM), index, say
        self._shape, self._device, self._context = shape, device, 0
        self._bases: list[Basis] | None = None
        scans = [self._scan(spec) for spec in specs]  # refuses what cannot be timed
        blocks = min(SEGMENT_BLOCKS, max(2, 1 << (max(1, min(contexts) // 64).bit_length() - 1)))
        for context in contexts:
            if context % (64 * blocks):
                raise UserError(_no_multiple(context, 64 * blocks))
        stores = known_stores(["planes", *(scan.store for scan in scans)])
        spans = {scan.span for scan in scans if scan.store == Landmarks.store} or {8}
        if len(spans) > 1:
            raise UserError(
                f"landmarks of {' and '.join(map(str, sorted(spans)))} tokens cannot share a pool: time them in runs of their own"
            )
        (span,) = spans
        self.arena = Arena(SegmentShape(shape.kv_heads, shape.head_dim, blocks, dtype, stores, span), device, index, host_pages)
        need = segments_for(max(contexts), blocks)
        host, _ = self.arena.estimate(1)
        free = host_bytes()
        limit = host_limit if host_limit is not None else (free or 2**62) * 2 // 3
        count = min(shape.layers * sessions * need, limit // host)
        if count < need:
            given = (
                f"{limit / 2**30:.3g} GiB are allowed" if host_limit is not None else f"{gib(limit)}, two thirds of what is free, are taken"
            )
            raise UserError(
                f"context {max(contexts)} needs {gib(need * host)} of host memory and {given}: give a shorter one or a larger --host-memory"
            )
        self.arena.check(count, limit=limit)
        apart, wanted = count // need, shape.layers * sessions
        self._count, self._spread, self.host_bytes, self.weight_bytes = count, spread, host * count, shape.matrix_elements * dtype.itemsize
        self._summary = (
            f"{shape.name}: random weights, synthetic K/V; {count} segments of {64 * blocks} tokens, {gib(self.host_bytes)} of host memory"
            + ("" if apart >= wanted else f" ({apart} of {wanted} layers at {max(contexts)})")
        )
        self._distinct: dict[int, int] = {}

    def build(self) -> None:
        """Make the weights, and pin and fill the pool."""
        self._say(self._summary)
        shape = self._shape
        try:
            self._plain = random_weights(shape, self._device, self.arena.shape.dtype, 0, 1)
            self.keys = SyntheticKeys.draw(shape.kv_heads, shape.head_dim, self._spread, self._device)
            self._setup = self._fill(self._count)
            self._say(", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self._setup.items()))
            self._queries = SharedQueries(self._plain, self.keys)
        except BaseException:
            self.arena.close()
            raise
        self._weights = self._plain
        # A matrix a layer, as real bases are: one for all would stay in the GPU's cache.
        self._bases = [self.keys.basis for _ in range(shape.layers)]

    def fixed_bits(self, spec: MethodSpec) -> float:
        """Bits of a token that a method reads whatever the query is; a plan made by the query counts nothing before it is made."""
        scan = self._scan(spec)
        scan.allocate(self.facts.layers, 1, self.facts.kv_heads, self.facts.head_dim, torch.device("cpu"))
        return scan.bits().mean().item()

    def _fill(self, count: int) -> dict[str, Any]:
        """Pin and fill the pool; what that took."""
        before, started = huge_bytes(), time.perf_counter()
        self.arena.grow(count)
        pinned = time.perf_counter()
        self.keys.fill(self.arena)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        filled = time.perf_counter()
        host, _ = self.arena.estimate(count)
        facts: dict[str, Any] = {"host_bytes": host, "host_pages": self.arena.host_pages}
        if self.arena.host_pages == "huge":
            facts["huge_share"] = round(min(1.0, (huge_bytes() - before) / host), 3)
        return {**facts, "pin_seconds": round(pinned - started, 2), "fill_seconds": round(filled - pinned, 2)}

    def open(self, context: int) -> None:
        """Set rotary angles, and the share of the queries that makes the winners' rows amount to what the paper moved."""
        self._context = context
        first = context - 2 * 64
        cosines, sines = rotary_angles(self._shape.head_dim, self._shape.rope_theta, max(first, 0), ROOM + 128, self._device)
        self._weights = dataclasses.replace(self._plain, cosines=cosines, sines=sines, first_position=max(first, 0))

    def fit(self, k: int, policy: Policy) -> dict[str, float]:
        """Find the share by bisection on Fathom 48, and say what it reads then."""
        spec = MethodSpec(Fathom(48, "raw"), Policy(policy.sink, policy.local))
        cache, scan = self.prepare(spec, 1, 1)
        step = DecodeStep(self._weights, cache, scan, k, spec.policy)
        group = self.facts.group
        target = k * (1 + (UNION_A_HEAD - 1) * (group - 1) / 3)
        low, high = 0.0, 1.0
        for _ in range(9):
            self._queries.set((low + high) / 2)
            self.reset(cache)
            step.run()
            rows = step.union_counts.double().mean().item()
            low, high = (self._queries.share, high) if rows > target else (low, self._queries.share)
        bits, channels = scan.bits().mean().item(), scan.channels().mean().item()
        return {"fathom48_bits": bits, "fathom48_channels": channels, "share": self._queries.share, "tilt": self._queries.tilt}

    def weights(self) -> DecoderWeights:
        return self._weights

    def segment_shape(self) -> SegmentShape:
        return self.arena.shape

    def prepare(
        self, spec: MethodSpec, rows: int, lanes: int, session: int = 0, sessions: int = 1, last_heads: int | None = None
    ) -> tuple[TieredCache, Scan]:
        lane_list = lanes_of(rows, self.facts.kv_heads, lanes, last_heads)
        scan = self._scan(spec)
        cache = TieredCache.allocate(self.arena, self.facts.layers, rows, lane_list, self._context, spec.policy.local, scan.bases)
        self._distinct[id(cache)] = attach_pool(cache, self._context, session, sessions)
        return cache, scan

    def reset(self, cache: TieredCache) -> None:
        for row in range(cache.rows):
            cache.set_length(row, self._context - cache.local)

    def notes(self, cache: TieredCache) -> dict[str, Any]:
        layers = self.facts.layers * cache.rows
        distinct = self._distinct[id(cache)]
        return {"distinct_layers": distinct, "aliased_layers": layers - distinct, **_basis_notes(cache, "identity"), **self._setup}

    def close(self) -> None:
        """Give the host memory back."""
        self.arena.close()

    def _scan(self, spec: MethodSpec) -> Scan:
        check_spec(spec, self.facts)
        method, facts = spec.method, self.facts
        if getattr(method, "statistics", "session") != "session" or getattr(method, "layer_plan", ""):
            raise UserError(f"{spec.label}: synthetic keys have statistics of their own; leave the calibration out")
        bases = self._bases if getattr(method.store(facts), "basis", "raw") == "klt" else None
        built = self._bases is not None
        scale = self.keys.scale if built else torch.ones(facts.kv_heads, facts.head_dim)
        if isinstance(method, Fathom):
            return WaterFilling([scale.square()] * facts.layers, [method.code_bits(facts.head_dim)] * facts.layers, bases)
        if isinstance(method, DoubleSparsity):
            best = _largest(scale, channel_count(method.c, facts.head_dim, "double_sparsity: c"))
            return FixedChannels([best] * facts.layers)
        if isinstance(method, Loki):
            energy = self._queries.energy() if built else torch.ones(facts.layers, *scale.shape)
            count = channel_count(method.r, facts.head_dim, "loki: r")
            return FixedChannels([_largest(scale.square() * layer, count) for layer in energy], bases)
        return fixed_scan(spec, facts)


def _largest(importance: Tensor, count: int) -> Tensor:
    """The channels ``[H, count]`` that matter most, ascending."""
    return importance.sort(dim=-1, descending=True, stable=True).indices[:, :count].sort(-1).values.int()


def _basis_notes(cache: TieredCache, vectors: str) -> dict[str, Any]:
    """Fields of a record about the channels that are scanned.

    Args:
        vectors: What a basis is, where there is one.
    """
    turned = cache.layers[0].basis is not None
    return {"scan_basis": "klt" if turned else "raw", "basis_of_keys": vectors if turned else None}


class PrefixSource:
    """A loaded model and real prefills: every method has its own segments, since stores differ in basis.

    The model's matrices are joined in place, once for all contexts.

    Args:
        prefix_of: Prefills ``context`` tokens.
    """

    synthetic = False

    def __init__(self, loaded: LoadedModel, prefix_of: Callable[[int], Prefix], index: str, host_pages: str = "auto") -> None:
        self._loaded, self._prefix_of, self.index, self._host_pages = loaded, prefix_of, index, host_pages
        self.facts = loaded.facts
        self._stack = contextlib.ExitStack()
        self.prefix: Prefix | None = None
        self._weights: DecoderWeights | None = None

    def build(self) -> None:
        """Every context has memory of its own."""

    def open(self, context: int) -> None:
        self._stack.close()
        self.prefix = self._prefix_of(context)
        self._weights = weights_of(self._loaded, self.prefix.tokens, ROOM, in_place=True)

    def weights(self) -> DecoderWeights:
        assert self._weights is not None
        return self._weights

    def segment_shape(self) -> SegmentShape:
        return SegmentShape(self.facts.kv_heads, self.facts.head_dim, 2, self._loaded.model.dtype, ())

    def prepare(
        self, spec: MethodSpec, rows: int, lanes: int, session: int = 0, sessions: int = 1, last_heads: int | None = None
    ) -> tuple[TieredCache, Scan]:
        prefix, facts = self.prefix, self.facts
        assert prefix is not None
        scan = scan_of_prefix(spec, facts, prefix.layers)
        most = prefix.tokens + ROOM
        shape = segment_shape(facts, scan.store, scan.span, most, prefix.layers[0].keys.dtype)
        arena = self._stack.enter_context(Arena(shape, self.weights().device, self.index, self._host_pages))
        arena.check(facts.layers * rows * segments_for(most, shape.blocks))
        lane_list = lanes_of(rows, facts.kv_heads, lanes, last_heads)
        cache = TieredCache.allocate(arena, facts.layers, rows, lane_list, most, spec.policy.local, scan.bases)
        for row in range(rows):
            for number, layer in enumerate(prefix.layers):
                cache.load(number, row, layer.keys, layer.values)
        self.reset(cache)
        cache.check_flags()
        return cache, scan

    def reset(self, cache: TieredCache) -> None:
        """Blocks that were sealed since stay sealed; a step only goes back within the tail that it started from."""
        assert self.prefix is not None
        for row in range(cache.rows):
            if not cache.lengths[row]:
                cache.set_length(row, self.prefix.tokens)

    def notes(self, cache: TieredCache) -> dict[str, Any]:
        apart = {"distinct_layers": self.facts.layers * cache.rows, "aliased_layers": 0}
        return {**apart, **_basis_notes(cache, "prefix"), "host_pages": cache.arena.host_pages}

    def close(self) -> None:
        """Give the host memory back."""
        self._stack.close()


def _no_multiple(context: int, size: int) -> str:
    """What is wrong with a context, and which nearby are right."""
    below = context // size * size
    right = f"{below} or {below + size}" if below else f"{size}"
    return f"context {context} is not a multiple of {size} tokens, the size of a segment: give {right}"


@contextlib.contextmanager
def closing(source: Any) -> Iterator[Any]:
    """Close a source on every way out."""
    try:
        yield source
    finally:
        source.close()
