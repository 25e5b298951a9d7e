"""Runs whose methods the host-resident runtime decoded, where it has them: the report says which, in words and in columns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.reports import build_report
from tests.reports.made_records import step_records, write_run
from tests.reports.pages import data, read_page

Records = list[dict[str, Any]]
MakeRecords = Callable[..., Records]
RUNTIME = {"runtime": "host", "runtime_scores": "float16"}
SEEDED = {"model": "5f3c9a", "seed": 0}


def decoded(records: Records, large: int | None = None) -> Records:
    """The records as the runtime leaves them: it has Fathom's reads and SparQ, and at no k of ``large`` anything."""
    ours = ("fathom", "sparq")
    return [
        {**one, "decoded_by": "runtime" if one["method"] in ours and (large is None or one["k"] < large) else "lock-step"}
        for one in records
    ]


@pytest.fixture
def ruler(make_records: MakeRecords) -> Records:
    return make_records(tasks=("vt",), samples=6)


def run_of(path: Path, records: Records, *, runtime: bool, kind: str = "ruler", identity: dict[str, Any] | None = None) -> Path:
    own = identity or {**SEEDED, **(RUNTIME if runtime else {})}
    settings: dict[str, Any] = {"seed": 0, **({"runtime": "host"} if runtime else {})}
    return write_run(path, records, kind=kind, identity=own, settings=settings)


def test_a_ruler_report_says_which_methods_the_runtime_decoded(ruler: Records, tmp_path: Path) -> None:
    files = build_report([run_of(tmp_path / "run", decoded(ruler), runtime=True)], tmp_path / "out")
    words = read_page(files).words
    assert "Decoded with --runtime host: 5 methods by the step of the host-resident runtime, 8 in lock-step." in words
    assert "Decoded by the step of the host-resident runtime (index in host memory, float16 scores): fathom budget=20 basis=klt," in words
    assert "Decoded in lock-step: dense, exact top-k, double_sparsity c=16, loki r=16," in words
    for name in ("results.csv", "overview.csv", "samples.csv"):
        rows = [row for row in data(files, name) if name != "samples.csv" or row["sample"] == "0"]
        found = {row.get("label") or row["method"]: row["decoded_by"] for row in rows}
        assert found["sparq r=8"] == "runtime"
        assert found["dense"] == found["landmark block=8"] == "lock-step"


def test_a_k_that_the_runtime_does_not_hold_is_named(make_records: MakeRecords, tmp_path: Path) -> None:
    records = decoded(make_records(tasks=("vt",), samples=6, ks=(128, 1024)), large=1024)
    files = build_report([run_of(tmp_path / "run", records, runtime=True)], tmp_path / "out")
    runtime, lock_step = read_page(files).words.split("float16 scores): ")[1].split(" Decoded in lock-step: ")
    assert "sparq r=8 at k = 128" in runtime
    assert "sparq r=8 at k = 1,024" in lock_step
    assert "landmark block=8." in lock_step
    assert {row["decoded_by"] for row in data(files, "results.csv") if row["method"] == "sparq r=8"} == {"runtime", "lock-step"}


def test_a_report_of_sessions_says_so_too(tmp_path: Path) -> None:
    files = build_report([run_of(tmp_path / "run", decoded(step_records()), runtime=True, kind="sessions")], tmp_path / "out")
    words = read_page(files).words
    assert "Decoded with --runtime host: 2 methods by the step of the host-resident runtime, 5 in lock-step." in words
    assert "(index in host memory, float16 scores): sparq r=D/8 and fathom budget=48. Decoded in lock-step: dense, exact," in words
    assert {row["method"]: row["decoded_by"] for row in data(files, "results.csv")}["fathom budget=48"] == "runtime"
    assert {row["label"]: row["decoded_by"] for row in data(files, "steps.csv")}["dense"] == "lock-step"


def test_a_run_in_lock_step_alone_says_nothing_of_it(ruler: Records, tmp_path: Path) -> None:
    files = build_report([run_of(tmp_path / "run", ruler, runtime=False)], tmp_path / "out")
    page = read_page(files)
    assert "ecoded" not in page.words
    assert all("decoded_by" not in data(files, name)[0] for name in ("results.csv", "overview.csv", "samples.csv"))
    steps = build_report([run_of(tmp_path / "steps", step_records(), runtime=False, kind="sessions")], tmp_path / "sessions")
    assert all("decoded_by" not in data(steps, name)[0] for name in ("results.csv", "steps.csv"))


def test_runs_that_differ_in_this_alone_are_said_to(ruler: Records, tmp_path: Path) -> None:
    paths = [run_of(tmp_path / "before", ruler, runtime=False), run_of(tmp_path / "after", decoded(ruler), runtime=True)]
    files = build_report(paths, tmp_path / "out")
    said = (
        "They differ only in how methods were decoded: before in lock-step alone and after with --runtime host, float16 scores, "
        "where the runtime has the method."
    )
    assert said in read_page(files).words
    rows = {(row["run"], row["method"]): row for row in data(files, "results.csv")}
    assert rows["before", "sparq r=8"]["decoded_by"] == ""
    assert rows["after", "sparq r=8"]["decoded_by"] == "runtime"
    assert rows["after", "sparq r=8"]["score"] == rows["before", "sparq r=8"]["score"]
    samples = data(files, "samples.csv")
    assert len(samples) == 2 * len(ruler)
    assert samples[-1]["generation"] == ruler[-1]["generation"]
    assert {row["decoded_by"] for row in samples if row["run"] == "before"} == {""}


def test_runs_that_differ_in_more_are_not(ruler: Records, tmp_path: Path) -> None:
    other = {**SEEDED, **RUNTIME, "seed": 1}
    paths = [
        run_of(tmp_path / "before", ruler, runtime=False),
        run_of(tmp_path / "after", decoded(ruler), runtime=True, identity=other),
    ]
    words = read_page(build_report(paths, tmp_path / "out")).words
    assert "They differ in seed, runtime and runtime_scores." in words
    assert "only in how" not in words
