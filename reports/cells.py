"""The numbers of a report: one :class:`Cell` a task, context, k and method, computed from records alone."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from statistics import fmean
from typing import Any

from fathom_eval.console import printable
from fathom_eval.reports.decoding import decoder_of, decoders
from fathom_eval.run import canonical_json
from fathom_eval.stats import CEILING, is_discriminative, mean_and_standard_error, paired_difference, pooled_mean_and_standard_error

FLOOR = 0.1
"""Where dense attention itself scores below this, or with some samples is not clearly above the floor of
:func:`~fathom_eval.stats.is_discriminative`, no scan can show a loss: the cell is marked ``not discriminative``."""

NOT_DISCRIMINATIVE = "not discriminative"
CEILING_NOTE = "at the ceiling"
NO_EXACT_NOTE = "no exact top-k at this k"

MINIMUM_PAIRS = 6
"""With fewer pairs not even a sign test on nothing but losses reaches 5 % (2 · 0.5⁵ = 0.0625), whatever a bootstrap of them says."""

ALL_TASKS = "all tasks"


class Role(Enum):
    """What a row is compared with, or that it is compared."""

    DENSE = "dense"
    EXACT = "exact top-k"
    SCAN = "scan"


@dataclass(frozen=True, slots=True)
class Method:
    """One configuration of one method, as the records name it. Two that differ in an option are two methods."""

    name: str
    options: str
    label: str
    family: str
    role: Role


@dataclass(frozen=True, slots=True)
class Point:
    """What a report needs of one record."""

    method: Method
    task: str
    context: int
    k: int | None
    sample: int
    score: float | None
    error: str
    bits: float | None
    declared_bits: float | None
    active_channels: float | None
    rows: float | None
    head_dim: float | None
    fired_per_step: float | None
    needles: tuple[tuple[float, bool], ...] = ()
    """Depth of every gold string in the haystack, and whether the generation contains it; empty where the record does not say."""
    decoded_by: str = ""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Score of a method minus score of a reference over the samples that both have, with a paired 95 % bootstrap interval.

    The interval of a single pair is NaN. ``tasks`` is how many tasks the pairs are of.
    """

    pairs: int
    mean: float
    low: float
    high: float
    wins: int
    ties: int
    losses: int
    tasks: int = 1

    @property
    def below(self) -> bool:
        """The interval lies wholly under zero, and there are pairs enough to say so."""
        return self.high < 0 and self.pairs >= MINIMUM_PAIRS

    @property
    def above(self) -> bool:
        """The interval lies wholly over zero, and there are pairs enough to say so."""
        return self.low > 0 and self.pairs >= MINIMUM_PAIRS


@dataclass(frozen=True, slots=True)
class Cell:
    """Result of one method on one task (or on all of them), context and k. ``k`` is None for dense.

    ``dense_score`` and ``exact_score`` are taken over the samples that this method and the reference both have. ``tasks`` are those that
    ``score`` is a mean over, and ``expected_tasks`` is how many the cells beside this one are over.
    """

    task: str
    context: int
    k: int | None
    method: Method
    samples: int
    expected: int
    failures: int
    score: float | None
    standard_error: float | None
    dense_score: float | None
    exact_score: float | None
    against_exact: Comparison | None
    against_dense: Comparison | None
    bits: float | None
    declared_bits: float | None
    active_channels: float | None
    rows: float | None
    head_dim: float | None
    notes: tuple[str, ...]
    tasks: tuple[str, ...]
    expected_tasks: int
    decoded_by: str = ""

    @property
    def whole(self) -> bool:
        """Whether the score is a mean over as many tasks as those beside it; one over fewer is compared with none of them."""
        return len(self.tasks) >= self.expected_tasks

    @property
    def compared(self) -> Comparison | None:
        """The comparison with exact top-k where its pairs are of every task that is expected; None elsewhere."""
        found = self.against_exact
        return found if found is not None and found.tasks >= self.expected_tasks else None

    @property
    def failed(self) -> bool:
        """Whether the method has no result because it failed."""
        return self.score is None and self.failures > 0

    @property
    def bits_per_channel(self) -> float | None:
        """Scan bits divided by head_dim, so that models of different head size compare."""
        return self.bits / self.head_dim if self.bits is not None and self.head_dim else None


def read_points(records: Iterable[Mapping[str, Any]]) -> tuple[list[Point], list[str]]:
    """The points of RULER records, and remarks on what was left out.

    Where the records hold several versions of one method's code, only the newest counts: two versions are never averaged. Of several
    oracles the one without options is the reference, and the others are compared with it.
    """
    versions: dict[tuple[str, str], int] = {}
    dated: list[tuple[tuple[str, str], int, Point]] = []
    foreign: list[str] = []
    for record in records:
        try:
            point = _point(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            foreign.append(f"{type(error).__name__}: {printable(error)}")
            continue
        key, version = (point.method.name, point.method.options), int(record.get("method_version") or 0)
        versions[key] = max(version, versions.get(key, version))
        dated.append((key, version, point))
    oracles = {point.method.options for _, _, point in dated if point.method.role is Role.EXACT}
    reference = "{}" if "{}" in oracles else next(iter(oracles)) if len(oracles) == 1 else None
    left_out: dict[str, int] = defaultdict(int)
    points = []
    for key, version, point in dated:
        if version != versions[key]:
            left_out[point.method.label] += 1
        elif point.method.role is Role.EXACT and point.method.options != reference:
            points.append(replace(point, method=replace(point.method, role=Role.SCAN)))
        else:
            points.append(point)
    notes = [f"{count} records of an older version of {label} are left out" for label, count in sorted(left_out.items())]
    if foreign:
        notes.append(f"{len(foreign)} records are not of this kind and are left out ({foreign[0]})")
    return points, notes


def compute_cells(points: Sequence[Point]) -> list[Cell]:
    """One cell a task, context, k and method."""
    return [cell for context in _contexts(points) for task in tasks_of(points) for cell in _cells(points, context, [task], task)]


def compute_overview(points: Sequence[Point], cells: Sequence[Cell]) -> list[Cell]:
    """One cell a context, k and method over all discriminative tasks of that context. Scores count every task alike."""
    overview = []
    for context in _contexts(points):
        floor = {cell.task for cell in cells if cell.context == context and NOT_DISCRIMINATIVE in cell.notes}
        tasks = [task for task in tasks_of(points) if task not in floor]
        overview += _cells(points, context, tasks, ALL_TASKS)
    return overview


def tasks_of(points: Iterable[Point]) -> list[str]:
    """The tasks, in the order they were first met."""
    return list(dict.fromkeys(point.task for point in points))


def _contexts(points: Iterable[Point]) -> list[int]:
    return sorted({point.context for point in points})


def _cells(points: Sequence[Point], context: int, tasks: Sequence[str], name: str) -> list[Cell]:
    groups: dict[tuple[int | None, Method], list[Point]] = defaultdict(list)
    for point in points:
        if point.context == context and point.task in tasks:
            groups[point.k, point.method].append(point)
    expected: dict[int | None, set[tuple[str, int]]] = defaultdict(set)
    for (k, _), members in groups.items():
        samples = {(point.task, point.sample) for point in members}
        expected[k] |= samples
        expected[None] |= samples
    present = len({task for task, _ in expected[None]})
    scores = {key: _scores(members) for key, members in groups.items()}
    dense: dict[tuple[str, int], float] = {}
    exact: dict[int | None, dict[tuple[str, int], float]] = defaultdict(dict)
    for (k, method), own in scores.items():
        if method.role is Role.DENSE:
            dense.update(own)
        elif method.role is Role.EXACT:
            exact[k].update(own)
    # A task, not a cell: a method with few samples must not drop a task that the others are measured on.
    # Over all tasks the question is settled: the mean is over those that can tell something.
    marks = [NOT_DISCRIMINATIVE] if name != ALL_TASKS and _at_floor(list(dense.values())) else []
    cells = [
        _cell(name, context, k, method, members, scores[k, method], len(expected[k]), present, dense, exact[k], marks)
        for (k, method), members in groups.items()
    ]
    return sorted(_with_ceiling(cells) if name != ALL_TASKS else cells, key=sort_key)


def _with_ceiling(cells: Sequence[Cell]) -> list[Cell]:
    """The cells, marked where they and every scan of their k solve the task: none can be told from another there."""
    scans: dict[int | None, list[Cell]] = defaultdict(list)
    for cell in cells:
        if cell.method.role is Role.SCAN:
            scans[cell.k].append(cell)
    solved = {k for k, found in scans.items() if all(cell.score is not None and cell.score >= CEILING for cell in found)}
    # Exact top-k may fail where every scan succeeds, by chance.
    return [
        replace(cell, notes=(*cell.notes, CEILING_NOTE)) if cell.k in solved and cell.score is not None and cell.score >= CEILING else cell
        for cell in cells
    ]


def _at_floor(dense: Sequence[float]) -> bool:
    if not dense:
        return False
    # Of a few samples the error is too uncertain to mark a task by: there the mean alone decides.
    return fmean(dense) < FLOOR or (len(dense) >= MINIMUM_PAIRS and not is_discriminative(dense))


def _cell(
    task: str,
    context: int,
    k: int | None,
    method: Method,
    members: Sequence[Point],
    own: Mapping[tuple[str, int], float],
    expected: int,
    expected_tasks: int,
    dense: Mapping[tuple[str, int], float],
    exact: Mapping[tuple[str, int], float],
    marks: Sequence[str],
) -> Cell:
    score, standard_error = _mean_and_standard_error(own)
    shared_dense = [sample for sample in own if sample in dense]
    shared_exact = [sample for sample in own if sample in exact]
    against_dense = _compare(own, dense, shared_dense) if method.role is not Role.DENSE else None
    complete = [point for point in members if point.score is not None]
    failures = len(members) - len(complete)
    notes = [*marks]
    if against_dense is not None and against_dense.above:
        notes.append("above dense")
    if len(own) + failures < expected:
        notes.append(f"{len(own) + failures} of {expected} samples")
    if failures:
        notes.append(f"{failures} failed")
    if method.role is Role.SCAN:
        notes += _firing(members)
        if not exact:
            notes.append(NO_EXACT_NOTE)
    return Cell(
        task=task,
        context=context,
        k=k,
        method=method,
        samples=len(own),
        expected=expected,
        failures=failures,
        score=score,
        standard_error=standard_error,
        dense_score=_mean_and_standard_error({sample: dense[sample] for sample in shared_dense})[0],
        exact_score=_mean_and_standard_error({sample: exact[sample] for sample in shared_exact})[0],
        against_exact=_compare(own, exact, shared_exact) if method.role is Role.SCAN else None,
        against_dense=against_dense,
        bits=_mean(complete, lambda point: point.bits),
        declared_bits=_mean(complete, lambda point: point.declared_bits),
        active_channels=_mean(complete, lambda point: point.active_channels),
        rows=_mean(complete, lambda point: point.rows),
        head_dim=_mean(members, lambda point: point.head_dim),
        notes=tuple(notes),
        tasks=tuple(sorted({task for task, _ in own})),
        expected_tasks=expected_tasks,
        decoded_by=decoders(members),
    )


def _compare(
    own: Mapping[tuple[str, int], float], other: Mapping[tuple[str, int], float], shared: Sequence[tuple[str, int]]
) -> Comparison | None:
    """Over several tasks every task counts alike, as in the scores themselves."""
    if not shared:
        return None
    # Sorted, so that the bootstrap draws the same samples whatever order the records were written in.
    ordered = sorted(shared)
    sizes = Counter(task for task, _ in ordered)
    found = paired_difference(
        [own[sample] for sample in ordered],
        [other[sample] for sample in ordered],
        weights=[1 / sizes[task] for task, _ in ordered],
        seed=0,
    )
    return Comparison(len(ordered), found.mean, found.low, found.high, found.wins, found.ties, found.losses, len(sizes))


def _mean_and_standard_error(scores: Mapping[tuple[str, int], float]) -> tuple[float | None, float | None]:
    """Over several tasks every task counts alike, however many samples of it there are."""
    if not scores:
        return None, None
    groups: dict[str, list[float]] = defaultdict(list)
    for (task, _), score in scores.items():
        groups[task].append(score)
    found = mean_and_standard_error(list(scores.values())) if len(groups) == 1 else pooled_mean_and_standard_error(groups)
    return found.mean, found.standard_error if math.isfinite(found.standard_error) else None


def _firing(members: Sequence[Point]) -> list[str]:
    """A method that stops firing would pass for dense attention: say so where it fired less often than its own best sample."""
    counts = [point.fired_per_step for point in members if point.fired_per_step is not None]
    if not counts:
        return []
    if max(counts) == 0:
        return ["never fired"]
    silent = sum(count < max(counts) for count in counts)
    return [f"fired less often in {silent} samples"] if silent else []


def _scores(members: Iterable[Point]) -> dict[tuple[str, int], float]:
    return {(point.task, point.sample): point.score for point in members if point.score is not None}


def sort_key(cell: Cell) -> tuple[float, int, float, str]:
    """Order of rows: by k, dense and exact top-k first, then by bits."""
    roles = [Role.DENSE, Role.EXACT, Role.SCAN]
    return (
        -1 if cell.k is None else cell.k,
        roles.index(cell.method.role),
        math.inf if cell.bits is None else cell.bits,
        cell.method.label,
    )


def _mean(members: Iterable[Point], value: Callable[[Point], float | None]) -> float | None:
    values = [found for point in members if (found := value(point)) is not None]
    return fmean(values) if values else None


def _point(record: Mapping[str, Any]) -> Point:
    k = record["k"]
    role = Role.SCAN if not record.get("control") else Role.DENSE if k is None else Role.EXACT
    label = printable(record.get("label") or record["method"])
    failed = record.get("finish") == "error"
    score = None if failed else _number(record.get("score"))
    steps, fired = _number(record.get("steps")), _number(record.get("fired"))
    return Point(
        method=Method(str(record["method"]), canonical_json(record["options"]), label, printable(record.get("family") or label), role),
        task=printable(record["task"]),
        context=int(record["context"]),
        k=k,
        sample=int(record["sample"]),
        score=score,
        error="" if score is not None else printable(record.get("error") or "no score recorded"),
        bits=_number(record.get("bits")),
        declared_bits=_number(record.get("declared_bits")),
        active_channels=_number(record.get("active_channels")),
        rows=_number(record.get("rows")),
        head_dim=_number(record.get("head_dim")),
        fired_per_step=fired / steps if fired is not None and steps else None,
        needles=_needles(record) if score is not None else (),
        decoded_by=decoder_of(record),
    )


def _needles(record: Mapping[str, Any]) -> tuple[tuple[float, bool], ...]:
    """The needles that hold gold come first among the depths, in the order of the hits."""
    hits, depths = record.get("hits"), record.get("depths")
    if not isinstance(hits, list) or not isinstance(depths, list) or len(depths) < len(hits):
        return ()
    return tuple((float(depth), bool(hit)) for depth, hit in zip(depths, hits, strict=False))


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None
