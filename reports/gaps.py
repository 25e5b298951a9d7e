"""What an interrupted run lacks: what its last start asked for, less what its records hold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

from fathom_eval.reports.wording import setting

Cell = tuple[str, int, int | None, str]
"""Task, context, k and label of a method."""


def planned(settings: Mapping[str, Any], kind: str, contexts_present: Iterable[int]) -> dict[Cell, int]:
    """How many samples of each cell the settings of a start ask for; empty where they do not say.

    Args:
        kind: ``ruler``, ``sessions`` or ``fidelity``.
        contexts_present: Contexts of the records, for a kind whose settings name none.
    """
    amount = settings.get({"ruler": "limit", "sessions": "sessions", "fidelity": "windows"}[kind])
    methods, k_values = settings.get("methods"), settings.get("k")
    tasks = settings.get("tasks") if kind == "ruler" else ["session" if kind == "sessions" else "fidelity"]
    contexts = settings.get("context") if kind != "sessions" else sorted(set(contexts_present))
    if not isinstance(amount, int) or not all(isinstance(part, list) for part in (methods, k_values, tasks, contexts)):
        return {}
    return {
        (str(task), int(context), k, str(label)): amount
        for task in tasks or ()
        for context in contexts or ()
        for label in methods or ()
        for k in ([None] if label == "dense" else k_values or ())
        if isinstance(context, int) and (k is None or isinstance(k, int))
    }


def gaps(expected: Mapping[Cell, int], present: Mapping[Cell, int], of: str = "samples") -> list[str]:
    """One line for every cell with fewer samples than expected.

    Where every method of a task, context and k lacks the same, one line says so: that is what an interruption leaves.
    """
    lacking: dict[tuple[str, int, int | None], dict[tuple[int, int], list[str]]] = defaultdict(lambda: defaultdict(list))
    methods: dict[tuple[str, int, int | None], set[str]] = defaultdict(set)
    for cell, amount in expected.items():
        task, context, k, label = cell
        methods[task, context, k].add(label)
        if present.get(cell, 0) < amount:
            lacking[task, context, k][present.get(cell, 0), amount].append(label)
    lines = []
    for where, groups in lacking.items():
        task, context, k = where
        for (own, amount), labels in groups.items():
            everyone = len(methods[where]) > 1 and set(labels) == methods[where]
            lines += [
                f"{label} on {task} at {setting(context, k)}: {own} of {amount} {of}"
                for label in (["every method"] if everyone else labels)
            ]
    return lines
