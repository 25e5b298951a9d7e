"""What a report knows of one run of RULER-style tasks: its points and cells, and the facts of its manifest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fathom_eval.errors import UserError
from fathom_eval.reports.cells import Cell, Point, Role, compute_cells, compute_overview, read_points, tasks_of
from fathom_eval.reports.facts import devices_of, fact, last_settings, model_of
from fathom_eval.reports.gaps import Cell as GapCell
from fathom_eval.reports.gaps import gaps, planned
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
        return fact(self.run.manifest, "haystack")

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
    def missing(self) -> list[str]:
        """What the run lacks: of what its last start asked for, and where a method has fewer samples than others beside it."""
        present = Counter((point.task, point.context, point.k, point.method.label) for point in self.points)
        expected: dict[GapCell, int] = {}
        for cell in self.cells:
            for method in {other.method for other in self.cells if (other.context, other.k) == (cell.context, cell.k)}:
                key = (cell.task, cell.context, cell.k, method.label)
                # Dense serves every k, so it may have samples that the scans at this k were never asked for.
                expected[key] = max(expected.get(key, 0), 0 if method.role is Role.DENSE else cell.expected)
        for key, amount in planned(last_settings(self.run.manifest), "ruler", ()).items():
            expected[key] = max(expected.get(key, 0), amount)
        return gaps(expected, present)


def ruler_source(loaded: Loaded) -> Source:
    """The run as a report sees it. Raises UserError where not one record is of this kind."""
    points, remarks = read_points(loaded.records.iter_records())
    if not points:
        raise UserError(f"{loaded.path} holds no record of kind 'ruler': {'; '.join(remarks)}")
    return Source(loaded.name, loaded.records, points, remarks)


def is_scan(cell: Cell) -> bool:
    """Whether the cell is a method under test and not a control."""
    return cell.method.role is Role.SCAN
