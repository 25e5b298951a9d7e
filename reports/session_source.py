"""What a report knows of one run of agent sessions: its steps and cells, and the sentences about them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fathom_eval.console import shorten
from fathom_eval.errors import UserError
from fathom_eval.reports.absent import adding
from fathom_eval.reports.cells import MINIMUM_PAIRS
from fathom_eval.reports.decoding import decoding_remarks, decoding_words
from fathom_eval.reports.facts import devices_of, fact, last_settings, model_of
from fathom_eval.reports.gaps import NOUNS, Gap, Half, gaps, half_remarks, half_written, planned
from fathom_eval.reports.gaps import Cell as GapCell
from fathom_eval.reports.impossible import impossible_notes
from fathom_eval.reports.loading import Loaded, Records
from fathom_eval.reports.session_cells import Pair, Role, SessionCell, Step, compute_session_cells, read_steps
from fathom_eval.reports.wording import Remark, count, join, number, signed

_SHOWN_GAPS = 3


@dataclass(frozen=True)
class SessionSource:
    """One run of sessions as a report sees it. ``name`` tells it from the other runs of the same report."""

    name: str
    run: Records
    steps: Sequence[Step]
    notes: Sequence[str]

    @cached_property
    def _computed(self) -> tuple[list[SessionCell], list[Pair]]:
        return compute_session_cells(self.steps, self.baseline)

    @property
    def cells(self) -> list[SessionCell]:
        """One cell a k and method."""
        return self._computed[0]

    @property
    def pairs(self) -> list[Pair]:
        """Every two methods at each k."""
        return self._computed[1]

    @cached_property
    def baseline(self) -> str | None:
        """Label of the method that the others are compared with: what the run's last start names, if it is measured."""
        scans = [step.method.label for step in self.steps if step.method.role is Role.SCAN]
        return self.asked_baseline if self.asked_baseline in scans else next(iter(scans), None)

    @property
    def asked_baseline(self) -> str:
        """Label of the method that the run's last start names as the baseline; empty where it names none."""
        return fact({"settings": last_settings(self.run.manifest)}, "baseline")

    @property
    def k_values(self) -> list[int | None]:
        """The k, ascending; None alone where a run has dense attention only."""
        return list(dict.fromkeys(cell.k for cell in self.cells))

    @property
    def sessions(self) -> int:
        """Sessions with records."""
        return len({step.session for step in self.steps})

    @cached_property
    def decoded(self) -> bool:
        """Whether the records say what decoded them."""
        return any(step.decoded_by for step in self.steps)

    @property
    def model(self) -> str:
        """The model's name."""
        return model_of(self.run.manifest)

    @property
    def tokens(self) -> str:
        """The range of tokens that a session holds, in words; empty where unknown."""
        return re.sub(r"\d+", lambda found: f"{int(found[0]):,}", fact(self.run.manifest, "session_tokens").replace(":", " to "))

    @property
    def trajectories(self) -> str:
        """The name of the set of trajectories."""
        return fact(self.run.manifest, "trajectories") or "an unnamed set"

    @property
    def scripted(self) -> bool:
        """Whether the trajectories are those of the built-in scripted agent."""
        named = self.run.manifest.get("trajectories")
        return isinstance(named, Mapping) and bool(named.get("scripted"))

    @cached_property
    def present(self) -> dict[GapCell, set[int]]:
        """The sessions of each k and method."""
        found: dict[GapCell, set[int]] = {}
        for step in self.steps:
            found.setdefault(("", step.context, step.k, step.method.label), set()).add(step.session)
        return found

    @cached_property
    def missing(self) -> list[Gap]:
        """What the run lacks of what its last start asked for, and where a method has fewer sessions than others."""
        beside: dict[int, set[int]] = {}
        for (_, context, _, _), sessions in self.present.items():
            beside.setdefault(context, set()).update(sessions)
        expected = {key: beside[key[1]] for key in self.present}
        for key, sessions in planned(last_settings(self.run.manifest), "sessions", beside).items():
            # A control's repetition alone belongs to it, though no start names it.
            for own in (key, (*key[:3], f"{key[3]}, alone")):
                if own == key or own in self.present:
                    expected[own] = expected.get(own, set()) | sessions
        return gaps(expected, self.present, NOUNS["sessions"])

    @cached_property
    def halves(self) -> list[Half]:
        """The sessions that are written only in part."""
        return half_written(self.present, NOUNS["sessions"])

    @cached_property
    def ids(self) -> dict[int, str]:
        """What the records call each session."""
        return {step.session: shorten(step.session_id, 60) for step in self.steps if step.session_id}

    def absent(self, k: int | None = None) -> str:
        """What the run lacks of what its steps are compared with, at every k or at one, and the command that adds it."""
        roles = {(step.k, step.method.role) for step in self.steps}
        without = [at for at in self.k_values if at is not None and k in (None, at) and (at, Role.EXACT) not in roles]
        parts = []
        if without:
            where = join([f"k = {at:,}" for at in without])
            measured = any(cell.k in without and cell.method.role is Role.SCAN and cell.agreement is not None for cell in self.cells)
            lost = "agreements are as recorded, and no step stands beside its own" if measured else "no step is compared with its own"
            parts.append(f"Exact top-k, which every step is compared with, is missing at {where}: {lost}.")
        if (None, Role.DENSE) not in roles:
            parts.append("Dense attention is missing: what selecting k tokens changes in a step is not known.")
        if parts:
            parts.append(adding("sessions", self.name))
        if self.asked_baseline and self.baseline != self.asked_baseline:
            instead = f"differences are from {self.baseline} instead" if self.baseline else "there are no differences"
            parts.append(f"The baseline that the run names, {self.asked_baseline}, is missing: {instead}.")
            parts.append(adding("sessions", self.name, "…") + " It must be among the methods.")
        return " ".join(parts)


def session_source(records: Records, name: str) -> SessionSource:
    """A run that has records. Raises UserError where not one is of this kind."""
    steps, notes = read_steps(records.iter_records())
    if not steps:
        raise UserError(f"{name} holds no record of kind 'sessions': {'; '.join(notes)}")
    return SessionSource(name, records, steps, [*notes, *impossible_notes(last_settings(records.manifest))])


def load_session_source(loaded: Loaded) -> SessionSource:
    """The run as a report sees it. Raises UserError where not one record is of this kind."""
    return session_source(loaded.records, loaded.name)


def mark(cell: SessionCell) -> str:
    """The sign that stands beside an agreement; readable without colour."""
    found = cell.against_baseline
    return "" if found is None else "▼" if found.below else "▲" if found.above else ""


def session_remarks(source: SessionSource) -> list[Remark]:
    """What limits the numbers."""
    found = []
    if source.scripted:
        text = "The trajectories are scripted: no model wrote the recorded steps. They show how the command works, not how methods do."
        found.append(Remark(text, grave=True))
    floor: dict[str, dict[int | None, str]] = {}
    for cell in source.cells:
        if cell.method.role is Role.NOISE and cell.agreement:
            floor.setdefault(cell.method.label, {})[cell.k] = number(cell.agreement)
    named: list[str] = []
    for label, values in floor.items():
        # Dense attention has no k and says the same at each.
        alike = len(set(values.values())) == 1
        named += [f"{label} {next(iter(values.values()))}"] if alike else [f"{label} {value} at k = {k:,}" for k, value in values.items()]
    if named:
        found.append(Remark(f"Noise floor, agreement of a branch with itself in another batch: {join(named)}."))
    if source.sessions < MINIMUM_PAIRS:
        found.append(Remark(f"{count(source.sessions, 'session')}: fewer than {MINIMUM_PAIRS} separate no two methods."))
    failed = sum(step.failed for step in source.steps)
    if failed:
        be, them = ("is", "it") if failed == 1 else ("are", "them")
        found.append(Remark(f"{count(failed, 'step')} failed and {be} in no mean; steps.csv names {them}.", grave=True))
    if source.missing:
        more = len(source.missing) - _SHOWN_GAPS
        shown = "; ".join([*map(str, source.missing[:_SHOWN_GAPS]), *([f"{count(more, 'gap')} more below"] if more > 0 else [])])
        found.append(Remark(f"Not every session is measured: {shown}. Comparisons use shared sessions only."))
    found += half_remarks(source.halves, source.run.torn, NOUNS["sessions"], source.ids)
    if source.run.problems:
        found.append(Remark(f"{count(len(source.run.problems), 'damaged line')} of the records skipped.", grave=True))
    found += decoding_remarks(source.run.manifest, source.steps)
    return found + [Remark(f"{note}.") for note in source.notes]


def subject(source: SessionSource) -> str:
    """What was compared."""
    scans = {cell.method for cell in source.cells if cell.method.role is Role.SCAN}
    devices = join(devices_of(source.run.manifest))
    length = f" of {source.tokens} tokens" if source.tokens else ""
    text = (
        f"{count(len(scans), 'scan')} of {source.model}{f' on {devices}' if devices else ''}: the agent's next step in "
        f"{count(source.sessions, 'session')}{length} made of {source.trajectories} trajectories, compared with the step of exact top-k "
        "at the same k."
    )
    return f"{text} {decoding_words(source.run.manifest, source.steps)}".rstrip()


def answer(source: SessionSource) -> str:
    """Which scans agree most with exact top-k at each k, and which separate from the baseline; what is missing to say so, first."""
    parts = [absent] if (absent := source.absent()) else []
    for k in source.k_values:
        scans = [cell for cell in source.cells if cell.k == k and cell.method.role is Role.SCAN and cell.agreement is not None]
        if not scans or k is None:
            continue
        best = max(scans, key=lambda cell: cell.agreement or 0.0)
        error = "" if best.standard_error is None else f" ± {number(best.standard_error)}"
        bits = "" if best.bits is None else f" at {number(best.bits, 0)} bits"
        # Keys that a rerank fetches are no bits of the scan.
        bits += " and the keys that it rescores" if bits and " rerank=" in best.method.label else ""
        text = f"At k = {k:,} {best.method.label} agrees most with exact top-k, {number(best.agreement)}{error}{bits}."
        beside = [pair for pair in source.pairs if pair.k == k and best.method in (pair.method, pair.other)]
        beside = [pair for pair in beside if {pair.method.role, pair.other.role} == {Role.SCAN}]
        apart = sum(pair.comparison.above or pair.comparison.below for pair in beside)
        if apart < len(beside):
            text += f" It separates from {apart} of the {count(len(beside), 'other scan')} by these sessions."
        compared = [(cell, cell.against_baseline) for cell in scans if cell.against_baseline is not None]
        above = [f"{cell.method.label} ({signed(found.mean)})" for cell, found in compared if found.above]
        below = [f"{cell.method.label} ({signed(found.mean)})" for cell, found in compared if found.below]
        if above:
            text += f" Above {source.baseline} by the paired interval: {join(above)}."
        if below:
            text += f" Below it: {join(below)}." if above else f" Below {source.baseline} by the paired interval: {join(below)}."
        if compared and not above and not below:
            text += f" No scan separates from {source.baseline} by these sessions."
        parts.append(text)
    return " ".join(parts)
