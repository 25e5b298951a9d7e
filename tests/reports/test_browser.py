"""Pages of reports in a real browser: nothing logged, nothing fetched, links, sorting by keyboard, narrow screens, hostile text."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.reports import build_report
from tests.reports.browser import Browser, browser, find_browser
from tests.reports.made_records import fidelity_records, step_records, timing_records, write_run

MakeRecords = Callable[..., list[dict[str, Any]]]

PROGRAM = find_browser()
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="no Chromium: apt-get install chromium")

HOSTILE = (
    "<script>document.title='owned'</script></script><img src=x onerror=alert(1)> \x1b[31mred \u202egpj.exe\u2066 \u2028 ]]> "
    + "x" * 30_000
)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    assert PROGRAM is not None
    with browser(PROGRAM) as opened:
        yield opened


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory, make_records: MakeRecords) -> Path:
    """One page with a run of every kind."""
    folder = tmp_path_factory.mktemp("page")
    steps = folder / "steps.jsonl"
    steps.write_text("\n".join(map(json.dumps, timing_records())), encoding="utf-8")
    runs = [
        write_run(folder / "ruler", make_records(tasks=("vt", "fwe"), contexts=(2048, 4096), samples=6), kind="ruler"),
        write_run(folder / "error", fidelity_records(ks=(64,), windows=6), kind="fidelity"),
        write_run(folder / "agents", step_records(text="I run the tests."), kind="sessions"),
        steps,
    ]
    return build_report(runs, folder / "out").html


def test_a_page_of_every_kind_logs_nothing_fetches_nothing_and_its_links_work(chromium: Browser, page: Path) -> None:
    chromium.console.clear()
    chromium.requests.clear()
    chromium.view(1200)
    chromium.open(page)
    assert chromium.console == []
    assert set(chromium.requests) == {page.resolve().as_uri()}
    links = chromium.evaluate("Array.from(document.querySelectorAll('a'), (link) => link.getAttribute('href').slice(1))")
    assert len(links) > 15
    assert chromium.evaluate(f"{json.dumps(links)}.filter((id) => !document.getElementById(id))") == []
    # Following one brings its heading to the top.
    chromium.evaluate("document.querySelectorAll('nav a')[4].click()")
    chromium.wait("Math.abs(document.getElementById(location.hash.slice(1)).getBoundingClientRect().top) < 3")
    # A link to a step opens it, and the two steps stand beside one another with the first difference framed.
    chromium.open(page, "run-3-steps-0-0-2")
    chromium.wait("document.querySelectorAll('.pair pre').length === 2")
    marks = chromium.evaluate("Array.from(document.querySelectorAll('.pair mark.first'), (mark) => mark.textContent)")
    assert marks == [" exact", " fathom budget=48"]
    assert chromium.evaluate("document.querySelectorAll('figure svg title').length") > 50
    assert chromium.console == []


@pytest.mark.parametrize("width", [400, 1200])
@pytest.mark.parametrize("dark", [False, True])
def test_no_width_or_scheme_makes_the_page_scroll_sideways_or_unreadable(chromium: Browser, page: Path, width: int, dark: bool) -> None:
    chromium.view(width, dark=dark)
    chromium.open(page)
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    colours = "[getComputedStyle(document.body).color, getComputedStyle(document.body).backgroundColor]"
    text, ground = (_luminance(colour) for colour in chromium.evaluate(colours))
    assert (max(text, ground) + 0.05) / (min(text, ground) + 0.05) > 7
    assert (ground < text) is dark
    quiet = chromium.evaluate("getComputedStyle(document.querySelector('.legend')).color")
    assert (max(_luminance(quiet), ground) + 0.05) / (min(_luminance(quiet), ground) + 0.05) > 4.5


def _luminance(colour: str) -> float:
    parts = [int(part) / 255 for part in colour[4:-1].split(",")]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_words_that_differ_are_told_by_lines_that_can_be_seen(chromium: Browser, page: Path, dark: bool) -> None:
    chromium.view(1200, dark=dark)
    chromium.open(page, "run-3-steps-0-0-2")
    chromium.wait("document.querySelectorAll('.pair pre').length === 2")
    facts = (
        "Array.from(document.querySelectorAll('.pair mark.first'), (mark) => { const s = getComputedStyle(mark);"
        " return [s.textDecorationLine, s.textDecorationStyle, s.textDecorationColor, s.color, s.backgroundColor,"
        " parseFloat(s.textDecorationThickness)]; })"
    )
    left, right = chromium.evaluate(facts)
    # Two kinds of line, so that nobody has to see a colour to tell the sides apart.
    assert (left[:2], right[:2]) == (["underline", "solid"], ["underline", "dashed"])
    for _, _, line, text, ground, thickness in (left, right):
        assert contrast(line, ground) >= 4.5
        assert contrast(text, ground) >= 7
        assert thickness >= 1.5


def contrast(one: str, other: str) -> float:
    """The ratio of WCAG between two colours."""
    a, b = _luminance(one), _luminance(other)
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)


def test_tables_sort_by_keyboard_and_say_so(chromium: Browser, page: Path) -> None:
    chromium.view(1200)
    chromium.open(page)
    column = "Array.from(document.querySelector('table[data-sort] thead').rows[0].cells).findIndex((c) => c.textContent.startsWith('bits'))"
    index = chromium.evaluate(column)
    cells = (
        f"Array.from(document.querySelector('table[data-sort]').tBodies[0].rows, (row) => row.cells[{index}].firstChild?.textContent ?? '')"
    )
    heading = f"document.querySelector('table[data-sort] thead').rows[0].cells[{index}]"
    chromium.evaluate(f"{heading}.querySelector('button').focus()")
    chromium.press("Enter")
    rising = [text for text in chromium.evaluate(cells) if text]
    assert chromium.evaluate(f"{heading}.getAttribute('aria-sort')") == "ascending"
    assert [float(text) for text in rising] == sorted(float(text) for text in rising)
    chromium.press("Enter")
    assert chromium.evaluate(f"{heading}.getAttribute('aria-sort')") == "descending"
    falling = chromium.evaluate(cells)
    assert [text for text in falling if text] == rising[::-1]
    assert falling[-2:] == ["", ""], "rows without a value stay below"
    # Tab goes on to the next heading, whose button shows that it has the focus.
    chromium.press("Tab")
    assert chromium.evaluate(f"document.activeElement.parentNode === {heading}.nextElementSibling")


def test_hostile_text_is_shown_as_text(chromium: Browser, tmp_path: Path, make_records: MakeRecords) -> None:
    records = make_records(tasks=(HOSTILE[:200],), samples=2)
    for record in records:
        if record["method"] == "sparq":
            record.update(label=HOSTILE[:300] + str(record["options"]["r"]), family=HOSTILE[:80])
        if record["method"] == "loki":
            record.update(finish="error", error=HOSTILE)
    ruler = write_run(tmp_path / "ruler", records, kind="ruler", model=HOSTILE[:100])
    changes = {"repo": HOSTILE[:90], "sources": [{"trajectory": HOSTILE, "tokens": 5, "whole": False}]}
    agents = write_run(tmp_path / "agents", step_records(text=HOSTILE, sessions=2, **changes), kind="sessions")
    html = build_report([ruler, agents], tmp_path / "out").html
    chromium.console.clear()
    chromium.requests.clear()
    chromium.view(400)
    chromium.open(html, "run-2-steps-0-0-2")
    chromium.wait("document.querySelectorAll('.pair pre').length === 2")
    assert chromium.evaluate("document.title").startswith("fathom-eval: ")
    assert chromium.evaluate("document.querySelectorAll('img, iframe, script:not([type]) ~ script').length") == 0
    shown = chromium.evaluate("document.querySelector('.pair pre').textContent")
    assert "<script>document.title='owned'</script>" in shown
    assert "[U+202E]gpj.exe" in shown
    assert "x" * 30_000 in shown
    assert not set(chromium.evaluate("document.documentElement.textContent")) & set("\x1b\u202e\u2066\u2028")
    assert chromium.evaluate("document.documentElement.scrollWidth") <= 400
    assert chromium.console == []
    assert set(chromium.requests) == {f"{html.resolve().as_uri()}"}
