"""How each method plans and scans in a decode step. This is all that the timed methods differ in.

A scan owns what it derives once from a prefix (variances, fixed channels) and the small plan buffers of a step. Everything it launches
has a fixed size and never waits for the device.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fathom_eval.calibration import Basis
from fathom_eval.calibration_file import statistics_of
from fathom_eval.errors import UserError
from fathom_eval.kernels.attend import PIECE
from fathom_eval.kernels.landmark import scan_landmarks
from fathom_eval.kernels.nibble import scan_nibbles
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.kernels.plan import ReadPlan, plan_depths, top_channels
from fathom_eval.kernels.scan import scan_segments
from fathom_eval.methods import MethodSpec
from fathom_eval.methods.base import Method, channel_count
from fathom_eval.methods.double_sparsity import DoubleSparsity
from fathom_eval.methods.fathom import Fathom
from fathom_eval.methods.landmark import Landmark
from fathom_eval.methods.loki import Loki
from fathom_eval.methods.sparq import SparQ
from fathom_eval.methods.uniform import Full, Thumbnail
from fathom_eval.offload.cache import Lane, LaneTables
from fathom_eval.planes import PlaneSpec
from fathom_eval.stores import LandmarkSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts
    from fathom_eval.prefill import PrefixLayer

TIMED = "fathom, sparq, double_sparsity, loki, thumbnail, full, landmark"
_METHODS: tuple[type[Method], ...] = (Fathom, SparQ, DoubleSparsity, Loki, Thumbnail, Full, Landmark)

_LARGEST_TENSOR = 2**20
"""Elements of a tensor that Triton takes at most."""


class Scan(ABC):
    """A method's plan and scan over R rows of H KV heads.

    Class attributes:
        store: The part of a segment that it reads, beside the scales.

    Attributes:
        bases: Karhunen–Loève bases of the layers' stores, None for the model's own channels.
        span: Tokens that one score stands for.
        adaptive: Whether what is read depends on the query; if not, it could be fetched ahead of it.
        code_bits: Bits a key that it reads, without scales; of several layers the fewest.
        hides_rows: Whether there is time beside it for rows that are fetched slowly; see :mod:`fathom_eval.offload.pacing`.
    """

    store: ClassVar[str]
    bases: Sequence[Basis] | None = None
    span: int = 1
    adaptive: bool = False
    code_bits: float
    hides_rows: bool = True

    @abstractmethod
    def allocate(self, layers: int, rows: int, heads: int, head_dim: int, device: torch.device) -> None:
        """Make the plan buffers."""

    def plan(self, layer: int, query: Tensor) -> None:  # noqa: B027 - a scan with a fixed plan has nothing to do
        """Plan for queries ``[R, H, G, D]`` in the store's basis."""

    @abstractmethod
    def scan(
        self, layer: int, lane: Lane, query: Tensor, tables: LaneTables, blocks: Tensor, scores: Tensor, maxima: Tensor, scaling: float
    ) -> None:
        """Score a lane's sealed keys; arguments as :func:`fathom_eval.kernels.scan.scan_segments`, of the lane."""

    @abstractmethod
    def planned(self, layer: int, lane: Lane) -> Tensor | None:
        """What a lane reads by the plan made last: depths ``[R, H, D]`` of planes, channels ``[R, H, c]`` of nibbles."""

    @abstractmethod
    def bits(self) -> Tensor:
        """Bits a sealed token of the last step, fp64 ``[L, R, H]``: code bits and 16 a scale and block."""

    @abstractmethod
    def channels(self) -> Tensor:
        """Channels read in the last step, fp64 ``[L, R, H]``."""


class _PlaneScan(Scan):
    store: ClassVar[str] = "planes"

    def allocate(self, layers: int, rows: int, heads: int, head_dim: int, device: torch.device) -> None:
        shared = ReadPlan.allocate(rows, heads, head_dim, device)
        counts = torch.zeros(layers, rows, heads, 4, dtype=torch.int32, device=device)
        # Counts are kept of every layer, so that what a step read can be told afterwards.
        self._plans = [ReadPlan(shared.depths, shared.channels, shared.slots, part) for part in counts]
        self._counts = counts

    def scan(
        self, layer: int, lane: Lane, query: Tensor, tables: LaneTables, blocks: Tensor, scores: Tensor, maxima: Tensor, scaling: float
    ) -> None:
        plan = self._plans[layer]
        part = ReadPlan(*(lane.part(tensor) for tensor in (plan.depths, plan.channels, plan.slots, plan.counts)))
        scan_segments(query, part, tables["planes"], tables["scales"], blocks, scores, maxima, scaling)

    def planned(self, layer: int, lane: Lane) -> Tensor | None:
        return lane.part(self._plans[layer].depths)

    def bits(self) -> Tensor:
        return self._counts.double().sum(-1) + 0.25 * self._counts[..., 0].double()

    def channels(self) -> Tensor:
        return self._counts[..., 0].double()


class WaterFilling(_PlaneScan):
    """Fathom: a bit budget spent by the query on the channels of a bit-plane store.

    Args:
        variances: fp32 ``[H, D]`` of every layer, in the store's basis.
        budgets: Code bits a key in every layer.
    """

    adaptive = True

    def __init__(self, variances: Sequence[Tensor], budgets: Sequence[int], bases: Sequence[Basis] | None = None) -> None:
        self._variances, self._budgets, self.bases = [part.contiguous() for part in variances], budgets, bases
        self.code_bits = min(budgets)

    def plan(self, layer: int, query: Tensor) -> None:
        plan_depths(query, self._variances[layer], self._budgets[layer], self._plans[layer])


class UniformDepth(_PlaneScan):
    """All channels at one depth (thumbnail)."""

    def __init__(self, depth: int) -> None:
        self._depth = depth

    def allocate(self, layers: int, rows: int, heads: int, head_dim: int, device: torch.device) -> None:
        super().allocate(layers, rows, heads, head_dim, device)
        plan = self._plans[0]
        plan.depths.fill_(self._depth)
        plan.slots.fill_(self._depth)
        plan.channels.copy_(torch.arange(head_dim, device=device))
        self.code_bits = self._depth * head_dim
        self._counts[..., : self._depth] = head_dim


class _NibbleScan(Scan):
    store: ClassVar[str] = "nibbles"
    _picked: list[Tensor]

    def scan(
        self, layer: int, lane: Lane, query: Tensor, tables: LaneTables, blocks: Tensor, scores: Tensor, maxima: Tensor, scaling: float
    ) -> None:
        channels = lane.part(self._picked[layer])
        scan_nibbles(query, channels, tables["nibbles"], tables["scales"], blocks, scores, maxima, scaling)

    def planned(self, layer: int, lane: Lane) -> Tensor | None:
        return lane.part(self._picked[layer])

    def bits(self) -> Tensor:
        return 4.25 * self.channels()

    def channels(self) -> Tensor:
        return torch.stack([part.new_full(part.shape[:2], part.shape[2], dtype=torch.float64) for part in self._picked])


class TopChannels(_NibbleScan):
    """SparQ: the channels with the largest |q| over the group, at four bits."""

    adaptive = True

    def __init__(self, count: int) -> None:
        self._count, self.code_bits = count, 4 * count

    def allocate(self, layers: int, rows: int, heads: int, head_dim: int, device: torch.device) -> None:
        picked = torch.zeros(rows, heads, self._count, dtype=torch.int32, device=device)
        self._picked = [picked] * layers

    def plan(self, layer: int, query: Tensor) -> None:
        top_channels(query, None, self._picked[layer])


class FixedChannels(_NibbleScan):
    """Channels chosen once, at four bits (Double Sparsity, Loki, the full scan).

    Args:
        channels: int32 ``[H, c]`` of every layer.
    """

    def __init__(self, channels: Sequence[Tensor], bases: Sequence[Basis] | None = None) -> None:
        self._fixed, self.bases = channels, bases
        self.code_bits = 4 * min(part.shape[-1] for part in channels)

    def allocate(self, layers: int, rows: int, heads: int, head_dim: int, device: torch.device) -> None:
        self._picked = [part.to(device).expand(rows, -1, -1).contiguous() for part in self._fixed]


class Landmarks(Scan):
    """fp16 means of a few tokens; a token scores as its landmark does."""

    store: ClassVar[str] = "landmarks"
    hides_rows = False  # top-k takes so long beside it that what follows would come late

    def __init__(self, size: int) -> None:
        self.span = size

    def allocate(self, layers: int, rows: int, heads: int, head_dim: int, device: torch.device) -> None:
        self._shape = (layers, rows, heads)
        self._head_dim = head_dim
        self.code_bits = 16 * head_dim / self.span

    def scan(
        self, layer: int, lane: Lane, query: Tensor, tables: LaneTables, blocks: Tensor, scores: Tensor, maxima: Tensor, scaling: float
    ) -> None:
        scan_landmarks(query, tables["landmarks"], self.span, blocks, scores, maxima, scaling)

    def planned(self, layer: int, lane: Lane) -> Tensor | None:
        return None

    def bits(self) -> Tensor:
        return torch.full(self._shape, 16.0 * self._head_dim / self.span, dtype=torch.float64)

    def channels(self) -> Tensor:
        return torch.full(self._shape, float(self._head_dim), dtype=torch.float64)


def check_spec(spec: MethodSpec, facts: ModelFacts) -> None:
    """Raise :class:`UserError` for a method, an option or a policy that the runtime does not have."""
    policy, method = spec.policy, spec.method
    if method.name in ("dense", "exact"):
        raise UserError(f"{spec.label}: the runtime has no step for it: it would read every key over the link; choose from {TIMED}")
    store = method.store(facts)
    known = type(method) in _METHODS and not getattr(method, "per_head", False) and not method.extended
    plain = isinstance(store, LandmarkSpec) or (
        isinstance(store, PlaneSpec) and (store.planes, store.scales, store.stored) == (4, "fp16", 0)
    )
    if not known or not plain:
        raise UserError(f"{spec.label}: the runtime has no step for this method; choose from {TIMED}")
    if getattr(method, "depths", "model") != "model":
        raise UserError(f"{spec.label}: the runtime has no depth tables; leave depths=measured out")
    for field in dataclasses.fields(policy):
        if field.name not in ("sink", "local", "rerank", "attend") and getattr(policy, field.name) != field.default:
            raise UserError(f"{spec.label}: the runtime does not have the switch {field.name}; it has sink, local, rerank and attend")


def check_size(spec: MethodSpec, k: int, facts: ModelFacts) -> None:
    """Raise :class:`UserError` where one program of a GPU cannot hold what a group selects; on a CPU there is no such limit."""
    if not facts.device.startswith("cuda"):
        return
    policy, group = spec.policy, _power(facts.group)
    count, tail = int((k - policy.sink - policy.local) * policy.rerank), BLOCK + policy.local - 1
    slots = facts.group * count + policy.sink + policy.local
    # The union seeks every candidate of every head in every head's list, the rerank ranks a group's, the attention joins their pieces.
    sought = group * group * _power(count)
    ranked = _power(slots + tail) if policy.rerank > 1 else 0
    joined = _power(-(-slots // PIECE) + -(-tail // PIECE)) * _power(facts.head_dim)
    if max(sought, ranked, joined) > _LARGEST_TENSOR:
        raise UserError(f"{spec.label}: the runtime does not select {count} candidates for each of {facts.group} query heads: give less k")


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << max(count - 1, 0).bit_length()


def scan_of_prefix(spec: MethodSpec, facts: ModelFacts, layers: Sequence[PrefixLayer]) -> Scan:
    """The scan of a method with the statistics of a prefix, as the evaluator's methods derive them.

    Raises:
        UserError: The runtime has no step for the method or one of its switches.
    """
    check_spec(spec, facts)
    method = spec.method
    store = method.store(facts)
    bases = None
    if isinstance(store, PlaneSpec) and store.basis == "klt":
        bases = [statistics_of(store.statistics, layer).key_statistics.basis for layer in layers]
    if isinstance(method, (Fathom, DoubleSparsity, Loki)):
        indexes = [method.index(layer, facts) for layer in layers]
        if isinstance(method, Fathom):
            return WaterFilling([variance for variance, _ in indexes], [bits for _, bits in indexes], bases)
        return FixedChannels([channels_of(depths) for depths in indexes], bases)
    return fixed_scan(spec, facts)


def fixed_scan(spec: MethodSpec, facts: ModelFacts) -> Scan:
    """The scan of a method that needs no statistics."""
    method = spec.method
    if isinstance(method, SparQ):
        return TopChannels(channel_count(method.r, facts.head_dim, "sparq: r"))
    if isinstance(method, Landmark):
        return Landmarks(method.size)
    assert isinstance(method, Thumbnail)
    if method.depth == 4:  # four bits of every channel are the same in either store, and nibbles take less arithmetic
        every = torch.arange(facts.head_dim, dtype=torch.int32).expand(facts.kv_heads, -1)
        return FixedChannels([every] * facts.layers)
    return UniformDepth(method.depth)


def store_of(spec: MethodSpec) -> tuple[str, int]:
    """``store`` and ``span`` of a method's scan, before there is a prefix to make it of."""
    method = spec.method
    if isinstance(method, Landmark):
        return Landmarks.store, method.size
    deep = isinstance(method, Fathom) or (isinstance(method, Thumbnail) and method.depth < 4)
    return (_PlaneScan if deep else _NibbleScan).store, 1


def channels_of(depths: Tensor) -> Tensor:
    """The channels of a fixed plan ``[H, D]`` that are read, int32 ``[H, c]`` ascending."""
    count = int((depths[0] > 0).sum())
    return (depths > 0).int().sort(dim=-1, descending=True, stable=True).indices[:, :count].int().contiguous()
