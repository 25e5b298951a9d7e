"""The sweeps by which rows were paced, and what the document of the runtime says of them."""

from __future__ import annotations

from typing import Any

from tests.recorded_names import DOUBLE, FATHOM, LANDMARK, LONG, PACED, SPARQ
from tests.recorded_steps import Record, in_words, lines_of, main_table, paced_equal, row, span


def swept(**wanted: Any) -> list[Record]:
    """Steps of the sweeps that pacing was chosen by, of one setting."""
    start = wanted.pop("start", 2)
    context = wanted.pop("context", LONG)
    lanes = wanted.pop("lanes", 2 if context < 2**19 else 3)
    found = lines_of("pacing.jsonl", PACED)
    return [step for step in found if (step["start"], step["context"], step["lanes"], step["setting"]) == (start, context, lanes, wanted)]


def swept_time(label: str, **wanted: Any) -> float:
    """The first of the steps where one was timed again."""
    return float(next(step["gpu_ms"] for step in swept(**wanted) if step["label"] == label))


def unpaced(label: str) -> Record:
    """A step as the code was before rows were paced, in the last of the sweeps."""
    (found,) = (step for step in swept(start=3, paced=0) if step["label"] == label)
    return found


def pacing() -> list[str]:
    """Fathom 48 and SparQ by the programs that fetch rows behind a scan."""
    found = []
    for context in (2**17, 2**18, 2**19, LONG):
        for programs in (132, 64, 32, 24, 16, 12, 8):
            wanted = {"context": context} | ({} if programs == 132 else {"fetch_programs": programs})
            if steps := swept(**wanted):
                own, other = (swept_time(label, **wanted) for label in (FATHOM, SPARQ))
                place = in_words(steps[0]["lanes"], steps[0]["last_lane"])
                found.append(row((f"{context:,}", place, programs, f"{own:.2f}", f"{other:.2f}", f"{other / own:.3f}")))
    return found


def phrases_of_pacing() -> dict[str, str]:
    """What was tried before the rows of a lane were fetched as slowly as the scan beside them allows."""
    plain, few = ({label: swept_time(label, **wanted) for label in (FATHOM, SPARQ)} for wanted in ({}, {"fetch_programs": 16}))
    (own, own_again), (other, other_again), (few_own, few_own_again), (few_other, few_other_again) = (
        [step["gpu_ms"] for step in swept(**wanted) if step["label"] == label]
        for wanted in ({}, {"fetch_programs": 16})
        for label in (FATHOM, SPARQ)
    )
    deeper = [next(step for step in swept(fetch_programs=count) if step["label"] == DOUBLE) for count in (16, 12)]
    wide = swept_time(FATHOM, scan_programs=264, fetch_programs=16)
    small, large = step_of_first(scan_words=64), step_of_first(scan_words=256, scan_stages=4)
    deep = [step_of_first(scan_stages=stages) for stages in (3, 6, 8, 12)]
    base = step_of_first()
    tail = swept_time(FATHOM, tail_beside_plan=1) - plain[FATHOM]
    now = {step["label"]: step["gpu_ms"] for step in paced_equal()}
    shallow = [
        now[f"fathom budget={budget} basis=klt attend=union"] - unpaced(f"fathom budget={budget} basis=klt attend=union")["gpu_ms"]
        for budget in (16, 24, 32)
    ]
    landmark = main_table()[LANDMARK]["gpu_ms"] - unpaced(LANDMARK)["gpu_ms"]
    return {
        "PACING": f"At 1M tokens 16 programs in place of 132 take Fathom's step from {plain[FATHOM]:.2f} to {few[FATHOM]:.2f} ms "
        "and SparQ's "
        f"from {plain[SPARQ]:.2f} to {few[SPARQ]:.2f}.",
        "PACINGNOISE": f"With 132 programs both were timed twice, Fathom at {own:.2f} and {own_again:.2f} ms, SparQ at {other:.2f} and "
        f"{other_again:.2f}; with 16 too, at {few_own:.2f} and {few_own_again:.2f}, and {few_other:.2f} and {few_other_again:.2f}.",
        "DEEPER": f"136 bits were tried: {deeper[0]['gpu_ms']:.2f} ms with 16 programs and {deeper[1]['gpu_ms']:.2f} with 12 (wall "
        f"{deeper[0]['wall_ms']:.2f} and {deeper[1]['wall_ms']:.2f}).",
        "SHALLOW": f"Unpaced in one start and paced in another, steps of budgets 32 and 24 took {-shallow[2]:.1f} and "
        f"{-shallow[1]:.1f} ms less "
        "with it, "
        f"that of budget 16 {shallow[0]:.1f} more, and landmark's {landmark:.1f} more:",
        "WIDER": f"264 programs of a scan ({base:.2f} to {step_of_first(scan_programs=264):.2f} ms) help alone, but not where the "
        "rows are paced "
        f"({wide:.2f} against {few[FATHOM]:.2f}, the tail not beside the plan);",
        "TILES": f"tiles of half the words ({small:.2f}) or twice as many ({large:.2f}), and three, six, eight or twelve stages "
        f"({span(deep)}) are no better than those of the kernel.",
        "TAIL": f"Scoring the tail beside the plan, on the other stream, made the step {tail:.1f} ms longer.",
    }


def step_of_first(**setting: int) -> float:
    """Fathom's time in the first of the sweeps, the first of two where one was timed again; all of it scores the tail beside the plan."""
    return swept_time(FATHOM, start=1, tail_beside_plan=1, **setting)
