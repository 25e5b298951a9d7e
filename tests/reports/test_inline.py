"""Figures within a page: smaller than their files, with every style, id and text that these have."""

from __future__ import annotations

import re
from html import unescape

import pytest

from fathom_eval.reports.canvas import GRID, INK, family_styles, inline
from fathom_eval.reports.curves import Panel, Point, draw_panels
from fathom_eval.reports.document import Drawing
from fathom_eval.reports.grids import Bar, draw_bars

LABEL = 'style="fill: red" id="m1" <b> & xlink:href="#m1"'


@pytest.fixture(scope="module", params=["curves", "bars"])
def drawing(request: pytest.FixtureRequest) -> Drawing:
    if request.param == "bars":
        found = draw_bars("b", "t", "d", "run", [Bar(f"bar {at}", [("scan", 1.0 + at), (LABEL, 2.0)]) for at in range(4)], "ms")
    else:
        points = [Point(family, 2.0**at, 0.1 * at, 0.01, f"{family}, {at}", joined=True) for family in ("a", LABEL) for at in range(1, 6)]
        found = draw_panels("c", "t", "d", "run", [Panel("one", points, [], "y")], family_styles(["a", LABEL]))
    assert found is not None
    return found


def resolved(svg: str) -> list[str]:
    """Every tag with the style of its class, and the ids that are referred to numbered in their order."""
    rules = dict(re.findall(r"\.([\w-]+)\{(.*?)\}", svg))
    tags = re.findall(r"<[a-zA-Z][^>]*>", svg[svg.index(">") + 1 :])
    tags = [re.sub(r'class="([^"]*)"', lambda one: f'style="{rules[one[1]]}"', tag) for tag in tags]
    ids: dict[str, str] = {}

    def number(found: re.Match[str]) -> str:
        return f"{found[1]}{ids.setdefault(found[2], str(len(ids)))}"

    # The rules' own element comes first.
    tags = [tag for tag in tags if tag != "<style>"]
    named = {name for tag in tags for name in re.findall(r'(?:href="#|url\(#)([^")]+)', tag)}
    tags = [re.sub(r'\s\bid="([^"]*)"', lambda one: one[0] if one[1] in named else "", tag) for tag in tags]
    return [re.sub(r'(href="#|url\(#|\bid=")([^")]+)', number, tag) for tag in tags]


def test_every_tag_has_the_style_and_the_references_of_the_file(drawing: Drawing) -> None:
    page = inline(drawing, "d7")
    body = re.sub(r"<metadata>.*?</metadata>", "", drawing.svg[drawing.svg.index("<svg") :], flags=re.DOTALL)
    expected = body.replace(INK, "currentColor").replace(GRID, "var(--rule)").replace("fill: #ffffff", "fill: none")
    assert resolved(page) == resolved(expected)
    assert "style=" not in re.sub(r">[^<]*<", "><", page)
    names = re.findall(r'\bid="([^"]*)"', re.sub(r">[^<]*<", "><", page))
    assert names
    assert len(names) == len(set(names))
    assert all(name.startswith("d7-") for name in names)
    assert len(page) < 0.8 * len(drawing.svg)


def test_a_label_that_reads_like_an_attribute_is_shown_as_it_is(drawing: Drawing) -> None:
    def texts(svg: str) -> list[str]:
        return [unescape(text) for text in re.findall(r"<(?:text|title)\b[^>]*>(.*?)</", svg, flags=re.DOTALL)]

    shown = texts(inline(drawing, "d0"))
    assert shown == texts(drawing.svg)
    assert any('style="fill: red" id="m1"' in text for text in shown)


def test_two_figures_share_no_id_and_no_class(drawing: Drawing) -> None:
    first, second = (set(re.findall(r'(?:class|id)="([^"]*)"', re.sub(r">[^<]*<", "><", inline(drawing, f"d{at}")))) for at in (1, 11))
    assert first
    assert not first & second
