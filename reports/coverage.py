"""What a mean leaves out, in words: tasks, or samples, that the rows beside it have."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from fathom_eval.reports.cells import ALL_TASKS, Cell
from fathom_eval.reports.wording import join

LACKS_TASKS = (
    "(n of m tasks): a mean, or a difference, over fewer tasks than those beside it; it cannot be compared with them and is in no sentence "
    "and in no figure"
)
LACKS_SAMPLES = "(n of m samples): a mean over fewer samples than those beside it"
OTHER_SAMPLES = (
    "not all rows have the same samples: a mean is over all that its row has, a difference over those that the row and exact top-k both "
    "have, so that it need not be the difference of the two means"
)


def covered(cell: Cell) -> str:
    """Of how many tasks, or else samples, a score is; empty where it is of all that the rows beside it have."""
    if cell.score is None:
        return ""
    if not cell.whole:
        return f"({len(cell.tasks)} of {cell.expected_tasks} tasks)"
    return f"({cell.samples} of {cell.expected} samples)" if cell.samples < cell.expected else ""


def pairs_covered(cell: Cell) -> str:
    """Of how many tasks the comparison with exact top-k is; empty where it is of all, or there is none."""
    if cell.against_exact is None or cell.compared is not None:
        return ""
    return f"({cell.against_exact.tasks} of {cell.expected_tasks} tasks)"


def coverage_legend(cells: Sequence[Cell]) -> str:
    """What the marks of :func:`covered` mean, as far as the scores of a table have them; empty where all are of the same samples."""
    marks = [covered(cell) + pairs_covered(cell) for cell in cells]
    amounts: dict[tuple[str, int], set[int]] = defaultdict(set)
    for cell in cells:
        if cell.score is not None:
            amounts[cell.task, cell.context].add(cell.samples)
    fewer = any("samples" in mark for mark in marks)
    applies = {
        LACKS_TASKS: any("tasks" in mark for mark in marks),
        LACKS_SAMPLES: fewer,
        # Dense serves every k, and may have samples that the methods at one k were never asked for.
        OTHER_SAMPLES: fewer or any(len(found) > 1 for found in amounts.values()),
    }
    return "".join(f"; {text}" for text, said in applies.items() if said)


def left_out_words(overview: Iterable[Cell]) -> str:
    """The rows over all tasks that no sentence compares, since they lack tasks; empty where there are none."""
    named = [f"{cell.method.label} {covered(cell)}" for cell in overview if cell.score is not None and not cell.whole]
    return f"Left out here, since their means over {ALL_TASKS} lack some: {join(list(dict.fromkeys(named)))}." if named else ""
