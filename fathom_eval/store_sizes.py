"""What each store takes in one layer, worked out before it is built."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fathom_eval.clusters import ClusterSpec
from fathom_eval.coded import DECODED_LIMIT, SEGMENT_TOKENS
from fathom_eval.columns import ColumnSpec
from fathom_eval.hashing import HashSpec
from fathom_eval.kernels.pack import BLOCK
from fathom_eval.kivi import KiviSpec
from fathom_eval.labels import LabelSpec
from fathom_eval.landmarks import CodedLandmarkSpec
from fathom_eval.nonuniform import NonuniformSpec
from fathom_eval.outliers import OutlierLandmarkSpec
from fathom_eval.pages import PageSpec
from fathom_eval.pair_graph import PairGraphSpec
from fathom_eval.planes import PlaneSpec
from fathom_eval.representatives import RepresentativeSpec
from fathom_eval.rotated import RotatedSpec
from fathom_eval.sign_codes import SignCodeSpec
from fathom_eval.skewed import SkewedSpec
from fathom_eval.stores import ExactSpec, LandmarkSpec, StoreSpec, UnreadSpec
from fathom_eval.vector_index import GraphSpec, InvertedSpec

if TYPE_CHECKING:
    from fathom_eval.models import ModelFacts


def store_bytes(spec: StoreSpec, facts: ModelFacts, tokens: int, item: int) -> int:
    """Bytes of one store in one layer, what it keeps decoded for its scans included.

    Args:
        tokens: In the prefix and outside the local window; only whole blocks are stored.
        item: Bytes of a key's channel.
    """
    tokens = max(tokens, 0) // BLOCK * BLOCK
    coded = _coded_bytes(spec, facts)
    if coded is None:
        return round(facts.kv_heads * tokens * _plain_bytes(spec, facts, item))
    kept, decoded = (facts.kv_heads * size for size in coded)
    full, rest = divmod(tokens, SEGMENT_TOKENS)
    total = 0.0
    for count in [SEGMENT_TOKENS] * full + [rest]:
        total += count * (kept + (decoded if count * decoded <= DECODED_LIMIT else 0))
    return round(total)


def _plain_bytes(spec: StoreSpec, facts: ModelFacts, item: int) -> float:
    """Bytes a token and KV head."""
    channels = facts.head_dim
    match spec:
        case ExactSpec() | UnreadSpec():
            return 0
        case LandmarkSpec(size=size):
            return 2 * channels / size
        case OutlierLandmarkSpec(size=size):
            return 2 * channels / size + 1
        case RepresentativeSpec(block=block, count=count):
            return 2 * channels * count / block
        case HashSpec(tables=tables):
            return 2 * tables
        case ClusterSpec(size=size):
            return 8 + ((2 + item) * channels + 8) / size
        case InvertedSpec(size=size):
            return 8 + 4 * channels / size
        case GraphSpec(links=links):  # in the host's memory, which is the device's on a CPU
            return 4 * channels + 8 * links if facts.device.startswith("cpu") else 0
        case PairGraphSpec(links=links):
            return 4 * links
        case _:
            return channels * item  # a store of another package: no more than the keys themselves


def _coded_bytes(spec: StoreSpec, facts: ModelFacts) -> tuple[float, float] | None:
    """Bytes a token and KV head of the codes (a byte each, but for planes) with their scales, and of what is decoded from them."""
    channels = facts.head_dim
    match spec:
        case PlaneSpec(planes=planes):
            return channels * (planes * 8 + 2) / BLOCK, channels * planes * 4
        case ColumnSpec() | SkewedSpec():
            return 2 * channels, 4 * channels
        case PageSpec(page=page, bits=bits):
            bound = 2.0 if bits == 16 else 1 + 2 / BLOCK
            return 2 * channels * bound / page, 8 * channels / page
        case CodedLandmarkSpec(size=size):
            return channels * (1 + 2 / BLOCK) / size, 4 * channels / size
        case KiviSpec(group=group):
            return channels * (1 + 4 / group), 4 * channels
        case RotatedSpec(residual=residual):
            return (channels + 2) * (1 + residual), 4 * channels * (1 + residual)
        case NonuniformSpec():
            return channels, 4 * channels
        case SignCodeSpec(group=group):
            return channels / group, 4 * channels
        case LabelSpec(channels=labelled):
            heads = facts.query_heads // facts.kv_heads
            return heads * (labelled + 4), heads * 4 * labelled
        case _:
            return None
