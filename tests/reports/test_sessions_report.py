"""The report of agent sessions: right numbers, complete files, and nothing of a step's text that acts on a page, table or terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.cli import main
from fathom_eval.errors import UserError
from fathom_eval.reports import build_report
from fathom_eval.reports.session_cells import Role, compute_session_cells, read_steps
from fathom_eval.reports.session_steps import marked_parts
from fathom_eval.reports.sessions import summary_table
from fathom_eval.run import Run
from tests.reports.made_records import step_records
from tests.reports.pages import Page, data, every_file, read_page, rows_of

Records = list[dict[str, Any]]

HOSTILE = (
    "<script>alert('x')</script>",
    "</pre></details><img src=x onerror=alert(1)>",
    "{{ 7 * 7 }} {% raw %}",
    "\x1b[31mred\x1b[0m\x07",
    "abc\u202egpj.exe\u2066",
    '=HYPERLINK("http://evil")',
    "lone \ud800 surrogate",
    "| pipe | `tick` [link](http://evil)",
)


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    def write_run(records: Records, name: str = "first", scripted: bool = False, baseline: str | None = "sparq r=D/8") -> Path:
        details = {
            "kind": "sessions",
            "model": "smollm2",
            "device": "a CPU",
            "trajectories": {"name": "rows.jsonl", "scripted": scripted},
            "settings": {"baseline": baseline, "session_tokens": "6000:7500"},
        }
        with Run.open(tmp_path / name, identity={"seed": 0}, details=details) as run:
            run.append(records)
        return tmp_path / name

    return write_run


def test_numbers_of_the_cells() -> None:
    steps, _ = read_steps(step_records())
    cells, pairs = compute_session_cells(steps, "sparq r=D/8")
    by_label = {cell.method.label: cell for cell in cells}
    assert [cell.method.label for cell in cells] == [
        "dense", "exact", "dense, alone", "exact, alone", "fathom budget=48", "sparq r=D/8", "landmark size=8",
    ]  # fmt: skip
    sparq, fathom, landmark = by_label["sparq r=D/8"], by_label["fathom budget=48"], by_label["landmark size=8"]
    assert sparq.agreement == pytest.approx(3.8 / 8)
    assert sparq.standard_error == pytest.approx(0.1035098 / 8**0.5, rel=1e-5)
    assert sparq.against_baseline is None
    assert fathom.against_baseline is not None
    assert fathom.against_baseline.mean == pytest.approx(0.3)
    assert (fathom.against_baseline.low, fathom.against_baseline.high) == pytest.approx((0.3, 0.3))
    assert (fathom.against_baseline.wins, fathom.against_baseline.ties, fathom.against_baseline.losses) == (8, 0, 0)
    assert fathom.against_baseline.above
    assert landmark.against_baseline is not None
    assert (landmark.against_baseline.wins, landmark.against_baseline.ties, landmark.against_baseline.losses) == (1, 3, 4)
    assert fathom.first_divergence == 3.5
    assert (fathom.exact_match, fathom.valid_calls, fathom.agreement_dense, fathom.agreement_recorded) == (0, 0.5, 0.25, 0.125)
    dense = by_label["dense"]
    # Dense attention has no k: what counts is its agreement with exact top-k there, not the 1.0 with itself.
    assert (dense.agreement, dense.exact_match, dense.first_divergence) == (pytest.approx(0.9), 0, 2)
    assert by_label["exact"].exact_match == 1
    assert by_label["exact, alone"].method.role is Role.NOISE
    assert {(pair.method.label, pair.other.label) for pair in pairs} == {
        ("dense", "fathom budget=48"), ("dense", "sparq r=D/8"), ("dense", "landmark size=8"),
        ("fathom budget=48", "sparq r=D/8"), ("fathom budget=48", "landmark size=8"), ("sparq r=D/8", "landmark size=8"),
    }  # fmt: skip


def test_failures_are_in_no_mean_and_old_versions_left_out() -> None:
    records = step_records()
    broken = next(record for record in records if record["method"] == "fathom")
    broken.update(finish="error", error="not finite", score=None, agreement_exact=None, tool_call=None, exact_match=None)
    old = [{**record, "method_version": 0, "score": 0.0} for record in records if record["method"] == "sparq"]
    steps, notes = read_steps([*old, *records])
    cells, _ = compute_session_cells(steps, "sparq r=D/8")
    fathom = next(cell for cell in cells if cell.method.name == "fathom")
    assert (fathom.sessions, fathom.failures, fathom.expected) == (7, 1, 8)
    assert fathom.agreement == pytest.approx((6.2 - 0.8) / 7)
    assert fathom.against_baseline is not None
    assert fathom.against_baseline.pairs == 7
    assert notes == ["8 records of older versions of methods are left out"]


def test_the_answer_says_what_the_best_scan_separates_from_and_that_a_rerank_reads_keys(write: Callable[..., Path], tmp_path: Path) -> None:
    records = step_records()
    build_report([write(records, "plain")], tmp_path / "plain")
    assert "It separates from" not in (tmp_path / "plain" / "results.md").read_text(encoding="utf-8"), "from all of them"
    for record in records:
        record["label"] = record["label"].replace("budget=48", "budget=48 rerank=2.0")
        if record["method"] == "landmark":
            record["score"] = record["agreement_exact"] = (
                0.75 + record["sample"] % 2 / 50
            )  # 0.76 in the mean, where the best scan has 0.775
    build_report([write(records, "reranked")], tmp_path / "reranked")
    text = (tmp_path / "reranked" / "results.md").read_text(encoding="utf-8")
    assert "at 28 bits and the keys that it rescores. It separates from 1 of the 2 other scans by these sessions." in text
    assert "keys rescored" not in text, "none of these records counts any"
    for record in records:
        record["candidate_rows"] = 321.25 if "rerank" in record["label"] else 0.0
    build_report([write(records, "counted")], tmp_path / "counted")
    text = (tmp_path / "counted" / "results.md").read_text(encoding="utf-8")
    head, _, *rows = [line.split("|") for line in text.splitlines() if line.startswith("|")][: 2 + 7]
    column = [name.strip() for name in head].index("keys rescored")
    shown = {row[1].strip(): row[column].strip() for row in rows}
    assert any(shown.values())
    assert {label: cell for label, cell in shown.items() if cell} == {label: "321.2" for label in shown if "rerank" in label}
    assert "321.25" in (tmp_path / "counted" / "results.csv").read_text(encoding="utf-8")


def steps_of(page: Page) -> list[dict[str, Any]]:
    """What the page's script is given to show."""
    [shown] = [json.loads(text) for attributes, text in page.scripts if attributes.get("type") == "application/json"]
    sessions: list[dict[str, Any]] = shown
    return sessions


def test_files_of_a_report(write: Callable[..., Path], tmp_path: Path) -> None:
    files = build_report([write(step_records(ks=(512, 2048)))], tmp_path / "out")
    written = {path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert written == every_file(files)
    assert len(files.figures) == 2 * 2
    assert len(rows_of(files.csv)) == 2 * 7
    assert len(data(files, "paired.csv")) == 2 * 6
    assert len(data(files, "steps.csv")) == 8 * (2 + 2 * 5)
    [row] = [row for row in rows_of(files.csv) if row["method"] == "fathom budget=48" and row["k"] == "512"]
    assert (float(row["difference"]), row["wins"], row["ties"], row["losses"], row["baseline"]) == (
        pytest.approx(0.3), "8", "0", "0", "sparq r=D/8",
    )  # fmt: skip
    page = read_page(files)
    page.check()
    [session, *_] = steps_of(page)
    assert [at["k"] for at in session["steps"]] == ["k = 512", "k = 2,048"]
    assert "fathom budget=48" in [method["label"] for method in session["steps"][0]["methods"]]
    assert "Noise floor, agreement of a branch with itself in another batch: dense, alone 0.950 and exact, alone 1.000." in page.words
    assert "At k = 512 fathom budget=48 agrees most with exact top-k, 0.775 ± 0.037 at 28 bits." in page.words
    again = build_report([tmp_path / "first"], tmp_path / "again")
    for one in written:
        other = again.html.parent / one.relative_to(tmp_path / "out")
        assert one.read_bytes() == other.read_bytes(), "the same records give the same files"


def test_the_viewer_marks_words_that_differ() -> None:
    left, right = marked_parts("I open the file\nand read it", "I open a file\nand read it twice\n")
    assert "".join(text for text, _ in left) == "I open the file\nand read it"
    assert "".join(text for text, _ in right) == "I open a file\nand read it twice\n"
    assert [text for text, differs in left if differs] == [" the"]
    assert [text for text, differs in right if differs] == [" a", " twice\n"]
    assert marked_parts("", "") == ([], [])
    assert marked_parts("same  words", "same words")[1][0][1] == 0


@pytest.mark.parametrize("evil", HOSTILE)
def test_hostile_steps_are_shown_as_text(write: Callable[..., Path], tmp_path: Path, evil: str, capsys: pytest.CaptureFixture[str]) -> None:
    records = step_records(text=evil, sessions=2, repo=f"o/{evil}", sources=[{"trajectory": evil, "tokens": 5, "whole": False}])
    path = write(records, baseline=None)
    files = build_report([path], tmp_path / "out")
    page = read_page(files)
    page.check()
    assert "<" not in "".join(text for attributes, text in page.scripts if attributes.get("type") == "application/json")
    texts = [file.read_text(encoding="utf-8") for file in (files.html, *files.data, *files.tables, files.markdown, files.latex)]
    for text in texts:
        assert all(character.isprintable() or character == "\n" for character in text)
    for row in data(files, "steps.csv"):
        assert not any(cell.startswith(("=", "+", "-", "@")) for cell in row.values() if not _is_number(cell))
    if "script" in evil:
        assert evil in steps_of(page)[0]["steps"][0]["methods"][0]["step"], "shown as it is, as text"
    assert main(["report", str(path)]) == 0
    out, err = capsys.readouterr()
    assert all(character.isprintable() or character == "\n" for character in out + err)


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def test_long_lines_are_shown(write: Callable[..., Path], tmp_path: Path) -> None:
    line = "x" * 30_000
    page = read_page(build_report([write(step_records(text=line, sessions=1))], tmp_path / "out"))
    assert line in steps_of(page)[0]["steps"][0]["exact"]
    page = read_page(build_report([write(step_records(text="y" * 50_000, sessions=1), name="longer")], tmp_path / "out"))
    assert "and 10,006 more characters" in steps_of(page)[0]["steps"][0]["exact"]


def test_a_run_without_text_has_no_viewer(write: Callable[..., Path], tmp_path: Path) -> None:
    records = step_records(generation=None)
    for record in records:
        record.pop("recorded_step", None)
    page = read_page(build_report([write(records)], tmp_path / "out"))
    assert len(page.scripts) == 1
    assert "fathom budget=48" in page.text


def test_scripted_trajectories_are_named_as_such(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write(step_records(), scripted=True)
    files = build_report([path], tmp_path / "out")
    for file in (files.html, files.markdown):
        assert "The trajectories are scripted" in file.read_text(encoding="utf-8")
    assert "The trajectories are scripted" in summary_table(Run.load(path)).attrs["note"]
    other = build_report([write(step_records(), name="other")], tmp_path / "other-out")
    assert "The trajectories are scripted" not in other.html.read_text(encoding="utf-8")


def test_the_table_that_a_run_prints(write: Callable[..., Path]) -> None:
    frame = summary_table(Run.load(write(step_records())))
    assert "k" not in frame.columns
    rows = {row["method"]: row for row in frame.to_dict(orient="records")}
    assert rows["fathom budget=48"]["agreement"] == "0.78 ± 0.04 ▲"
    assert rows["fathom budget=48"]["minus sparq r=D/8"] == "+0.30 [+0.30, +0.30]"
    assert rows["landmark size=8"]["w/t/l"] == "1/3/4"
    assert rows["dense"]["agreement"].startswith("0.90")
    assert list(summary_table(Run.load(write(step_records(ks=(512, 2048)), name="two")))["k"].unique()) == ["512", "2,048"]


def test_runs_of_several_kinds_share_a_page(
    write: Callable[..., Path], tmp_path: Path, write_run: Callable[..., Path], make_records: Any
) -> None:
    ruler = write_run(make_records(samples=2), name="ruler")
    files = build_report([ruler, write(step_records())], tmp_path / "out")
    page = read_page(files)
    page.check()
    assert "Run ruler" in page.text
    assert "Run first" in page.text
    assert {path.name for path in files.data} >= {"ruler-results.csv", "sessions-results.csv", "ruler-samples.csv", "sessions-steps.csv"}
    assert "What changed" not in page.text, "runs of two kinds have nothing to be set side by side"


def test_records_of_another_kind_are_refused(write: Callable[..., Path], tmp_path: Path) -> None:
    path = write([{key: value for key, value in record.items() if key != "token_ids"} for record in step_records(sessions=1)])
    with pytest.raises(UserError, match=r"no record of kind 'sessions': .*KeyError: 'token_ids'"):
        build_report([path], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    manifest = json.loads((path / "manifest.json").read_text())
    (tmp_path / "empty" / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(UserError, match="no records yet: run 'fathom-eval sessions"):
        build_report([tmp_path / "empty"], tmp_path / "out")


def test_several_runs_side_by_side(write: Callable[..., Path], tmp_path: Path) -> None:
    files = build_report([write(step_records()), write(step_records(), name="second")], tmp_path / "out")
    page = read_page(files)
    assert "2 runs side by side" in page.text
    assert {row["run"] for row in rows_of(files.csv)} == {"first", "second"}
    assert len(files.figures) == 4
