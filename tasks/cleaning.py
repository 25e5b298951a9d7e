"""Raw text → sentences.

Every function returns sentences that carry the whitespace before them (one space, or a line break where a paragraph
starts, or nothing), so that ``"".join(sentences)`` is the cleaned text and every boundary between two of them is a place
where a needle can go.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

LONGEST_SENTENCE = 1000
"""Characters. A longer run without a sentence end (a log, a table) is cut at whitespace, so that needles have places."""
_PIECE = 300

_ABBREVIATION = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|St|Prof|Sr|Jr|vs|cf|e\.g|i\.e|etc|al|Fig|No|Vol)|(?:^|[\s.])[A-Z])\.$")
_SENTENCE_END = re.compile(r"[.!?][\"')\]”’]*(?=\s+[\"'(\[“‘]?[^\sa-z])|[。！？][”’」』]*")
_RAW_SENTENCE_END = re.compile(r"\s[.!?]+(?:\s?\")?(?=\s|$)")
_HEADING = re.compile(r"^(?:= )+\S.*\S(?: =)+$|^(?:= )+\S(?: =)+$")
_SPACED_MARKS = (
    (re.compile(r" ?@([-.,])@ ?"), r"\1"),
    (re.compile(r"\" ([^\"]*?) \""), r'"\1"'),
    (re.compile(r" ([.,;:!?%)\]])"), r"\1"),
    (re.compile(r"([(\[$£€]) "), r"\1"),
    (re.compile(r" ('(?:s|re|ve|ll|d|m|t)\b)"), r"\1"),
    (re.compile(r"(\w) n't\b"), r"\1n't"),
    (re.compile(r"(s) ' "), r"\1' "),
    (re.compile(r"(\w) / (\w)"), r"\1/\2"),
)


def plain_sentences(text: str) -> tuple[str, ...]:
    """Sentences of running text; a blank line ends a paragraph and single line breaks are spaces."""
    paragraphs = (" ".join(block.split()) for block in re.split(r"\n[^\S\n]*\n", text))
    return _join(_split(paragraph, _SENTENCE_END) for paragraph in paragraphs)


def is_wikitext(text: str) -> bool:
    """Whether ``text`` is in the raw WikiText form: it has joined marks (``@-@``) or set-off headings (`` = Title = ``)."""
    lines = text.split("\n")
    return any(mark in text for mark in (" @-@ ", " @,@ ", " @.@ ")) or any(is_heading(lines, row) for row in range(len(lines)))


def is_heading(lines: list[str], row: int) -> bool:
    """Whether line ``row`` is a heading: ``= … =``, one blank line before and after (an equation has neither)."""
    if not _HEADING.match(lines[row].strip()):
        return False
    before, after = row == 0 or not lines[row - 1].strip(), row + 1 >= len(lines) or not lines[row + 1].strip()
    return before and after


def wikitext_sentences(text: str) -> tuple[str, ...]:
    """Sentences of raw WikiText: headings left out, ``@-@`` and its like joined, spaced punctuation closed up."""
    lines = text.split("\n")
    paragraphs: list[str] = []
    continues = False
    for row, line in enumerate(lines):
        line = " ".join(line.split())
        if not line or line == "<formula>" or is_heading(lines, row):
            continues = continues and line == "<formula>"
            continue
        if continues:
            paragraphs[-1] += f" {line}"
        else:
            paragraphs.append(line)
        # A line that breaks off before its sentence ends is a paragraph cut by a formula: the next line goes on with it.
        continues = not re.search(r"[.!?:;\"]$", line)
    return _join([_close_up(sentence) for sentence in _split(paragraph, _RAW_SENTENCE_END)] for paragraph in paragraphs)


def documentation_sentences(topics: Mapping[str, str]) -> tuple[str, ...]:
    """Sentences of reference pages in text form (``pydoc_data.topics``).

    Titles, grammars, code, tables and signatures are left out, markup is dropped, and a paragraph that several pages
    share is taken once.
    """
    seen: set[str] = set()
    paragraphs: list[list[str]] = []
    for name in sorted(topics):
        for block in re.split(r"\n\s*\n|\n(?=\s*(?:\*|\d+\.|-)\s)", topics[name]):
            paragraph = _documentation_paragraph(block)
            if paragraph and paragraph not in seen:
                seen.add(paragraph)
                paragraphs.append(_split(paragraph, _SENTENCE_END))
    return _join(paragraphs)


def _documentation_paragraph(block: str) -> str:
    """The block as prose, or nothing when it is not prose."""
    text = " ".join(re.sub(r"^\s*(?:\*|\d+\.|-)\s+", "", block).split())
    text = re.sub(r"(?<![\w*])(\*{1,2})([^\s*](?:[^*]*[^\s*])?)\1(?![\w*])", r"\2", text)
    text = re.sub(r"\s*\[\d+\](?=[\s.,;:)]|$)", "", text)
    if text.endswith(":"):
        text = f"{text[:-1]}."
    words = text.split(" ")
    prose = sum(re.fullmatch(r"[\"'(“‘]*[A-Za-z][A-Za-z'’-]*[\"')”’.,;:!?]*", word) is not None for word in words)
    is_prose = len(words) >= 6 and prose >= 0.75 * len(words) and re.search(r"[.!?][\"')”’]*$", text) and text[0] in _OPENERS
    return text if is_prose and not re.search(r"::=|>>>|\*{3}|={3}|-{3}|[|]", text) else ""


_OPENERS = frozenset("ABCDEFGHIJKLMNOPQRSTUVWXYZ\"'(“‘")


def _close_up(sentence: str) -> str:
    for pattern, replacement in _SPACED_MARKS:
        sentence = pattern.sub(replacement, sentence)
    return sentence


def _split(paragraph: str, end: re.Pattern[str]) -> list[str]:
    """Cut a paragraph (single-spaced) after every sentence end; the pieces keep the space before them."""
    pieces, start = [], 0
    for match in end.finditer(paragraph):
        if not _ABBREVIATION.search(paragraph, max(0, match.end() - 8), match.end()):
            pieces.append(paragraph[start : match.end()])
            start = match.end()
    pieces.append(paragraph[start:])
    return [part for piece in pieces if piece.strip() for part in _cut_overlong(piece)]


def _cut_overlong(sentence: str) -> list[str]:
    if len(sentence) <= LONGEST_SENTENCE:
        return [sentence]
    return re.findall(rf".{{1,{_PIECE}}}(?=\s|$)|.{{1,{_PIECE}}}", sentence, flags=re.DOTALL)


def _join(paragraphs: Iterable[list[str]]) -> tuple[str, ...]:
    """All sentences in order; the first of every paragraph but the first starts with a line break."""
    sentences: list[str] = []
    for paragraph in paragraphs:
        for position, sentence in enumerate(paragraph):
            sentences.append(f"\n{sentence.lstrip()}" if position == 0 and sentences else sentence)
    return tuple(sentences)
