"""Runs beside one another: what was measured in several of them, what changed, and in which facts they differ."""

from __future__ import annotations

from collections.abc import Sequence

from fathom_eval.reports.cells import MINIMUM_PAIRS
from fathom_eval.reports.decoding import decoding_difference
from fathom_eval.reports.document import Block, Column, Entry, Measure, Row, Section, Table, difference, entry
from fathom_eval.reports.facts import differing_facts
from fathom_eval.reports.wording import join
from fathom_eval.stats import paired_difference

_MAX_ONLY = 12
_Key = tuple[str, str, str, str]


def comparison_blocks(sections: Sequence[Section]) -> list[Block]:
    """One block for every run after the first of its kind, set against that first one; and the facts in which runs differ."""
    blocks = []
    for kind in dict.fromkeys(section.kind for section in sections):
        first, *others = [section for section in sections if section.kind == kind]
        blocks += [_block(first, other) for other in others]
    differing = differing_facts([section.manifest for section in sections])
    if differing:
        columns = (Column("fact"), *(Column(section.name, text=True) for section in sections))
        rows = tuple(Row((Entry(name), *(Entry(text) for text in texts))) for name, texts in differing)
        origin = ", ".join(f"run {section.name}" for section in sections)
        table = Table("differences", "Facts in which the runs differ", origin, columns, rows)
        blocks.append(Block("differences", "What differs between the runs", [table]))
    return blocks


def _block(first: Section, other: Section) -> Block:
    same = bool(first.identity) and first.identity == other.identity
    before, after = _by_key(first.measures), _by_key(other.measures)
    rows = [_row(before[key], after[key], same) for key in before if key in after]
    text = _words(first, other, same, list(before), list(after))
    columns = (
        Column("method"),
        Column("where", text=True),
        Column("quantity", text=True),
        Column(first.name),
        Column(other.name),
        Column("change"),
        Column("pairs"),
    )
    legend = (
        f"change: {other.name} minus {first.name}, paired by sample with a 95 % bootstrap interval where both runs have one identity; "
        "coloured where that interval excludes zero and there are pairs enough"
    )
    origin = f"run {first.name} ({_where(first)}) and run {other.name} ({_where(other)})"
    name = f"change-{first.anchor}-{other.anchor}"
    table = Table(name, f"{other.name} against {first.name}", origin, columns, tuple(rows), legend)
    return Block(name, f"What changed from {first.name} to {other.name}", [table] if rows else [], text)


def _where(section: Section) -> str:
    return ", ".join(part for part in (section.model, section.device) if part)


def _by_key(measures: Sequence[Measure]) -> dict[_Key, Measure]:
    return {(measure.where, measure.quantity, measure.method, measure.over): measure for measure in measures}


def _row(before: Measure, after: Measure, same: bool) -> Row:
    shared = sorted((sample for sample in after.samples if sample in before.samples), key=repr) if same else []
    digits = before.decimals
    pairs = Entry()
    if shared:
        found = paired_difference([after.samples[sample] for sample in shared], [before.samples[sample] for sample in shared], seed=0)
        enough = found.n >= MINIMUM_PAIRS
        style = "differs" if enough and (found.high < 0 or found.low > 0) else ""
        change = difference(found.mean, found.low, found.high, digits, style=style)
        pairs = Entry(f"{found.n}", found.n)
    else:
        change = difference(after.value - before.value, None, None, digits)
    own = [entry(measure.value, digits, error=measure.error) for measure in (before, after)]
    return Row((Entry(after.method), Entry(after.where), Entry(after.quantity), *own, change, pairs))


def _words(first: Section, other: Section, same: bool, before: Sequence[_Key], after: Sequence[_Key]) -> str:
    if same:
        text = "Both runs have one identity: model, tokenizer, data, seed and protocol. Their samples are paired."
    else:
        names = [
            name.removeprefix("identity.") for name, _ in differing_facts([first.manifest, other.manifest]) if name.startswith("identity.")
        ]
        reason = decoding_difference(names, [(section.name, section.manifest) for section in (first, other)])
        reason = reason or (f"They differ in {join(names)}." if names else "At least one of them records none.")
        text = f"The identities of the runs do not match. {reason} Nothing is averaged or paired; values stand side by side."
    for own, theirs, section in ((before, after, first), (after, before, other)):
        methods = {key[2] for key in theirs}
        only = list(dict.fromkeys(key[2] for key in own if key[2] not in methods))
        if only:
            more = f" and {len(only) - _MAX_ONLY} more" if len(only) > _MAX_ONLY else ""
            text += f" Only in {section.name}: {join(only[:_MAX_ONLY])}{more}."
    if not set(before) & set(after):
        text += " They have no method, task, context and k in common."
    return text
