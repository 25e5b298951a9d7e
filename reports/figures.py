"""Score against scan bits, drawn so that the same records give the same bytes."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fathom_eval.console import shorten
from fathom_eval.reports.cells import Cell, Role, sort_key
from fathom_eval.reports.narrative import setting
from fathom_eval.reports.source import Source, is_scan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette for colour-blind readers, without the black of the references and the yellow that is lost on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1")
MARKERS = "osD^vP*X<>"
LINES = ("-", "--", ":", "-.")
INK, GRID = "#1b1f24", "#d0d7de"
_SIZE_INCHES = (4.8, 3.7)
_LEGEND_CHARACTERS = 30
_PARAMETERS: dict[Any, Any] = {
    "svg.hashsalt": "fathom-eval",
    "svg.fonttype": "none",
    "savefig.dpi": 160,
    "text.parse_math": False,
    "font.family": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


@dataclass(frozen=True)
class Drawing:
    """One figure: its file name without ending, what it shows in words, and its bytes in both formats."""

    name: str
    title: str
    description: str
    svg: str
    png: bytes

    def inline(self) -> str:
        """The SVG to stand inside a page: it takes the page's colours, and its ids cannot meet those of another figure."""
        body = self.svg[self.svg.index("<svg") :]
        body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
        body = body.replace(INK, "currentColor").replace(GRID, "var(--rule)").replace("fill: #ffffff", "fill: none")
        body = re.sub(r'\bid="([^"]*)"', rf'id="{self.name}-\1"', body)
        body = re.sub(r'(xlink:href="#|url\(#)', rf"\g<1>{self.name}-", body)
        # The page sizes it; the drawing says only its proportions. What it shows is told by the element around it.
        return re.sub(r'<svg\b[^>]*?viewBox="([^"]*)"[^>]*>', r'<svg viewBox="\1" aria-hidden="true" focusable="false">', body, count=1)


def family_styles(families: Sequence[str]) -> dict[str, tuple[str, str, str]]:
    """Colour, marker and line of each family, the same in every figure of a report. Shape differs too, for readers without colour."""
    return {
        family: (PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)], LINES[index // len(PALETTE) % len(LINES)])
        for index, family in enumerate(dict.fromkeys(families))
    }


def draw(sources: Sequence[Source]) -> dict[str, list[Drawing]]:
    """The figures of every run, by run name: one a task, context and k that has scans with known bits."""
    # A label that matplotlib's font lacks a sign for is drawn with a box; the page and the tables show it as it is.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        styles = family_styles([cell.method.family for source in sources for cell in source.cells if is_scan(cell)])
        drawings: dict[str, list[Drawing]] = {}
        for index, source in enumerate(sources, start=1):
            prefix = f"run{index}-" if len(sources) > 1 else ""
            drawings[source.name] = _draw_run(source, prefix, styles)
    return drawings


def _draw_run(source: Source, prefix: str, styles: Mapping[str, tuple[str, str, str]]) -> list[Drawing]:
    found = []
    for context, k in source.settings():
        for position, task in enumerate(source.tasks):
            cells = [cell for cell in source.cells if cell.context == context and cell.task == task and cell.k in (None, k)]
            if not any(is_scan(cell) and cell.bits is not None and cell.score is not None for cell in cells):
                continue
            slug = re.sub(r"[^A-Za-z0-9_]+", "-", task).strip("-")[:40] or "task"
            clash = [other for other in source.tasks[:position] if re.sub(r"[^A-Za-z0-9_]+", "-", other).strip("-")[:40] == slug]
            name = f"{prefix}score-{slug}{f'-{position}' if clash else ''}-{context}-k{k}"
            title = f"{task}, {setting(context, k)}"
            description = f"Score against scan bits per token on {title}. The numbers are in the table above."
            found.append(Drawing(name, title, description, *render_cells(cells, title, f"{source.model}, run {source.name}", styles)))
    return found


def render_cells(
    cells: Sequence[Cell], title: str, subtitle: str, styles: Mapping[str, tuple[str, str, str]], label: str = "score"
) -> tuple[str, bytes]:
    """The figure of some cells as SVG and PNG; ``label`` names what their score is."""
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.figure import Figure

    with rc_context():
        # A reader's own matplotlib settings must not change the figures of a record.
        rcdefaults()
        rcParams.update(_PARAMETERS)
        figure = Figure(figsize=_SIZE_INCHES)
        _plot(figure, cells, title, subtitle, styles, label)
        text, image = io.BytesIO(), io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Title": shorten(title, 120)})
        figure.savefig(image, format="png", metadata={"Software": None})
    return text.getvalue().decode(), image.getvalue()


def _plot(figure: Figure, cells: Sequence[Cell], title: str, subtitle: str, styles: Mapping[str, tuple[str, str, str]], label: str) -> None:
    families: dict[str, list[Cell]] = {}
    for cell in sorted(cells, key=sort_key):
        if is_scan(cell) and cell.bits is not None and cell.score is not None:
            families.setdefault(cell.method.family, []).append(cell)
    legend_rows = (len(families) + 3) // 2
    bottom = 0.155 + 0.052 * legend_rows
    axes = figure.add_axes((0.115, bottom, 0.865, 0.875 - bottom))
    handles: list[Any] = []
    labels: list[str] = []
    for cell in cells:
        if is_scan(cell) or cell.score is None:
            continue
        dense = cell.method.role is Role.DENSE
        handles.append(axes.axhline(cell.score, color=INK, linewidth=1.1, linestyle="-" if dense else (0, (5, 3)), zorder=1))
        labels.append("dense" if dense else "exact top-k")
    for family in styles:
        members = families.get(family, [])
        if not members:
            continue
        colour, marker, line = styles[family]
        drawn = axes.errorbar(
            [cell.bits or 0.0 for cell in members],
            [cell.score or 0.0 for cell in members],
            yerr=[cell.standard_error or 0.0 for cell in members],
            color=colour,
            marker=marker,
            markersize=5,
            linestyle=line,
            linewidth=1.3,
            elinewidth=0.9,
            capsize=2,
            zorder=3,
        )
        handles.append(drawn)
        # matplotlib hides an entry that begins with an underscore.
        labels.append(shorten(family.lstrip("_") or family, _LEGEND_CHARACTERS))
    bits = [cell.bits for members in families.values() for cell in members if cell.bits is not None]
    _bit_axis(axes, bits)
    axes.set_ylim(-0.04, 1.06)
    axes.set_ylabel(label)
    axes.set_xlabel("scan bits per token, KV head and layer")
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.text(0.02, 0.955, shorten(title, 62), fontsize=10, fontweight="bold")
    figure.text(0.02, 0.908, shorten(subtitle, 76), fontsize=7.5)
    figure.legend(handles, labels, loc="lower left", bbox_to_anchor=(0.01, 0.0), ncols=2, frameon=False, fontsize=8, handlelength=2.4)


def _bit_axis(axes: Any, bits: Sequence[float]) -> None:
    """A logarithmic axis with plain numbers; where a method reads no key bits at all, zero gets a place of its own."""
    from matplotlib.ticker import NullLocator

    positive = [value for value in bits if value > 0]
    low, high = min(positive, default=1.0), max(positive, default=2.0)
    ticks = [float(2**power) for power in range(14) if low / 1.5 <= 2**power <= high * 1.5]
    if len(positive) < len(bits):
        axes.set_xscale("symlog", base=2, linthresh=low / 2)
        axes.set_xlim(-low / 12, high * 1.3)
        ticks = [0.0, *ticks]
    else:
        axes.set_xscale("log", base=2)
        axes.set_xlim(low / 1.3, high * 1.3)
    axes.set_xticks(ticks, labels=[f"{tick:g}" for tick in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
