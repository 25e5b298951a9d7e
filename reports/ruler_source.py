"""What a report knows of one run of RULER-style tasks: its points and cells, and the facts of its manifest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fathom_eval.errors import UserError
from fathom_eval.reports.absent import absent_words
from fathom_eval.reports.cells import Cell, Point, Role, compute_cells, compute_overview, read_points, tasks_of
from fathom_eval.reports.facts import asked_for, devices_of, haystack_of, last_settings, model_of
from fathom_eval.reports.gaps import NOUNS, Gap, Half, gaps, half_written, planned
from fathom_eval.reports.gaps import Cell as GapCell
from fathom_eval.reports.impossible import impossible_notes
from fathom_eval.reports.loading import Loaded, Records


@dataclass(frozen=True)
class Source:
    """One run as a report sees it. ``name`` tells it from the other runs of the same report."""

    name: str
    run: Records
    points: Sequence[Point]
    remarks: Sequence[str]

    @cached_property
    def cells(self) -> list[Cell]:
        """One cell a task, context, k and method."""
        return compute_cells(self.points)

    @cached_property
    def overview(self) -> list[Cell]:
        """One cell a context, k and method over all discriminative tasks."""
        return compute_overview(self.points, self.cells)

    @cached_property
    def tasks(self) -> list[str]:
        """The run's tasks."""
        return tasks_of(self.points)

    @cached_property
    def decoded(self) -> bool:
        """Whether the records say what decoded them."""
        return any(point.decoded_by for point in self.points)

    @property
    def failures(self) -> list[Point]:
        """The samples that gave no score."""
        return [point for point in self.points if point.score is None]

    @property
    def model(self) -> str:
        """The model's name."""
        return model_of(self.run.manifest)

    @property
    def haystack(self) -> str:
        """The name of the text that the needles were hidden in."""
        return haystack_of(self.run.manifest)

    @property
    def devices(self) -> list[str]:
        """The devices of all starts of the run, each once."""
        return devices_of(self.run.manifest)

    @cached_property
    def settings(self) -> list[tuple[int, int | None]]:
        """The (context, k) pairs of the scans; (context, None) where a context has dense alone."""
        pairs = {(cell.context, cell.k) for cell in self.cells}
        with_k = {context for context, k in pairs if k is not None}
        kept = [(context, k) for context, k in pairs if k is not None or context not in with_k]
        return sorted(kept, key=lambda pair: (pair[0], pair[1] or 0))

    @cached_property
    def present(self) -> dict[GapCell, set[int]]:
        """The samples of each task, context, k and method."""
        found: dict[GapCell, set[int]] = defaultdict(set)
        for point in self.points:
            found[point.task, point.context, point.k, point.method.label].add(point.sample)
        return found

    @cached_property
    def missing(self) -> list[Gap]:
        """What the run lacks: of what its last start asked for, and where a method has fewer samples than others beside it."""
        beside: dict[tuple[str, int, int | None], set[int]] = defaultdict(set)
        methods: dict[tuple[int, int | None], dict[str, Role]] = defaultdict(dict)
        for cell in self.cells:
            methods[cell.context, cell.k][cell.method.label] = cell.method.role
        for (task, context, k, _), samples in self.present.items():
            beside[task, context, k] |= samples
        expected: dict[GapCell, set[int]] = {}
        for (task, context, k), samples in beside.items():
            for label, role in methods[context, k].items():
                # Dense serves every k, so it may have samples that the scans at this k were never asked for.
                expected[task, context, k, label] = set() if role is Role.DENSE else samples
        for key, samples in planned(last_settings(self.run.manifest), "ruler", ()).items():
            expected[key] = expected.get(key, set()) | samples
        return gaps(expected, self.present, NOUNS["ruler"])

    @cached_property
    def halves(self) -> list[Half]:
        """The samples that are written only in part."""
        return half_written(self.present, NOUNS["ruler"])

    def absent(self, context: int | None = None, k: int | None = None) -> str:
        """What the run lacks of its controls, everywhere or at one context and k, and the command that adds it."""
        exact: dict[tuple[int, int | None], list[str]] = {}
        dense: dict[int, list[str]] = {}
        for at in self.settings:
            if context is not None and at != (context, k):
                continue
            here = [cell for cell in self.cells if cell.context == at[0] and cell.k in (None, at[1])]
            scanned = [task for task in self.tasks if any(cell.task == task and is_scan(cell) for cell in here)]
            for role, found, place in ((Role.EXACT, exact, at), (Role.DENSE, dense, at[0])):
                without = [task for task in scanned if not any(cell.task == task and cell.method.role is role for cell in here)]
                if without:
                    found[place] = [] if without == scanned else without  # type: ignore[index]
        return absent_words(self.name, exact, dense)


def ruler_source(loaded: Loaded) -> Source:
    """The run as a report sees it. Raises UserError where not one record is of this kind."""
    points, remarks = read_points(loaded.records.iter_records())
    if not points:
        raise UserError(f"{loaded.path} holds no record of kind 'ruler': {'; '.join(remarks)}")
    # Records lie in the order in which workers finished them; a table has its tasks in the order in which they were asked for.
    order = {task: place for place, task in enumerate(asked_for(loaded.records.manifest, "tasks"))}
    points = sorted(points, key=lambda point: order.get(point.task, len(order)))
    return Source(loaded.name, loaded.records, points, [*remarks, *impossible_notes(last_settings(loaded.records.manifest))])


def is_scan(cell: Cell) -> bool:
    """Whether the cell is a method under test and not a control."""
    return cell.method.role is Role.SCAN
