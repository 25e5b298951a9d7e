"""What a record of a decode step says, and which read of Fathom it is set against."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fathom_eval.console import printable

Step = Mapping[str, Any]
BUDGET = 48
"""Mean budget of the read that the others are set against."""
MOST_METHODS = 12
"""So many methods beside the reference are columns of a table and are told one by one in a sentence; more of them are neither."""
APART = "†"
"""Stands beside a ratio of two steps that did not take turns, or may not have."""
OTHER_ROUND, UNKNOWN_ROUND = "timed in another round", "round not recorded"
"""Why steps are not known to have taken turns with the read that they are set against."""
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?![\w.])")


@dataclass(frozen=True)
class Turns:
    """Steps of one setting and context that are set against one read of Fathom.

    Attributes:
        own: That read.
        others: The rest, none of them void.
        apart: Empty where all were timed in one round, in turn, else why that is not so; a ratio of two rounds also has what changed
            between them.
    """

    own: Step
    others: Sequence[Step]
    apart: str = ""


def in_turn(one: Step, other: Step) -> bool:
    """Whether two steps took turns in one round, or are one and the same; of a step whose round is not recorded that is not known."""
    return one is other or (one.get("round") is not None and one["round"] == other.get("round"))


def turns_of(steps: Sequence[Step], reads: Sequence[str]) -> list[Turns]:
    """The steps of one setting and context by what they are set against; empty where Fathom has no read among them.

    The reference is the first of ``reads`` that was timed there. Where several rounds timed it, each step is set against that of its own
    round; steps of a round without it come last, against the first, and after them those whose round is not recorded.
    """
    label = next((label for label in reads if any(method_of(step) == label for step in steps)), None)
    timed = [step for step in steps if method_of(step) == label]
    if not timed:
        return []
    own: list[Step] = []
    for step in timed:
        if step.get("round") is not None and not any(in_turn(step, read) for read in own):
            own.append(step)
    own = own or timed[:1]
    found = [Turns(read, [step for step in steps if step is not read and in_turn(step, read)]) for read in own]
    rest: dict[str, list[Step]] = {OTHER_ROUND: [], UNKNOWN_ROUND: []}
    for step in steps:
        if not any(in_turn(step, read) for read in own):
            known = step.get("round") is not None and own[0].get("round") is not None
            rest[OTHER_ROUND if known else UNKNOWN_ROUND].append(step)
    return [*found, *(Turns(own[0], others, apart) for apart, others in rest.items() if others)]


def legend_of_mark(ways: Iterable[str], reference: str) -> str:
    """What the mark beside a multiple of ``reference`` means, by the ways in which the table's steps are apart from it."""
    found = set(ways)
    if OTHER_ROUND in found:
        unknown = ", or in one that is not recorded" if UNKNOWN_ROUND in found else ""
        return f"; {APART} timed in another round than {reference}, not in turn with it{unknown}"
    return f"; {APART} not known to have taken turns with {reference}, since no round is recorded" if UNKNOWN_ROUND in found else ""


def reads_of(steps: Sequence[Step]) -> list[str]:
    """Labels of Fathom's reads, that first which the others are to be set against.

    A read of the budget of 48 before others; own winners, no rerank, raw channels, nothing else that its label names before what adds to
    that; then the one that was timed in most settings.
    """
    amounts = Counter(method_of(step) for step in steps if str(step.get("method", "")).startswith("fathom"))
    return sorted(amounts, key=lambda label: (*_additions(label), -amounts[label]))


def is_48_bit(label: str) -> bool:
    """Whether a label of Fathom names a mean budget of 48, as ``fathom budget=48`` and ``fathom 48`` do."""
    words = label.split()
    named = [word.partition("=")[2] for word in words if word.startswith("budget=")]
    numbers = _NUMBER.findall(" ".join(named or [word for word in words if "=" not in word]))
    return bool(numbers) and float(numbers[0]) == BUDGET


def _additions(label: str) -> tuple[bool, bool, bool, bool, int]:
    options = dict(word.split("=", 1) for word in label.split() if "=" in word)
    union = options.get("attend", "own") != "own"
    others = sum(name not in ("budget", "basis", "attend", "rerank") for name in options)
    return not is_48_bit(label), union, "rerank" in options, options.get("basis", "raw") != "raw", others


def ratio(step: Step, own: Step) -> float | None:
    """Time of a step over that of another by the same clock; None where they have none in common."""
    clock = clock_of(step)
    if clock != clock_of(own):
        return None
    time, base = value(step, clock), value(own, clock)
    return time / base if time is not None and base else None


def clock_of(step: Step) -> str:
    """The time that ratios of a step are of: GPU time, and wall time where there was no GPU or several sessions ran side by side.

    Of kernels of several sessions the profiler gives times above those of a run without it.
    """
    return "wall_ms" if value(step, "gpu_ms") is None or (value(step, "sessions") or 1) > 1 else "gpu_ms"


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


def void_reason(step: Step) -> str:
    """Why a step is void; empty where its record does not say."""
    reason = step.get("void_reason") or ("" if step["void"] is True else step["void"])
    return printable(reason) if reason else ""


def aliased_layers(step: Step) -> float:
    """Layers that have no buffers of their own."""
    layers, apart = value(step, "layers"), value(step, "distinct_layers")
    return value(step, "aliased_layers") or (layers - apart if layers is not None and apart is not None else 0.0)
