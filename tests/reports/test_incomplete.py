"""Runs that lack something: controls, samples, branches of a sample, the end of a write, or records altogether."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.cli import main
from fathom_eval.errors import UserError
from fathom_eval.reports import build_report
from fathom_eval.reports.gaps import half_written
from fathom_eval.run import MANIFEST, RECORDS, Run
from tests.reports.made_records import fidelity_records, step_records, timing_records, write_run
from tests.reports.pages import data, read_page, rows_of

Records = list[dict[str, Any]]
MakeRecords = Callable[..., Records]


def lead(words: str) -> str:
    """The answer at the top of a page: what stands before the first run's heading."""
    return words.split("What the columns mean")[0]


@pytest.mark.parametrize(
    ("left_out", "said", "command"),
    [
        (("exact_topk",), "Exact top-k, the baseline of every scan, is missing at 2,048 tokens, k = 64 and 2,048 tokens, k = 128", "exact"),
        (("dense",), "Dense attention is missing at 2,048 tokens: whether a task can tell scans apart", "dense"),
        (("dense", "exact_topk"), "Dense attention is missing at 2,048 tokens", "dense,exact"),
    ],
)
def test_a_run_of_tasks_without_a_control_says_so_and_how_to_add_it(
    left_out: tuple[str, ...], said: str, command: str, make_records: MakeRecords, tmp_path: Path
) -> None:
    records = [record for record in make_records(tasks=("vt", "fwe"), ks=(64, 128), samples=6) if record["method"] not in left_out]
    files = build_report([write_run(tmp_path / "lone", records, kind="ruler")], tmp_path / "out")
    page = read_page(files)
    adding = f"'fathom-eval ruler … --methods {command} --output lone'"
    assert said in lead(page.words)
    assert adding in lead(page.words)
    # Again above the table of each k, and in the other forms of the report.
    tables = [part for part in page.source.split("<table data-sort>")[:-1] if "Scores at" in part]
    assert all(adding.replace("'", "&#39;") in part for part in tables[:2])
    assert files.markdown.read_text(encoding="utf-8").count(f"--methods {command}") == 1 + 2
    assert files.latex.read_text(encoding="utf-8").count(f"--methods {command}") == 2


def test_a_control_that_is_missing_on_one_task_is_named_with_it(make_records: MakeRecords, tmp_path: Path) -> None:
    records = [one for one in make_records(tasks=("vt", "fwe"), samples=6) if one["method"] != "exact_topk" or one["task"] == "fwe"]
    page = read_page(build_report([write_run(tmp_path / "run", records, kind="ruler")], tmp_path / "out"))
    assert "Exact top-k, the baseline of every scan, is missing at 2,048 tokens, k = 128 on vt:" in page.words


def test_a_run_with_its_controls_says_nothing_of_the_kind(make_records: MakeRecords, tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path / "ruler", make_records(tasks=("vt",), samples=6), kind="ruler"),
        write_run(tmp_path / "error", fidelity_records(ks=(64,), windows=6), kind="fidelity"),
        write_run(tmp_path / "agents", step_records(), kind="sessions", settings={"baseline": "sparq r=D/8"}),
        write_run(tmp_path / "steps", [{**one, "task": "x", "sample": 0, "options": {}, "method_version": 1} for one in timing_records()]),
    ]
    page = read_page(build_report(runs, tmp_path / "out"))
    assert "Add it with" not in page.words
    assert "Written only in part" not in page.words
    assert "The last write" not in page.words


def test_fidelity_and_sessions_without_exact_top_k(tmp_path: Path) -> None:
    errors = [record for record in fidelity_records(ks=(64,), windows=6) if record["method"] != "exact"]
    page = read_page(build_report([write_run(tmp_path / "error", errors, kind="fidelity")], tmp_path / "out"))
    assert "Exact top-k, the baseline of every scan, is missing at 2,048 tokens, k = 64" in page.words
    assert page.words.count("'fathom-eval fidelity … --methods exact --output error'") == 2
    steps = [record for record in step_records(ks=(512, 2048)) if record["method"] != "exact" or record["k"] == 2048]
    page = read_page(build_report([write_run(tmp_path / "agents", steps, kind="sessions")], tmp_path / "out"))
    assert "Exact top-k, which every step is compared with, is missing at k = 512: agreements are as recorded" in page.words
    assert page.words.count("'fathom-eval sessions … --output agents'") == 2, "in the answer and above the table of that k alone"


def test_a_baseline_that_was_not_measured_is_not_replaced_in_silence(tmp_path: Path) -> None:
    run = write_run(tmp_path / "agents", step_records(), kind="sessions", settings={"baseline": "sparq r=D/4"})
    words = read_page(build_report([run], tmp_path / "out")).words
    assert "The baseline that the run names, sparq r=D/4, is missing: differences are from sparq r=D/8 instead." in words


def test_steps_without_fathoms_read_say_that_there_are_no_ratios(tmp_path: Path) -> None:
    steps = [record for record in timing_records(indexes=("host",)) if not record["method"].startswith("fathom")]
    file = tmp_path / "steps.jsonl"
    file.write_text("\n".join(map(json.dumps, steps)), encoding="utf-8")
    words = read_page(build_report([file], tmp_path / "out")).words
    assert words.count("Fathom's read, which the others are set against, is missing.") == 2
    assert "'fathom-eval bench step … --methods fathom:budget=48 --output steps.jsonl'" in words


def test_many_gaps_stand_worst_first_with_the_rest_folded_away(tmp_path: Path) -> None:
    labels = ["dense", "exact", *(f"scan {number}" for number in range(14))]
    template = next(record for record in step_records(sessions=1) if record["method"] == "sparq")
    records = [record for record in step_records() if record["method"] in ("dense", "exact") and not record["options"]]
    for number in range(14):
        # Scan 13 has none of the eight sessions, scan 0 all but one.
        for session in range(max(0, 7 - number)):
            records.append({**template, "method": f"scan{number}", "label": f"scan {number}", "sample": session})
    settings = {"sessions": 8, "k": [512], "methods": labels}
    files = build_report([write_run(tmp_path / "run", records, kind="sessions", settings=settings)], tmp_path / "out")
    page = read_page(files)
    rows = data(files, "missing.csv")
    amounts = [int(row["missing"]) for row in rows]
    assert amounts == sorted(amounts, reverse=True)
    assert (len(rows), amounts[0], amounts[-1]) == (14, 8, 1)
    last = rows[-1]
    assert (last["method"], last["k"], last["present"], last["expected"], last["missing_samples"]) == ("scan 0", "512", "7", "8", "7")
    listed = page.source.split('id="run-1-missing"')[1].split("</section>")[0]
    open_, folded = listed.split("<details>")
    assert open_.count("<li>") == 10
    assert "4 more, none of them larger" in folded
    assert folded.count("<li>") == 4
    assert "scan 0 at 7,500 tokens, k = 512: 7 of 8 sessions, without 7" in folded
    assert "scan 13 at" in open_


def test_what_a_spreadsheet_takes_for_a_formula_is_text_in_the_list_of_gaps(tmp_path: Path) -> None:
    settings = {"sessions": 8, "k": [512], "methods": ["dense", "exact", "=1+1"]}
    files = build_report([write_run(tmp_path / "run", step_records(), kind="sessions", settings=settings)], tmp_path / "out")
    assert [row["method"] for row in data(files, "missing.csv")] == ["'=1+1"]


def test_sessions_that_are_written_in_part_are_named_and_the_rest_reported(tmp_path: Path) -> None:
    records = [
        record
        for record in step_records()
        if not (record["sample"] == 3 and record["method"] in ("fathom", "landmark")) and not (record["sample"] == 5 and record["k"])
    ]
    files = build_report([write_run(tmp_path / "run", records, kind="sessions")], tmp_path / "out")
    words = read_page(files).words
    assert "Written only in part: session 3 (id3; 5 of 7 branches) and session 5 (id5; 2 of 7 branches)." in words
    assert "and so is the rest" in words
    [row] = [row for row in rows_of(files.csv) if row["method"] == "fathom budget=48"]
    assert row["sessions"] == "6"
    by_method = {row["method"]: row["missing_samples"] for row in data(files, "missing.csv")}
    assert (by_method["fathom budget=48"], by_method["sparq r=D/8"]) == ("3 5", "5")


def test_a_method_that_was_added_to_few_samples_makes_the_others_no_halves() -> None:
    present = {("vt", 2048, 64, "a"): set(range(8)), ("vt", 2048, 64, "b"): {0, 1, 2, 3, 5, 6, 7}, ("vt", 2048, 64, "new"): {0, 1}}
    [half] = half_written(present, "sample")
    assert (half.sample, half.present, half.lacking) == (4, 1, ((64, "b"),))
    assert half.words() == "sample 4 of vt at 2,048 tokens (1 of 2 branches)"


def test_samples_and_windows_in_part(make_records: MakeRecords, tmp_path: Path) -> None:
    tasks = [one for one in make_records(tasks=("vt",), samples=6) if not (one["sample"] == 2 and one["method"] == "loki")]
    errors = [one for one in fidelity_records(ks=(64,), windows=6) if not (one["sample"] == 1 and one["method"] == "sparq")]
    runs = [write_run(tmp_path / "tasks", tasks, kind="ruler"), write_run(tmp_path / "errors", errors, kind="fidelity")]
    words = read_page(build_report(runs, tmp_path / "out")).words
    assert "Written only in part: sample 2 of vt at 2,048 tokens (11 of 13 branches)." in words
    assert "Written only in part: window 1 at 2,048 tokens (12 of 14 branches)." in words


@pytest.mark.parametrize("cut", [30, 1500])
def test_a_write_that_was_cut_off_names_its_session(tmp_path: Path, cut: int) -> None:
    records = step_records(sessions=4)
    run = write_run(tmp_path / "run", records[: 3 * 7], kind="sessions")
    with Run.open(run, identity={"model": "5f3c9a", "seed": 0}, details={"kind": "sessions", "model": "smollm2"}) as opened:
        opened.append(records[3 * 7 :])
    (run / RECORDS).write_bytes((run / RECORDS).read_bytes()[:-cut])
    torn = Run.load(run).torn
    assert set(torn) == {("session", 3)}
    files = build_report([run], tmp_path / "out")
    assert [warning.split(":")[0] for warning in files.warnings] == ["run"]
    words = read_page(files).words
    assert f"The last write was cut off, or is still going on: {torn['session', 3]} records of session 3 not counted." in words
    assert "The rest is reported." in words
    assert "in 3 sessions" in words


def test_a_whole_run_has_nothing_torn(tmp_path: Path) -> None:
    assert Run.load(write_run(tmp_path / "run", step_records(), kind="sessions")).torn == {}


def test_a_report_without_its_records_says_what_must_lie_beside_it(
    make_records: MakeRecords, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "run", make_records(tasks=("vt",), samples=2), kind="ruler")
    build_report([run], tmp_path / "published")
    published = tmp_path / "published"
    assert main(["report", str(published), "--output", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "holds a report (report.html, results.csv, results.md) without the records that it was made of" in error
    assert "manifest.json and records.jsonl (or records.jsonl.gz) must lie beside it" in error
    (published / MANIFEST).write_bytes((run / MANIFEST).read_bytes())
    assert main(["report", str(published), "--output", str(tmp_path / "out")]) == 2
    assert "was made of: records.jsonl (or records.jsonl.gz) must lie beside it" in capsys.readouterr().err
    (published / f"{RECORDS}.gz").write_bytes(gzip.compress((run / RECORDS).read_bytes()))
    assert main(["report", str(published), "--output", str(tmp_path / "out")]) == 0
    # The file of records in place of its folder is the run as well.
    assert main(["report", str(published / f"{RECORDS}.gz"), "--output", str(tmp_path / "file")]) == 0
    assert (tmp_path / "file" / "overview.csv").read_bytes() == (tmp_path / "out" / "overview.csv").read_bytes()
    assert not (published / RECORDS).exists(), "the published folder stays as it is"


def test_packed_records_are_not_computed_anew_in_silence(make_records: MakeRecords, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", make_records(tasks=("vt",), samples=2), kind="ruler")
    (run / f"{RECORDS}.gz").write_bytes(gzip.compress((run / RECORDS).read_bytes()))
    (run / RECORDS).unlink()
    identity = {"model": "5f3c9a", "seed": 0}
    for start in (lambda: Run.open(run, identity=identity, details={"kind": "ruler"}), lambda: Run.check(run)):
        with pytest.raises(UserError, match=r"are packed: unpack them first \(gunzip -k .*records\.jsonl\.gz\)"):
            start()
    (run / RECORDS).write_bytes(gzip.decompress((run / f"{RECORDS}.gz").read_bytes()))
    with Run.open(run, identity=identity, details={"kind": "ruler"}) as opened:
        assert len(opened) == 2 * 13


def test_packed_lines_of_a_timing_script(tmp_path: Path) -> None:
    text = "\n".join(map(json.dumps, timing_records(indexes=("host",)))).encode()
    (tmp_path / "steps.jsonl.gz").write_bytes(gzip.compress(text))
    assert "Decode steps of 6 methods" in read_page(build_report([tmp_path / "steps.jsonl.gz"], tmp_path / "out")).words
    (tmp_path / "cut.jsonl.gz").write_bytes(gzip.compress(text)[:-20])
    files = build_report([tmp_path / "cut.jsonl.gz"], tmp_path / "out")
    assert "Decode steps of 6 methods" in read_page(files).words
    assert files.warnings[0].startswith(f"cut.jsonl.gz: {tmp_path / 'cut.jsonl.gz'} is cut off: what follows its first ")
    (tmp_path / "broken.jsonl.gz").write_bytes(gzip.compress(text)[:8])
    with pytest.raises(UserError, match="cannot be read"):
        build_report([tmp_path / "broken.jsonl.gz"], tmp_path / "out")


def test_packed_records_that_are_cut_off_are_reported_as_far_as_they_go(make_records: MakeRecords, tmp_path: Path) -> None:
    run = tmp_path / "run"
    records = make_records(tasks=("vt",), samples=24)
    for sample in range(24):
        write_run(run, [record for record in records if record["sample"] == sample], kind="ruler")
    whole = (run / RECORDS).read_bytes()
    packed = gzip.compress(whole)
    (run / RECORDS).unlink()
    (run / f"{RECORDS}.gz").write_bytes(packed[: len(packed) // 2])
    files = build_report([run], tmp_path / "out")
    read = len(data(files, "samples.csv"))
    assert 0 < read < whole.count(b"\n")
    assert any(f"{RECORDS}.gz is cut off: what follows its first " in warning for warning in files.warnings)


def test_a_method_without_one_record_is_named_in_the_lead_and_among_the_warnings(make_records: MakeRecords, tmp_path: Path) -> None:
    records = [one for one in make_records(tasks=("vt",), samples=6) if one["method"] != "landmark"]
    labels = list(dict.fromkeys(one["label"] for one in records))
    impossible = [{"method": "shadowkv", "k": 128, "reason": "no room"}]
    settings = {"methods": [*labels, "landmark block=8", "shadowkv"], "k": [128], "impossible": impossible}
    files = build_report([write_run(tmp_path / "run", records, kind="ruler", settings=settings)], tmp_path / "out")
    said = "The run was asked for landmark block=8 and holds no record of it."
    assert said in lead(read_page(files).words)
    assert files.warnings == (f"run: {said}",)


def test_a_file_whose_lines_have_no_kind_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "versions.jsonl").write_text('{"python": "3.12.1"}\n', encoding="utf-8")
    with pytest.raises(UserError, match=r"versions.jsonl holds no run: no record with a kind; this version"):
        build_report([tmp_path / "versions.jsonl"], tmp_path / "out")
