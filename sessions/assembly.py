"""Sessions: trajectories of one repository, one after another, cut before a response of the model that is the target."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fathom_eval.errors import UserError, did_you_mean
from fathom_eval.sessions.encoded_cache import EncodedTrajectory, TokenTarget
from fathom_eval.sessions.encoding import Candidate, TrajectoryEncoder, prompt_ids
from fathom_eval.sessions.packing import Item, Pack, by_repository, pack, rank
from fathom_eval.sessions.safe_text import visible

DEFAULT_TOKENS = (80_000, 100_000)


@dataclass(frozen=True)
class SessionSource:
    """A trajectory in a session. ``tokens`` of it are used; ``whole`` says whether that is all of it."""

    trajectory: str
    source: str
    content_hash: str
    tokens: int
    whole: bool


@dataclass(frozen=True)
class Session:
    """One session.

    Attributes:
        id: hash of what it is made of.
        repo: repository of all its trajectories.
        sources: its trajectories, in order.
        prompt_ids: int32 tokens, shape ``[tokens]``; they end where the model goes on with the target.
        target_content: recorded content of the target, without tool calls.
        target_text: the recorded target as it is rendered, tool calls included, without what ends its turn in a chat template.
        target_step: index of the target among the steps of the last trajectory.
        target_index: its position in the source.
    """

    id: str
    repo: str
    sources: tuple[SessionSource, ...]
    prompt_ids: NDArray[np.int32]
    target_content: str
    target_text: str
    target_step: int
    target_index: int


@dataclass(frozen=True)
class RepositorySummary:
    """What one repository gave.

    Attributes:
        trajectories, tokens, sessions: How many.
        unused: trajectories that are in no session, with the reason.
        late: trajectories longer than a session and without a usable target early enough for one.
        earliest_target: fewest tokens, with those that stand before every session, that a session ending in one of ``late`` takes; None
            where they have no usable target at all.
    """

    repo: str
    trajectories: int
    tokens: int
    sessions: int
    unused: tuple[tuple[str, str], ...]
    late: int = 0
    earliest_target: int | None = None


@dataclass(frozen=True)
class Plan:
    """Which trajectories make up which session. ``packs`` are in seeded order; their members are named by content hash."""

    packs: tuple[tuple[str, Pack], ...]
    repositories: tuple[RepositorySummary, ...]
    notes: tuple[str, ...]


def parse_session_tokens(text: str) -> tuple[int, int]:
    """The bounds of ``LOW:HIGH``. Raises UserError for anything else."""
    low, _, high = text.replace("_", "").partition(":")
    if not (low.isascii() and low.isdigit() and high.isascii() and high.isdigit() and 0 < int(low) <= int(high) < 10**9):
        raise UserError(f"session tokens '{visible(text, 40)}' are no range: the form is LOW:HIGH with 0 < LOW <= HIGH, e.g. 80000:100000")
    return int(low), int(high)


def check_repository(repo: str | None, found: Iterable[str]) -> None:
    """Raise UserError where a repository is asked for that is none of those found; the empty name stands for none."""
    repos = {name for name in found if name}
    if repo is not None and repo not in repos:
        known = visible(did_you_mean(repo, repos), 300) if repos else "none names a repository"
        raise UserError(f"no trajectory is of repository '{visible(repo, 80)}'; {known}")


def plan_sessions(
    candidates: Sequence[Candidate], *, low: int, high: int, seed: int = 0, repo: str | None = None, prefix_tokens: int = 0
) -> Plan:
    """Decide which trajectories make up which session: as many sessions as possible.

    A trajectory longer than a session is used as well: it stands last, and is cut. One without a repository, and a copy of another one, is
    not used.

    Args:
        candidates: encoded trajectories.
        low: least tokens of a session.
        high: most tokens of a session.
        seed: another seed gives other sessions.
        repo: only this repository.
        prefix_tokens: tokens that stand once before every session.

    Raises:
        UserError: there is no such repository.
    """
    check_repository(repo, (candidate.repo for candidate in candidates))
    kept: list[Candidate] = []
    seen: set[str] = set()
    notes = []
    for candidate in candidates:
        if candidate.content_hash in seen:
            notes.append(f"{visible(candidate.source)} ({visible(candidate.id, 80)}) is a copy of another trajectory: left out")
        elif not candidate.repo:
            notes.append(f"{visible(candidate.source)} ({visible(candidate.id, 80)}) names no repository: left out")
        elif repo is None or candidate.repo == repo:
            kept.append(candidate)
        seen.add(candidate.content_hash)
    low, high = max(low - prefix_tokens, 1), high - prefix_tokens
    items = [
        (candidate.repo, Item(candidate.content_hash, candidate.length, tuple(start for _, start in candidate.targets)))
        for candidate in kept
    ]
    names = {candidate.content_hash: candidate.id for candidate in kept}
    packs: list[tuple[str, Pack]] = []
    summaries = []
    for name, of_one in by_repository(items).items():
        found = pack(of_one, low, high, seed)
        packs.extend((name, one) for one in found)
        used = {member for one in found for member in one.members}
        unused = tuple((names[item.name], _why_unused(item, of_one, low, high)) for item in of_one if item.name not in used)
        late = [item for item in of_one if _is_late(item, high)]
        earliest = min((item.cuts[0] + prefix_tokens for item in late if item.cuts), default=None)
        tokens = sum(item.length for item in of_one)
        summaries.append(RepositorySummary(name, len(of_one), tokens, len(found), unused, len(late), earliest))
    packs.sort(key=lambda entry: rank(seed, "session", entry[0], *entry[1].members))
    return Plan(tuple(packs), tuple(summaries), tuple(notes))


def _is_late(item: Item, high: int) -> bool:
    return item.length >= high and not item.cuts_between(0, high)


def _why_unused(item: Item, items: Sequence[Item], low: int, high: int) -> str:
    if _is_late(item, high):
        return f"longer than a session ({item.length:,} tokens) and without a usable target in its first {high:,} tokens"
    total = sum(other.length for other in items)
    if total < low:
        return f"the repository has {total:,} tokens in all, a session needs {low:,}"
    return "left over: what remains of the repository fills no further session"


def gather_candidates(
    candidates: Iterator[Candidate], *, sessions: int, low: int, high: int, seed: int = 0, repo: str | None = None, prefix_tokens: int = 0
) -> tuple[list[Candidate], bool]:
    """Read candidates until they give so many sessions, and say whether any may be left: for sets that are too large to be read whole.

    What is read, and so what the sessions are, depends on the order of the source and on nothing else.
    """
    gathered: list[Candidate] = []
    next_look = 1
    for candidate in candidates:
        gathered.append(candidate)
        if len(gathered) < next_look or not any(known.repo and repo in (None, known.repo) for known in gathered):
            continue
        # Looking seldom keeps the cost of planning below that of reading.
        next_look = len(gathered) + max(1, len(gathered) // 8)
        plan = plan_sessions(gathered, low=low, high=high, seed=seed, repo=repo, prefix_tokens=prefix_tokens)
        if len(plan.packs) >= sessions:
            return gathered, True
    return gathered, False


def build_sessions(
    plan: Plan, candidates: Iterable[Candidate], encoder: TrajectoryEncoder, *, seed: int = 0, sessions: int | None = None
) -> tuple[list[Session], list[str]]:
    """The sessions of a plan, each checked, and notes on what could not be built.

    Every prompt is checked to be a token-level prefix of the rendering of its last trajectory; a target that fails gives way to another.
    So does one whose prompt an earlier session has, as where one trajectory is the beginning of another.

    Args:
        plan: from :func:`plan_sessions`.
        candidates: those that it was made of.
        encoder: the one that encoded them.
        seed: picks the targets.
        sessions: at most so many; all if None.
    """
    by_content = {candidate.content_hash: candidate for candidate in reversed(list(candidates))}
    built: list[Session] = []
    notes: list[str] = []
    taken: set[bytes] = set()
    for repo, one in plan.packs:
        if sessions is not None and len(built) >= sessions:
            break
        last = by_content[one.last]
        encoded = encoder.load(last)
        why = f"no prompt is a token-level prefix of {visible(last.id, 80)}"
        for target in _checked_targets(one, last, encoded, encoder, seed):
            session = _session(repo, [by_content[name] for name in one.whole], last, encoded, target, encoder)
            content = hashlib.sha256(session.prompt_ids.tobytes()).digest()
            if content not in taken:
                taken.add(content)
                built.append(session)
                break
            why = f"its prompt, which ends in {visible(last.id, 80)}, is that of another session"
        else:
            notes.append(f"a session of {visible(repo, 80)} is left out: {why}")
    return built, notes


def _checked_targets(
    one: Pack, last: Candidate, encoded: EncodedTrajectory, encoder: TrajectoryEncoder, seed: int
) -> Iterator[TokenTarget]:
    fitting = [target for target in encoded.targets if target.start in one.cuts]
    fitting.sort(key=lambda target: rank(seed, "target", last.content_hash, str(target.step)))
    return (target for target in fitting if encoder.is_prefix(encoded, target))


def _session(
    repo: str, whole: Sequence[Candidate], last: Candidate, encoded: EncodedTrajectory, target: TokenTarget, encoder: TrajectoryEncoder
) -> Session:
    sources = [SessionSource(member.id, member.source, member.content_hash, member.length, True) for member in whole]
    sources.append(SessionSource(last.id, last.source, last.content_hash, target.start, False))
    parts = [encoder.load(member).ids for member in whole]
    identity = rank(
        0, encoder.tokenizer_fingerprint, encoder.renderer.identity, *(source.content_hash for source in sources), str(target.step)
    )
    return Session(
        id=identity[:16],
        repo=repo,
        sources=tuple(sources),
        prompt_ids=prompt_ids(encoder.prefix, [*parts, encoded.ids[: target.start]]),
        target_content=target.content,
        target_text=encoder.step_text(encoded, target),
        target_step=target.step,
        target_index=target.index,
    )
