"""What a report knows of one run: its points and cells, and the facts of its manifest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from fathom_eval.console import printable
from fathom_eval.errors import UserError
from fathom_eval.reports.cells import Cell, Point, Role, compute_cells, compute_overview, read_points, tasks_of
from fathom_eval.run import MANIFEST, Run

SUPPORTED_KINDS = ("ruler", "sessions")


@dataclass(frozen=True)
class Source:
    """One run as a report sees it. ``name`` tells it from the other runs of the same report."""

    name: str
    run: Run
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

    @property
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
        return fact(self.run.manifest, "model", "model_name") or "an unnamed model"

    @property
    def haystack(self) -> str:
        """The name of the text that the needles were hidden in."""
        return fact(self.run.manifest, "haystack")

    @property
    def devices(self) -> list[str]:
        """The devices of all starts of the run, each once."""
        invocations = self.run.manifest.get("invocations")
        starts = [self.run.manifest, *(start for start in invocations if isinstance(start, dict))] if isinstance(invocations, list) else []
        return list(dict.fromkeys(device for start in starts if (device := fact(start, "device"))))

    def settings(self) -> list[tuple[int, int | None]]:
        """The (context, k) pairs of the scans; (context, None) where a context has dense alone."""
        pairs = {(cell.context, cell.k) for cell in self.cells}
        with_k = {context for context, k in pairs if k is not None}
        kept = [(context, k) for context, k in pairs if k is not None or context not in with_k]
        return sorted(kept, key=lambda pair: (pair[0], pair[1] or 0))


def report_kind(paths: Sequence[Path]) -> str:
    """The kind of the runs. Raises UserError where they differ; what is wrong with a run itself is found when it is loaded."""
    kinds = {}
    for path in paths:
        try:
            manifest = json.loads((path / MANIFEST).read_bytes())
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(manifest, dict) and manifest.get("kind") in SUPPORTED_KINDS:
            kinds[manifest["kind"]] = path
    if len(kinds) > 1:
        named = " and ".join(f"{path} ({kind})" for kind, path in kinds.items())
        raise UserError(f"runs of different kinds make no common report: {named}; give each kind a report of its own")
    return next(iter(kinds), "ruler")


def load_sources(paths: Sequence[Path]) -> list[Source]:
    """Load RULER runs, each once. Raises UserError where one is missing, no run, of a kind without a report, or without records."""
    unique = list({path.resolve(): path for path in paths}.values())
    sources = []
    for path in unique:
        run = Run.load(path)
        kind = run.manifest.get("kind")
        if kind not in SUPPORTED_KINDS:
            raise UserError(f"{path} is a run of kind '{printable(kind)}': this version makes reports of {', '.join(SUPPORTED_KINDS)}")
        if not len(run):
            damage = f" ({len(run.problems)} damaged lines)" if run.problems else ""
            raise UserError(f"{path} has no records yet{damage}: run 'fathom-eval {kind} … --output {path}' to fill it")
        try:
            points, remarks = read_points(run.iter_records())
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{path} holds a record that is not one of kind '{kind}': {type(error).__name__}: {error}") from error
        same_name = [other for other in unique if other.resolve().name == path.resolve().name]
        sources.append(Source(printable(path.resolve().name if len(same_name) == 1 else path), run, points, remarks))
    return sources


def fact(holder: Mapping[str, Any], *names: str) -> str:
    """A fact of a manifest as text, from its top, its settings or its identity; of a table its ``name``. Empty where unknown."""
    for part in (holder, holder.get("settings"), holder.get("identity")):
        if not isinstance(part, Mapping):
            continue
        for name in names:
            value = part.get(name)
            if isinstance(value, Mapping):
                value = value.get("name")
            if value is not None and not isinstance(value, (list, Mapping)):
                return printable(value)
    return ""


def flatten(value: object, prefix: str = "") -> Iterator[tuple[str, str]]:
    """(dotted name, text) of every leaf of a JSON value."""
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from flatten(item, f"{prefix}.{printable(name)}" if prefix else printable(name))
    elif isinstance(value, list) and any(isinstance(item, (list, Mapping)) for item in value):
        for index, item in enumerate(value):
            yield from flatten(item, f"{prefix}.{index}")
    elif isinstance(value, list):
        yield prefix, ", ".join(printable(item) for item in value) or "none"
    else:
        yield prefix, "none" if value is None else printable(value)


def differing_facts(sources: Sequence[Source]) -> list[tuple[str, list[str]]]:
    """The facts in which runs differ, one text a run: what must be known before their numbers are set side by side."""
    tables = [
        dict(flatten({name: value for name, value in source.run.manifest.items() if name not in ("invocations", "identity_sha256")}))
        for source in sources
    ]
    names = dict.fromkeys(name for table in tables for name in table)
    rows = [(name, [table.get(name, "absent") for table in tables]) for name in names]
    return [(name, texts) for name, texts in rows if len(set(texts)) > 1]


def is_scan(cell: Cell) -> bool:
    """Whether the cell is a method under test and not a control."""
    return cell.method.role is Role.SCAN
