"""Step agreement against scan bits, one figure a k."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from fathom_eval.reports.cells import Cell
from fathom_eval.reports.cells import Method as ScoredMethod
from fathom_eval.reports.cells import Role as ScoredRole
from fathom_eval.reports.figures import Drawing, family_styles, render_cells
from fathom_eval.reports.session_cells import Role, SessionCell
from fathom_eval.reports.sessions import SessionSource
from fathom_eval.reports.source import fact

_ROLES = {Role.DENSE: ScoredRole.DENSE, Role.EXACT: ScoredRole.EXACT, Role.SCAN: ScoredRole.SCAN}


def draw_sessions(sources: Sequence[SessionSource]) -> dict[str, list[Drawing]]:
    """The figures of every run, by run name: one a k that has scans with known bits."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        styles = family_styles([cell.method.family for source in sources for cell in source.cells if cell.method.role is Role.SCAN])
        drawings: dict[str, list[Drawing]] = {}
        for index, source in enumerate(sources, start=1):
            prefix = f"run{index}-" if len(sources) > 1 else ""
            model = fact(source.run.manifest, "model") or "an unnamed model"
            drawings[source.name] = []
            for k in source.k_values:
                cells = [_scored(cell) for cell in source.cells if cell.k == k and cell.method.role in _ROLES]
                if not any(cell.method.role is ScoredRole.SCAN and cell.bits is not None and cell.score is not None for cell in cells):
                    continue
                title = f"agent sessions, k = {k:,}"
                description = (
                    f"Step agreement with exact top-k against scan bits per token at k = {k:,}. The numbers are in the table above."
                )
                drawn = render_cells(cells, title, f"{model}, run {source.name}", styles, "agreement with exact top-k")
                drawings[source.name].append(Drawing(f"{prefix}agreement-k{k}", title, description, *drawn))
    return drawings


def _scored(cell: SessionCell) -> Cell:
    """The cell as the figures take it: agreement is its score."""
    method = cell.method
    return Cell(
        task="session",
        context=0,
        k=None if method.role is Role.DENSE else cell.k,
        method=ScoredMethod(method.name, method.options, method.label, method.family, _ROLES[method.role]),
        samples=cell.sessions,
        expected=cell.expected,
        failures=cell.failures,
        score=cell.agreement,
        standard_error=cell.standard_error,
        dense_score=None,
        exact_score=None,
        against_exact=None,
        against_dense=None,
        bits=cell.bits,
        declared_bits=None,
        active_channels=None,
        rows=cell.rows,
        head_dim=None,
        notes=(),
    )
