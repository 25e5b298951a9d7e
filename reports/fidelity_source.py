"""What a report knows of one fidelity run: its records and frames, and what it lacks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd

from fathom_eval.console import printable
from fathom_eval.errors import UserError
from fathom_eval.reports.absent import adding
from fathom_eval.reports.facts import last_settings
from fathom_eval.reports.fidelity import fidelity_frame, pairs_frame
from fathom_eval.reports.gaps import NOUNS, Cell, Gap, Half, gaps, half_written, planned
from fathom_eval.reports.impossible import impossible_notes
from fathom_eval.reports.loading import Loaded, Records
from fathom_eval.reports.wording import join, setting
from fathom_eval.run import canonical_json

AXES = {"error_dense": "error to dense", "error_exact": "error to exact top-k"}
_NEEDED = ("context", "k", "sample", "method", "options", "method_version", "label", "family", "control", "finish")


@dataclass(frozen=True)
class FidelitySource:
    """One fidelity run as a report sees it."""

    name: str
    run: Records
    records: Sequence[Mapping[str, Any]]
    notes: Sequence[str]

    @cached_property
    def frame(self) -> pd.DataFrame:
        """One row a context, k and method."""
        return fidelity_frame(self.records)

    @cached_property
    def pairs(self) -> pd.DataFrame:
        """One row a pair of methods and an error."""
        return pairs_frame(self.records)

    @cached_property
    def rows(self) -> list[dict[str, Any]]:
        """The rows of the frame; what is unknown is None."""
        return [{str(name): None if _unknown(value) else value for name, value in row.items()} for row in self.frame.to_dict("records")]

    @property
    def settings(self) -> list[tuple[int, int]]:
        """The (context, k) pairs."""
        return list(dict.fromkeys((int(row["context"]), int(row["k"])) for row in self.rows if row["k"] is not None))

    @property
    def families(self) -> list[str]:
        """The lines of the scans, as figures draw them."""
        return list(dict.fromkeys(row["line"] for row in self.rows if not row["control"]))

    @cached_property
    def present(self) -> dict[Cell, set[int]]:
        """The windows of each context, k and method."""
        found: dict[Cell, set[int]] = {}
        for one in self.records:
            found.setdefault(("", one["context"], one["k"], printable(one["label"])), set()).add(one["sample"])
        return found

    @cached_property
    def missing(self) -> list[Gap]:
        """What the run lacks of what its last start asked for, and where a method has fewer windows than others."""
        beside: dict[int, set[int]] = {}
        for (_, context, _, _), windows in self.present.items():
            beside.setdefault(context, set()).update(windows)
        expected = {key: beside[key[1]] for key in self.present}
        for key, windows in planned(last_settings(self.run.manifest), "fidelity", ()).items():
            expected[key] = expected.get(key, set()) | windows
        return gaps(expected, self.present, NOUNS["fidelity"])

    @cached_property
    def halves(self) -> list[Half]:
        """The windows that are written only in part."""
        return half_written(self.present, NOUNS["fidelity"])

    def absent(self, context: int | None = None, k: int | None = None) -> str:
        """Where exact top-k's own error is missing, and the command that adds it; empty where it is there."""
        wanted = [at for at in self.settings if context is None or at == (context, k)]
        there = {(row["context"], row["k"]) for row in self.rows if row["name"] == "exact" and row["options"] == "{}"}
        where = [setting(*at) for at in wanted if at not in there]
        if not where:
            return ""
        lead = f"Exact top-k, the baseline of every scan, is missing at {join(where)}: how much of an error comes of attending to k tokens"
        return f"{lead} at all is not known there. {adding('fidelity', self.name, 'exact')}"

    def values(self, context: int, k: int | None, method: str, metric: str) -> dict[int, float]:
        """A metric by window."""
        return self._values.get((context, k, method, metric), {})

    @cached_property
    def _values(self) -> dict[tuple[int, int | None, str, str], dict[int, float]]:
        found: dict[tuple[int, int | None, str, str], dict[int, float]] = {}
        for one in self.records:
            if one["finish"] == "complete":
                for metric in (*AXES, "excess"):
                    if one.get(metric) is not None:
                        found.setdefault((one["context"], one["k"], printable(one["label"]), metric), {})[one["sample"]] = float(
                            one[metric]
                        )
        return found


def fidelity_source(loaded: Loaded) -> FidelitySource:
    """The run as a report sees it, the newest version of every method. Raises UserError where not one record is of this kind."""
    records, foreign = [], 0
    for record in loaded.records.iter_records():
        if all(name in record for name in _NEEDED) and (record["finish"] != "complete" or record.get("error_dense") is not None):
            records.append(record)
        else:
            foreign += 1
    if not records:
        raise UserError(f"{loaded.path} holds no record of kind 'fidelity'")
    newest: dict[tuple[str, str], int] = {}
    for record in records:
        key = (record["method"], canonical_json(record["options"]))
        newest[key] = max(newest.get(key, 0), record["method_version"])
    kept = [record for record in records if record["method_version"] == newest[record["method"], canonical_json(record["options"])]]
    notes = [f"{len(records) - len(kept)} records of older versions of methods are left out"] if len(kept) < len(records) else []
    notes += [f"{foreign} records are not of this kind and are left out"] if foreign else []
    notes += impossible_notes(last_settings(loaded.records.manifest))
    return FidelitySource(loaded.name, loaded.records, kept, notes)


def _unknown(value: object) -> bool:
    return value is None or (isinstance(value, float) and value != value)
