"""What a file of trajectories holds, and how many sessions it can give."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from fathom_eval.sessions.assembly import Plan, check_repository, plan_sessions
from fathom_eval.sessions.encoding import TrajectoryEncoder
from fathom_eval.sessions.rendering import PlainRenderer
from fathom_eval.sessions.report import ReadReport
from fathom_eval.sessions.steps import Trajectory


@dataclass
class RepositoryCounts:
    """Counts of one repository. ``size`` is in tokens or words, see :attr:`Inspection.unit`."""

    trajectories: int = 0
    steps: int = 0
    targets: int = 0
    size: int = 0
    longest: int = 0
    sessions: int | None = None


@dataclass
class Inspection:
    """What was found.

    Attributes:
        unit: ``tokens`` of the given tokenizer, or ``words``, which say little about tokens.
        repositories: counts by repository; the empty name stands for trajectories that name none.
        report: what was read and what was skipped.
        notes: what readers and assembly left out or changed, with the number of trajectories it happened to.
        refused: targets that cannot be used, since their prompt is no prefix of the trajectory's own tokens.
        plan: None without a tokenizer.
    """

    unit: str
    report: ReadReport
    repositories: dict[str, RepositoryCounts] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    endings: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    plan: Plan | None = None


def inspect_trajectories(
    trajectories: Iterator[Trajectory],
    report: ReadReport,
    *,
    encoder: TrajectoryEncoder | None,
    low: int,
    high: int,
    seed: int = 0,
    repo: str | None = None,
) -> Inspection:
    """Count what there is, and plan sessions if there is a tokenizer.

    Args:
        trajectories: from :func:`fathom_eval.sessions.reading.read_trajectories`.
        report: that was given to it.
        encoder: counts tokens; words are counted if None.
        low: least tokens of a session.
        high: most tokens of a session.
        seed: of the sessions.
        repo: only this repository.

    Raises:
        UserError: from reading; no trajectory is of ``repo``.
    """
    inspection = Inspection("words" if encoder is None else "tokens", report)
    counted = _counted(trajectories, inspection)
    if encoder is None:
        renderer = PlainRenderer()
        for trajectory in counted:
            _add_size(inspection, trajectory.repo, len(renderer.render(trajectory).text.split()))
        check_repository(repo, inspection.repositories)
        return inspection
    candidates = []
    for candidate in encoder.candidates(counted, report):
        candidates.append(candidate)
        _add_size(inspection, candidate.repo, candidate.length)
        inspection.refused += candidate.refused
    inspection.plan = plan_sessions(candidates, low=low, high=high, seed=seed, repo=repo, prefix_tokens=len(encoder.prefix))
    for name, counts in inspection.repositories.items():
        counts.sessions = 0 if repo in (None, name) else None
    for summary in inspection.plan.repositories:
        inspection.repositories[summary.repo].sessions = summary.sessions
    return inspection


def _counted(trajectories: Iterator[Trajectory], inspection: Inspection) -> Iterator[Trajectory]:
    for trajectory in trajectories:
        counts = inspection.repositories.setdefault(trajectory.repo, RepositoryCounts())
        counts.trajectories += 1
        counts.steps += len(trajectory.steps)
        counts.targets += len(trajectory.targets)
        inspection.endings[trajectory.ending] += 1
        for note in trajectory.notes:
            count, _, what = note.partition(" × ")
            inspection.notes[what or note] += int(count) if what else 1
        yield trajectory


def _add_size(inspection: Inspection, repo: str, size: int) -> None:
    counts = inspection.repositories[repo]
    counts.size += size
    counts.longest = max(counts.longest, size)
