"""Values against cost: a line a family, points for scans of a fixed depth, references across."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fathom_eval.console import shorten
from fathom_eval.reports.canvas import GRID, HEAD, INK, Style, Tips, draw
from fathom_eval.reports.document import Drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

FIXED_DEPTH = frozenset({"sparq", "double_sparsity", "loki", "thumbnail", "full", "landmark"})
"""Methods that read every channel they touch to one depth: drawn as points, since nothing lies between two of them."""

_LEGEND_CHARACTERS, _WIDE_LEGEND_CHARACTERS = 30, 36
"""In one line of a legend's entry, below one panel and below several."""
_LEGEND_LINES = 2
_MOST_TICKS = 7


def how_to_read(better: str, beyond: str, lines: str) -> str:
    """A few words for a reader who meets such a figure for the first time.

    Args:
        better: ``higher`` or ``lower``.
        beyond: What a mark further that way has.
        lines: What the lines across are.
    """
    return (
        "Every mark is one scan. Further left is cheaper: fewer bits of the keys are read for each token. "
        f"{better.capitalize()} is better: {beyond}. A scan with no other mark both further left and {better} is on the Pareto front: "
        "whoever wants better must read more. All others are beaten by one that is cheaper and better at once. "
        f"{lines} Where error bars overlap, the samples may not tell two scans apart; the table's paired differences say whether they do. "
        "The pointer on a mark shows its numbers."
    )


@dataclass(frozen=True, slots=True)
class Point:
    """One measurement: where it lies, its standard error, and what the pointer tells."""

    family: str
    x: float
    y: float
    error: float | None
    tip: str
    joined: bool


@dataclass(frozen=True, slots=True)
class Reference:
    """A level across the figure: dense attention (solid), exact top-k (dashed), or exact top-k under another policy (dotted)."""

    label: str
    y: float
    dashed: bool
    tip: str
    dotted: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One pair of axes. ``y_log`` needs positive values: others are left out. ``y_range`` fixes the axis."""

    title: str
    points: Sequence[Point]
    references: Sequence[Reference]
    y_label: str
    x_label: str = "scan bits per token, KV head and layer"
    y_log: bool = False
    y_range: tuple[float, float] | None = None


def draw_panels(name: str, title: str, description: str, origin: str, panels: Sequence[Panel], styles: dict[str, Style]) -> Drawing | None:
    """One figure with the panels side by side; None where no panel has a point."""
    panels = [panel for panel in panels if any(not panel.y_log or point.y > 0 for point in panel.points)]
    if not panels:
        return None
    families = [family for family in styles if any(point.family == family for panel in panels for point in panel.points)]
    columns = 2 if len(panels) == 1 else 3
    labels = _legend_labels(families, _LEGEND_CHARACTERS if len(panels) == 1 else _WIDE_LEGEND_CHARACTERS)
    # Two lines of the references stand first; entries fill one column after the other.
    lines = [1, 1, *(label.count("\n") + 1 for label in labels.values())]
    rows, more = divmod(len(lines), columns)
    filled = [lines[rows * place + min(place, more) :][: rows + (place < more)] for place in range(columns)]
    rows += more > 0
    legend = 0.1 + 0.19 * rows + 0.14 * (max(map(sum, filled)) - rows)
    size = (4.8 if len(panels) == 1 else 0.72 + 3.98 * len(panels), 3.35 + legend)

    def plot(figure: Figure, tips: Tips) -> None:
        handles: dict[str, Any] = {}
        left, gap = 0.62 / size[0], 0.92 / size[0]
        width = (1 - left - 0.1 / size[0] - gap * (len(panels) - 1)) / len(panels)
        titled = any(panel.title for panel in panels)
        bottom, top = (0.5 + legend) / size[1], 1 - (HEAD + (0.26 if titled else 0.06)) / size[1]
        for index, panel in enumerate(panels):
            axes = figure.add_axes((left + index * (width + gap), bottom, width, top - bottom))
            _draw_panel(axes, panel, styles, tips, handles, labels)
        figure.legend(
            handles.values(),
            handles.keys(),
            loc="lower left",
            bbox_to_anchor=(0.01, 0.0),
            ncols=columns,
            frameon=False,
            fontsize=8,
            handlelength=2.2,
            columnspacing=1.0,
        )

    return draw(name, title, description, origin, size, plot)


def _legend_labels(families: Sequence[str], width: int) -> dict[str, str]:
    """A text for each family of a bounded number of lines, no two alike: long names often differ in their ends alone."""
    found: dict[str, str] = {}
    for family in families:
        # matplotlib hides an entry that begins with an underscore.
        name = family.lstrip("_") or family
        label = _lines(name, width)
        if label in found.values():
            half = width // 2
            label = f"{name[: half - 1]}…{name[-half:]}"
        number = 2
        while label in found.values():
            label = f"{shorten(name, width - 4)} ({number})"
            number += 1
        found[family] = label
    return found


def _lines(name: str, width: int) -> str:
    lines = textwrap.wrap(name, width) or [name]
    return "\n".join(lines) if len(lines) <= _LEGEND_LINES else shorten(name, width)


def _draw_panel(axes: Axes, panel: Panel, styles: dict[str, Style], tips: Tips, handles: dict[str, Any], labels: Mapping[str, str]) -> None:
    for reference in panel.references:
        if panel.y_log and reference.y <= 0:
            continue
        style: Any = (0, (1, 2)) if reference.dotted else (0, (5, 3)) if reference.dashed else "-"
        line = axes.axhline(reference.y, color=INK, linewidth=1.1, linestyle=style, zorder=1, gid=tips.gid(reference.tip))
        handles.setdefault(reference.label, line)
    for family, (colour, marker, line_style) in styles.items():
        members = sorted((point for point in panel.points if point.family == family), key=lambda point: (point.x, point.y))
        members = [point for point in members if not panel.y_log or point.y > 0]
        if not members:
            continue
        joined = any(point.joined for point in members)
        drawn = axes.errorbar(
            [point.x for point in members],
            [point.y for point in members],
            yerr=[_bar(point, panel) for point in members],
            color=colour,
            marker=marker,
            markersize=5.5,
            markerfacecolor=colour if joined else "none",
            markeredgewidth=1.4,
            linestyle=line_style if joined else "none",
            linewidth=1.4,
            elinewidth=0.9,
            capsize=2,
            zorder=3,
        )
        handles.setdefault(labels[family], drawn)
        for point in members:
            # What the pointer meets is larger than the mark.
            axes.plot([point.x], [point.y], marker="o", markersize=13, color=colour, alpha=0.01, zorder=4, gid=tips.gid(point.tip))
    _axes(axes, panel)


def _bar(point: Point, panel: Panel) -> float:
    """Half the length of the error bar: on a logarithmic axis it must end above zero."""
    error = point.error or 0.0
    return min(error, point.y * 0.95) if panel.y_log else error


def _axes(axes: Axes, panel: Panel) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    _cost_axis(axes, [point.x for point in panel.points])
    if panel.y_range is not None:
        axes.set_ylim(*panel.y_range)
    elif panel.y_log:
        values = [point.y for point in panel.points if point.y > 0] + [one.y for one in panel.references if one.y > 0]
        axes.set_yscale("log")
        axes.set_ylim(min(values) / 1.45, max(values) * 1.45)
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if max(values) < 300 * min(values) else (1.0,)))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.9f}".rstrip("0").rstrip(".")))
        axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_ylabel(panel.y_label)
    axes.set_xlabel(panel.x_label)
    if panel.title:
        axes.set_title(shorten(panel.title, 44), fontsize=8.5)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _short(tick: float) -> str:
    return f"{tick / 2**20:g}M" if tick >= 2**20 else f"{tick / 1024:g}k" if tick >= 4096 else f"{tick:g}"


def _cost_axis(axes: Axes, values: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers; where a method reads no key bits at all, zero gets a place of its own."""
    from matplotlib.ticker import NullLocator

    positive = [value for value in values if value > 0]
    low, high = min(positive, default=1.0), max(positive, default=2.0)
    ticks = [float(2**power) for power in range(-4, 24) if low / 1.5 <= 2.0**power <= high * 1.5]
    # More would run into one another.
    ticks = ticks[:: -(-len(ticks) // _MOST_TICKS)] if ticks else ticks
    if len(positive) < len(values):
        axes.set_xscale("symlog", base=2, linthresh=low / 2)
        axes.set_xlim(-low / 12, high * 1.3)
        ticks = [0.0, *ticks]
    else:
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / 1.3, high * 1.3)
    axes.set_xticks(ticks, labels=[_short(tick) for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
