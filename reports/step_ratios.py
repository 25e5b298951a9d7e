"""Decode steps of all settings in one table: times over that of Fathom's 48-bit read, and how close its own step is to the floor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fathom_eval.console import printable
from fathom_eval.reports.document import Column, Entry, Row, Table, entry
from fathom_eval.reports.wording import number

Step = Mapping[str, Any]
Setting = tuple[str, Sequence[Step]]
"""A setting in words, and its steps that count."""


def ratio_table(settings: Sequence[Setting], origin: str) -> Table | None:
    """One row a setting and context; None where nothing is set against a reference, or nothing has a floor."""
    cells = [
        (words, context, [step for step in steps if step["context"] == context])
        for words, steps in settings
        for context in sorted({step["context"] for step in steps})
    ]
    with_own = [(words, context, steps, own) for words, context, steps in cells if (own := reference_of(steps)) is not None]
    if not any(len(steps) > 1 or value(own, "floor_ms") for _, _, steps, own in with_own):
        return None
    bits: dict[str, list[float]] = {}
    for *_, steps, own in with_own:
        for step in steps:
            if step is not own:
                bits.setdefault(method_of(step), []).append(value(step, "scan_bits") or 0.0)
    names = sorted(bits, key=lambda name: bits[name])
    columns = (
        Column("setting"),
        Column("context"),
        *(Column(f"{name} ÷", f"{number(bits[name][0], 0)} bits" if bits[name][0] else "") for name in names),
        Column("step ÷ floor"),
        Column("wall ÷ GPU"),
        Column("top-k a layer", "ms"),
        Column("scan of link"),
    )
    rows = []
    apart = False
    for words, context, steps, own in with_own:
        base = time_of(own)
        others = {method_of(step): step for step in reversed(steps)}
        found = []
        for name in names:
            other = others.get(name)
            mark = "" if other is None or other.get("round") == own.get("round") else "†"
            apart = apart or bool(mark)
            found.append(entry(None if other is None or not base else (time_of(other) or 0.0) / base, 2, mark=mark))
        parts, layers = own.get("parts_ms"), value(own, "layers")
        top = value(parts, "top_k") if isinstance(parts, Mapping) and not overlaps(own) else None
        rows.append(
            Row(
                (
                    Entry(words),
                    Entry(f"{context:,}", context),
                    *found,
                    entry(quotient(own, "gpu_ms", "floor_ms"), 2),
                    entry(quotient(own, "wall_ms", "gpu_ms"), 3),
                    entry(top / layers if top and layers else None, 3),
                    entry(value(own, "scan_of_link"), 3),
                )
            )
        )
    legend = (
        "÷: a method's GPU time over that of Fathom's 48-bit read, which the last four columns are about; scan of link: the rate of its "
        "scan over the copy rate of the link; top-k and scan only where no other kernel runs beside them"
        + ("; † timed in another round than the reference, not in turn with it" if apart else "")
    )
    return Table("step-ratios", "All settings against Fathom's 48-bit read", origin, columns, tuple(rows), legend)


def reference_of(steps: Sequence[Step]) -> Step | None:
    """The read of variable depth that the others of one setting and context are set against: its mean budget of 48, or the fastest."""
    own = [step for step in steps if str(step.get("method", "")).startswith("fathom")]
    return next((step for step in own if "48" in method_of(step)), own[0] if own else None)


def method_of(step: Step) -> str:
    """The label of a step's method; a rerank that the label does not name is added."""
    label = printable(step.get("label") or step.get("method"))
    rerank = value(step, "rerank")
    return f"{label} rerank={rerank:g}" if rerank is not None and rerank > 1 and "rerank" not in label else label


def time_of(step: Step) -> float | None:
    """GPU milliseconds of a step; those of the clock where there was no GPU."""
    gpu = value(step, "gpu_ms")
    return value(step, "wall_ms") if gpu is None else gpu


def value(record: Step, name: str) -> float | None:
    """A number of a record; None where it is missing or no number."""
    found = record.get(name)
    return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) and found - found == 0 else None


def overlaps(step: Step) -> bool:
    """Whether kernels of a step ran side by side, so that their sum is more than its time."""
    total, busy = value(step, "gpu_sum_ms"), value(step, "gpu_ms")
    return total is not None and busy is not None and total > 1.01 * busy


def quotient(step: Step, above: str, below: str) -> float | None:
    """One number of a step over another, where it has both."""
    first, second = value(step, above), value(step, below)
    return first / second if first is not None and second else None
