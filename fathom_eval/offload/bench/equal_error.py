"""Step times at equal attention error: errors of a fidelity run beside times of a step run.

The models of the two runs differ as a rule: errors come from a model that was trained, times from random weights of a larger shape. A
configuration of the one stands for one of the other where k, method, rerank and what a head attends to are the same and the bits a token
and channel agree; so must budgets and numbers of channels that both labels name, as shares of head_dim. Where no step of the same basis was
timed, one of the model's own channels stands for it; what turns a query into a basis is not in that time then.
"""

from __future__ import annotations

import contextlib
import csv
import io
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import Any

from fathom_eval.console import csv_safe, printable
from fathom_eval.errors import UserError, did_you_mean, nearest
from fathom_eval.reports.timing_steps import in_turn
from fathom_eval.run_files import file_errors, write_atomically

SAME_BITS = 0.06
"""Bits a channel may differ by so much, relative: blocks not yet full and the spread of plans over layers move them by a few per cent.

Budgets may lie as close to each other, which is why those that are named are compared first.
"""

_TABLE = "equal-error-"


@dataclass(frozen=True)
class EqualError:
    """The cheapest timed configuration of one method and basis whose error is no larger than the reference's.

    Attributes:
        error_context, error_k: Of the fidelity run's cell.
        windows: Of the fidelity run, that the error is a mean over.
        basis: Of the keys in the fidelity run; empty for a method that has none.
        error, reference_error: ``error_dense``, means over windows.
        label, bits_a_channel: Of the configuration in the fidelity run; bits a token over head_dim.
        error_head_dim: Of the fidelity run's model.
        step_context, step_index, step_label, step_ms: Of the step that stands for it.
        step_model, step_bits_a_channel: What was timed.
        reference_ms: Of the reference's fastest step; where rounds timed both, of its fastest in these, and ``step_ms`` is of that round.
        ratio: The reference's time over this one's.
        step_basis: Of the scan that was timed, ``raw`` or ``klt``.
        same_round: Whether both steps took turns in one process.
        step_wall_ms, reference_wall_ms: Wall time of the same two steps.
        windows_shared, windows_below: Windows that both configurations have, and those of them in which this one's error is the smaller.
        errors_run, errors_model, errors_text: Where the errors come from, in words; empty where nobody said.
    """

    error_context: int
    error_k: int
    windows: int
    method: str
    basis: str
    label: str
    error: float
    reference: str
    reference_error: float
    bits_a_channel: float
    error_head_dim: int
    step_context: int
    step_k: int
    step_index: str
    step_label: str
    step_model: str
    step_bits_a_channel: float
    step_ms: float
    reference_ms: float
    ratio: float
    step_basis: str
    same_round: bool
    step_wall_ms: float
    reference_wall_ms: float
    windows_shared: int
    windows_below: int
    errors_run: str = ""
    errors_model: str = ""
    errors_text: str = ""


@dataclass(frozen=True)
class _Configuration:
    method: str
    basis: str
    rerank: float
    attend: str
    label: str
    windows: int
    bits: float
    error: float
    head_dim: int
    errors: Mapping[tuple[Any, Any], float]


def equal_error(
    fidelity: Iterable[Mapping[str, Any]],
    steps: Iterable[Mapping[str, Any]],
    references: str | Sequence[str],
    say: Callable[[str], None] = lambda line: None,
) -> list[EqualError]:
    """Every method, in each basis, at the error of each reference.

    Args:
        fidelity: Records of a fidelity run.
        steps: Records of ``bench step``; those of one session count, void ones not. Of the rounds that timed a configuration and the
            reference that one counts in which the reference was fastest, and in it the fastest of either; without such a round the fastest
            of either anywhere.
        references: The fidelity run's configuration whose error is to be reached, or several, as :func:`find_label` takes them.
        say: Told of errors that are left out, since no step of their k was timed.

    Raises:
        UserError: A reference has no record, or none of its error or time.
    """
    cells = _cells(fidelity)
    known = {one.label for cell in cells.values() for one in cell}
    asked = [references] if isinstance(references, str) else references
    wanted = list(dict.fromkeys(find_label(reference, known) for reference in asked))
    timed = _timed(steps)
    other = _other_k({k for _, k in cells}, {k for _, k, _, _ in timed})
    found = []
    for reference in wanted:
        rows = [
            row
            for (context, k), cell in sorted(cells.items())
            for target in cell
            if target.label == reference
            for (_, step_k, _, _), members in timed.items()
            if step_k == k  # an error at another k is that of another step
            for row in _rows(context, k, cell, target, members)
        ]
        if not rows:
            missing = "time its method and rerank at the same k and bits a channel"
            raise UserError(f"no step of the run stands for '{reference}': {missing}{other and f' ({other})'}")
        found += rows
    if other:
        say(f"left out: {other}")
    return found


def labels_of(fidelity: Iterable[Mapping[str, Any]]) -> set[str]:
    """Labels of the configurations of a fidelity run that can be references."""
    return {one.label for cell in _cells(fidelity).values() for one in cell}


def find_label(text: str, known: Collection[str]) -> str:
    """The known label that ``sparq r=D/4`` is, or that ``sparq:r=D/4`` has, as options of methods are given.

    Raises:
        UserError: There is none.
    """
    from fathom_eval.methods import parse_method  # imports torch

    if text in known:
        return text
    spelt = text
    with contextlib.suppress(UserError):
        spelt = parse_method(text).label
    if spelt in known:
        return spelt
    name = re.split("[: ]", spelt)[0]
    near = nearest(name, {label.split()[0] for label in known})
    own = [label for label in known if label.split()[0] == near]
    hint = did_you_mean(spelt, own or known) if near in (None, name) else f"did you mean one of {', '.join(sorted(own))}?"
    raise UserError(f"the fidelity run has no '{text}'; {hint}")


def lost_references(path: Path, rows: Sequence[EqualError]) -> list[str]:
    """References of the table at ``path`` that the rows lack: what is gone once they replace it. Raises as :func:`read_table`."""
    return sorted({row.reference for row in read_table(path)} - {row.reference for row in rows})


def write_table(path: Path, rows: Sequence[EqualError]) -> None:
    """The rows as CSV, numbers unrounded. Raises UserError where the file cannot be written."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(EqualError)], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_safe(value) if isinstance(value, str) else value for name, value in asdict(row).items()} for row in rows)
    with file_errors(path):
        write_atomically(path, text.getvalue().encode())


def table_name(run: str) -> str:
    """The file of a table beside the steps, named after the run of the errors."""
    return f"{_TABLE}{re.sub(r'[^A-Za-z0-9._-]+', '-', run).strip('-.')[:100] or 'run'}.csv"


def tables_of(folder: Path) -> list[Path]:
    """The tables beside the steps of a run."""
    return sorted(path for path in folder.glob(f"{_TABLE}*.csv") if path.is_file())


def read_table(path: Path) -> list[EqualError]:
    """The rows that :func:`write_table` wrote. Raises UserError where the file cannot be read, or is not what this version writes."""
    again = "'fathom-eval bench equal-error' writes it anew"
    try:
        with path.open(encoding="utf-8", newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}; {again}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        if missing := [field.name for field in fields(EqualError) if line.get(field.name) is None]:
            raise UserError(f"{path} lacks {', '.join(missing)}, as of an earlier version; {again}")
        try:
            row = EqualError(**{field.name: _READ[str(field.type)](line[field.name]) for field in fields(EqualError)})
        except (KeyError, ValueError) as error:
            raise UserError(f"{path}, row {number}: {error} is no value of its column; {again}") from None
        rows.append(row)
    return rows


def _number(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ValueError(repr(text))
    return found


_TRUTH = {"True": True, "False": False}
_READ: dict[str, Callable[[str], Any]] = {"int": int, "float": _number, "bool": _TRUTH.__getitem__, "str": printable}


def _other_k(of_errors: set[int], of_steps: set[int]) -> str:
    """Which k only the errors have, in words; empty where there is a step of each."""
    alone = ", ".join(map(str, sorted(of_errors - of_steps)))
    return alone and f"errors at k = {alone}; steps were timed at k = {', '.join(map(str, sorted(of_steps))) or 'none'}"


def _cells(records: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int], list[_Configuration]]:
    gathered: dict[tuple[int, int, str], list[Mapping[str, Any]]] = {}
    for record in records:
        if record.get("kind") == "fidelity" and record["finish"] == "complete" and record["k"] is not None and record.get("bits"):
            gathered.setdefault((record["context"], record["k"], record["label"]), []).append(record)
    cells: dict[tuple[int, int], list[_Configuration]] = {}
    for (context, k, label), members in gathered.items():
        first = members[0]
        options = first["options"]
        bits, error = (fmean(member[name] for member in members) for name in ("bits", "error_dense"))
        errors = {(member.get("task"), member.get("sample")): member["error_dense"] for member in members}
        found = _Configuration(
            method=first["method"],
            basis=str(options.get("basis", "")),
            rerank=float(options.get("rerank", 1)),
            attend=_attended(options),
            label=label,
            windows=len(members),
            bits=bits,
            error=error,
            head_dim=first["head_dim"],
            errors=errors,
        )
        cells.setdefault((context, k), []).append(found)
    return cells


def _timed(records: Iterable[Mapping[str, Any]]) -> dict[tuple[int, int, str, str], list[Mapping[str, Any]]]:
    """Steps of one session by context, k, place of the index and model."""
    found: dict[tuple[int, int, str, str], list[Mapping[str, Any]]] = {}
    for record in records:
        if record.get("kind") == "step" and (record["batch"], record["sessions"]) == (1, 1) and not record["void"]:
            found.setdefault((record["context"], record["k"], record["index"], record["model"]), []).append(record)
    return found


def _attended(options: Mapping[str, Any]) -> str:
    """What a head attends to: its own winners where nothing else is said."""
    return str(options.get("attend", "own"))


def _steps_of(configuration: _Configuration, steps: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The steps that stand for a configuration, all of them of one basis."""
    density = configuration.bits / configuration.head_dim
    named = _named(configuration.method, configuration.label, configuration.head_dim)
    same = [
        step
        for step in steps
        if (step["method"], float(step["rerank"]), _attended(step.get("options", {})))
        == (configuration.method, configuration.rerank, configuration.attend)
        and all(named.get(key, share) == share for key, share in _named(step["method"], step["label"], step["head_dim"]).items())
        and math.isclose(step["scan_bits"] / step["head_dim"], density, rel_tol=SAME_BITS)
    ]
    # Where a record does not tell a basis from raw channels (``auto``), the step that does more work is the careful choice.
    turned = configuration.basis == "klt" or (not configuration.basis and configuration.method in ("fathom", "loki"))
    for basis in ("klt", "raw") if turned else ("raw",):
        found = [step for step in same if _basis(step) == basis]
        if found:
            return found
    return []


def _basis(step: Mapping[str, Any]) -> str:
    """Of a step's scan; older records of ``bench step`` do not name it."""
    turned = step["method"] == "loki" or step.get("options", {}).get("basis") == "klt"
    return str(step.get("scan_basis", "klt" if turned else "raw"))


def _named(method: str, label: str, head_dim: int) -> dict[tuple[str, ...], Fraction]:
    """What a label says of its reads, over head_dim: the code bits of Fathom's budget, the channels of ``c`` or ``r``.

    A budget that spends its bits in another way, by measured depths or by the ratio of k to the context, is another quantity.
    """
    from fathom_eval.methods.base import channel_count  # imports torch
    from fathom_eval.methods.fathom import scaled_bits

    options = dict(word.split("=", 1) for word in label.split() if "=" in word)
    found: dict[tuple[str, ...], Fraction] = {}
    # What is no number of this kind, a plug-in's option of the same name, is left to the bits.
    with contextlib.suppress(ValueError):
        if method == "fathom" and "budget" in options:
            spent = (options.get("depths", ""), options.get("by_ratio", ""))
            found["budget", *spent] = Fraction(scaled_bits(int(options["budget"]), head_dim), head_dim)
    for name in {"c", "r"} & options.keys():
        with contextlib.suppress(UserError):
            found[name,] = Fraction(channel_count(options[name], head_dim, name), head_dim)
    return found


def _pair(steps: Sequence[Mapping[str, Any]], bases: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A configuration's step and the reference's, in turn where any are.

    The reference picks the round, by its own fastest step there: that is its best, however many rounds the configuration was timed in, and
    a round in which the configuration happened to be fast, or the reference slow, gains nothing by it.
    """
    shared = [base for base in bases if any(in_turn(step, base) for step in steps)]
    base = min(shared or bases, key=_time)
    return min((step for step in steps if not shared or in_turn(step, base)), key=_time), base


def _time(step: Mapping[str, Any]) -> float:
    return float(step["wall_ms"] if step["gpu_ms"] is None else step["gpu_ms"])


def _rows(
    context: int, k: int, cell: Sequence[_Configuration], target: _Configuration, steps: Sequence[Mapping[str, Any]]
) -> list[EqualError]:
    """The cheapest configuration of every method and basis that reaches the target's error, if both were timed."""
    bases = _steps_of(target, steps)
    if not bases:
        return []
    rows = []
    for line in dict.fromkeys((one.method, one.basis) for one in cell):
        own = [(one, _steps_of(one, steps)) for one in cell if (one.method, one.basis) == line and one.error <= target.error]
        timed = [(one, *_pair(found, bases)) for one, found in own if found]
        if timed:
            best, step, base = min(timed, key=lambda item: _time(item[1]))
            rows.append(_row(context, k, best, step, target, base))
    return rows


def _row(context: int, k: int, one: _Configuration, step: Mapping[str, Any], target: _Configuration, base: Mapping[str, Any]) -> EqualError:
    shared = one.errors.keys() & target.errors.keys()
    return EqualError(
        error_context=context,
        error_k=k,
        windows=one.windows,
        method=one.method,
        basis=one.basis,
        label=one.label,
        error=one.error,
        reference=target.label,
        reference_error=target.error,
        bits_a_channel=one.bits / one.head_dim,
        error_head_dim=one.head_dim,
        step_context=step["context"],
        step_k=step["k"],
        step_index=step["index"],
        step_label=step["label"],
        step_model=step["model"],
        step_bits_a_channel=step["scan_bits"] / step["head_dim"],
        step_ms=_time(step),
        reference_ms=_time(base),
        ratio=_time(base) / _time(step),
        step_basis=_basis(step),
        same_round=in_turn(step, base),
        step_wall_ms=float(step["wall_ms"]),
        reference_wall_ms=float(base["wall_ms"]),
        windows_shared=len(shared),
        windows_below=sum(one.errors[window] < target.errors[window] for window in shared),
    )
