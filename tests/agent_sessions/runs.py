"""Runs of sessions: the methods compared in them, their records, and the sessions that trajectories give."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from fathom_eval.run import Run
from fathom_eval.session_data import SessionData, SourceSettings, prepare_sessions

METHODS = "fathom,sparq,landmark"


def records(folder: Path) -> list[dict[str, Any]]:
    return Run.load(folder).records()


def by_branch(folder: Path) -> dict[Any, dict[str, Any]]:
    return {(record["sample"], record["label"], record["k"]): record for record in records(folder)}


def data_of(loaded: Any, trajectories: Path, **changes: Any) -> SessionData:
    settings = SourceSettings(str(trajectories), "auto", sessions=9, low=500, high=700)
    return prepare_sessions(loaded, dataclasses.replace(settings, **changes))
