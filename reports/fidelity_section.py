"""A fidelity run as a section of a report: the error of attention outputs over the bits that scans read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd

from fathom_eval.console import printable
from fathom_eval.reports.ablations import ablation_tables, equal_bytes_table
from fathom_eval.reports.canvas import Style
from fathom_eval.reports.cells import MINIMUM_PAIRS
from fathom_eval.reports.curves import FIXED_DEPTH, Panel, Point, Reference, draw_panels, how_to_read
from fathom_eval.reports.document import (
    Block,
    Column,
    Drawing,
    Entry,
    Fact,
    Item,
    Measure,
    Row,
    Section,
    Table,
    difference,
    entry,
    explained,
)
from fathom_eval.reports.facts import devices_of, fact, haystack_of, last_settings, model_of, provenance_of, starts_of
from fathom_eval.reports.fidelity import LEGEND
from fathom_eval.reports.fidelity_source import AXES, FidelitySource
from fathom_eval.reports.fidelity_words import answer, equal_error, fidelity_remarks, finding, frontier
from fathom_eval.reports.gaps import NOUNS, half_remarks
from fathom_eval.reports.glossary import glossary
from fathom_eval.reports.tables import results_csv
from fathom_eval.reports.wording import count, join, number, setting, significant, spread
from fathom_eval.run import canonical_json
from fathom_eval.stats import paired_difference

_MANY_METHODS = 16
"""With more of them the page sets only those against each other that none beats in bits and error; the CSV holds every pair."""
_ORACLES = (
    (canonical_json({}), "exact top-k, own winners", False),
    (canonical_json({"attend": "union"}), "exact top-k, attend=union", True),
)
"""Options of exact top-k in the order of the figure's lines, what they are called there, and whether the line is dotted."""
READING = how_to_read(
    "lower",
    "the attention output is closer to the one it is compared with. Both axes are logarithmic",
    "The dashed line is exact top-k whose heads attend to their own winners: what is left of the error when each head's k tokens are "
    "chosen without a mistake. Scans with attend=union attend to more tokens than k and may lie below it; a dotted line, where the run has "
    "it, is exact top-k with attend=union, which they are set against.",
)


def fidelity_section(source: FidelitySource, anchor: str, styles: dict[str, Style]) -> Section:
    """The run with everything that a report shows of it."""
    blocks = []
    manifest = source.run.manifest
    lead = answer(source.rows, source.settings, source.pairs)
    for context, k in source.settings:
        here = [row for row in source.rows if row["context"] == context and row["k"] in (None, k)]
        where = _origin(source, context, k, here)
        items: list[Item] = [
            _errors(source, context, k, here, where),
            *_figure(context, k, here, where, styles),
            *_equal_error(context, k, here, where),
            _squared(context, k, here, where),
            *_pairs(source, context, k, here, where),
        ]
        text = finding(source.rows, (context, k), source.pairs)
        # Of a single setting the lead may say it all.
        blocks.append(Block(f"{anchor}-{context}-{k}", setting(context, k), items, "" if text == lead else text))
    blocks = explained(blocks, READING)
    where = _origin(source, None, None, source.rows)
    settings = last_settings(manifest)
    suite = printable(settings.get("suite") or "")
    ablations = [*equal_bytes_table(source.records, settings, where), *ablation_tables(source.records, where)]
    if ablations:
        text = (
            "Methods of one kind that differ in one option, the rest held fixed: the second's error less the first's, paired by window. "
            "Of a suite also all its methods at the bytes that each reads."
        )
        blocks.append(Block(f"{anchor}-ablations", f"Ablations: suite {suite}" if suite else "Ablations", ablations, text))
    failures = [row for row in source.rows if row["failures"]]
    if failures:
        blocks.append(Block(f"{anchor}-failures", "Failed windows", [_failures(source, failures)]))
    return Section(
        anchor=anchor,
        name=source.name,
        kind="fidelity",
        model=model_of(manifest),
        device=", ".join(devices_of(manifest)),
        subject=_subject(source),
        answer=" ".join(part for part in (source.absent(), lead) if part),
        remarks=[
            *fidelity_remarks(source.rows, list(source.run.problems), source.missing, source.notes, haystack_of(manifest)),
            *half_remarks(source.halves, source.run.torn, NOUNS["fidelity"]),
        ],
        blocks=blocks,
        missing=source.missing,
        measures=_measures(source),
        facts=_facts(source),
        glossary=glossary("fidelity"),
        provenance=provenance_of(manifest),
        starts=starts_of(manifest),
        identity=str(manifest.get("identity_sha256", "")),
        manifest=manifest,
        data={"results.csv": partial(_write, source=source, name="frame"), "pairs.csv": partial(_write, source=source, name="pairs")},
    )


def _subject(source: FidelitySource) -> str:
    manifest = source.run.manifest
    scans = {row["method"] for row in source.rows if not row["control"]}
    devices = join(devices_of(manifest))
    haystack = haystack_of(manifest)
    positions = fact(manifest, "positions")
    windows = spread([row["windows"] for row in source.rows if row["windows"]], "window")
    where = f" on {devices}" if devices else ""
    return (
        f"{count(len(scans), 'scan')} of {model_of(manifest)}{where}: the relative error of attention outputs "
        f"against dense attention and against exact top-k{f', at the last {positions} positions' if positions else ''} of {windows}"
        f"{f' of {haystack}' if haystack else ''}."
    )


def _origin(source: FidelitySource, context: int | None, k: int | None, rows: Sequence[Mapping[str, Any]]) -> str:
    manifest = source.run.manifest
    windows = spread([row["windows"] for row in rows if row["windows"]], "window")
    at = "" if context is None else setting(context, k)
    parts = (f"run {source.name}", model_of(manifest), at, ", ".join(devices_of(manifest)), windows)
    return " · ".join(part for part in parts if part)


def _name(row: Mapping[str, Any]) -> Entry:
    return Entry(row["method"], small=() if not row["control"] or row["method"] == row["family"] else (row["family"],))


def _errors(source: FidelitySource, context: int, k: int, rows: Sequence[Mapping[str, Any]], where: str) -> Table:
    titles = ("error to dense", "error to exact top-k", "excess")
    columns = (
        Column("method"),
        Column("bits", "a channel"),
        *(Column(title, "interval over windows") for title in titles),
        *map(Column, ("recall", "k∪", "windows")),
    )
    table = []
    for row in rows:
        found = []
        for metric in (*AXES, "excess"):
            values = list(source.values(context, row["k"], row["method"], metric).values())
            estimate = paired_difference(values, [0.0] * len(values), seed=0) if len(values) > 1 and any(values) else None
            small = () if estimate is None else (f"[{significant(estimate.low)}, {significant(estimate.high)}]",)
            found.append(entry(row[metric], None, error=row.get(f"{metric}_se"), small=small))
        if not row["windows"]:
            found[0] = Entry("failed")
        bits = row["bits"]
        width = (number(bits / row["head_dim"], 2),) if bits is not None and row["head_dim"] else ()
        entries = (
            _name(row),
            Entry() if bits is None else entry(bits, 1, small=width),
            *found,
            entry(row["recall"], 3, error=row["recall_se"]),
            entry(row["rows"], 1),
            Entry(f"{row['windows']}", row["windows"]),
        )
        table.append(Row(entries, control=bool(row["control"])))
    title, caution = f"Errors at {setting(context, k)}", source.absent(context, k)
    return Table(f"errors-{context}-k{k}", title, where, columns, tuple(table), LEGEND, caution=caution)


def _squared(context: int, k: int, rows: Sequence[Mapping[str, Any]], where: str) -> Table:
    metrics = {"squared_error_dense": "squared error to dense", "squared_error_exact": "to exact top-k", "squared_excess": "squared excess"}
    titles = (*metrics.values(), "declared bits", "channels", "candidate rows")
    table = []
    for row in rows:
        entries = [_name(row), *(entry(row[metric], None, error=row[f"{metric}_se"]) for metric in metrics)]
        entries += [entry(row["declared_bits"], 2), entry(row["active_channels"], 1), entry(row["candidate_rows"], 1)]
        table.append(Row(tuple(entries), control=bool(row["control"])))
    title = f"Squared errors and reads at {setting(context, k)}"
    return Table(f"squared-{context}-k{k}", title, where, (Column("method"), *map(Column, titles)), tuple(table), collapsed=True)


def _figure(context: int, k: int, rows: Sequence[Mapping[str, Any]], where: str, styles: dict[str, Style]) -> list[Drawing]:
    panels = []
    for metric, label in AXES.items():
        points = [
            Point(
                row["line"],
                row["bits"],
                row[metric],
                row[f"{metric}_se"],
                f"{row['method']}: {label} {entry(row[metric], None, error=row[f'{metric}_se']).text} at {number(row['bits'], 1)} bits",
                row["name"] not in FIXED_DEPTH,
            )
            for row in rows
            if not row["control"] and row["bits"] is not None and row[metric] is not None
        ]
        references = [
            Reference(name, row[metric], True, f"{name}: {label} {significant(row[metric])}", dotted=dotted)
            for options, name, dotted in _ORACLES
            for row in rows
            if row["name"] == "exact" and row["options"] == options and row[metric] is not None
        ]
        panels.append(Panel(label, points, references, label, y_log=True))
    title = f"error of attention outputs, {setting(context, k)}"
    description = (
        f"Error to dense attention and to exact top-k against scan bits at {setting(context, k)}. The numbers are in the table above."
    )
    drawing = draw_panels(f"fidelity-{context}-k{k}", title, description, where, panels, styles)
    return [] if drawing is None else [drawing]


def _equal_error(context: int, k: int, rows: Sequence[Mapping[str, Any]], where: str) -> list[Table]:
    found = equal_error(rows)
    if not found:
        return []
    columns = (
        Column("scan"),
        Column("bits"),
        Column("error to dense"),
        Column("reached by", text=True),
        Column("its bits"),
        Column("its error"),
    )
    table = [
        Row(
            (
                Entry(row["method"]),
                entry(row["bits"], 1),
                entry(row["error_dense"], None),
                Entry(best["method"] if best else "none"),
                entry(best["bits"], 1) if best else Entry(),
                entry(best["error_dense"], None) if best else Entry(),
                entry(row["bits"] / best["bits"], 2) if best else Entry(),
            )
        )
        for row, best in found
    ]
    legend = "the read of variable depth with the fewest bits whose mean error to dense is no larger; nothing is interpolated"
    title = f"Bits at equal error, {setting(context, k)}"
    return [Table(f"equal-error-{context}-k{k}", title, where, (*columns, Column("bits ÷ its bits")), tuple(table), legend)]


def _pairs(source: FidelitySource, context: int, k: int, here: Sequence[Mapping[str, Any]], where: str) -> list[Table]:
    frame = source.pairs
    frame = frame[(frame["context"] == context) & (frame["k"] == k)]
    which = "Every two methods"
    if len({row["method"] for row in here}) > _MANY_METHODS:
        best = [row["method"] for row in frontier(list(here))]
        frame = frame[frame["method"].isin(best) & frame["other"].isin(best)]
        which = "Every two scans that none beats in both bits and error under the paper's protocol"
    if not len(frame):
        return []
    columns = (
        Column("method"),
        Column("minus", text=True),
        Column("error", text=True),
        *map(Column, ("difference", "lower / ties / higher", "windows")),
    )
    table = []
    for row in frame.to_dict("records"):
        enough = row["windows"] >= MINIMUM_PAIRS
        style = "above" if enough and row["high"] < 0 else "below" if enough and row["low"] > 0 else ""
        entries = (
            Entry(row["method"]),
            Entry(row["other"]),
            Entry(AXES[row["metric"]]),
            difference(row["difference"], row["low"], row["high"], None, style=style),
            Entry(f"{row['lower']} / {row['ties']} / {row['higher']}"),
            Entry(f"{row['windows']}", row["windows"]),
        )
        table.append(Row(entries))
    legend = (
        "difference of errors paired by window with a 95 % bootstrap interval; coloured where it excludes zero and there are windows enough"
    )
    return [Table(f"pairs-{context}-k{k}", f"{which} at {setting(context, k)}", where, columns, tuple(table), legend, collapsed=True)]


def _failures(source: FidelitySource, rows: Sequence[Mapping[str, Any]]) -> Table:
    columns = (Column("method"), Column("setting", text=True), Column("windows"), Column("first reason", text=True))
    table = [
        Row(
            (
                Entry(row["method"]),
                Entry(setting(row["context"], None if row["k"] is None else int(row["k"]))),
                Entry(f"{row['failures']}", row["failures"]),
                Entry(str(row["failure"])[:500]),
            )
        )
        for row in rows
    ]
    return Table("failures", "Failed windows", f"run {source.name}", columns, tuple(table))


def _measures(source: FidelitySource) -> list[Measure]:
    found = []
    for row in source.rows:
        k = None if row["k"] is None else int(row["k"])
        for metric, title in AXES.items():
            if row[metric] is not None and not (row["control"] and row[metric] == 0):
                samples = source.values(row["context"], row["k"], row["method"], metric)
                where = setting(row["context"], k)
                found.append(Measure(where, row["method"], title, row[metric], row[f"{metric}_se"], samples, decimals=None))
    return found


def _facts(source: FidelitySource) -> list[Fact]:
    found = []
    for row in source.rows:
        for metric in ("error_dense", "active_channels"):
            if row[metric] is not None and not row["control"]:
                k = None if row["k"] is None else int(row["k"])
                found.append(Fact(metric, "", row["method"], row["context"], k, row[metric], row.get(f"{metric}_se")))
    return found


def _write(path: Path, source: FidelitySource, name: str) -> None:
    frame: pd.DataFrame = getattr(source, name)
    frame = frame.drop(columns=[column for column in ("name", "options") if column in frame])
    frame.insert(0, "run", source.name)
    path.write_text(results_csv([frame]), encoding="utf-8")
