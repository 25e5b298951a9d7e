"""What a comparison needs and a run does not hold, in sentences that name the command which adds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fathom_eval.reports.wording import join, setting

Setting = tuple[int, int | None]


def adding(command: str, run: str, methods: str = "") -> str:
    """The sentence that names the command. What is there is kept, so only the missing methods are computed."""
    more = f" --methods {methods}" if methods else ""
    return f"Add it with the run's own options and 'fathom-eval {command} …{more} --output {run}'; what is there is kept."


def absent_words(run: str, exact: Mapping[Setting, Sequence[str]], dense: Mapping[int, Sequence[str]]) -> str:
    """What a run of tasks lacks of its controls; empty where it lacks nothing.

    Args:
        run: Its name.
        exact: Tasks without exact top-k by context and k, none named where it is missing for all of them.
        dense: Tasks without dense attention by context, likewise.
    """
    parts = []
    if exact:
        where = join([_where(setting(*at), tasks) for at, tasks in exact.items()])
        parts.append(f"Exact top-k, the baseline of every scan, is missing at {where}: no scan is compared with it there.")
    if dense:
        where = join([_where(setting(context, None), tasks) for context, tasks in dense.items()])
        parts.append(
            f"Dense attention is missing at {where}: whether a task can tell scans apart, and what selecting k tokens costs, is not known."
        )
    if not parts:
        return ""
    methods = ",".join(name for name, found in (("dense", dense), ("exact", exact)) if found)
    return " ".join([*parts, adding("ruler", run, methods)])


def _where(place: str, tasks: Sequence[str]) -> str:
    return f"{place} on {join(tasks)}" if tasks else place
