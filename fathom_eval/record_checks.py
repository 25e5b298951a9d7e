"""What makes a line of records unusable, and whether what such a line held has been measured again."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

RecordKey = tuple[Any, ...]
"""Kind, task, context, sample, k, method, options (canonical JSON) and method_version of a record."""
Sample = tuple[Any, ...]
"""The first four of a key: what is measured together and written as one unit."""

_KINDS = frozenset({"ruler", "sessions", "fidelity"})
_LARGEST, _LARGEST_NUMBER = 2**53, sys.float_info.max
_NUMBERS = (
    *("score", "agreement_exact", "agreement_dense", "agreement_recorded", "dense_agreement_exact", "first_divergent_token"),
    *("error_dense", "error_exact", "excess", "squared_error_dense", "squared_error_exact", "squared_excess", "recall", "near_ties"),
    *("bits", "declared_bits", "active_channels", "rows", "candidate_rows", "scan_bytes", "head_dim"),
    *("new_tokens", "prompt_tokens", "fired", "steps", "seconds", "prefill_seconds"),
)
_TEXTS = ("task", "method", "finish", "error", "generation", "tool_call", "session_id", "repo")
_LISTS: Mapping[str, type | tuple[type, ...]] = {"hits": (bool, int), "gold": str, "depths": (int, float), "token_ids": int}
_SAMPLE = re.compile(rb'"kind": "([^"\\]+)", "task": "([^"\\]+)", "context": (\d{1,15}), "sample": (\d{1,15}), ')
_MOST_DAMAGES = 100


def check_record(record: Mapping[str, Any]) -> None:
    """Raise ValueError where a field that tables are made of is of a type, or a value, that no run writes; what is absent is not missed."""
    if record.get("kind") not in _KINDS:
        return
    check_key(record)
    for names, kinds, what in ((_NUMBERS, (int, float), "a number"), (_TEXTS, (str,), "text"), (tuple(_LISTS), (list,), "a list")):
        for name in names:
            value = record.get(name)
            if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
                raise ValueError(f"the field '{name}' must be {what}, not {_shown(value)}")
            if isinstance(value, (int, float)) and not -_LARGEST_NUMBER <= value <= _LARGEST_NUMBER:
                raise ValueError(f"the field '{name}' must be finite")
            if isinstance(value, list) and not all(isinstance(one, _LISTS[name]) for one in value):
                raise ValueError(f"the field '{name}' lists what it should not")


def check_key(record: Mapping[str, Any]) -> None:
    """Raise ValueError where a field of a record's key is of a type, or a value, that no run writes."""
    for name, least in (("context", 1), ("sample", 0), ("k", 1), ("method_version", 0)):
        value = record.get(name)
        if not (value is None and name == "k") and not (_is_whole(value) and least <= value < _LARGEST):
            raise ValueError(f"the field '{name}' must be a whole number of at least {least}, not {_shown(value)}")
    if not isinstance(record.get("options"), dict):
        raise ValueError(f"the field 'options' must be an object, not {_shown(record.get('options'))}")


def begins_record(line: bytes) -> bool:
    """Whether a line without an end may be a record that is still being written, or whose writing was cut off."""
    return line.isascii() and line.decode("ascii").isprintable() and (b'{"' + line[2:]).startswith(line)


@dataclass
class _Damage:
    """A damaged line: the key or at least the sample of its record as far as they are known, and where its unit ends in the file."""

    problem: str
    key: RecordKey | None
    sample: Sample | None
    end: int


class Damages:
    """The damaged lines of a file, told in its order: :meth:`add` each of them, and :meth:`pass_record` every whole record."""

    def __init__(self) -> None:
        self._found: list[_Damage] = []
        self._of_unit: list[_Damage] = []
        self._unit: Sample | None = None

    def add(self, problem: str, line: bytes, end: int, key: RecordKey | None) -> None:
        """Note a damaged line that ends at ``end``.

        Args:
            problem: What a reader is told of it.
            key: Of its record, if the line still says it.
        """
        if len(self._found) < _MOST_DAMAGES:
            damage = _Damage(problem, key, _sample_in(line) or self._unit, end)
            self._found.append(damage)
            self._of_unit.append(damage)

    def pass_record(self, key: RecordKey, number: int, size: int, start: int, end: int) -> None:
        """A whole record, the ``number``-th of ``size`` in its unit, from ``start`` to ``end``: it tells of damaged lines beside it."""
        for damage in self._of_unit:
            damage.end = end if number > 1 else start
            damage.sample = damage.sample or (key[:4] if number > 1 else None)
        self._of_unit = self._of_unit if 1 < number < size else []
        self._unit = key[:4] if number < size else None

    def standing(self, offsets: Mapping[RecordKey, int]) -> list[str]:
        """What a reader is told of the lines whose records are not known to be there again.

        A record that names its key is there if the key is. Of another, its sample must have been measured again: as many records of it
        follow as were damaged, and no method lacks the sample that others beside it have.

        Args:
            offsets: Where the newest whole record of each key begins.
        """
        unnamed: dict[Sample | None, list[_Damage]] = {}
        for damage in self._found:
            if damage.key is None:
                unnamed.setdefault(damage.sample, []).append(damage)
        again = {sample: _measured_again(sample, members, offsets) for sample, members in unnamed.items()}
        return [one.problem for one in self._found if (one.key not in offsets if one.key is not None else not again[one.sample])]


def _measured_again(sample: Sample | None, damages: list[_Damage], offsets: Mapping[RecordKey, int]) -> bool:
    end = max(damage.end for damage in damages)
    later = sum(offset >= end and sample in (None, key[:4]) for key, offset in offsets.items())
    if later < len(damages):
        return False
    newest: dict[tuple[Any, ...], int] = {}
    for *_, method, options, version in offsets:
        newest[method, options] = max(_version(version), newest.get((method, options), 0))
    # Samples of every method and k, by what has the same samples: a task and context, and all tasks where nobody knows which it was.
    cells: dict[tuple[Any, ...], dict[tuple[Any, ...], set[Any]]] = {}
    for kind, task, context, number, k, method, options, version in offsets:
        if _version(version) == newest[method, options]:
            beside = (kind, context) if sample is None else (kind, task, context)
            cells.setdefault(beside, {}).setdefault((task, k, method, options), set()).add(number)
    if sample is not None:
        return all(sample[3] in numbers for numbers in cells.get(sample[:3], {}).values())
    return all(numbers == set(range(max(map(len, own.values())))) for own in cells.values() for numbers in own.values())


def _sample_in(line: bytes) -> Sample | None:
    found = _SAMPLE.search(line)
    return None if found is None else (found[1].decode(errors="replace"), found[2].decode(errors="replace"), int(found[3]), int(found[4]))


def _version(value: object) -> int:
    return value if isinstance(value, int) else 0


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _shown(value: object) -> str:
    if value is None:
        return "null"
    return f"{value}" if _is_whole(value) and -_LARGEST < value < _LARGEST else type(value).__name__
