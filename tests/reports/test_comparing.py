"""Several runs on one page: what changed, what cannot be compared, and runs that cannot be read."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.cli import main
from fathom_eval.errors import UserError
from fathom_eval.reports import build_report
from fathom_eval.reports.gaps import gaps, planned
from fathom_eval.run import MANIFEST, RECORDS, Run
from tests.reports.pages import read_page, rows_of, table

Records = list[dict[str, Any]]
MakeRecords = Callable[..., Records]
WriteRun = Callable[..., Path]


def worse(records: Records, label: str, sample: int) -> Records:
    """The records with the scores of one method at zero from a sample on."""
    return [{**one, "score": 0.0} if one["label"] == label and one["sample"] >= sample else one for one in records]


def test_runs_of_one_identity_are_paired_by_sample(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    records = make_records(tasks=("vt",))
    paths = [write_run(records, name="before"), write_run(worse(records, "loki r=32", 0), name="after")]
    files = build_report(paths, tmp_path / "out")
    rows = {row["method"]: row for row in table(files, "change-run-1-run-2")}
    loki, sparq = rows["loki r=32"], rows["sparq r=8"]
    assert float(loki["change"]) == pytest.approx(float(loki["after"]) - float(loki["before"]))
    assert float(loki["change high"]) < 0
    assert (loki["pairs"], sparq["pairs"], float(sparq["change"])) == ("24", "24", 0.0)
    assert "Both runs have one identity" in read_page(files).words


def test_runs_of_other_identities_are_set_side_by_side_only(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    records = make_records(tasks=("vt",), samples=8)
    fewer = [record for record in records if record["method"] != "landmark"]
    paths = [write_run(records, name="before"), write_run(fewer, name="after", seed=1, model="other")]
    files = build_report(paths, tmp_path / "out")
    rows = table(files, "change-run-1-run-2")
    assert {row["pairs"] for row in rows} == {""}
    assert "landmark block=8" not in {row["method"] for row in rows}
    words = read_page(files).words
    assert "They differ in seed." in words
    assert "Only in before: landmark block=8." in words
    dense = [float(row["score"]) for row in rows_of(files.csv) if row["method"] == "dense"]
    assert len(dense) == 2


def test_a_run_that_cannot_be_read_is_named_and_the_rest_reported(
    make_records: MakeRecords, write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good = write_run(make_records(tasks=("vt",), samples=6), name="good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / MANIFEST).write_text('{"schema": 99, "identity": {}}')
    Run.open(tmp_path / "fresh", identity={}, details={}).close()
    torn = write_run(make_records(tasks=("vt",), samples=6), name="torn")
    (torn / RECORDS).write_bytes((torn / RECORDS).read_bytes()[:-30])
    bad = [str(tmp_path / name) for name in ("empty", "newer", "fresh", "torn")]
    assert main(["report", str(good), *bad, "--output", str(tmp_path / "out")]) == 0
    _, error = capsys.readouterr()
    for reason in (
        "empty is not a run directory: it is empty",
        "newer fathom-eval (schema 99",
        "fresh has no records yet",
        "torn has no records yet",
    ):
        assert reason in error
        assert reason in (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
        assert reason in (tmp_path / "out" / "results.md").read_text(encoding="utf-8").replace("\\", "")
    assert main(["report", *bad, "--output", str(tmp_path / "none")]) == 2
    assert not (tmp_path / "none").exists()


def test_foreign_records_are_counted_and_the_rest_reported(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    records = make_records(tasks=("vt",), samples=6)
    records[3] |= {"kind": "other", "context": "long"}
    files = build_report([write_run(records)], tmp_path / "out")
    assert "1 records are not of this kind and are left out" in read_page(files).words


def test_an_interrupted_run_says_what_is_missing(make_records: MakeRecords, tmp_path: Path) -> None:
    records = [one for one in make_records(tasks=("vt", "fwe"), samples=4) if one["task"] == "vt" or one["sample"] < 2]
    labels = ["dense", *dict.fromkeys(one["label"] for one in records if one["label"] != "dense"), "quest page=16"]
    settings = {"tasks": ["vt", "fwe", "niah_single"], "context": [2048], "k": [128], "limit": 4, "methods": labels}
    with Run.open(tmp_path / "run", identity={}, details={"settings": settings}) as run:
        run.append(records)
    page = read_page(build_report([tmp_path / "run"], tmp_path / "out"))
    assert "sparq r=8 on fwe at 2,048 tokens, k = 128: 2 of 4 samples" in page.words
    assert "quest page=16 on vt at 2,048 tokens, k = 128: 0 of 4 samples" in page.words
    assert "every method on niah_single at 2,048 tokens, k = 128: 0 of 4 samples" in page.words
    assert "sparq r=8 on vt" not in page.words
    assert "run-1-missing" in page.ids


def test_gaps_need_a_plan_that_says_enough() -> None:
    assert planned({"methods": ["dense"], "k": [1]}, "ruler", ()) == {}
    asked = planned({"methods": ["dense", "a"], "k": [64], "sessions": 3}, "sessions", [9000])
    dense, scan = ("", 9000, None, "dense"), ("", 9000, 64, "a")
    assert asked == {dense: {0, 1, 2}, scan: {0, 1, 2}}
    [gap] = gaps(asked, {dense: {0, 1, 2}, scan: {1}}, "session")
    assert str(gap) == "a at 9,000 tokens, k = 64: 1 of 3 sessions, without 0 and 2"


def test_the_largest_gaps_come_first() -> None:
    asked = {("vt", 2048, 64, label): set(range(4)) for label in "abc"} | {("vt", 4096, 64, label): set(range(4)) for label in "ab"}
    present = {("vt", 2048, 64, "a"): {0, 1, 2}, ("vt", 2048, 64, "b"): {0}, ("vt", 2048, 64, "c"): {0, 1, 2, 3}}
    found = gaps(asked, present, "sample")
    assert [(gap.label, gap.context, gap.present, gap.missing) for gap in found] == [
        ("every method", 4096, 0, (0, 1, 2, 3)),
        ("b", 2048, 1, (1, 2, 3)),
        ("a", 2048, 3, (3,)),
    ]


def test_packed_records_of_a_published_run(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    run = write_run(make_records(tasks=("vt",), samples=6), name="packed")
    (run / f"{RECORDS}.gz").write_bytes(gzip.compress((run / RECORDS).read_bytes()))
    plain = build_report([run], tmp_path / "plain")
    (run / RECORDS).unlink()
    packed = build_report([run], tmp_path / "again")
    assert packed.csv.read_bytes() == plain.csv.read_bytes()
    damaged = gzip.decompress((run / f"{RECORDS}.gz").read_bytes()).replace(b"\n", b"\n{broken\n", 1)
    (run / f"{RECORDS}.gz").write_bytes(gzip.compress(damaged))
    [warning] = build_report([run], tmp_path / "again").warnings
    assert warning.startswith(f"packed: {run / RECORDS}.gz: line 2 is damaged"), "not where it was unpacked to"
    (run / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=f"^{re.escape(str(run / 'manifest.json'))} is not the manifest of a run"):
        build_report([run], tmp_path / "again")
    (run / f"{RECORDS}.gz").write_bytes(b"not gzip")
    with pytest.raises(UserError, match="cannot be unpacked"):
        build_report([run], tmp_path / "again")


@pytest.mark.parametrize("name", [f"{RECORDS}.gz", "steps.jsonl.gz"])
def test_a_packed_file_that_holds_far_more_than_records_can_is_refused(
    name: str, make_records: MakeRecords, write_run: WriteRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fathom_eval.reports.loading._LEAST_LIMIT", 1 << 20)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    run = write_run(make_records(tasks=("vt",), samples=1), name="packed")
    (run / RECORDS).unlink()
    (run / name).write_bytes(gzip.compress(bytes(1 << 24)))
    with pytest.raises(UserError, match=f"{name} holds over 200 times its own size"):
        build_report([run if name.startswith(RECORDS) else run / name], tmp_path / "out")
    assert list((tmp_path / "temporary").iterdir()) == []


def test_stale_files_of_an_earlier_report_go_and_others_stay(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = build_report([write_run(make_records(tasks=("vt", "fwe"), ks=(64, 128), samples=2), name="first")], out)
    (out / "figures" / "mine.svg").write_text("not ours", encoding="utf-8")
    (out / "tables" / "scores-2048-k64.csv").write_text("changed by hand", encoding="utf-8")
    (out / "notes.txt").write_text("not ours", encoding="utf-8")
    second = build_report([write_run(make_records(tasks=("vt",), ks=(128,), samples=2), name="second")], out)
    gone = set(first.figures) - set(second.figures)
    assert gone
    assert not [path for path in gone if path.exists()]
    assert (out / "figures" / "mine.svg").exists()
    assert (out / "notes.txt").exists()
    assert (out / "tables" / "scores-2048-k64.csv").exists(), "what somebody changed is theirs"
    assert "first" not in second.csv.read_text(encoding="utf-8")


def test_a_list_that_leads_out_of_the_folder_is_not_followed(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    import hashlib

    outside = tmp_path / "outside.txt"
    outside.write_text("keep", encoding="utf-8")
    digest = hashlib.sha256(b"keep").hexdigest()
    out = tmp_path / "out"
    out.mkdir()
    listed = {"report": {"../outside.txt": digest, str(outside): digest, "x": 3}}
    (out / "files.json").write_text(json.dumps(listed), encoding="utf-8")
    build_report([write_run(make_records(tasks=("vt",), samples=2))], out)
    assert outside.exists()
