"""Two other figures: a grid of numbers in colour, and stacked bars."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fathom_eval.console import shorten
from fathom_eval.reports.canvas import GRID, HEAD, INK, PALETTE, Tips, draw
from fathom_eval.reports.document import Drawing
from fathom_eval.reports.wording import number, significant

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Dark to light of one hue family that colour-blind readers see in order (cividis), as the background of a printed number.
_LOW, _HIGH = (0, 34, 78), (254, 232, 56)
_LABEL_CHARACTERS, _BAR_CHARACTERS = 34, 30
HATCHES = ("", "//", "\\\\", "xx", "--", "||", "++")
LEFT_OVER, GREY = "other", "#8b949e"
"""The part of a bar that is none of the named ones, and its colour."""


@dataclass(frozen=True, slots=True)
class GridGroup:
    """Neighbouring columns under one heading."""

    title: str
    columns: Sequence[str]


def draw_grid(
    name: str,
    title: str,
    description: str,
    origin: str,
    rows: Sequence[str],
    groups: Sequence[GridGroup],
    values: Sequence[Sequence[float | None]],
    tips_of: Sequence[Sequence[str]],
    axis: str,
) -> Drawing:
    """A heat map of numbers from 0 to 1, each printed in its cell."""
    columns = [column for group in groups for column in group.columns]
    size = (2.6 + 0.56 * len(columns), 1.45 + 0.27 * len(rows))

    def plot(figure: Figure, tips: Tips) -> None:
        from matplotlib.patches import Rectangle

        left, bottom, top = 2.3 / size[0], 0.48 / size[1], 1 - (HEAD + 0.24) / size[1]
        axes = figure.add_axes((left, bottom, 1 - left - 0.12 / size[0], top - bottom))
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                colour = "none" if value is None else _shade(value)
                axes.add_patch(
                    Rectangle(
                        (x - 0.48, y - 0.46), 0.96, 0.92, facecolor=colour, edgecolor=GRID, linewidth=0.6, gid=tips.gid(tips_of[y][x])
                    )
                )
                ink = INK if value is None else "#fefefe" if value < 0.44 else "#111111"
                axes.text(x, y, "–" if value is None else number(value, 2), ha="center", va="center", fontsize=7.5, color=ink)
        axes.set_xlim(-0.55, len(columns) - 0.45)
        axes.set_ylim(len(rows) - 0.5, -0.5)
        axes.set_yticks(range(len(rows)), labels=[shorten(row, _LABEL_CHARACTERS) for row in rows], fontsize=7.5)
        axes.set_xticks(range(len(columns)), labels=list(columns), fontsize=7.5)
        axes.tick_params(length=0)
        axes.set_xlabel(axis, fontsize=8)
        for side in axes.spines.values():
            side.set_visible(False)
        start = 0
        for group in groups:
            middle = start + (len(group.columns) - 1) / 2
            axes.text(middle, -0.62, shorten(group.title, 24), ha="center", va="bottom", fontsize=8)
            if start:
                axes.axvline(start - 0.5, color=INK, linewidth=1)
            start += len(group.columns)

    return draw(name, title, description, origin, size, plot)


def _shade(value: float) -> str:
    part = min(max(value, 0.0), 1.0)
    return "#" + "".join(f"{round(low + (high - low) * part):02x}" for low, high in zip(_LOW, _HIGH, strict=True))


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: its parts, stacked in the order of the legend, and marks across it with their names, the first solid, others dashed."""

    label: str
    parts: Sequence[tuple[str, float]]
    marks: Sequence[tuple[str, float]] = ()


def part_styles(parts: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and hatch of every part, no two alike; the hatch tells parts apart without colour. What is left over is grey."""
    named = [part for part in parts if part != LEFT_OVER]
    # From the second round of colours on each has another hatch than before.
    styles = {
        part: (PALETTE[index % len(PALETTE)], HATCHES[(index + index // len(PALETTE)) % len(HATCHES)]) for index, part in enumerate(named)
    }
    return {part: styles.get(part, (GREY, "--")) for part in parts}


def draw_bars(name: str, title: str, description: str, origin: str, bars: Sequence[Bar], axis: str) -> Drawing | None:
    """Lying bars of stacked parts; None without bars."""
    if not bars:
        return None
    parts = list(dict.fromkeys(part for bar in bars for part, _ in bar.parts))
    columns = 3
    marks = list(dict.fromkeys(mark for bar in bars for mark, _ in bar.marks))
    legend = 0.1 + 0.19 * -(-(len(parts) + max(1, len(marks))) // columns)
    # Labels differ in their ends: they are broken into lines and not cut.
    labels = [textwrap.wrap(shorten(bar.label, 4 * _BAR_CHARACTERS), _BAR_CHARACTERS) or [""] for bar in bars]
    lines = max(map(len, labels))
    size = (6.6, 1.4 + legend + (0.29 if lines == 1 else 0.14 * lines + 0.07) * len(bars))

    def plot(figure: Figure, tips: Tips) -> None:
        left, bottom, top = 2.1 / size[0], (0.48 + legend) / size[1], 1 - (HEAD + 0.08) / size[1]
        axes = figure.add_axes((left, bottom, 1 - left - 0.15 / size[0], top - bottom))
        handles: dict[str, Any] = {}
        styles = part_styles(parts)
        for y, bar in enumerate(bars):
            start = 0.0
            for part, amount in bar.parts:
                colour, hatch = styles[part]
                tip = f"{bar.label}: {part} {significant(amount)}"
                drawn = axes.barh(
                    y,
                    amount,
                    left=start,
                    height=0.68,
                    color=colour,
                    edgecolor="#ffffff",
                    linewidth=0.6,
                    hatch=hatch,
                )
                drawn.patches[0].set_gid(tips.gid(tip))
                handles.setdefault(shorten(part, 26), drawn)
                start += amount
            for mark, amount in bar.marks:
                tip = f"{bar.label}: {mark} {significant(amount)}"
                style: Any = {"linewidth": 2} if mark == marks[0] else {"linewidth": 1.6, "linestyle": (0, (2, 1))}
                (line,) = axes.plot([amount, amount], [y - 0.42, y + 0.42], color=INK, gid=tips.gid(tip), **style)
                handles.setdefault(mark, line)
        axes.set_yticks(range(len(bars)), labels=["\n".join(label) for label in labels], fontsize=8)
        axes.set_ylim(len(bars) - 0.5, -0.5)
        axes.set_xlim(left=0)
        axes.set_xlabel(axis)
        axes.grid(axis="x", color=GRID, linewidth=0.6)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        if len(handles) == 1:
            return  # the axis says what the only part is
        handles |= {mark: handles.pop(mark) for mark in marks if mark in handles}
        figure.legend(
            handles.values(), handles.keys(), loc="lower left", bbox_to_anchor=(0.01, 0.0), ncols=columns, frameon=False, fontsize=8
        )

    return draw(name, title, description, origin, size, plot)
