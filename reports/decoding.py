"""How a run's methods were decoded: by the step of the host-resident runtime where the run asked for it, or in lock-step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from fathom_eval.console import printable
from fathom_eval.reports.facts import fact
from fathom_eval.reports.wording import Remark, count, join

COLUMN = "decoded_by"
"""What records of such a run hold, and the column of CSV files: ``runtime`` or ``lock-step``."""
FACTS = frozenset({"runtime", "runtime_scores"})
"""What the identity of such a run says of it."""
_RUNTIME = "runtime"
_INDEX = {"host": "index in host memory", "hbm": "index in HBM"}


class _Labelled(Protocol):
    @property
    def label(self) -> str: ...


class Decoded(Protocol):
    """What is needed of a record."""

    @property
    def method(self) -> _Labelled: ...
    @property
    def k(self) -> int | None: ...
    @property
    def decoded_by(self) -> str: ...


def decoder_of(record: Mapping[str, Any]) -> str:
    """What decoded a record's method; empty in a run without the runtime."""
    return printable(record.get(COLUMN) or "")


def decoders(members: Iterable[Decoded]) -> str:
    """What decoded several records, each once."""
    return "; ".join(sorted({one.decoded_by for one in members if one.decoded_by}))


def decoding_words(manifest: Mapping[str, Any], records: Sequence[Decoded]) -> str:
    """The sentence on a run's settings; empty in a run without the runtime."""
    asked = fact(manifest, _RUNTIME)
    found = _labels(records)
    if not asked and not found:
        return ""
    ours, others = found.get(_RUNTIME, []), [label for by, labels in found.items() if by != _RUNTIME for label in labels]
    lead = f"Decoded with --runtime {asked}" if asked else "Decoded with the host-resident runtime"
    if not found:
        return f"{lead}; which methods it decoded is not recorded."
    return f"{lead}: {count(len(ours), 'method')} by the step of the host-resident runtime, {len(others)} in lock-step."


def decoding_remarks(manifest: Mapping[str, Any], records: Sequence[Decoded]) -> list[Remark]:
    """Which methods the runtime decoded and which lock-step decoding did; nothing in a run without the runtime."""
    found = _labels(records)
    if not found:
        return []
    index, scores = fact(manifest, _RUNTIME), fact(manifest, "runtime_scores")
    how = ", ".join(part for part in (_INDEX.get(index, ""), f"{scores} scores" if scores else "") if part)
    ours = join(found.get(_RUNTIME, [])) or "none"
    text = f"Decoded by the step of the host-resident runtime{f' ({how})' if how else ''}: {ours}."
    for by, labels in found.items():
        if by != _RUNTIME:
            text += f" Decoded in {by}: {join(labels)}."
    if _RUNTIME in found:
        text += " Seconds of what the runtime decoded contain pinning, packing and capture."
    return [Remark(text)]


def decoding_difference(names: Sequence[str], runs: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
    """The sentence on runs whose identities differ in how methods were decoded alone; empty where they differ in more or in less.

    Args:
        names: Facts of the identities that differ.
        runs: Name and manifest of each.
    """
    if not names or not set(names) <= FACTS:
        return ""
    return f"They differ only in how methods were decoded: {join([_way(name, manifest) for name, manifest in runs])}."


def _way(name: str, manifest: Mapping[str, Any]) -> str:
    asked, scores = fact(manifest, _RUNTIME), fact(manifest, "runtime_scores")
    if not asked:
        return f"{name} in lock-step alone"
    return f"{name} with --runtime {asked}{f', {scores} scores,' if scores else ''} where the runtime has the method"


def _labels(records: Sequence[Decoded]) -> dict[str, list[str]]:
    """Labels by what decoded them, with the k where another k of the same method was decoded otherwise."""
    ways: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))
    for one in records:
        if one.decoded_by:
            ways[one.method.label][one.decoded_by].update(() if one.k is None else (one.k,))
    found: dict[str, list[str]] = defaultdict(list)
    for label, by in ways.items():
        for name, ks in by.items():
            at = f" at k = {', '.join(f'{k:,}' for k in sorted(ks))}" if len(by) > 1 and ks else ""
            found[name].append(f"{label}{at}")
    return dict(found)
