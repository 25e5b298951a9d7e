"""The sessions of a run: which trajectories are read, how long sessions are, and what is known of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fathom_eval.errors import UserError
from fathom_eval.models import LoadedModel, ModelFacts
from fathom_eval.reports.wording import count
from fathom_eval.sessions import builtin
from fathom_eval.sessions.assembly import (
    DEFAULT_TOKENS,
    Plan,
    Session,
    build_sessions,
    gather_candidates,
    parse_session_tokens,
    plan_sessions,
)
from fathom_eval.sessions.encoded_cache import EncodedCache
from fathom_eval.sessions.encoding import TrajectoryEncoder
from fathom_eval.sessions.packing import rank
from fathom_eval.sessions.reading import read_trajectories
from fathom_eval.sessions.rendering import Renderer, choose_renderer
from fathom_eval.sessions.report import ReadReport
from fathom_eval.sessions.safe_text import visible
from fathom_eval.sessions.steps import Assistant, Trajectory
from fathom_eval.tool_calls import tool_call_state

_LEAST_TOKENS = 256
"""Sessions shorter than this say nothing of long contexts, and a model that holds no more is refused."""
_WHOLE_FILE_BYTES = 256 << 20
"""Local files up to this size are read whole, so that more sessions later leave the first ones as they are."""


@dataclass(frozen=True)
class SourceSettings:
    """Which trajectories make up the sessions, and how they are rendered.

    Attributes:
        trajectories: File, folder or hub id; None for the built-in set.
        rendering: ``auto``, ``template`` or ``plain``.
        sessions: At most so many.
        low, high: Tokens of a session.
    """

    trajectories: str | None
    rendering: str
    sessions: int
    low: int
    high: int
    seed: int = 0
    format_name: str | None = None
    repo: str | None = None
    default_repo: str = ""
    condensation: str = "full"
    revision: str | None = None

    @property
    def name(self) -> str:
        """What reports call the set. A path is shown by its last part."""
        if self.trajectories is None:
            return builtin.TITLE
        path = Path(self.trajectories).expanduser()
        name = path.name if path.exists() else self.trajectories
        return f"{name}@{self.revision}" if self.revision else name


@dataclass(frozen=True)
class PreparedSession:
    """A session as it is measured.

    Attributes:
        id, repo: See :class:`fathom_eval.sessions.assembly.Session`.
        sources: Its trajectories with the tokens that are used of each.
        prompt_ids: Tokens; the model goes on with the step that is compared.
        target_text: The recorded step as it is rendered.
        target_step: Its index in the last trajectory.
        tools: Names that a call may have: those declared in the last trajectory, or those called in it where it declares none.
        recorded_tool_call: Whether the recorded step itself calls a known tool (:func:`~fathom_eval.tool_calls.tool_call_state`).
    """

    id: str
    repo: str
    sources: list[dict[str, Any]]
    prompt_ids: list[int]
    target_text: str
    target_step: int
    tools: frozenset[str]
    recorded_tool_call: str


@dataclass(frozen=True)
class SessionData:
    """The sessions of a run.

    Attributes:
        identity: What the sessions depend on.
        rendering: The rendering, and why it is that one.
        low, high: Tokens of a session.
        notes: What a reader should know of how they came about.
        report: What was read, and what was left out.
    """

    sessions: list[PreparedSession]
    renderer: Renderer
    rendering: str
    identity: dict[str, Any]
    low: int
    high: int
    notes: list[str]
    report: ReadReport


def choose_bounds(
    asked: str | None, facts: ModelFacts, max_new_tokens: int, *, is_builtin: bool, scaling: float = 1
) -> tuple[int, int, str]:
    """Least and most tokens of a session, and in words why.

    Args:
        asked: ``LOW:HIGH``; None for the default of 80,000 to 100,000, scaled down to what the model and the built-in set can hold.
        scaling: Factor of the rope scaling that the model was loaded with.

    Raises:
        UserError: The bounds are no range, or sessions of that length and the step do not fit in the model's positions.
    """
    room = facts.max_positions - max_new_tokens
    if asked is not None:
        low, high = parse_session_tokens(asked)
        if high > room:
            factor = math.ceil(scaling * (high + max_new_tokens) / facts.max_positions)
            raise UserError(
                f"sessions of up to {high:,} tokens and {max_new_tokens} new ones do not fit: {facts.name} holds {facts.max_positions:,}; "
                f"give --session-tokens up to {max(room, 0):,} or --rope-scaling yarn:{factor}"
            )
        return low, high, "as asked"
    if room < _LEAST_TOKENS:
        raise UserError(
            f"{facts.name} holds {facts.max_positions:,} tokens, {max_new_tokens} of them for the step: too few for a session; "
            "give a smaller --max-new-tokens, another model or --rope-scaling yarn:FACTOR"
        )
    most = min(room, builtin.SESSION_TOKENS) if is_builtin else room
    if most >= DEFAULT_TOKENS[1]:
        return *DEFAULT_TOKENS, "the full length"
    high = most // 500 * 500 or most
    cause = (
        f"{facts.name} holds {facts.max_positions:,}"
        if most == room
        else "the built-in trajectories are short; longer ones: --trajectories"
    )
    return high * 4 // 5, high, f"scaled down from {DEFAULT_TOKENS[0]:,} to {DEFAULT_TOKENS[1]:,}, since {cause}"


def check_k(k_values: list[int], low: int, high: int, facts: ModelFacts) -> None:
    """Raise UserError for a k that no session is longer than: top-k would be dense attention."""
    for k in k_values:
        if k >= low:
            raise UserError(
                f"k={k:,} is no selection from sessions of {low:,} to {high:,} tokens: give a k below {low:,}, or longer sessions "
                f"(--session-tokens; {facts.name} holds {facts.max_positions:,} tokens, more with --rope-scaling)"
            )


def prepare_sessions(
    loaded: LoadedModel, settings: SourceSettings, *, report: ReadReport | None = None, say: Callable[[str], None] = lambda line: None
) -> SessionData:
    """Read trajectories and assemble sessions.

    Args:
        report: Filled as reading goes on, so that it tells what was left out even where this raises.

    Raises:
        UserError: There are no trajectories, none can be rendered, no repository has enough text, the chat template was asked for and
            takes no tools, or an option is unknown.
    """
    renderer, rendering = choose_renderer(loaded.tokenizer, settings.rendering)
    encoder = TrajectoryEncoder(loaded.tokenizer, renderer, EncodedCache())
    report = ReadReport() if report is None else report
    tools: dict[str, frozenset[str]] = {}
    trajectories = read_trajectories(
        settings.trajectories or str(builtin.PATH),
        report,
        format_name=settings.format_name,
        revision=settings.revision,
        condensation=settings.condensation,
        default_repo=settings.default_repo,
    )
    stream = encoder.candidates(_with_tools(trajectories, tools), report)
    bounds: dict[str, Any] = {"low": settings.low, "high": settings.high, "seed": settings.seed, "repo": settings.repo}
    prefix_tokens = len(encoder.prefix)
    notes: list[str] = []
    if is_read_whole(settings.trajectories):
        candidates = list(stream)
    else:
        candidates, more = gather_candidates(stream, sessions=settings.sessions, prefix_tokens=prefix_tokens, **bounds)
        if more:
            notes.append(f"the first {len(candidates):,} trajectories were read: they give the sessions asked for")
    if not candidates:
        raise UserError(f"no trajectory of {visible(settings.name, 80)} can be rendered: {next(iter(report.lines()), 'it is empty')}")
    plan = plan_sessions(candidates, prefix_tokens=prefix_tokens, **bounds)
    if not plan.packs:
        raise UserError(_no_session(settings, plan))
    made, of = count(len(plan.packs), "session"), count(len(candidates), "trajectory")
    say(f"{made} of {settings.low:,} to {settings.high:,} tokens can be made of {of}")
    built, left_out = build_sessions(plan, candidates, encoder, seed=settings.seed, sessions=settings.sessions)
    if not built:
        raise UserError(f"no session can be built: {left_out[0]}")
    if len(built) < settings.sessions:
        notes.append(f"{settings.sessions} sessions were asked for; the trajectories give {len(built)}")
    content = rank(0, *sorted(f"{candidate.repo} {candidate.content_hash}" for candidate in candidates))
    return SessionData(
        sessions=[_prepared(session, tools, renderer) for session in built],
        renderer=renderer,
        rendering=rendering,
        identity={
            "trajectories_sha256": content,
            "rendering": renderer.identity,
            "session_tokens": [settings.low, settings.high],
            "seed": settings.seed,
            "repo": settings.repo,
            "condensation": settings.condensation,
        },
        low=settings.low,
        high=settings.high,
        notes=notes + left_out,
        report=report,
    )


def is_read_whole(trajectories: str | None) -> bool:
    """Whether all of a source is read before sessions are made: not sets of the hub, and no files too large for it."""
    if trajectories is None:
        return True
    path = Path(trajectories).expanduser()
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else []
    return bool(files) and sum(file.stat().st_size for file in files) <= _WHOLE_FILE_BYTES


def _with_tools(trajectories: Iterator[Trajectory], tools: dict[str, frozenset[str]]) -> Iterator[Trajectory]:
    for trajectory in trajectories:
        declared = {str(tool.get("function", tool).get("name")) for tool in trajectory.tools}
        called = {call.name for step in trajectory.steps if isinstance(step, Assistant) for call in step.tool_calls}
        tools[trajectory.content_hash] = frozenset(declared or called)
        yield trajectory


def _prepared(session: Session, tools: dict[str, frozenset[str]], renderer: Renderer) -> PreparedSession:
    known = tools[session.sources[-1].content_hash]
    plain = not renderer.raw_special_tokens
    return PreparedSession(
        id=session.id,
        repo=session.repo,
        sources=[{"trajectory": source.trajectory, "tokens": source.tokens, "whole": source.whole} for source in session.sources],
        prompt_ids=session.prompt_ids.tolist(),
        target_text=session.target_text,
        target_step=session.target_step,
        tools=known,
        recorded_tool_call=tool_call_state(session.target_text, known, plain=plain, cut=False),
    )


def _no_session(settings: SourceSettings, plan: Plan) -> str:
    named = sorted(plan.repositories, key=lambda repository: -repository.tokens)
    if not named:
        return f"no trajectory of {visible(settings.name, 80)} names a repository: name it with --default-repo"
    refusal = f"no repository of {visible(settings.name, 80)} gives a session of {settings.low:,} to {settings.high:,} tokens"
    largest = named[0]
    if largest.tokens < settings.low:
        shown = ", ".join(f"{visible(one.repo, 60)} has {one.tokens:,}" for one in named[:3])
        more = f" and {len(named) - 3} more have less" if len(named) > 3 else ""
        return f"{refusal} ({shown}{more}): give other --session-tokens or more trajectories"
    has = f"{visible(largest.repo, 60)} has {largest.tokens:,} tokens"
    late = f"longer and without a usable target in the first {settings.high:,} tokens"
    if largest.late < largest.trajectories:
        return (
            f"{refusal}: text is not lacking ({has}), but no choice of trajectories ends before a usable target at that length; "
            f"{largest.late} of {largest.trajectories} are {late}: give a wider or longer --session-tokens"
        )
    if largest.earliest_target is None:
        return f"{refusal}: text is not lacking ({has}), but all its trajectories are longer and without a usable target: give others"
    return (
        f"{refusal}: text is not lacking ({has}), but all its trajectories are {late}; the earliest comes after "
        f"{largest.earliest_target:,}: give longer --session-tokens"
    )
