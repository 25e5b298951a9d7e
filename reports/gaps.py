"""What an interrupted run lacks: what its last start asked for, less what its records hold; and samples that are written in part."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fathom_eval.console import printable
from fathom_eval.reports.impossible import impossible_cells
from fathom_eval.reports.wording import Remark, count, join, setting

Cell = tuple[str, int, int | None, str]
"""Task, context, k and label of a method; the task is empty for a kind of run that has one alone."""
Samples = Mapping[Cell, set[int]]
_MOST_NAMED = 5
NOUNS = {"ruler": "sample", "sessions": "session", "fidelity": "window"}
"""What the samples of a kind of run are called."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Samples that one method, or every method of its task, context and k, lacks.

    Attributes:
        label: Of the method, or ``every method``.
        methods: How many methods lack them.
        missing: Numbers of the samples.
        noun: What a sample is called.
    """

    label: str
    methods: int
    task: str
    context: int
    k: int | None
    expected: int
    missing: tuple[int, ...]
    noun: str

    @property
    def present(self) -> int:
        """Samples that are there."""
        return self.expected - len(self.missing)

    def __str__(self) -> str:
        on = f" on {self.task}" if self.task else ""
        which = f", without {named(self.missing)}" if self.present else ""
        return f"{self.label}{on} at {setting(self.context, self.k)}: {self.present} of {count(self.expected, self.noun)}{which}"


@dataclass(frozen=True, slots=True)
class Half:
    """A sample of which some branches are written and others, that most samples have, are not."""

    task: str
    context: int
    sample: int
    present: int
    lacking: tuple[tuple[int | None, str], ...]
    noun: str

    @property
    def expected(self) -> int:
        """Branches that the sample should have."""
        return self.present + len(self.lacking)

    def words(self, name: str = "") -> str:
        """The sample with how much of it is there; ``name`` is what else it is known by."""
        # All sessions of a run have one context, the longest that a session may be.
        at = "" if self.noun == NOUNS["sessions"] else f" at {self.context:,} tokens"
        on = f"{f' of {self.task}' if self.task else ''}{at}"
        known = f"{name}; " if name else ""
        return f"{self.noun} {self.sample}{on} ({known}{self.present} of {self.expected} branches)"


def named(samples: Iterable[int]) -> str:
    """Numbers of samples in words, of many the first ones."""
    found = [f"{sample}" for sample in samples]
    more = len(found) - _MOST_NAMED
    return join([*found[:_MOST_NAMED], f"{more} more"] if more > 0 else found)


def planned(settings: Mapping[str, Any], kind: str, contexts_present: Iterable[int]) -> dict[Cell, set[int]]:
    """The samples of each cell that the settings of a start ask for and that can be measured; empty where they do not say.

    Args:
        kind: ``ruler``, ``sessions`` or ``fidelity``.
        contexts_present: Contexts of the records, for a kind whose settings name none.
    """
    amount = settings.get({"ruler": "limit", "sessions": "sessions", "fidelity": "windows"}[kind])
    methods, k_values = settings.get("methods"), settings.get("k")
    tasks = settings.get("tasks") if kind == "ruler" else [""]
    contexts = settings.get("context") if kind != "sessions" else sorted(set(contexts_present))
    if not isinstance(amount, int) or not all(isinstance(part, list) for part in (methods, k_values, tasks, contexts)):
        return {}
    cannot = impossible_cells(settings)
    return {
        (str(task), int(context), k, str(label)): set(range(amount))
        for task in tasks or ()
        for context in contexts or ()
        for label in methods or ()
        for k in ([None] if label == "dense" else k_values or ())
        if isinstance(context, int) and (k is None or isinstance(k, int)) and (str(label), k) not in cannot
    }


def unrecorded(settings: Mapping[str, Any], labels: Collection[str]) -> list[str]:
    """The methods that the settings of a start ask for, at one k at least, and that are not among the labels of its records."""
    methods, k_values, cannot = settings.get("methods"), settings.get("k"), impossible_cells(settings)
    possible = [
        printable(label)
        for label in (methods if isinstance(methods, list) else ())
        if (label, None) not in cannot and not (isinstance(k_values, list) and k_values and all((label, k) in cannot for k in k_values))
    ]
    return [label for label in dict.fromkeys(possible) if label not in labels]


def unrecorded_words(labels: Sequence[str]) -> str:
    """What a run has not one record of, as a sentence; empty where it lacks no method wholly."""
    return f"The run was asked for {join(labels)} and holds no record of {'it' if len(labels) == 1 else 'them'}." if labels else ""


def gaps(expected: Samples, present: Samples, noun: str) -> list[Gap]:
    """One entry for every cell with fewer samples than expected, those that lack most first.

    Where every method of a task, context and k lacks the same, one entry says so: that is what an interruption leaves.
    """
    lacking: dict[tuple[str, int, int | None], dict[tuple[int, tuple[int, ...]], list[str]]] = defaultdict(lambda: defaultdict(list))
    methods: dict[tuple[str, int, int | None], set[str]] = defaultdict(set)
    for cell, wanted in expected.items():
        task, context, k, label = cell
        methods[task, context, k].add(label)
        missing = wanted - present.get(cell, set())
        if missing:
            lacking[task, context, k][len(wanted), tuple(sorted(missing))].append(label)
    found = []
    for where, groups in lacking.items():
        for (amount, missing_samples), labels in groups.items():
            everyone = len(methods[where]) > 1 and set(labels) == methods[where]
            own = [("every method", len(labels))] if everyone else [(label, 1) for label in labels]
            found += [Gap(label, of, *where, amount, missing_samples, noun) for label, of in own]
    return sorted(found, key=lambda gap: -gap.methods * len(gap.missing))


def half_written(present: Samples, noun: str) -> list[Half]:
    """The samples that lack branches which at least half of the samples beside them have."""
    cells: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in present:
        cells[cell[:2]].append(cell)
    found = []
    for (task, context), own in cells.items():
        samples = set().union(*(present[cell] for cell in own))
        usual = [cell for cell in own if 2 * len(present[cell]) >= len(samples)]
        for sample in sorted(samples):
            lacking = tuple((k, label) for cell in usual if sample not in present[cell] for _, _, k, label in [cell])
            if lacking:
                there = sum(sample in present[cell] for cell in own)
                found.append(Half(task, context, sample, there, lacking, noun))
    return found


def half_remarks(
    halves: Sequence[Half], torn: Mapping[tuple[str, int], int], noun: str, names: Mapping[int, str] | None = None
) -> list[Remark]:
    """Remarks that name the samples which are written in part, and those of records at the end of a run that are cut off.

    Args:
        torn: Number of such records by task and sample (:attr:`fathom_eval.run.Run.torn`).
        noun: What a sample is called.
        names: What else samples are known by.
    """
    found = []
    if halves:
        shown = [half.words((names or {}).get(half.sample, "")) for half in halves[:_MOST_NAMED]]
        more = len(halves) - len(shown)
        text = f"Written only in part: {join([*shown, f'{more} more'] if more > 0 else shown)}."
        text += " What they hold is reported, and so is the rest; the same command computes what they lack."
        found.append(Remark(text, grave=True))
    if torn:
        named_task = noun == NOUNS["ruler"]
        parts = [
            f"{count(amount, 'record')} of {noun} {sample}{f' of {task}' if named_task and task else ''}"
            for (task, sample), amount in torn.items()
        ]
        text = f"The last write was cut off, or is still going on: {join(parts)} not counted. The rest is reported."
        found.append(Remark(text, grave=True))
    return found
