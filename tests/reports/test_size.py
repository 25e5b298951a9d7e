"""How large a page gets, and how long a report of many records takes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.reports import build_report
from tests.reports.made_records import step_records, write_run


def test_forty_sessions_of_fifteen_methods_stay_under_two_megabytes_with_every_step(tmp_path: Path) -> None:
    words = random.Random(0)
    template = next(record for record in step_records(sessions=1) if record["method"] == "sparq")
    records = []
    for session in range(40):
        step = [f"word{words.randrange(2000)}" for _ in range(180)]
        for number in range(15):
            own = [word if words.random() > 0.3 else "other" for word in step]
            names: dict[str, Any] = {"method": "exact" if number == 0 else f"scan{number}", "label": f"scan number {number}"}
            records.append({**template, **names, "k": 2048, "sample": session, "generation": " ".join(own), "control": number == 0})
    files = build_report([write_run(tmp_path / "run", records, kind="sessions")], tmp_path / "out")
    assert files.html.stat().st_size < 2_000_000
    assert "more sessions are in" not in files.html.read_text(encoding="utf-8")


def test_a_page_of_more_steps_than_it_can_hold_says_how_many_it_leaves_out(tmp_path: Path) -> None:
    words = random.Random(0)
    text = " ".join(f"word{words.randrange(9999)}" for _ in range(5000))
    files = build_report([write_run(tmp_path / "run", step_records(text=text), kind="sessions")], tmp_path / "out")
    assert files.html.stat().st_size < 2_000_000
    assert "The steps of 3 more sessions are in" in files.html.read_text(encoding="utf-8")


@pytest.mark.slow
def test_ten_thousand_records_take_less_than_half_a_minute(tmp_path: Path, make_records: Callable[..., list[dict[str, Any]]]) -> None:
    tasks = ("niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt", "fwe")
    records = make_records(tasks=tasks, contexts=(4096, 32768), ks=(64, 128), samples=34)
    assert len(records) > 10_000
    run = write_run(tmp_path / "run", records, kind="ruler")
    began = time.process_time()
    files = build_report([run], tmp_path / "out")
    assert time.process_time() - began < 30
    assert files.html.stat().st_size < 2_000_000
