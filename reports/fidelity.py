"""Fidelity records as tables, CSV and one figure: the error of attention outputs over the bits that scans read."""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fathom_eval.console import printable, shorten
from fathom_eval.errors import UserError
from fathom_eval.reports.figures import GRID, INK, family_styles
from fathom_eval.reports.narrative import number, setting
from fathom_eval.reports.tables import results_csv
from fathom_eval.run import Run, canonical_json, raise_file_error
from fathom_eval.stats import mean_and_standard_error, paired_difference

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ESTIMATED = ("error_dense", "error_exact", "excess", "squared_error_dense", "squared_error_exact", "squared_excess", "recall")
COUNTED = ("bits", "declared_bits", "active_channels", "rows", "candidate_rows")
COMPARED = ("error_dense", "error_exact")
LEGEND = (
    "mean over positions, layers, query heads and windows ± standard error over windows; error: ‖o − o_ref‖ / ‖o_ref‖ with dense "
    "attention or exact top-k at the same k as the reference; excess: error to dense beyond exact top-k's own"
)
_AXES = {"error_dense": "error to dense", "error_exact": "error to exact top-k"}
_BOOTSTRAP_SEED = 0


@dataclass(frozen=True)
class FidelityFiles:
    """The files of a fidelity report.

    Attributes:
        csv: One row a context, k and method.
        pairs_csv: One row a pair of methods; without rows for a single window.
        figures: The figure as SVG and PNG; empty where no scan has known bits.
    """

    csv: Path
    pairs_csv: Path
    figures: tuple[Path, ...]


def fidelity_frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """One row a context, k and method: means over windows with standard errors (``_se``, missing for a single window); unrounded.

    ``failures`` counts windows in which the method failed, ``failure`` is what the first of them said.
    """
    cells: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        cells.setdefault(_cell(record), []).append(record)
    rows = [_row(members) for members in cells.values()]
    rows.sort(key=lambda row: (row["context"], row["k"] or 0, not row["control"], row["bits"] is None, row["bits"] or 0, row["method"]))
    return pd.DataFrame(rows)


def pairs_frame(records: Iterable[Mapping[str, Any]]) -> pd.DataFrame:
    """Differences between any two methods at one context and k, paired by window, for pairs that share at least two.

    ``difference`` is the error of ``method`` minus that of ``other`` with its bootstrap interval; ``lower`` and ``higher`` count windows.
    """
    cells: dict[tuple[Any, ...], dict[str, dict[int, Mapping[str, Any]]]] = {}
    for record in records:
        if record["k"] is not None and record["finish"] == "complete":
            methods = cells.setdefault((record["context"], record["k"]), {})
            methods.setdefault(record["label"], {})[record["sample"]] = record
    columns = ["context", "k", "metric", "method", "other", "windows", "difference", "low", "high", "lower", "ties", "higher"]
    rows = []
    for (context, k), methods in sorted(cells.items()):
        for (first, a), (second, b) in combinations(methods.items(), 2):
            shared = [window for window in a if window in b]
            if len(shared) < 2:
                continue
            for metric in COMPARED:
                found = paired_difference([a[w][metric] for w in shared], [b[w][metric] for w in shared], seed=_BOOTSTRAP_SEED)
                interval = (found.mean, found.low, found.high, found.losses, found.ties, found.wins)
                rows.append((context, k, metric, first, second, found.n, *interval))
    return pd.DataFrame(rows, columns=columns)


def fidelity_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of :func:`fidelity_frame` as texts for a terminal; ``attrs["note"]`` explains them."""
    rows = []
    for row in frame.to_dict(orient="records"):
        bits = None if pd.isna(row["bits"]) else row["bits"]
        rows.append(
            {
                "context": f"{row['context']:,}",
                "k": "" if pd.isna(row["k"]) else f"{int(row['k']):,}",
                "method": row["method"],
                "bits": "" if bits is None else number(bits, 1),
                "÷ D": "" if bits is None else number(bits / row["head_dim"], 2),
                "error to dense": "failed" if row["windows"] == 0 else _estimate(row, "error_dense"),
                "to exact top-k": _estimate(row, "error_exact"),
                "excess": _estimate(row, "excess"),
                "recall": _estimate(row, "recall", digits=3),
                "k∪": "" if pd.isna(row["rows"]) else number(row["rows"], 1),
            }
        )
    table = pd.DataFrame(rows)
    for column in ("context", "k"):
        if len(set(table[column]) - {""}) <= 1:
            table = table.drop(columns=column)
    table.attrs["note"] = LEGEND
    return table


def build_fidelity_report(run_path: Path, output: Path) -> FidelityFiles:
    """Write CSV files and the figure of one run into the folder ``output``. Files of the same names there are replaced.

    Raises:
        UserError: There is no run or it has no fidelity records, or ``output`` cannot be written.
    """
    with Run.load(run_path) as run:
        records = [record for record in run.iter_records() if record["kind"] == "fidelity"]
        model = str(run.manifest.get("model", ""))
    if not records:
        raise UserError(f"the run {run_path} has no fidelity records yet")
    frame, pairs = fidelity_frame(records), pairs_frame(records)
    drawing = draw_fidelity(frame, f"{model}, run {run_path.name}")
    files = FidelityFiles(output / "results.csv", output / "pairs.csv", ())
    try:
        output.mkdir(parents=True, exist_ok=True)
        files.csv.write_text(results_csv([frame]), encoding="utf-8")
        files.pairs_csv.write_text(results_csv([pairs]), encoding="utf-8")
        if drawing is not None:
            files = FidelityFiles(files.csv, files.pairs_csv, (output / "fidelity.svg", output / "fidelity.png"))
            files.figures[0].write_text(drawing[0], encoding="utf-8")
            files.figures[1].write_bytes(drawing[1])
    except OSError as error:
        raise_file_error(output, "write", error)
    return files


def draw_fidelity(frame: pd.DataFrame, subtitle: str = "") -> tuple[str, bytes] | None:
    """Error over bits on logarithmic axes, one line a family, as SVG text and PNG bytes; None where there is nothing to draw.

    One column of panels a context and k; above the error to dense, with exact top-k's own error as a dashed line, below the error to
    exact top-k.
    """
    scans = frame[~frame["control"] & frame["bits"].notna() & (frame["bits"] > 0)] if len(frame) else frame
    settings = list(dict.fromkeys((int(row["context"]), int(row["k"])) for row in scans.to_dict(orient="records")))
    if not settings:
        return None
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.figure import Figure

    with rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        # A reader's own matplotlib settings must not change the figures of a record.
        rcdefaults()
        parameters: Any = {"svg.hashsalt": "fathom-eval", "svg.fonttype": "none", "text.parse_math": False, "font.size": 9.0}
        rcParams.update(parameters)
        figure = Figure(figsize=(1.2 + 3.9 * len(settings), 7.2), layout="constrained")
        _plot(figure, frame, scans, settings)
        figure.suptitle(f"Error of attention outputs over scan bits\n{shorten(subtitle, 76)}", fontsize=10)
        text, image = io.BytesIO(), io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
        figure.savefig(image, format="png", dpi=160, metadata={"Software": None})
    return text.getvalue().decode(), image.getvalue()


def _plot(figure: Figure, frame: pd.DataFrame, scans: pd.DataFrame, settings: Sequence[tuple[int, int]]) -> None:
    styles = family_styles(list(scans["family"]))
    panels = figure.subplots(len(_AXES), len(settings), squeeze=False, sharex=True)
    handles: dict[str, Any] = {}
    for column, (context, k) in enumerate(settings):
        here = scans[(scans["context"] == context) & (scans["k"] == k)]
        oracle = frame[frame["control"] & (frame["context"] == context) & (frame["k"] == k)]
        for line, (metric, label) in enumerate(_AXES.items()):
            axes = panels[line, column]
            for family, (colour, marker, style) in styles.items():
                # A logarithmic axis has no place for an error of 0 (k of all tokens).
                members = here[(here["family"] == family) & (here[metric] > 0)].sort_values("bits")
                if len(members):
                    drawn = axes.errorbar(
                        members["bits"],
                        members[metric],
                        yerr=members[f"{metric}_se"].astype(float).fillna(0.0),
                        color=colour,
                        marker=marker,
                        markersize=5,
                        linestyle=style,
                        linewidth=1.3,
                        elinewidth=0.9,
                        capsize=2,
                    )
                    # matplotlib hides an entry that begins with an underscore.
                    handles.setdefault(shorten(family.lstrip("_") or family, 30), drawn)
            if metric == "error_dense" and len(oracle):
                handles["exact top-k"] = axes.axhline(float(oracle[metric].iloc[0]), color=INK, linewidth=1.1, linestyle=(0, (5, 3)))
            _finish(axes, list(scans["bits"]), [value for value in pd.concat([scans, oracle])[metric] if value > 0])
            if line == 0:
                axes.set_title(setting(context, k), fontsize=9)
            if column == 0:
                axes.set_ylabel(label)
            if line == len(_AXES) - 1:
                axes.set_xlabel("scan bits per token, KV head and layer")
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=8)


def _finish(axes: Axes, bits: Sequence[float], errors: Sequence[float]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    if errors:
        axes.set_ylim(min(errors) / 1.25, max(errors) * 1.25)
    axes.set_xlim(min(bits) / 1.3, max(bits) * 1.3)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    ticks = [float(2**power) for power in range(-4, 14) if min(bits) / 1.5 <= 2.0**power <= max(bits) * 1.5]
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _cell(record: Mapping[str, Any]) -> tuple[Any, ...]:
    return record["context"], record["k"], record["method"], canonical_json(record["options"]), record["method_version"]


def _row(members: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    first = members[0]
    complete = [record for record in members if record["finish"] == "complete"]
    failed = [str(record["error"]) for record in members if record["finish"] != "complete"]
    row: dict[str, Any] = {
        "context": first["context"],
        "k": first["k"],
        "method": first["label"],
        "family": first["family"],
        "control": first["control"],
        "head_dim": first.get("head_dim"),
        "windows": len(complete),
        "failures": len(failed),
    }
    for name in (*ESTIMATED, *COUNTED):
        values = [float(record[name]) for record in complete if record[name] is not None]
        estimate = mean_and_standard_error(values) if values else None
        row[name] = estimate.mean if estimate else None
        if name in ESTIMATED:
            row[f"{name}_se"] = estimate.standard_error if estimate and estimate.n > 1 else None
    row["failure"] = printable(failed[0]) if failed else None
    return row


def _estimate(row: Mapping[str, Any], name: str, digits: int = 4) -> str:
    if pd.isna(row[name]):
        return ""
    error = row[f"{name}_se"]
    return number(row[name], digits) if pd.isna(error) else f"{number(row[name], digits)} ± {number(error, digits)}"
