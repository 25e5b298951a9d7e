"""What one choice changes: methods that differ in a single option, and a suite's methods at equal bytes."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from fathom_eval.console import printable
from fathom_eval.errors import UserError
from fathom_eval.reports.canvas import slug
from fathom_eval.reports.cells import MINIMUM_PAIRS
from fathom_eval.reports.document import Column, Entry, Row, Table, difference, entry
from fathom_eval.run import canonical_json
from fathom_eval.stats import paired_difference

_DEFAULT = "default"

Records = Sequence[Mapping[str, Any]]


def ablation_tables(records: Records, origin: str) -> list[Table]:
    """One table an option: every two neighbouring values of it in methods that are alike in everything else."""
    errors: dict[tuple[Any, ...], dict[int, Mapping[str, Any]]] = defaultdict(dict)
    for record in records:
        if record["finish"] == "complete" and record["k"] is not None and not record["control"]:
            key = (record["context"], record["k"], record["method"], canonical_json(record["options"]))
            errors[key][record["sample"]] = record
    groups: dict[str, dict[tuple[Any, ...], list[tuple[Any, dict[int, Mapping[str, Any]]]]]] = defaultdict(lambda: defaultdict(list))
    for (context, k, method, _), own in errors.items():
        options: Mapping[str, Any] = next(iter(own.values()))["options"]
        names = {name for (_, _, other, _), found in errors.items() if other == method for name in next(iter(found.values()))["options"]}
        for name in sorted(names):
            rest = canonical_json({key: value for key, value in options.items() if key != name})
            groups[name][context, k, method, rest].append((options.get(name), own))
    tables: list[Table] = []
    taken: set[str] = set()
    for name, found in sorted(groups.items()):
        rows = [
            row
            for key, members in sorted(found.items(), key=lambda item: (item[0][:2], next(iter(item[1][0][1].values()))["label"]))
            for row in _neighbours(key, name, members)
        ]
        if rows:
            tables.append(_table(printable(name), rows, origin, taken))
    return tables


def _neighbours(key: tuple[Any, ...], name: str, members: list[tuple[Any, dict[int, Mapping[str, Any]]]]) -> list[Row]:
    context, k, _, _ = key
    ordered = sorted(members, key=lambda member: (_mean(member[1], "bits") or 0.0, repr(member[0])))
    rows = []
    for (first, a), (second, b) in pairwise(ordered):
        shared = sorted(window for window in a if window in b)
        if not shared:
            continue
        found = paired_difference(
            [float(b[window]["error_dense"]) for window in shared], [float(a[window]["error_dense"]) for window in shared], seed=0
        )
        style = "" if found.n < MINIMUM_PAIRS else "above" if found.high < 0 else "below" if found.low > 0 else ""
        rows.append(
            Row(
                (
                    Entry(printable(next(iter(a.values()))["label"])),
                    Entry(f"{_shown(first, name, a)} → {_shown(second, name, b)}"),
                    Entry(f"{context:,}", context),
                    Entry(f"{k:,}", k),
                    entry(_mean(a, "bits"), 1),
                    entry(_mean(b, "bits"), 1),
                    entry(_mean(a, "error_dense"), None),
                    entry(_mean(b, "error_dense"), None),
                    difference(found.mean, found.low, found.high, None, style=style),
                    Entry(f"{found.n}", found.n),
                )
            )
        )
    return rows


def _mean(records: Mapping[int, Mapping[str, Any]], name: str) -> float | None:
    values = [float(record[name]) for record in records.values() if record.get(name) is not None]
    return sum(values) / len(values) if values else None


def _shown(value: object, name: str, records: Mapping[int, Mapping[str, Any]]) -> str:
    """The option's value; where it was left out, what the label says it is."""
    if value is not None:
        return printable(value)
    label = re.search(rf"\b{re.escape(name)}=(\S+)", str(next(iter(records.values()))["label"]))
    return printable(label[1]) if label else _DEFAULT


def _table(name: str, rows: Sequence[Row], origin: str, taken: set[str]) -> Table:
    titles = ("context", "k", "bits", "then", "error to dense", "then", "difference", "windows")
    columns = (Column("method"), Column(name, text=True), *map(Column, titles))
    legend = "coloured where the paired interval excludes zero and there are windows enough; an option left out of a label has its default"
    return Table(slug(f"ablation-{name}", taken), f"Ablation of {name}", origin, columns, tuple(rows), legend, collapsed=True)


def equal_bytes_table(records: Records, settings: Mapping[str, Any], origin: str) -> list[Table]:
    """A suite's methods beside its plain line at the bytes that each reads; nothing for a run that no known suite chose."""
    from fathom_eval.suites import SUITES

    known = next((suite for suite in SUITES if suite.name == settings.get("suite")), None)
    if known is None:
        return []
    # These bring torch along, which no other part of a report needs.
    from fathom_eval.equal_bytes import LEGEND, compare_at_equal_bytes, comparison_rows

    calibrations = settings.get("calibrations")
    try:
        plain = known.plain_labels(calibrations if isinstance(calibrations, Mapping) else {})
    except (UserError, KeyError):
        # The calibrations of another machine: errors and bytes can be shown, but not the plain line.
        plain = []
    rows = comparison_rows(compare_at_equal_bytes(records, plain))
    if not rows:
        return []
    names = ["method", *(name for name in rows[0] if name != "method")]
    table = tuple(Row(tuple(_cell(name, row[name]) for name in names)) for row in rows)
    title = f"Suite {known.name}: {known.question}"
    columns = tuple(Column(name) for name in names)
    return [Table(f"equal-bytes-{known.name}", title, f"{origin} · {known.source}", columns, table, LEGEND)]


def _cell(name: str, text: str) -> Entry:
    """A text of the comparison at equal bytes, with the number that it shows."""
    return Entry(printable(text), None if name == "method" or not text else float(text.replace(",", "")))
