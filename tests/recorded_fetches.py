"""Earlier sweeps of fetches of rows, and the tables that the document of the runtime makes of them."""

from __future__ import annotations

from tests.recorded_steps import lines_of, row


def rate(pages: str, at_once: int, programs: int, order: str, name: str) -> float:
    (found,) = (
        line["gb_s"]
        for line in lines_of("rows.jsonl")
        if (line["host_pages"], line["rows_at_once"], line["programs"], line["order"], line["name"])
        == (pages, at_once, programs, order, name)
    )
    return float(found)


def fetches() -> list[str]:
    """Rates of fetches in one setting, by pages."""
    places = ("again", "one layer", "layers", "after a scan", "scan")
    return [
        row((pages, order, programs or "all", *(f"{rate(pages, 8, programs, order, place):.1f}" for place in places)))
        for pages in ("small", "single", "driver")
        for order, programs in (("runs", 0), ("ascending", 0), ("ascending", 132))
    ]


def huge() -> list[str]:
    """Huge pages against small ones: an earlier sweep."""
    found = {
        (line["host_pages"], line["place"]): line["gb_s"]
        for line in lines_of("rows-huge.jsonl")
        if (line["rows_a_program"], line["order"]) == (8, "ascending")
    }
    places = ("same rows again", "one layer", "5 layers")
    return [row((pages, *(f"{found[pages, place]:.1f}" for place in places))) for pages in ("small", "huge")]
