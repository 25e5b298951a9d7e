"""Every wording of the tasks, once. ``VERSION`` is part of a run's identity: raise it with any change here."""

from __future__ import annotations

from dataclasses import dataclass

VERSION = "2"

NEEDLE = "One of the special magic numbers for {key} is: {value}."
FIRST_ASSIGNMENT = "VAR {name} = {value}."
LATER_ASSIGNMENT = "VAR {name} = VAR {source}."
WORD_SEPARATOR = ", "

LAYOUT = "{instruction}\n\n{context}\n\n{question}"
"""A prompt up to its answer prefix; a plain completion goes on with ``"\\n" + answer_prefix``."""


@dataclass(frozen=True)
class Wording:
    """The text around a context.

    The answer prefix ends right before the answer, without a trailing space. An answer of several parts is expected with
    ``separator`` between them: this counts for its length in tokens, not for its score. A prefix for several numbers ends
    in "the numbers" and not in a colon, which invites a numbered list: four of its lines are longer than the limit.
    """

    instruction: str
    question: str
    answer_prefix: str
    separator: str = ", "


NIAH_SINGLE = Wording(
    instruction="Here is a long text. A special magic number is hidden in it. Read it and remember the number.",
    question="What is the special magic number for {keys} in the text above?",
    answer_prefix="The special magic number for {keys} is:",
)
NIAH_MULTIKEY = Wording(
    instruction="Here is a long text. Special magic numbers are hidden in it. Read it and remember all the numbers.",
    question="What is the special magic number for {keys} in the text above?",
    answer_prefix="The special magic number for {keys} is:",
)
NIAH_MULTIVALUE = Wording(
    instruction="Here is a long text. Special magic numbers are hidden in it. Read it and remember all the numbers.",
    question="What are the {count} special magic numbers for {keys} in the text above?",
    answer_prefix="The {count} special magic numbers for {keys} are the numbers",
)
NIAH_MULTIQUERY = Wording(
    instruction="Here is a long text. Special magic numbers are hidden in it. Read it and remember all the numbers.",
    question="What are the special magic numbers for {keys} in the text above?",
    answer_prefix="The special magic numbers for {keys} are, in this order, the numbers",
)
VARIABLE_TRACKING = Wording(
    instruction="Here is a long text. Assignments of variables are hidden in it. Read it and follow the value of every variable.",
    question="Which {count} variables hold the value {value}, directly or through another variable?",
    answer_prefix="The {count} variables that hold the value {value} are VAR",
    separator=", VAR ",
)
FREQUENT_WORDS = Wording(
    instruction="Here is a list of made-up words. Some of them come up much more often than others. Count how often each word appears.",
    question="Which three different words come up most often in the list above?",
    answer_prefix="The three most frequent words, the most frequent one first, are:",
)

COUNTS = {1: "one", 4: "four"}
