"""Figures of values against cost: nothing in them covers anything else, however many families there are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.transforms import Bbox

from fathom_eval.reports import canvas, curves
from fathom_eval.reports.canvas import Tips, family_styles
from fathom_eval.reports.curves import Panel, Point, Reference, draw_panels


@pytest.mark.parametrize("panels", [1, 2])
@pytest.mark.parametrize("amount", [3, 13, 40])
def test_the_legend_of_many_families_covers_no_axes_and_panels_not_one_another(
    amount: int, panels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Figure] = []

    def keep(name: str, title: str, description: str, origin: str, size: tuple[float, float], plot: Any) -> None:
        figure = Figure(figsize=size)
        FigureCanvasAgg(figure)
        with canvas_parameters():
            plot(figure, Tips())
            figure.canvas.draw()
        drawn.append(figure)

    monkeypatch.setattr(curves, "draw", keep)
    families = [f"a family with a long name, number {index}" for index in range(amount)]
    points = [Point(family, 3.0 * 1.2**index, 10.0 ** -(index % 5), 0.001, "", joined=True) for index, family in enumerate(families)]
    references = [Reference("dense", 0.1, False, ""), Reference("exact top-k", 0.2, True, "")]
    panel = Panel("a title", points, references, "error to exact top-k", y_log=True)
    draw_panels("name", "title", "description", "origin", [panel] * panels, family_styles(families))
    [figure] = drawn
    [legend] = figure.legends
    box = legend.get_window_extent()
    whole = figure.bbox
    assert len(legend.get_texts()) == amount + 2
    shown = {" ".join(text.get_text().split()) for text in legend.get_texts()}
    assert shown == {"dense", "exact top-k", *families}, "every entry is whole, on two lines where it is long"
    assert box.y0 >= whole.y0 - 1
    assert box.x1 <= whole.x1 + 1
    boxes = [axes.get_tightbbox() for axes in figure.axes]
    assert all(found is not None and not Bbox.intersection(box, found) for found in boxes)
    if panels == 2:
        left, right = boxes
        assert left is not None
        assert right is not None
        assert left.x1 <= right.x0, "labels of the right panel's axis stand beside the left panel"
    labels = [tick.get_window_extent() for tick in figure.axes[0].get_xticklabels() if tick.get_text()]
    assert all(before.x1 < after.x0 for before, after in pairwise(labels))


def canvas_parameters() -> Any:
    """The settings that figures are drawn with."""
    from matplotlib import rc_context

    return rc_context(canvas._PARAMETERS)
