"""What timings say in sentences: what was compared, how the methods stand to Fathom's read, and what a reader must know first."""

from __future__ import annotations

import math

from fathom_eval.reports.absent import adding
from fathom_eval.reports.kernel_tables import kernel_answer, time_of_kernel
from fathom_eval.reports.timing_source import Place, TimingSource, contexts_of, valid
from fathom_eval.reports.timing_steps import (
    APART,
    BUDGET,
    MOST_METHODS,
    OTHER_ROUND,
    Step,
    Turns,
    aliased_layers,
    clock_of,
    method_of,
    quotient,
    ratio,
    value,
    void_reason,
)
from fathom_eval.reports.wording import Remark, count, join, number, others_below, significant


def subject(source: TimingSource) -> str:
    """What was timed, on what and at which contexts."""
    on = f" on {source.device}" if source.device else ""
    if not source.steps:
        return f"Times of {count(len([one for one in source.others if time_of_kernel(one) is not None]), 'kernel measurement')}{on}."
    contexts = sorted({step["context"] for step in source.steps})
    span = f"{contexts[0]:,}" if len(contexts) == 1 else f"{contexts[0]:,} to {contexts[-1]:,}"
    shape = f" of the shape of {source.model}" if source.model else ""
    return f"Decode steps of {count(len(source.families), 'method')}{shape}{on}, at {span} tokens of context."


def answer(source: TimingSource) -> str:
    """The first setting that counts; the paragraphs of the others stand with their tables."""
    if not source.steps:
        return kernel_answer(source.others)
    found = [place for place in source.places if valid(source.at(place))]
    if not found:
        return ""
    return finding(source, found[0]) + others_below(len(found) - 1)


def finding(source: TimingSource, place: Place) -> str:
    """The times of one setting at its longest context, over that of Fathom's read; empty where every step is void."""
    contexts = contexts_of(source.at(place))
    if not contexts:
        return ""
    turns = source.turns(place, contexts[-1])
    if not turns:
        return absent(source, place, contexts[-1])
    own = turns[0].own
    base, over = value(own, clock_of(own)) or math.nan, _over_floor(own)
    clock = "wall-clock time" if clock_of(own) == "wall_ms" else "GPU time"
    clock += ", without a GPU" if value(own, "gpu_ms") is None else ""
    floor = "" if over is None else f", {number(over, 2)} times its floor"
    own_time = f"{method_of(own)} takes {significant(base)} ms of {clock}{floor}"
    return f"With the {place}, at {contexts[-1]:,} tokens: {own_time}.{_compared(turns)}"


def _over_floor(step: Step) -> float | None:
    """The time that ratios are of over the floor; None without a GPU."""
    return None if value(step, "gpu_ms") is None else quotient(step, clock_of(step), "floor_ms")


def _compared(turns: list[Turns]) -> str:
    """The steps that took turns with the reference as multiples of it; of the others, that they did not or may not have."""
    rounds = [one for one in turns if not one.apart]
    pairs = [(ratio(step, one.own), method_of(step)) for one in rounds for step in one.others]
    ratios = sorted(((amount, label) for amount, label in pairs if amount is not None), key=lambda pair: pair[0])
    apart = [one for one in turns if one.apart]
    of_it = "it" if len(rounds) == 1 else "it in their round"
    text = ""
    if len(ratios) > MOST_METHODS:
        (low, lowest), (high, highest) = ratios[0], ratios[-1]
        span = f"from {number(low, 2)}× ({lowest}) to {number(high, 2)}× ({highest})"
        text = f" The {len(ratios)} others that took turns with it take, as a multiple of {of_it}, {span}; the table has each."
    elif ratios:
        others = join([f"{label} {number(amount, 2)}×" for amount, label in ratios])
        text = f" The others {'that took turns with it ' if apart else ''}take, as a multiple of {of_it}: {others}."
    for one in apart:
        amount_of = count(len(one.others), "step")
        lost = f"{amount_of} of another round did not take turns with it"
        if one.apart != OTHER_ROUND:
            lost = f"Whether {amount_of} took turns with it is not recorded"
        text += f" {lost}; the tables mark their multiples {APART}."
    return text


def absent(source: TimingSource, place: Place, context: int) -> str:
    """What a setting without a read of Fathom cannot tell, and the command that adds it."""
    lost = f"With the {place}, at {context:,} tokens: Fathom's read, which the others are set against, is missing."
    return f"{lost} {adding('bench step', source.name, f'fathom:budget={BUDGET}')}"


def remarks(source: TimingSource) -> list[Remark]:
    """Void steps, shared buffers, how far the clock is from GPU time, and damaged lines."""
    found = []
    void = [step for step in source.steps if step.get("void")]
    if void:
        reasons = list(dict.fromkeys(reason for step in void if (reason := void_reason(step))))
        because = f": {'; '.join(reasons)}" if reasons else ", for reasons that the records do not give"
        found.append(Remark(f"{count(len(void), 'step')} void, in no figure and no ratio{because}.", grave=True))
    if any(aliased_layers(step) for step in source.steps):
        found.append(Remark("In some steps layers share buffers because host memory did not hold them all; their rows say so."))
    ratios = sorted(ratio for step in valid(source.steps) if (ratio := quotient(step, "wall_ms", "gpu_ms")) is not None)
    if ratios:
        span = dict.fromkeys(number(ratio, 2) for ratio in (ratios[0], ratios[-1]))
        found.append(Remark(f"Wall-clock is {' to '.join(span)} times GPU time."))
    if source.run.problems:
        found.append(Remark(f"{count(len(source.run.problems), 'damaged line')} of the records skipped.", grave=True))
    return found
