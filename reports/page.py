"""The HTML page: everything in one file, nothing fetched, every text escaped, and one script that the page names by its hash."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from fathom_eval import __version__
from fathom_eval.reports.canvas import inline
from fathom_eval.reports.document import Block, Document, Drawing, Steps, Table

MAX_LISTED = 200
"""Lines of a list on the page; a file beside it has them all."""
SHOWN_GAPS = 10
"""Of what a run lacks, the worst first; the rest is folded away."""
MAX_DRAWN_BYTES = 900_000
"""Of the figures on the page; those beyond stay in their files, and the page says so."""

_TEMPLATES = Path(__file__).parent / "templates"


def render(document: Document, data_files: Sequence[str]) -> str:
    """The page of a report as one HTML document."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["groups"] = _groups
    script = (_TEMPLATES / "page.js").read_text(encoding="utf-8")
    glossaries = {section.kind: section.glossary for section in document.sections}
    return environment.get_template("page.html").render(
        document=document,
        several=len(document.sections) > 1,
        glossaries=list(glossaries.items()),
        data_files=data_files,
        version=__version__,
        max_listed=MAX_LISTED,
        shown_gaps=SHOWN_GAPS,
        # matplotlib escaped every text within a drawing, and the script is the package's own.
        inlined={name: Markup(svg) for name, svg in _inlined(document.drawings).items()},
        steps_json=lambda steps: Markup(_json(steps)),
        script=Markup(script),
        script_hash="sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _inlined(drawings: Sequence[Drawing]) -> dict[str, str]:
    found: dict[str, str] = {}
    size = 0
    for index, drawing in enumerate(drawings):
        svg = inline(drawing, f"d{index}")
        size += len(svg)
        if size > MAX_DRAWN_BYTES:
            break
        found[drawing.name] = svg
    return found


def _groups(block: Block) -> list[dict[str, Any]]:
    """The items in order, neighbouring figures together."""

    def kind(item: object) -> str:
        return "figures" if isinstance(item, Drawing) else "table" if isinstance(item, Table) else "steps"

    found: list[dict[str, Any]] = []
    for name, members in groupby(block.items, kind):
        items = list(members)
        found += [{"kind": name, "items": items}] if name == "figures" else [{"kind": name, "items": [item]} for item in items]
    return found


def _json(steps: Steps) -> str:
    """JSON that no text in it can end the element of."""
    text = json.dumps(steps.sessions, ensure_ascii=False, separators=(",", ":"))
    for character in ("<", ">", "&", "\u2028", "\u2029"):
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
