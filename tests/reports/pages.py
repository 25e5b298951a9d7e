"""What a test wants to know of a page and of the files beside it."""

from __future__ import annotations

import base64
import csv
import hashlib
import io
import re
from html.parser import HTMLParser
from pathlib import Path

from fathom_eval.reports import ReportFiles


class Page(HTMLParser):
    """Tags, ids and text of a page; the text leaves out scripts and styles."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.source = source
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self._silent = False
        self.feed(source)
        self.ids = [attributes["id"] for _, attributes in self.tags if "id" in attributes]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._silent = tag in ("script", "style")
        if tag == "script":
            self.scripts.append((dict(attrs), ""))

    def handle_endtag(self, tag: str) -> None:
        self._silent = False
        if tag in ("th", "td", "p", "li", "dd"):
            self.text += " "

    def handle_data(self, data: str) -> None:
        if self._silent:
            if self.scripts and self.tags[-1][0] == "script":
                attributes, before = self.scripts[-1]
                self.scripts[-1] = (attributes, before + data)
        else:
            self.text += data

    @property
    def words(self) -> str:
        """The text with single spaces."""
        return " ".join(self.text.split())

    def check(self) -> None:
        """Nothing is fetched, every link leads somewhere, and the only script is the one that the policy names by its hash."""
        assert len(self.ids) == len(set(self.ids))
        assert not {tag for tag, _ in self.tags} & {"iframe", "object", "embed", "img", "form"}
        for tag, attributes in self.tags:
            assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
            for name in ("src", "href", "xlink:href", "action", "data"):
                address = attributes.get(name)
                if address is not None:
                    assert address.startswith(("#", "data:,")), (tag, address)
                    assert not address.startswith("#") or address[1:] in self.ids, address
        assert set(re.findall(r"url\((.*?)\)", self.source)) <= {f"#{name}" for name in self.ids}
        running = [text for attributes, text in self.scripts if attributes.get("type") != "application/json"]
        assert len(running) == 1
        digest = base64.b64encode(hashlib.sha256(running[0].encode()).digest()).decode()
        [policy] = [one["content"] for _, one in self.tags if one.get("http-equiv") == "Content-Security-Policy"]
        assert policy is not None
        assert policy.startswith("default-src 'none'")
        assert f"script-src 'sha256-{digest}'" in policy


def read_page(files: ReportFiles) -> Page:
    """The page of a report."""
    return Page(files.html.read_text(encoding="utf-8"))


def data(files: ReportFiles, name: str) -> list[dict[str, str]]:
    """The rows of one of the files of unrounded results."""
    [path] = [path for path in files.data if path.name == name]
    return rows_of(path)


def table(files: ReportFiles, name: str) -> list[dict[str, str]]:
    """The rows of one table."""
    [path] = [path for path in files.tables if path.stem == name]
    return rows_of(path)


def rows_of(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file."""
    return list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))


def every_file(files: ReportFiles) -> set[Path]:
    """All files that a report says it wrote."""
    return {files.html, files.markdown, files.latex, files.list, *files.data, *files.tables, *files.figures}
