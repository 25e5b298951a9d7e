"""How long a table of steps will take, before anything is allocated: rough, and from figures of one H200."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fathom_eval.methods import MethodSpec
from fathom_eval.methods.fathom import Fathom
from fathom_eval.offload.bench.sources import SyntheticSource
from fathom_eval.offload.bench.steps import PROFILED, WARM_UP, Variant
from fathom_eval.offload.bench.synthetic import ROW_BYTES

PIN_AND_FILL = {"huge": 0.4, "small": 0.5}
"""Seconds a GiB of host memory, ``pin_seconds`` and ``fill_seconds`` of ``reports/published/step-h200`` rounded up: a GiB of many
takes longer."""

LINK, MEMORY, OVER_FLOOR = 55e9, 4e12, 1.5
"""Bytes a second of a PCIe 5 x16 link and of HBM, and a step's time over its floor from them."""

START, A_CONTEXT, A_VARIANT = 20.0, 3.0, 1.0
"""Seconds to make weights, compile and measure rates; to fit queries; to check, capture and profile a variant."""


def step_seconds(source: SyntheticSource, variant: Variant, context: int) -> float:
    """What one step may take: its bytes over the link and the weights from the GPU's memory, with a surcharge."""
    facts = source.facts
    index = context * facts.layers * facts.kv_heads * scan_bits(source, variant.spec) / 8
    a_session = ROW_BYTES[1] * variant.spec.policy.rerank * variant.k / 512
    # An index in the GPU's memory is read so much faster than one on the host that it is left out.
    moved = variant.batch * (a_session + (index if source.index == "host" else 0.0))
    return variant.sessions * OVER_FLOOR * (moved / LINK + source.weight_bytes / MEMORY)


def scan_bits(source: SyntheticSource, spec: MethodSpec) -> float:
    """Bits of a sealed token that a method's scan reads, per layer and KV head; a plan that the query makes is taken at its mean."""
    if isinstance(spec.method, Fathom):
        return spec.method.code_bits(source.facts.head_dim) * 7 / 6
    return source.fixed_bits(spec)


def table_seconds(source: SyntheticSource, missing: Mapping[int, Sequence[Variant]], repeats: int) -> float:
    """What a table may take.

    Args:
        missing: What is to be timed, by context.
        repeats: Timed turns.
    """
    turns = repeats + WARM_UP + PROFILED + 2  # the check and the pass that compiles come before
    total = START + source.host_bytes / 2**30 * PIN_AND_FILL[source.arena.host_pages]
    for context, variants in missing.items():
        steps = sum(step_seconds(source, variant, context) for variant in variants)
        total += A_CONTEXT + A_VARIANT * len(variants) + turns * steps
    return total
