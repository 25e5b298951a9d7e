"""The HTML page of agent sessions: tables, figures, and a viewer that sets each method's step beside that of exact top-k."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

from fathom_eval import __version__
from fathom_eval.console import printable
from fathom_eval.reports.cells import MINIMUM_PAIRS
from fathom_eval.reports.figures import Drawing
from fathom_eval.reports.narrative import Remark, number
from fathom_eval.reports.session_cells import Pair, SessionCell
from fathom_eval.reports.sessions import SessionSource, difference, mark, session_remarks, subject
from fathom_eval.reports.source import flatten

MAX_SESSIONS = 12
"""Sessions whose steps the page shows; steps.csv has them all."""
_MAX_CHARACTERS = 40_000
_MAX_COMPARED_WORDS = 4_000


@dataclass(frozen=True)
class Part:
    """A run of text, and whether the other step lacks it."""

    text: str
    differs: bool


@dataclass(frozen=True)
class ShownStep:
    """A method's step beside that of exact top-k."""

    label: str
    facts: str
    exact: list[Part]
    own: list[Part]


@dataclass(frozen=True)
class ShownSession:
    """One session of the viewer; ``steps`` by k."""

    title: str
    sources: list[str]
    recorded: str | None
    steps: list[tuple[int | None, list[ShownStep]]]


@dataclass(frozen=True)
class Block:
    """One k: a table and its figure."""

    anchor: str
    title: str
    cells: list[SessionCell]
    pairs: list[Pair]
    drawings: list[Drawing]


@dataclass(frozen=True)
class Section:
    """One run on the page."""

    anchor: str
    name: str
    subject: str
    baseline: str | None
    remarks: list[Remark]
    blocks: list[Block]
    viewer: list[ShownSession]
    hidden_sessions: int
    failures: list[tuple[str, int, str]]
    provenance: list[tuple[str, str]]


def render_sessions(sources: Sequence[SessionSource], drawings: Mapping[str, Sequence[Drawing]]) -> str:
    """The page of these runs as one HTML document."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(number=number, mark=mark, difference=difference)
    return environment.get_template("sessions.html").render(
        sections=[_section(source, index, drawings[source.name]) for index, source in enumerate(sources, start=1)],
        minimum_pairs=MINIMUM_PAIRS,
        version=__version__,
        # matplotlib escaped every text within the drawing.
        inline=lambda drawing: Markup(drawing.inline()),
    )


def _section(source: SessionSource, index: int, drawings: Sequence[Drawing]) -> Section:
    anchor = f"run-{index}"
    blocks = [
        Block(
            anchor=f"{anchor}-{k}",
            title="dense attention" if k is None else f"k = {k:,}",
            cells=[cell for cell in source.cells if cell.k == k],
            pairs=[pair for pair in source.pairs if pair.k == k],
            drawings=[drawing for drawing in drawings if drawing.title.endswith(f" k = {k:,}" if k is not None else " dense")],
        )
        for k in source.k_values
    ]
    return Section(
        anchor=anchor,
        name=source.name,
        subject=subject(source),
        baseline=source.baseline,
        remarks=session_remarks(source),
        blocks=blocks,
        viewer=_viewer(source),
        hidden_sessions=max(source.sessions - MAX_SESSIONS, 0),
        failures=_failures(source),
        provenance=list(flatten({name: value for name, value in source.run.manifest.items() if name != "invocations"})),
    )


def _failures(source: SessionSource) -> list[tuple[str, int, str]]:
    return [
        (printable(record.get("label")), int(record["sample"]), printable(str(record.get("error") or "no reason recorded")[:500]))
        for record in source.run.iter_records()
        if record["finish"] == "error"
    ]


def _viewer(source: SessionSource) -> list[ShownSession]:
    """The steps of the first sessions; nothing of a run that keeps no text."""
    shown: dict[int, list[dict[str, Any]]] = {}
    first = sorted({step.session for step in source.steps})[:MAX_SESSIONS]
    for record in source.run.iter_records():
        if record["sample"] in first and isinstance(record.get("generation"), str):
            shown.setdefault(record["sample"], []).append(record)
    return [_shown_session(records) for _, records in sorted(shown.items())]


def _shown_session(records: Sequence[Mapping[str, Any]]) -> ShownSession:
    record = records[0]
    exact = {other["k"]: other for other in records if other["method"] == "exact" and not other["options"]}
    recorded = next((other["recorded_step"] for other in records if isinstance(other.get("recorded_step"), str)), None)
    steps: list[tuple[int | None, list[ShownStep]]] = []
    for k in sorted(exact) or [None]:
        own = [other for other in records if other["k"] in (k, None) and other is not exact.get(k) and "batch" not in other["options"]]
        steps.append((k, [_shown_step(other, exact.get(k)) for other in own]))
    title = f"session {record['sample']}: {printable(record.get('repo'))}, {record.get('prompt_tokens'):,} tokens"
    sources = [
        f"{printable(source.get('trajectory'))}: {source.get('tokens'):,} tokens{'' if source.get('whole') else ', cut before the step'}"
        for source in record.get("sources") or []
    ]
    return ShownSession(title, sources, None if recorded is None else _clip(recorded), steps)


def _shown_step(record: Mapping[str, Any], exact: Mapping[str, Any] | None) -> ShownStep:
    reference = "" if exact is None else str(exact["generation"])
    left, right = marked_parts(reference, str(record["generation"]))
    facts = []
    if exact is not None:
        agreement = exact.get("dense_agreement_exact") if record["k"] is None else record.get("agreement_exact")
        facts.append(f"agreement {number(agreement)}")
        facts.append(_where_it_differs(exact["token_ids"], record["token_ids"]))
    facts.append(f"ends by {printable(record['finish'])} after {record['new_tokens']:,} tokens")
    if record.get("tool_call"):
        facts.append(f"tool call: {printable(record['tool_call'])}")
    return ShownStep(printable(record["label"]), "; ".join(facts), left, right)


def _where_it_differs(exact: Sequence[int], own: Sequence[int]) -> str:
    if list(exact) == list(own):
        return "the same tokens"
    pairs = enumerate(zip(exact, own, strict=False))
    first = next((position for position, (a, b) in pairs if a != b), min(len(exact), len(own)))
    return f"first differs at token {first} of {len(exact)}"


def marked_parts(a: str, b: str) -> tuple[list[Part], list[Part]]:
    """Both texts in parts, with the words that the other lacks marked, as the agreement counts them. All text is printable."""
    left, right = _words(_clip(a)), _words(_clip(b))
    if max(len(left), len(right)) > _MAX_COMPARED_WORDS:
        return [Part("".join(left), False)], [Part("".join(right), False)]
    matcher = SequenceMatcher(None, [word.strip() for word in left], [word.strip() for word in right], autojunk=False)
    parts: tuple[list[Part], list[Part]] = ([], [])
    for kind, left_start, left_end, right_start, right_end in matcher.get_opcodes():
        for target, words in ((parts[0], left[left_start:left_end]), (parts[1], right[right_start:right_end])):
            if words:
                target.append(Part("".join(words), kind != "equal"))
    return parts


def _words(text: str) -> list[str]:
    """Words with the white space before them; white space at the end stays with the last one."""
    words = re.findall(r"\s*\S+", text)
    rest = text[sum(map(len, words)) :]
    return [*words[:-1], words[-1] + rest] if words else []


def _clip(text: str) -> str:
    """Printable text of a bounded length, with its line breaks."""
    shown = printable(text[:_MAX_CHARACTERS], newline="\n")
    left = len(text) - _MAX_CHARACTERS
    return f"{shown}\n… and {left:,} more characters" if left > 0 else shown
