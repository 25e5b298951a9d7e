"""Step times at equal attention error: errors of a fidelity run beside times of a step run.

The models of the two runs differ as a rule: errors come from a model that was trained, times from random weights of a larger shape. A
configuration of the one stands for one of the other where method, rerank and what a head attends to are the same and the bits a token and
channel agree. Channels of the model stand for those of a basis too: synthetic keys are timed in the former alone, and what turns a query
into a basis is not in the time.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import fmean
from typing import Any

from fathom_eval.console import csv_safe
from fathom_eval.errors import UserError, did_you_mean
from fathom_eval.run_files import write_atomically

SAME_BITS = 0.06
"""Bits a channel may differ by so much, relative: blocks not yet full and the spread of plans over layers move them by a few per cent."""


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
        ratio: The reference's time over this one's.
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


def equal_error(fidelity: Iterable[Mapping[str, Any]], steps: Iterable[Mapping[str, Any]], reference: str) -> list[EqualError]:
    """Every method, in each basis, at the error of a reference.

    Args:
        fidelity: Records of a fidelity run.
        steps: Records of ``bench step``; those of one session count, each configuration at its fastest, void ones not.
        reference: Label of the fidelity run's configuration whose error is to be reached.

    Raises:
        UserError: The reference has no record, or none of its error or time.
    """
    cells = _cells(fidelity)
    known = sorted({one.label for cell in cells.values() for one in cell})
    if reference not in known:
        raise UserError(f"the fidelity run has no '{reference}'; {did_you_mean(reference, known)}")
    timed = _timed(steps)
    found = []
    for (context, k), cell in sorted(cells.items()):
        target = next((one for one in cell if one.label == reference), None)
        if target is None:
            continue
        for members in timed.values():
            base = _step_of(target, members)
            if base is None:
                continue
            for line in dict.fromkeys((one.method, one.basis) for one in cell):
                own = [one for one in cell if (one.method, one.basis) == line and one.error <= target.error]
                reaching = [(one, _step_of(one, members)) for one in own]
                pairs = [(one, step) for one, step in reaching if step is not None]
                if pairs:
                    best, step = min(pairs, key=lambda pair: _time(pair[1]))
                    found.append(_row(context, k, best, step, target, base))
    if not found:
        raise UserError(f"no step of the run stands for '{reference}': time its method and rerank at the same bits a channel")
    return found


def write_table(path: Path, rows: Sequence[EqualError]) -> None:
    """The rows as CSV, numbers unrounded."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(EqualError)], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: csv_safe(value) if isinstance(value, str) else value for name, value in asdict(row).items()} for row in rows)
    write_atomically(path, text.getvalue().encode())


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


def _step_of(configuration: _Configuration, steps: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The fastest step that stands for a configuration."""
    density = configuration.bits / configuration.head_dim
    same = [
        step
        for step in steps
        if (step["method"], float(step["rerank"]), _attended(step.get("options", {})))
        == (configuration.method, configuration.rerank, configuration.attend)
        and math.isclose(step["scan_bits"] / step["head_dim"], density, rel_tol=SAME_BITS)
    ]
    return min(same, key=_time, default=None)


def _time(step: Mapping[str, Any]) -> float:
    return float(step["wall_ms"] if step["gpu_ms"] is None else step["gpu_ms"])


def _row(context: int, k: int, one: _Configuration, step: Mapping[str, Any], target: _Configuration, base: Mapping[str, Any]) -> EqualError:
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
    )
