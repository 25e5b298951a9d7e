"""Folders that a report may be written into, and those that it must leave alone."""

from __future__ import annotations

import gzip
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.cli import main
from fathom_eval.reports import build
from fathom_eval.run import MANIFEST, RECORDS

MakeRecords = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(make_records: MakeRecords, write_run: Callable[..., Path]) -> Path:
    return write_run(make_records(tasks=("vt",), samples=2), name="mine")


def refusal(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["report", *map(str, words)]) == 2
    out, error = capsys.readouterr()
    assert (out, error.count("\n")) == ("", 1)
    return error


def test_files_of_others_are_not_replaced(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    (out / "results.csv").write_text("mine")
    with monkeypatch.context() as patched:
        patched.setattr(build, "load_runs", lambda *_: pytest.fail("work before the refusal"))
        assert f"{out} holds results.csv, not written by fathom-eval" in refusal(capsys, run, "--output", out)
    assert (out / "results.csv").read_text() == "mine"
    (out / "results.csv").rename(out / "samples.csv")
    assert "holds samples.csv, not" in refusal(capsys, run, "--output", out)
    (out / "samples.csv").unlink()
    (out / "figures").mkdir()
    (out / "figures" / "score-vt-2048-k128.svg").write_text("mine")
    assert "holds figures/score-vt-2048-k128.svg, not" in refusal(capsys, run, "--output", out)
    assert sorted(path.name for path in out.iterdir()) == ["figures", "notes.txt"]
    (out / "figures" / "score-vt-2048-k128.svg").rename(out / "figures" / "other.svg")
    assert main(["report", str(run), "--output", str(out)]) == 0
    assert (out / "notes.txt").read_text() == (out / "figures" / "other.svg").read_text() == "mine"


def test_the_list_of_another_program_is_no_sign_of_a_report(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for content in ("[]", '{"report": "weekly"}', "{broken"):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / "files.json").write_text(content)
        assert "holds files.json, not" in refusal(capsys, run, "--output", tmp_path / "out")


def test_the_folder_of_another_run_takes_no_report(
    run: Path, make_records: MakeRecords, write_run: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_run(make_records(tasks=("fwe",), samples=2), name="other")
    before = sorted(other.iterdir())
    assert f"{other} holds another run" in refusal(capsys, run, "--output", other)
    assert main(["report", str(other), "--output", str(other), "--quiet"]) == 0
    capsys.readouterr()
    assert f"{other} holds another run" in refusal(capsys, run, "--output", other), "also where it holds its own report"
    assert len(sorted(other.iterdir())) > len(before)
    assert main(["report", str(run), str(other), "--output", str(other)]) == 0


def test_a_manifest_of_another_program_is_no_run(run: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / MANIFEST).write_text('{"name": "a web page"}')
    assert main(["report", str(run), "--output", str(tmp_path / "out")]) == 0


def test_reports_are_made_again(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for _ in range(2):
        assert main(["report", str(run), "--output", str(out)]) == 0
    # What is kept of a published report has no list.
    (out / "files.json").unlink()
    assert main(["report", str(run), "--output", str(out)]) == 0
    # A run's own folder, as it is published and by its file of records.
    (run / f"{RECORDS}.gz").write_bytes(gzip.compress((run / RECORDS).read_bytes()))
    (run / RECORDS).unlink()
    shutil.copy(out / "results.csv", run)
    assert main(["report", str(run), "--output", str(run)]) == 0
    (run / "files.json").unlink()
    (run / "report.html").unlink()
    assert main(["report", str(run / f"{RECORDS}.gz"), "--output", str(run)]) == 0


def test_a_report_that_was_cut_off_is_made_anew(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(build, "table_csv", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        assert main(["report", str(run)]) == 130
    assert (run / "report" / "results.csv").exists()
    assert not (run / "report" / "report.html").exists()
    assert main(["report", str(run)]) == 0


def test_a_folder_that_cannot_be_is_told_before_the_records_are_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "load_runs", lambda *_: pytest.fail("work before the refusal"))
    assert "is a file" in refusal(capsys, run, "--output", run / MANIFEST / "below")
    assert "empty" in refusal(capsys, run, "--output", "")
    assert "empty" in refusal(capsys, "")
    assert "cannot" in refusal(capsys, run, "--output", tmp_path / ("x" * 300))
