"""Needle depth against context: which part of the haystack each method finds needles in."""

from __future__ import annotations

from collections import defaultdict

from fathom_eval.reports.cells import Method, Role
from fathom_eval.reports.document import Column, Entry, Item, Row, Table, entry
from fathom_eval.reports.grids import GridGroup, draw_grid
from fathom_eval.reports.ruler_source import Source
from fathom_eval.reports.wording import number, spread

BINS = 5
_ROLES = (Role.DENSE, Role.EXACT, Role.SCAN)


def depth_items(source: Source) -> list[Item]:
    """A heat map and its table for every k: methods × (context, depth), with the contexts of that k.

    Nothing where records do not say at what depth needles stand.
    """
    needles: dict[tuple[int | None, Method, int, int], list[bool]] = defaultdict(list)
    for point in source.points:
        for depth, hit in point.needles:
            needles[point.k, point.method, point.context, min(int(depth * BINS), BINS - 1)].append(hit)
    items: list[Item] = []
    contexts: dict[int | None, set[int]] = defaultdict(set)
    for k, _, context, _ in needles:
        contexts[k].add(context)
    # Dense stands beside the methods of every k at their contexts, and alone where there are none.
    contexts[None] -= set().union(*(found for k, found in contexts.items() if k is not None))
    for k in sorted(contexts, key=lambda k: (k is None, k or 0)):
        shown = {key[1:]: hits for key, hits in needles.items() if key[0] in (None, k) and key[2] in contexts[k]}
        items += _items(source, k, shown) if shown else []
    return items


def _items(source: Source, k: int | None, needles: dict[tuple[Method, int, int], list[bool]]) -> list[Item]:
    bits = {cell.method: cell.bits for cell in source.cells}
    methods = sorted(
        {method for method, _, _ in needles}, key=lambda method: (_ROLES.index(method.role), bits.get(method) or 0, method.label)
    )
    contexts = sorted({context for _, context, _ in needles})
    edges = [f"{number(index / BINS, 1)}–{number((index + 1) / BINS, 1)}" for index in range(BINS)]
    places = [(context, index) for context in contexts for index in range(BINS)]
    counts = [[needles.get((method, context, index), []) for context, index in places] for method in methods]
    values = [[sum(hits) / len(hits) if hits else None for hits in line] for line in counts]
    tips = [
        [
            f"{method.label}, {context:,} tokens, depth {edges[index]}: {sum(hits)} of {len(hits)} gold strings"
            for (context, index), hits in zip(places, line, strict=True)
        ]
        for method, line in zip(methods, counts, strict=True)
    ]
    name = "depth-dense" if k is None else f"depth-k{k}"
    at = "" if k is None else f", k = {k:,}"
    tasks = ", ".join(dict.fromkeys(point.task for point in source.points if point.needles))
    samples: dict[tuple[str, int], set[int]] = defaultdict(set)
    for point in source.points:
        if point.needles and point.context in contexts:
            samples[point.task, point.context].add(point.sample)
    where = f"{spread(contexts, 'token')}{at}"
    amount = f"{spread([len(found) for found in samples.values()], 'sample')} a task and context"
    origin = " · ".join(part for part in (f"run {source.name}", source.model, tasks, where, ", ".join(source.devices), amount) if part)
    title = f"Found by needle depth{at}"
    groups = [GridGroup(f"{context:,} tokens", edges) for context in contexts]
    labels = [method.label for method in methods]
    description = f"Heat map of the share of gold strings found by depth of the needle and context{at}. The numbers are in the table below."
    drawing = draw_grid(name, title, description, origin, labels, groups, values, tips, "depth of the needle in the haystack")
    columns = (Column("method"), *(Column(f"{context:,}", edges[index]) for context, index in places))
    rows = tuple(
        Row(
            (
                Entry(method.label),
                *(entry(value, 3, small=(f"{sum(hits)} of {len(hits)}",)) for value, hits in zip(line, hit_lists, strict=True)),
            ),
            control=method.role is not Role.SCAN,
        )
        for method, line, hit_lists in zip(methods, values, counts, strict=True)
    )
    table = Table(name, f"{title}: numbers", origin, columns, rows, "columns: tokens of context and depth", collapsed=True)
    return [drawing, table]
