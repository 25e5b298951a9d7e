"""How a figure becomes bytes: the same records give the same bytes, and an SVG that fits into a page and tells its values on hover."""

from __future__ import annotations

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from xml.sax.saxutils import escape

from fathom_eval.console import printable, shorten
from fathom_eval.reports.document import Drawing

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Okabe and Ito's palette for colour-blind readers, without the black of the references and the yellow that is lost on white.
PALETTE = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#8c6bb1")
MARKERS = "osD^vP*X<>"
LINES: tuple[Any, ...] = ("-", "--", ":", "-.")
INK, GRID = "#1b1f24", "#d0d7de"
HEAD = 0.68
"""Inches at the top of a figure for its title and two lines of origin."""
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

_TAG = re.compile(r"<[A-Za-z][^>]*>")

Style = tuple[str, str, Any]


class Tips:
    """Texts that a figure shows when the pointer rests on a mark."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def gid(self, text: str) -> str:
        """The id that a mark must carry to show ``text``."""
        self.texts.append(printable(text))
        return f"tip-{len(self.texts) - 1}"


def family_styles(families: Sequence[str]) -> dict[str, Style]:
    """Colour, marker and line of each family, the same in every figure of a report. Shape differs too, for readers without colour."""
    return {
        family: (PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)], LINES[index // len(PALETTE) % len(LINES)])
        for index, family in enumerate(dict.fromkeys(families))
    }


def draw(name: str, title: str, description: str, origin: str, size: tuple[float, float], plot: Callable[[Figure, Tips], None]) -> Drawing:
    """A figure of ``size`` inches, drawn by ``plot`` below :data:`HEAD` inches that its title and origin take."""
    from matplotlib import rc_context, rcdefaults, rcParams
    from matplotlib.figure import Figure
    from matplotlib.textpath import TextPath

    tips = Tips()
    # A label that matplotlib's font lacks a sign for is drawn with a box; the page and the tables show it as it is.
    with rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        # A reader's own matplotlib settings must not change the figures of a record.
        rcdefaults()
        rcParams.update(_PARAMETERS)
        figure = Figure(figsize=size)
        plot(figure, tips)
        width = int(size[0] * 13)
        head = figure.text(0.16 / size[0], 1 - 0.16 / size[1], shorten(title, int(width * 1.2)), fontsize=10, fontweight="bold", va="top")
        # A long title is set smaller, so that the frame does not cut it.
        inches = TextPath((0, 0), head.get_text() or " ", size=10, prop=head.get_fontproperties()).get_extents().width / 72
        # Hinted at some resolution it is up to 4 % wider.
        head.set_fontsize(10 * min(1.0, (size[0] - 0.32) / max(0.1, 1.04 * inches)))
        below = textwrap.wrap(shorten(origin, 4 * width), int(width * 1.25)) or [""]
        below[1:] = [shorten(" ".join(below[1:]), int(width * 1.25))] if below[1:] else []
        figure.text(0.16 / size[0], 1 - 0.36 / size[1], "\n".join(below), fontsize=7.5, va="top", linespacing=1.25)
        text, image = io.BytesIO(), io.BytesIO()
        figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None, "Title": shorten(title, 120)})
        figure.savefig(image, format="png", metadata={"Software": None})
    return Drawing(name, title, description, origin, _smaller(_with_tips(text.getvalue().decode(), tips)), image.getvalue())


def inline(drawing: Drawing, prefix: str) -> str:
    """The SVG to stand inside a page: it takes the page's colours, and shows what the file shows in a good deal fewer bytes.

    Args:
        prefix: Begins its ids and classes, and those of no other figure.
    """
    body = drawing.svg[drawing.svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = body.replace(INK, "currentColor").replace(GRID, "var(--rule)").replace("fill: #ffffff", "fill: none")
    # Most ids are never used, the others are long, and few styles are repeated thousands of times.
    named = dict.fromkeys(name for tag in _TAG.findall(body) for name in re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', tag))
    names = {name: f"{prefix}-{index}" for index, name in enumerate(named)}
    styles: dict[str, str] = {}

    def shorter(found: re.Match[str]) -> str:
        tag = re.sub(r'\s?\bid="([^"]*)"', lambda one: f' id="{names[one[1]]}"' if one[1] in names else "", found[0])
        tag = re.sub(r'(xlink:href="#|url\(#)([^")]+)', lambda one: one[1] + names[one[2]], tag)
        return re.sub(r'\bstyle="([^"]*)"', lambda one: f'class="{styles.setdefault(one[1], f"{prefix}s{len(styles)}")}"', tag)

    # Within tags alone: a label may read like an attribute.
    body = _TAG.sub(shorter, body)
    rules = "".join(f".{name}{{{style}}}" for style, name in styles.items())
    # The page sizes it; the drawing says only its proportions. What it shows is told by the element around it.
    more = f'aria-hidden="true" focusable="false"><style>{rules}</style>'
    return re.sub(r'<svg\b[^>]*?viewBox="([^"]*)"[^>]*>', lambda found: f'<svg viewBox="{found[1]}" {more}', body, count=1)


def _with_tips(svg: str, tips: Tips) -> str:
    def insert(found: re.Match[str]) -> str:
        return f"{found[0]}<title>{escape(tips.texts[int(found[1])])}</title>"

    return re.sub(r'<g id="tip-(\d+)">', insert, svg)


def _smaller(svg: str) -> str:
    """Two decimals of a point are finer than any screen; indentation and comments say nothing."""
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    parts = re.split(r"(<(?:text|title|tspan)\b.*?</(?:text|title|tspan)>)", svg, flags=re.DOTALL)
    for index in range(0, len(parts), 2):
        parts[index] = re.sub(r"(\d\.\d\d)\d+", r"\1", re.sub(r"\n\s*", "\n", parts[index]))
    return "".join(parts)


def slug(text: str, taken: set[str]) -> str:
    """A file name's part made of a text, told apart from those already taken."""
    base = re.sub(r"[^A-Za-z0-9_]+", "-", text).strip("-")[:40] or "item"
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}-{number}"
    taken.add(name)
    return name
