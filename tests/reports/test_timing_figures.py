"""Decode steps of several sessions and of several lanes: what their ratios are of, and what their figures show."""

from __future__ import annotations

import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from matplotlib import rc_context
from matplotlib.figure import Figure

from fathom_eval.reports import build_report, canvas
from fathom_eval.reports.canvas import draw
from fathom_eval.reports.wording import significant
from tests.reports.made_records import timing_records
from tests.reports.pages import read_page, table

WALL = "wall ms 10th to 90th percentile"


def lines(path: Path, records: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(map(json.dumps, records)) + "\n", encoding="utf-8")
    return path


def figure_of(files: Any, start: str) -> str:
    [path] = [path for path in files.figures if path.name.startswith(start) and path.suffix == ".svg"]
    return str(path.read_text(encoding="utf-8"))


def test_sessions_side_by_side_are_set_against_one_another_by_wall_time(tmp_path: Path) -> None:
    # The profiler slows Fathom's read by a tenth and landmarks not at all, so that the ratios of the two clocks differ.
    slowed = {"fathom 48": 1.1}
    steps = [
        {**record, "sessions": sessions, "gpu_ms": record["gpu_ms"] * (slowed.get(record["method"], 1.0) if sessions > 1 else 1.0)}
        for record in timing_records((131072,), ("host",))
        for sessions in (1, 2)
    ]
    files = build_report([lines(tmp_path / "steps.jsonl", steps)], tmp_path / "out")
    for name, clock in (("steps-host-b1-k512", "GPU ms"), ("steps-host-b1-k512-s2", WALL)):
        own = {row["method"]: row for row in table(files, name)}
        ratio = float(own["landmark"][clock]) / float(own["fathom 48"][clock])
        assert float(own["landmark"]["× Fathom"]) == pytest.approx(ratio)
    alone, double = table(files, "step-ratios")
    assert "2 sessions side by side" in double["setting"]
    assert double["landmark ÷ 256 bits"] == own["landmark"]["× Fathom"]
    assert float(double["step ÷ floor"]) == pytest.approx(float(own["fathom 48"][WALL]) / float(own["fathom 48"]["floor ms"]))
    assert float(alone["landmark ÷ 256 bits"]) == pytest.approx(ratio), "one session's two clocks give one ratio in these records"
    words = read_page(files).words
    assert f"{float(own['fathom 48'][WALL]):.1f} ms of wall-clock time" in words
    assert "of several sessions side by side ÷ and step ÷ floor are of wall times" in words
    assert words.count("GPU ms of sessions side by side are of a profiled run") == 1


@pytest.mark.parametrize(("sessions", "clock"), [(1, "GPU"), (2, "wall")])
def test_bars_of_kernels_side_by_side_mark_the_step_itself(sessions: int, clock: str, tmp_path: Path) -> None:
    steps = [
        {**record, "lanes": 2, "sessions": sessions, "gpu_sum_ms": 1.2 * record["gpu_ms"]}
        for record in timing_records((131072,), ("host",))
    ]
    files = build_report([lines(tmp_path / "steps.jsonl", steps)], tmp_path / "out")
    figure = figure_of(files, "parts-")
    own = {row["method"]: row for row in table(files, f"steps-host-b1-k512{'-s2' if sessions > 1 else ''}-l2")}
    assert f">the whole step, {clock} time<" in figure
    time = float(own["sparq 16"][WALL if clock == "wall" else "GPU ms"])
    assert f"<title>sparq 16: the whole step, {clock} time {significant(time)}</title>" in figure
    assert "<title>sparq 16: floor " in figure
    assert "the step's own time marked, which the bar exceeds" in unescape(files.html.read_text(encoding="utf-8"))
    alone = [{**record, "gpu_sum_ms": record["gpu_ms"]} for record in timing_records((131072,), ("host",))]
    files = build_report([lines(tmp_path / "alone.jsonl", alone)], tmp_path / "other")
    assert "the whole step" not in figure_of(files, "parts-")


def test_labels_of_bars_are_broken_into_lines_and_not_cut(tmp_path: Path) -> None:
    label = "fathom budget=32 basis=klt rerank=2.0 attend={}"
    steps = [
        {**record, "label": label.format("union" if record["method"] == "fathom 64" else "own")}
        for record in timing_records((131072,), ("host",))
        if record["method"] in ("fathom 48", "fathom 64")
    ]
    files = build_report([lines(tmp_path / "steps.jsonl", steps)], tmp_path / "out")
    shown = re.sub(r"<title>.*?</title>", "", figure_of(files, "parts-"))
    assert "attend=union" in shown
    assert "attend=own" in shown
    assert "…" not in shown


def test_a_long_title_is_set_so_small_that_the_frame_does_not_cut_it(tmp_path: Path) -> None:
    sizes = {}
    for name, rows in (("short", "gpu"), ("long", "both")):
        steps = [{**record, "rows_by": rows, "lanes": 4, "batch": 4} for record in timing_records((32768, 131072), ("host",))]
        files = build_report([lines(tmp_path / f"{name}.jsonl", steps)], tmp_path / name)
        [(size, title)] = re.findall(r"font-size: ([\d.]+)px[^>]*>(decode step[^<]*)<", figure_of(files, "step-"))
        sizes[name] = float(size)
        assert title.endswith("last lane" if rows == "both" else "4 lanes")
    assert sizes["short"] == 10
    assert 7 < sizes["long"] < 10


@pytest.mark.parametrize("words", [10, 14, 22])
def test_the_frame_cuts_no_title(words: int, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Figure] = []
    save = Figure.savefig

    def keep(figure: Figure, *args: Any, **options: Any) -> None:
        drawn.append(figure)
        save(figure, *args, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    draw("name", " ".join(["gathered"] * words), "description", "origin", (8.68, 4.0), lambda figure, tips: None)
    figure = drawn[0]
    figure.set_dpi(canvas._PARAMETERS["savefig.dpi"])
    title = figure.texts[0]
    with rc_context(canvas._PARAMETERS):
        assert title.get_window_extent().x1 <= figure.bbox.x1
    assert (title.get_fontsize() == 10) == (words == 10)
