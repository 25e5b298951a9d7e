"""A method's step beside that of exact top-k: the words that differ, and the first token that does."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from typing import Any

from fathom_eval.console import printable
from fathom_eval.reports.document import Steps
from fathom_eval.reports.session_source import SessionSource
from fathom_eval.reports.wording import number

MAX_BYTES = 1_400_000
"""Of the steps on a page, so that it opens quickly; steps.csv has them all."""
_MAX_CHARACTERS = 40_000
_MAX_COMPARED_WORDS = 4_000

Part = list[Any]
"""``[text, whether the other step lacks it]``."""


def session_steps(source: SessionSource, name: str) -> Steps | None:
    """The steps of as many sessions as a page may hold, the first always among them; None for a run that keeps no text."""
    order = sorted({step.session for step in source.steps})
    records: dict[int, list[dict[str, Any]]] = {}
    for record in source.run.iter_records():
        if isinstance(record.get("generation"), str) and record.get("sample") in order:
            records.setdefault(record["sample"], []).append(record)
    if not records:
        return None
    shown: list[Mapping[str, Any]] = []
    size = 0
    for session in order:
        if session not in records:
            continue
        found = _session(records[session])
        size += len(json.dumps(found, ensure_ascii=False).encode())
        if shown and size > MAX_BYTES:
            break
        shown.append(found)
    return Steps(name, shown, len(records) - len(shown))


def _session(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    record = records[0]
    exact = {other["k"]: other for other in records if other["method"] == "exact" and not other["options"]}
    recorded = next((other["recorded_step"] for other in records if isinstance(other.get("recorded_step"), str)), None)
    steps = []
    for k in sorted(exact, key=lambda value: value or 0) or [None]:
        reference = exact.get(k)
        own = [other for other in records if other["k"] in (k, None) and other is not reference and "batch" not in other["options"]]
        found = [_step(other, reference) for other in own]
        steps.append(
            {"k": "" if k is None else f"k = {k:,}", "exact": _clip(str(reference["generation"])) if reference else "", "methods": found}
        )
    tokens = record.get("prompt_tokens")
    return {
        "title": f"session {record['sample']}: {printable(record.get('repo'))}"
        + (f", {tokens:,} tokens" if isinstance(tokens, int) else ""),
        "sources": [_source(source) for source in record.get("sources") or [] if isinstance(source, Mapping)],
        "recorded": None if recorded is None else _clip(recorded),
        "steps": steps,
    }


def _source(source: Mapping[str, Any]) -> str:
    cut = "" if source.get("whole") else ", cut before the step"
    return f"{printable(source.get('trajectory'))}: {source.get('tokens')} tokens{cut}"


def _step(record: Mapping[str, Any], exact: Mapping[str, Any] | None) -> dict[str, Any]:
    facts = []
    if exact is not None:
        agreement = exact.get("dense_agreement_exact") if record["k"] is None else record.get("agreement_exact")
        facts.append(f"agreement {number(agreement)}")
        facts.append(_where_it_differs(exact.get("token_ids") or [], record.get("token_ids") or []))
    facts.append(f"ends by {printable(record.get('finish'))} after {record.get('new_tokens')} tokens")
    if record.get("tool_call"):
        facts.append(f"tool call: {printable(record['tool_call'])}")
    left, right = marked_parts("" if exact is None else str(exact["generation"]), str(record["generation"]))
    # The step of exact top-k is on the page once; of each comparison only the lengths of its parts are.
    return {
        "label": printable(record.get("label")),
        "facts": "; ".join(facts),
        "step": "".join(text for text, _ in right),
        "left": _runs(left),
        "right": _runs(right),
    }


def _runs(parts: Sequence[Part]) -> list[int]:
    """Lengths of the parts in turn: what both steps have, what the other lacks, what both have, and so on."""
    runs = [0]
    for text, differs in parts:
        if len(runs) % 2 == differs:
            runs.append(0)
        runs[-1] += len(text)
    return runs


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
        return [["".join(left), 0]], [["".join(right), 0]]
    matcher = SequenceMatcher(None, [word.strip() for word in left], [word.strip() for word in right], autojunk=False)
    parts: tuple[list[Part], list[Part]] = ([], [])
    for kind, left_start, left_end, right_start, right_end in matcher.get_opcodes():
        for target, words in ((parts[0], left[left_start:left_end]), (parts[1], right[right_start:right_end])):
            if words:
                target.append(["".join(words), int(kind != "equal")])
    return parts


def _words(text: str) -> list[str]:
    """Words with the white space before them; white space at the end stays with the last one."""
    words = re.findall(r"\s*\S+", text)
    rest = text[sum(map(len, words)) :]
    return [*words[:-1], words[-1] + rest] if words else [rest] if rest else []


def _clip(text: str) -> str:
    """Printable text of a bounded length, with its line breaks."""
    shown = printable(text[:_MAX_CHARACTERS], newline="\n")
    left = len(text) - _MAX_CHARACTERS
    return f"{shown}\n… and {left:,} more characters" if left > 0 else shown
