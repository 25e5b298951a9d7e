from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom_eval.tasks.cleaning import (
    LONGEST_SENTENCE,
    documentation_sentences,
    is_wikitext,
    plain_sentences,
    wikitext_sentences,
)

WIKITEXT_FILE = Path(__file__).resolve().parents[3] / "shared" / "data" / "wikitext" / "wiki.test.raw"

WIKITEXT = "\n".join(
    (
        " ",
        " = Half @-@ section filters = ",
        " ",
        ' The cut @-@ off is 1 @,@ 500 Hz , or 1 @.@ 5 kHz ( roughly ) . It \'s called " k " . ',
        " ",
        " = = Prototype = = ",
        " ",
        " It has a cut @-@ off frequency of ωc ",
        " = 1 rad / s and a nominal impedance k = ",
        " 1 Ω . It scales . ",
        " <formula> ",
        " ",
        " = = = Notes = = = ",
        " ",
        " Mr. Zobel named it in the U.S. in 1920 . ",
        "",
    )
)


def test_wikitext_reads_as_prose():
    assert wikitext_sentences(WIKITEXT) == (
        "The cut-off is 1,500 Hz, or 1.5 kHz (roughly).",
        ' It\'s called "k".',
        "\nIt has a cut-off frequency of ωc = 1 rad/s and a nominal impedance k = 1 Ω.",
        " It scales.",
        "\nMr. Zobel named it in the U.S. in 1920.",
    )


def test_wikitext_form_is_recognised():
    assert is_wikitext(WIKITEXT)
    assert is_wikitext("\n = Title = \n\nText .\n")
    assert not is_wikitext("A sum is written\nx = y =\nz in that book. Write to me@home.example.")


@pytest.mark.skipif(not WIKITEXT_FILE.is_file(), reason="the WikiText test file is not here")
def test_real_wikitext_has_no_headings_and_keeps_both_equations():
    raw = WIKITEXT_FILE.read_text(encoding="utf-8")
    sentences = wikitext_sentences(raw)
    text = "".join(sentences)
    assert "a cut-off frequency of ωc = 1 rad/s and a nominal impedance k = 1 Ω." in text
    assert "with inductance L = 1 henry and capacitance C = 1 farad." in text
    assert not any(mark in text for mark in ("@-@", "@.@", "@,@", "= =", " ,", " . "))
    headings = [line.strip(" =") for line in raw.split("\n") if line.startswith(" = ") and line.rstrip().endswith(" =")]
    assert headings[0] == "Robert Boulter"
    assert not {heading for heading in headings if heading.count(" ") < 6} & {sentence.strip() for sentence in sentences}
    assert sentences[0] == "Robert Boulter is an English film, television and theatre actor."
    assert len(sentences) > 9000
    assert max(map(len, sentences)) <= LONGEST_SENTENCE


def test_plain_text_paragraphs_and_sentences():
    text = 'One line\ngoes on. "Is it?" Yes!\n\n\nDr. A. B. Smith, e.g., paid 3.5 dollars.\n  \n第一句。第二句！'
    assert plain_sentences(text) == (
        "One line goes on.",
        ' "Is it?"',
        " Yes!",
        "\nDr. A. B. Smith, e.g., paid 3.5 dollars.",
        "\n第一句。",
        "第二句！",
    )


@pytest.mark.parametrize("text", ["x" * 5000, "word " * 2000, "0123456789abcdef\n" * 400])
def test_text_without_sentence_ends_still_has_places_for_needles(text: str):
    sentences = plain_sentences(text)
    assert len(sentences) > 10
    assert "".join(sentences) == " ".join(text.split())


@settings(deadline=None)
@given(st.text(max_size=300))
def test_plain_sentences_lose_nothing_but_whitespace(text: str):
    assert "".join("".join(plain_sentences(text)).split()) == "".join(text.split())


def test_documentation_keeps_prose_alone():
    topics = {
        "b": "Shared things\n*************\n\nThis *paragraph* stands in **two** of the pages at once [1].\n",
        "a": """The "with" statement
********************

A block is wrapped by the statement as follows:

   with_stmt ::= "with" expression ":" suite

   with open(name) as file:
       print(file.read())

* The first item of the list is evaluated once
  before all others.

1. Another item of the same list comes after it.

New in version 2.5.

+-----------+---------------+
| A table   | with the cells that hold nothing but words.  |
+-----------+---------------+

This *paragraph* stands in **two** of the pages at once [1].
""",
    }
    assert documentation_sentences(topics) == (
        "A block is wrapped by the statement as follows.",
        "\nThe first item of the list is evaluated once before all others.",
        "\nAnother item of the same list comes after it.",
        "\nThis paragraph stands in two of the pages at once.",
    )
