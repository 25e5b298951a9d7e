"""Times at equal error in a report: the tables that lie beside the steps of a run, and those that cannot be shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from fathom_eval.offload.bench.equal_error import EqualError, table_name, write_table
from fathom_eval.reports import ReportFiles, build_report
from tests.reports.made_records import timing_records, write_run
from tests.reports.pages import read_page, table

ROW = EqualError(
    error_context=90112,
    error_k=512,
    windows=8,
    method="fathom",
    basis="klt",
    label="fathom budget=26 basis=klt attend=union",
    error=0.196,
    reference="double_sparsity c=D/4",
    reference_error=0.2034,
    bits_a_channel=0.24,
    error_head_dim=64,
    step_context=2**20,
    step_k=512,
    step_index="host",
    step_label="fathom budget=26 basis=klt attend=union",
    step_model="qwen3-8b-shape",
    step_bits_a_channel=0.24,
    step_ms=36.85,
    reference_ms=113.6,
    ratio=3.083,
    step_basis="klt",
    same_round=True,
    step_wall_ms=37.5,
    reference_wall_ms=114.4,
    windows_shared=8,
    windows_below=5,
    errors_run="fidelity-90k",
    errors_model="small model",
    errors_text="agent sessions",
)
RAW = replace(ROW, basis="raw", step_basis="raw", label="fathom budget=40 basis=raw", ratio=2.31, step_ms=49.1, same_round=False)


def report(tmp_path: Path, tables: dict[str, Sequence[EqualError]]) -> ReportFiles:
    key = {"task": "qwen3-8b-shape", "sample": 0, "method_version": 1, "options": {}}
    run = write_run(tmp_path / "steps", [{**one, **key} for one in timing_records(contexts=(131072,), indexes=("host",))], kind="bench")
    for name, rows in tables.items():
        write_table(run / table_name(name), rows)
    return build_report([run], run / "report")


def test_a_table_shows_fathom_beside_each_reference(tmp_path: Path) -> None:
    auto = replace(ROW, basis="", label="fathom budget=28 basis=auto", step_ms=41.0, ratio=2.8)
    other = replace(ROW, method="sparq", basis="", label="sparq r=D/8", ratio=1.2)
    alone = [replace(one, reference="loki r=D/4", reference_error=0.177) for one in (other,)]
    files = report(tmp_path, {"fidelity-90k": [other, auto, ROW, RAW, *alone]})
    rows = table(files, "equal-error-fidelity-90k")
    assert [list(row.values()) for row in rows] == [
        ["90112", "double_sparsity c=D/4", "0.2034", "budget=26 attend=union", "0.196", "5 of 8", "36.85", "3.083", "budget=40", "2.31"],
        ["90112", "loki r=D/4", "0.177", "none", "", "", "", "", "none", ""],
    ]
    page = read_page(files)
    page.check()
    for words in (
        "Time at equal error",
        "3.08 (3.05)",
        "2.31 (3.05) †",
        "errors: run fidelity-90k, small model, head_dim 64, agent sessions, 8 windows · times: run steps, qwen3-8b-shape",
        "equal-error-fidelity-90k.csv beside the run's records has other methods at these errors too",
    ):
        assert words in page.words
    shown = files.markdown.read_text(encoding="utf-8")
    assert "| 90,112 | double_sparsity c=D/4 | 0.203 | budget=26 attend=union | 0.196 | 5 of 8 |" in shown
    assert not files.warnings


def test_every_file_and_every_setting_of_the_steps_has_a_table_of_its_own(tmp_path: Path) -> None:
    shorter = [replace(one, step_context=2**17, ratio=1.5) for one in (ROW, RAW)]
    files = report(tmp_path, {"a": [ROW, *shorter, replace(ROW, step_index="hbm", ratio=1.1)], "b": [replace(ROW, error_context=32768)]})
    names = sorted(path.stem for path in files.tables if path.stem.startswith("equal-error"))
    assert names == ["equal-error-a", "equal-error-a-2", "equal-error-a-3", "equal-error-b"]
    assert [row["speed"] for name in names for row in table(files, name)] == ["3.083", "1.5", "1.1", "3.083"]
    assert "1,048,576 tokens, k = 512, index in HBM" in read_page(files).words


def test_what_cannot_be_shown_is_told_and_the_rest_is_there(tmp_path: Path) -> None:
    files = report(tmp_path, {"good": [ROW], "bad": [ROW], "none": []})
    path = tmp_path / "steps" / table_name("bad")
    path.write_text(path.read_text(encoding="utf-8").replace("windows_below", "other"), encoding="utf-8")
    again = build_report([tmp_path / "steps"], tmp_path / "steps/report")
    [warning] = again.warnings
    assert warning.startswith(f"steps: {path} lacks windows_below, as of an earlier version; 'fathom-eval bench equal-error' writes it")
    assert [path.stem for path in again.tables if path.stem.startswith("equal-error")] == ["equal-error-good"]
    assert {"equal-error-bad", "equal-error-good"} <= {path.stem for path in files.tables}
    assert not (tmp_path / "steps/report/tables/equal-error-bad.csv").exists()


def test_a_run_without_such_tables_has_no_such_block(tmp_path: Path) -> None:
    files = report(tmp_path, {})
    assert "equal error" not in read_page(files).words
    lines = tmp_path / "steps/records.jsonl"
    write_table(tmp_path / table_name("stray"), [ROW])
    bare = lines.rename(tmp_path / "bare.jsonl")
    assert "equal error" not in read_page(build_report([bare], tmp_path / "out")).words, "a file of lines has no folder of its own"
