"""Reports: tables, figures and one self-contained HTML page made from the records of runs.

:func:`~fathom_eval.reports.build.build_report` writes a report; :func:`~fathom_eval.reports.tables.summary_table` is the table that a run
prints at its end. Both need pandas, so this package imports them on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fathom_eval.reports.build import ReportFiles, build_report
    from fathom_eval.reports.tables import summary_table

__all__ = ["ReportFiles", "build_report", "summary_table"]


def __getattr__(name: str) -> Any:
    if name in ("ReportFiles", "build_report"):
        from fathom_eval.reports import build

        return getattr(build, name)
    if name == "summary_table":
        from fathom_eval.reports.tables import summary_table

        return summary_table
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
