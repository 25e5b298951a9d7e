"""Tables as CSV, Markdown and LaTeX: unrounded numbers, and text that none of them acts on."""

from __future__ import annotations

import csv
import io

import pytest

from fathom_eval.reports.document import Column, Entry, Row, Table, difference, entry
from fathom_eval.reports.wording import significant, spread
from fathom_eval.reports.writing import latex_safe, latex_table, markdown_table, table_csv

TABLE = Table(
    "scores",
    "Scores",
    "run a · model_b · 100 %",
    (Column("method"), Column("score"), Column("2,048", "0.0–0.2"), Column("change"), Column("notes", text=True)),
    (
        Row((Entry("a_b | c"), entry(1 / 3, error=0.01), entry(None), difference(-0.25, -0.5, 0.125), Entry("=1+1"))),
        Row((Entry("d"), entry(0.5), entry(0.25), difference(0.5, float("nan"), float("nan")), Entry())),
    ),
)


def test_csv_has_numbers_unrounded_and_their_errors_and_bounds() -> None:
    first, second = csv.DictReader(io.StringIO(table_csv(TABLE)))
    assert list(first) == ["method", "score", "score standard error", "2,048 0.0–0.2", "change", "change low", "change high", "notes"]
    assert (first["score"], first["score standard error"], first["2,048 0.0–0.2"]) == (str(1 / 3), "0.01", "")
    assert (first["change"], first["change low"], first["change high"], first["notes"]) == ("-0.25", "-0.5", "0.125", "'=1+1")
    assert (second["score standard error"], second["change low"]) == ("", "")


def test_markdown_and_latex_show_text_as_it_is() -> None:
    assert markdown_table(TABLE)[2] == r"| a_b \| c | 0.333 ± 0.010 | – | −0.250 \[−0.500, +0.125\] | =1+1 |"
    text = latex_table(TABLE)
    assert r"a\_b | c & 0.333 $\pm$ 0.010 & -- & $-$0.250 [$-$0.500, +0.125] & =1+1 \\" in text
    assert r"\caption{Scores. run a · model\_b · 100 \%.}" in text
    assert r"\begin{longtable}{lrrrl}" in text
    assert latex_safe("\\input{x}$&#%~^") == r"\textbackslash{}input\{x\}\$\&\#\%\textasciitilde{}\textasciicircum{}"
    assert "\x1b" not in latex_safe("\x1b[31mred")


@pytest.mark.parametrize(("first", "shown"), [("[a] b", "{[}a] b"), ("*x", "{*}x"), (" [c", "{[}c"), ("a [b]", "a [b]")])
def test_no_cell_is_taken_for_an_argument_of_the_line_break_before_it(first: str, shown: str) -> None:
    rows = (Row((Entry("before"), Entry("1"))), Row((Entry(first), Entry("[2]"))))
    text = latex_table(Table("t", "T", "run a", (Column(first), Column("score")), rows))
    assert f"\\toprule\n{shown} & score \\\\\n" in text
    assert f"before & 1 \\\\\n{shown} & [2] \\\\\n" in text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0000321, "0.0000321"), (0.05342, "0.0534"), (177.4, "177"), (1234.5, "1234"), (0.0, "0"), (None, "–"), (-0.25, "−0.250")],
)
def test_three_digits_that_count(value: float | None, text: str) -> None:
    assert significant(value) == text


def test_one_is_not_many() -> None:
    assert [spread(values, "window") for values in ([1], [1, 1], [3], [1, 3], [1200, 900], [])] == [
        "1 window", "1 window", "3 windows", "1 to 3 windows", "900 to 1,200 windows", "",
    ]  # fmt: skip
