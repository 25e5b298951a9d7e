"""The timings of a run, and the settings they were made in."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from fathom_eval.console import printable
from fathom_eval.errors import UserError
from fathom_eval.reports.equal_errors import EqualErrors, equal_errors
from fathom_eval.reports.facts import devices_of, fact
from fathom_eval.reports.kernel_tables import time_of_kernel
from fathom_eval.reports.loading import Loaded, Records
from fathom_eval.reports.timing_steps import Step, Turns, method_of, reads_of, time_of, turns_of, value
from fathom_eval.reports.wording import count

ROWS = {"cpu": "rows gathered by the CPU", "both": "rows gathered by the CPU but for the last lane"}
"""Who brings the rows, where it is not the GPU alone."""
_INDEX = {"host": "index in host memory", "hbm": "index in HBM"}


@dataclass(frozen=True, order=True)
class Place:
    """A setting that steps of several contexts share: where the index lies, and so on to who brings the rows.

    Attributes:
        last: KV heads of the last lane; 0 where they are as many as those of the others.
    """

    index: str
    batch: int
    k: int
    sessions: int
    lanes: int
    last: int
    rows: str

    def __str__(self) -> str:
        return self.shared([self])

    def shared(self, others: Sequence[Place]) -> str:
        """What this setting has in common with the others, in words, but for what is usual."""
        parts = zip(self._usual(), self._parts(), *(other._parts() for other in others), strict=True)
        return ", ".join(own for usual, own, *their in parts if not usual and set(their) <= {own})

    def apart(self, others: Sequence[Place]) -> str:
        """What tells this setting from the others, in words; empty where nothing does."""
        parts = zip(self._parts(), *(other._parts() for other in others), strict=True)
        return ", ".join(own for own, *their in parts if set(their) - {own})

    def _parts(self) -> tuple[str, ...]:
        return (
            _INDEX.get(self.index, f"index: {self.index}"),
            f"batch {self.batch}",
            f"k = {self.k:,}",
            "1 session" if self.sessions == 1 else f"{self.sessions} sessions side by side",
            count(self.lanes, "lane"),
            f"the last of {count(self.last, 'KV head')}" if self.last else "all lanes alike",
            ROWS.get(self.rows, "rows gathered by the GPU"),
        )

    def _usual(self) -> tuple[bool, ...]:
        return (False, False, False, self.sessions == 1, self.lanes == 1, not self.last, self.rows not in ROWS)


def place_of(step: Step) -> Place:
    """The setting of a step."""
    batch, sessions, lanes = (int(value(step, name) or 1) for name in ("batch", "sessions", "lanes"))
    return Place(
        index=printable(step.get("index") or "unknown"),
        batch=batch,
        k=int(value(step, "k") or 0),
        sessions=sessions,
        lanes=lanes,
        last=int(value(step, "last_lane") or 0),
        rows=printable(step.get("rows_by") or "gpu"),
    )


@dataclass(frozen=True)
class TimingSource:
    """Timings as a report sees them.

    Attributes:
        equal: Tables of times at equal error that lie beside the steps.
        not_shown: Those of them that cannot be read, a line each.
    """

    name: str
    run: Records
    steps: Sequence[Step]
    others: Sequence[Step]
    equal: Sequence[EqualErrors] = ()
    not_shown: Sequence[str] = ()

    @cached_property
    def device(self) -> str:
        """The devices named by the records or the manifest."""
        named = [printable(step["device"]) for step in self.steps if step.get("device")] or devices_of(self.run.manifest)
        return ", ".join(dict.fromkeys(named))

    @cached_property
    def model(self) -> str:
        """The model whose shape was timed; empty where unknown."""
        named = [str(step["model"]) for step in self.steps if isinstance(step.get("model"), str)]
        return printable(named[0]) if named else fact(self.run.manifest, "model", "shape")

    @property
    def families(self) -> list[str]:
        """Every method is a line of its own."""
        return list(dict.fromkeys(method_of(step) for step in self.steps))

    @cached_property
    def reads(self) -> list[str]:
        """Labels of Fathom's reads; all settings take the first that they have as their reference."""
        return reads_of(sorted(valid(self.steps), key=lambda step: time_of(step) or 0.0))

    @cached_property
    def places(self) -> list[Place]:
        """Every setting that spans contexts; of one place and batch that with the longest context first."""
        longest: dict[Place, int] = defaultdict(int)
        for step in self.steps:
            place = place_of(step)
            longest[place] = max(longest[place], step["context"])

        def position(place: Place) -> tuple[bool, str, int, int, int, int, Place]:
            return (place.index != "host", place.index, place.batch, place.k, place.sessions, -longest[place], place)

        return sorted(longest, key=position)

    def at(self, place: Place) -> list[Step]:
        """The steps of a setting by context, the fastest of each first; void ones too."""
        return sorted((step for step in self.steps if place_of(step) == place), key=lambda step: (step["context"], time_of(step)))

    def turns(self, place: Place, context: int) -> list[Turns]:
        """The steps of a setting and context that count, by the read of Fathom that they are set against; empty where there is none."""
        return turns_of([step for step in valid(self.at(place)) if step["context"] == context], self.reads)

    def origin(self, words: str = "") -> str:
        """Where the numbers of a table come from."""
        return " · ".join(part for part in (f"run {self.name}", self.model, words, self.device) if part)


def timing_source(loaded: Loaded) -> TimingSource:
    """The timings. Raises UserError where there are none."""
    steps, others = [], []
    for record in loaded.records.iter_records():
        timed = time_of(record) is not None and isinstance(record.get("context"), int)
        if record.get("kind") == "step" and timed:
            steps.append(record)
        else:
            others.append(record)
    if not steps and not any(time_of_kernel(record) is not None for record in others):
        raise UserError(f"{loaded.path} holds no timings{_instead(others)}")
    equal, not_shown = equal_errors(loaded.path) if loaded.path.is_dir() else ([], [])
    return TimingSource(loaded.name, loaded.records, steps, others, equal, not_shown)


def _instead(records: Sequence[Step]) -> str:
    """What a run without timings holds, where it is a run of the link on a machine without a GPU."""
    if not records or any(record.get("kind") != "link" or record.get("measure") != "host" for record in records):
        return ""
    return ": 'fathom-eval bench link' found no CUDA device and recorded the host's memory and cores alone; to time the link it needs a GPU"


def valid(steps: Sequence[Step]) -> list[Step]:
    """The steps that count."""
    return [step for step in steps if not step.get("void")]


def contexts_of(steps: Sequence[Step]) -> list[int]:
    """The contexts of the steps that count, shortest first."""
    return sorted({step["context"] for step in valid(steps)})
