"""The numbers of a report on agent sessions, computed from records alone."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from statistics import fmean, median
from typing import Any

from fathom_eval.console import printable
from fathom_eval.reports.cells import Comparison
from fathom_eval.reports.decoding import decoder_of, decoders
from fathom_eval.reports.protocols import line_of
from fathom_eval.run import canonical_json
from fathom_eval.stats import mean_and_standard_error, paired_difference


class Role(Enum):
    """What a row is."""

    DENSE = "dense"
    EXACT = "exact top-k"
    NOISE = "noise floor"
    SCAN = "scan"


@dataclass(frozen=True, slots=True)
class Method:
    """One configuration of one method, as the records name it."""

    name: str
    options: str
    label: str
    family: str
    role: Role


@dataclass(frozen=True, slots=True)
class Step:
    """What a report needs of one record.

    Attributes:
        agreement: With exact top-k at the same k; of dense attention's repetition with dense attention. None of a failed step, and of
            dense attention, which has no k.
        dense_agreement: In the record of exact top-k: dense attention's agreement with it.
    """

    method: Method
    k: int | None
    context: int
    session: int
    agreement: float | None
    dense_agreement: float | None
    agreement_dense: float | None
    agreement_recorded: float | None
    exact_match: bool | None
    first_divergence: int | None
    tool_call: str | None
    failed: bool
    bits: float | None
    rows: float | None
    rescored: float | None
    tokens: tuple[int, ...]
    session_id: str = ""
    decoded_by: str = ""


@dataclass(frozen=True, slots=True)
class SessionCell:
    """One method at one k, over the sessions. Dense attention has one at every k.

    Attributes:
        sessions: With an agreement.
        agreement, standard_error: Mean agreement with exact top-k at this k.
        exact_match: Share of sessions in which every token is that of exact top-k.
        first_divergence: Median position of the first token that differs, over the sessions in which one does.
        agreement_dense, agreement_recorded: Mean agreement with dense attention and with the recorded step.
        valid_calls: Share of steps that call a known tool.
        against_baseline: Agreement minus that of the baseline, paired by session.
    """

    k: int | None
    method: Method
    sessions: int
    failures: int
    expected: int
    agreement: float | None
    standard_error: float | None
    exact_match: float | None
    first_divergence: float | None
    agreement_dense: float | None
    agreement_recorded: float | None
    valid_calls: float | None
    bits: float | None
    rows: float | None
    rescored: float | None
    against_baseline: Comparison | None
    decoded_by: str = ""

    @property
    def failed(self) -> bool:
        """Whether all of its steps failed."""
        return self.failures > 0 and self.agreement is None and self.rows is None


@dataclass(frozen=True, slots=True)
class Pair:
    """Two methods at one k: agreement of the first minus agreement of the second, paired by session."""

    k: int | None
    method: Method
    other: Method
    comparison: Comparison


def read_steps(records: Iterable[Mapping[str, Any]]) -> tuple[list[Step], list[str]]:
    """The steps of records, and remarks on what was left out: of several versions of a method's code only the newest counts."""
    versions: dict[tuple[str, str], int] = {}
    dated = []
    foreign = []
    for record in records:
        try:
            step = _step(record)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            foreign.append(f"{type(error).__name__}: {printable(error)}")
            continue
        key, version = (step.method.name, step.method.options), int(record.get("method_version") or 0)
        versions[key] = max(version, versions.get(key, version))
        dated.append((key, version, step))
    kept = [step for key, version, step in dated if version == versions[key]]
    old = len(dated) - len(kept)
    notes = [f"{old} records of older versions of methods are left out"] if old else []
    if foreign:
        notes.append(f"{len(foreign)} records are not of this kind and are left out ({foreign[0]})")
    return kept, notes


def compute_session_cells(steps: Sequence[Step], baseline: str | None) -> tuple[list[SessionCell], list[Pair]]:
    """One cell a k and method, and every pair of scans at each k.

    Args:
        baseline: Label of the method that the others are compared with; without it nothing is compared.
    """
    cells: list[SessionCell] = []
    pairs: list[Pair] = []
    k_values: list[int | None] = [*sorted({step.k for step in steps if step.k is not None})]
    for k in k_values or [None]:
        groups: dict[Method, list[Step]] = defaultdict(list)
        for step in _at(steps, k):
            groups[step.method].append(step)
        expected = len({step.session for step in steps})
        scores = {method: _scores(members) for method, members in groups.items()}
        reference = next((own for method, own in scores.items() if method.label == baseline), None)
        found = []
        for method, members in groups.items():
            against = None
            if method.role in (Role.DENSE, Role.SCAN) and method.label != baseline and reference is not None:
                against = _compare(scores[method], reference)
            found.append(_cell(k, method, members, scores[method], expected, against))
        cells += sorted(found, key=sort_key)
        scans = [cell.method for cell in sorted(found, key=sort_key) if cell.method.role in (Role.DENSE, Role.SCAN)]
        for position, method in enumerate(scans):
            for other in scans[position + 1 :]:
                compared = _compare(scores[method], scores[other])
                if compared is not None:
                    pairs.append(Pair(k, method, other, compared))
    return cells, pairs


def sort_key(cell: SessionCell) -> tuple[int, float, str]:
    """Order of rows at one k: controls first, then by bits."""
    order = [Role.DENSE, Role.EXACT, Role.NOISE, Role.SCAN]
    return order.index(cell.method.role), math.inf if cell.bits is None else cell.bits, cell.method.label


def _at(steps: Sequence[Step], k: int | None) -> list[Step]:
    """The steps of one k. Dense attention's are set against exact top-k there."""
    exact = {step.session: step for step in steps if step.method.role is Role.EXACT and step.k == k}
    found = []
    for step in steps:
        if step.method.role is Role.DENSE and step.k is None:
            found.append(_dense_at(step, exact.get(step.session)))
        elif step.k in (k, None):
            found.append(step)
    return found


def _dense_at(dense: Step, exact: Step | None) -> Step:
    differs = None if exact is None or exact.dense_agreement is None else exact.tokens != dense.tokens
    pairs = enumerate(zip(exact.tokens, dense.tokens, strict=False)) if exact is not None and differs else ()
    shorter = min(len(exact.tokens), len(dense.tokens)) if exact is not None else None
    return Step(
        method=dense.method,
        k=dense.k,
        context=dense.context,
        session=dense.session,
        agreement=None if exact is None else exact.dense_agreement,
        dense_agreement=None,
        agreement_dense=dense.agreement_dense,
        agreement_recorded=dense.agreement_recorded,
        exact_match=None if differs is None else not differs,
        first_divergence=next((position for position, (a, b) in pairs if a != b), shorter) if differs else None,
        tool_call=dense.tool_call,
        failed=dense.failed,
        bits=None,
        rows=dense.rows,
        rescored=dense.rescored,
        tokens=dense.tokens,
        session_id=dense.session_id,
        decoded_by=dense.decoded_by,
    )


def _cell(
    k: int | None, method: Method, members: Sequence[Step], own: Mapping[int, float], expected: int, against: Comparison | None
) -> SessionCell:
    complete = [step for step in members if not step.failed]
    estimate = mean_and_standard_error([own[session] for session in sorted(own)]) if own else None
    calls = [step.tool_call == "valid" for step in members if step.tool_call is not None]
    matches = [step.exact_match for step in members if step.exact_match is not None]
    divergences = [step.first_divergence for step in members if step.first_divergence is not None]
    return SessionCell(
        k=k,
        method=method,
        sessions=len(own),
        failures=len(members) - len(complete),
        expected=expected,
        agreement=None if estimate is None else estimate.mean,
        standard_error=None if estimate is None or math.isnan(estimate.standard_error) else estimate.standard_error,
        exact_match=fmean(matches) if matches else None,
        first_divergence=median(divergences) if divergences else None,
        agreement_dense=_mean(members, lambda step: step.agreement_dense),
        agreement_recorded=_mean(members, lambda step: step.agreement_recorded),
        valid_calls=fmean(calls) if calls else None,
        bits=_mean(complete, lambda step: step.bits),
        rows=_mean(complete, lambda step: step.rows),
        rescored=_mean(complete, lambda step: step.rescored),
        against_baseline=against,
        decoded_by=decoders(members),
    )


def _compare(own: Mapping[int, float], other: Mapping[int, float]) -> Comparison | None:
    shared = sorted(session for session in own if session in other)
    if not shared:
        return None
    found = paired_difference([own[session] for session in shared], [other[session] for session in shared], seed=0)
    return Comparison(len(shared), found.mean, found.low, found.high, found.wins, found.ties, found.losses)


def _scores(members: Iterable[Step]) -> dict[int, float]:
    return {step.session: step.agreement for step in members if step.agreement is not None}


def _mean(members: Iterable[Step], value: Callable[[Step], float | None]) -> float | None:
    values = [found for step in members if (found := value(step)) is not None]
    return fmean(values) if values else None


def _step(record: Mapping[str, Any]) -> Step:
    options = record["options"]
    label = printable(record.get("label") or record["method"])
    k = record["k"]
    if "batch" in options:
        role = Role.NOISE
    elif k is None:
        role = Role.DENSE
    elif record["method"] == "exact" and not options:
        role = Role.EXACT
    else:
        role = Role.SCAN
    line = printable(line_of({**record, "label": label}))
    return Step(
        method=Method(str(record["method"]), canonical_json(options), label, line, role),
        k=k,
        context=int(record["context"]),
        session=int(record["sample"]),
        agreement=None if role is Role.DENSE else _number(record.get("score")),
        dense_agreement=_number(record.get("dense_agreement_exact")),
        agreement_dense=_number(record.get("agreement_dense")),
        agreement_recorded=_number(record.get("agreement_recorded")),
        exact_match=record.get("exact_match"),
        first_divergence=record.get("first_divergent_token"),
        tool_call=record.get("tool_call"),
        failed=record["finish"] == "error",
        bits=_number(record.get("bits")),
        rows=_number(record.get("rows")),
        rescored=_number(record.get("candidate_rows")),
        tokens=tuple(record["token_ids"]),
        session_id=printable(record.get("session_id") or ""),
        decoded_by=decoder_of(record),
    )


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) else None
