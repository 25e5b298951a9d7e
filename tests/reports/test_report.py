"""The files of a report: complete, reproducible, self-contained, and safe with hostile text."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fathom_eval.cli import main
from fathom_eval.errors import UserError
from fathom_eval.reports import build_report, summary_table
from fathom_eval.reports.build import build_document
from fathom_eval.reports.loading import load_runs
from fathom_eval.run import MANIFEST, RECORDS, Run
from tests.reports.made_records import fidelity_records, step_records, timing_records
from tests.reports.made_records import write_run as write_plain_run
from tests.reports.pages import data, every_file, read_page, rows_of, table

Records = list[dict[str, Any]]
MakeRecords = Callable[..., Records]
WriteRun = Callable[..., Path]

HOSTILE = (
    "<script>alert('x')</script>",
    '"><img src=x onerror=alert(1)>',
    "{{ 7 * 7 }} {% raw %}",
    "\x1b[31mred\x1b[0m\x07",
    "abc\u202egpj.exe\u2066",
    '=HYPERLINK("http://evil")',
    "_$x^{2$ \\alpha %d %s",
    "| pipe | `tick` *star* [link](http://evil)",
    "lone \ud800 surrogate \ufffe",
    "漢字 🙂 " + "x" * 300,
)


def test_every_file_is_written_and_nothing_else(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    files = build_report([write_run(make_records(tasks=("vt", "fwe"), ks=(64, 128), samples=2))], tmp_path / "out")
    written = {path for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert written == every_file(files)
    # Two tasks and all of them at two k, and the depths at each k; every one as SVG and PNG.
    assert len(files.figures) == 2 * (3 * 2 + 2)
    # Every table of the page is a CSV file, and stands in the Markdown and the LaTeX.
    page = read_page(files)
    assert len(files.tables) == sum(tag == "table" and "data-sort" in attributes for tag, attributes in page.tags)
    assert files.latex.read_text(encoding="utf-8").count("\\begin{longtable}") == len(files.tables)
    assert not list((tmp_path / "first").glob("report*"))


def test_tasks_stand_in_the_order_in_which_they_were_asked_for(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    files = build_report([write_run(make_records(tasks=("fwe", "vt", "niah_single"), samples=2))], tmp_path / "out")
    header = files.markdown.read_text(encoding="utf-8").split("| method | all tasks |")[1].splitlines()[0]
    assert header == " minus exact top-k | bits | niah_single | vt | fwe |"


def test_results_csv_has_a_row_a_cell_and_samples_csv_a_row_a_record(
    make_records: MakeRecords, write_run: WriteRun, tmp_path: Path
) -> None:
    records = make_records(tasks=("vt",), ks=(64, 128))
    files = build_report([write_run(records)], tmp_path / "out")
    rows = rows_of(files.csv)
    assert len(rows) == 1 + 2 * 12
    row = next(row for row in rows if row["method"] == "sparq r=8" and row["task"] == "vt" and row["k"] == "64")
    assert (row["samples"], row["pairs"], row["context"], row["bits"], row["bits_per_channel"]) == ("24", "24", "2048", "34.0", "0.53125")
    assert int(row["wins"]) + int(row["ties"]) + int(row["losses"]) == 24
    assert float(row["score"]) - float(row["exact_top_k_score"]) == pytest.approx(float(row["minus_exact_top_k"]))
    assert float(row["minus_exact_top_k_low"]) <= float(row["minus_exact_top_k"]) <= float(row["minus_exact_top_k_high"])
    dense = next(row for row in rows if row["method"] == "dense")
    assert (dense["k"], dense["bits"], dense["minus_exact_top_k"]) == ("", "", "")
    assert len(data(files, "overview.csv")) == 1 + 2 * 12
    samples = data(files, "samples.csv")
    assert len(samples) == len(records)
    assert json.loads(samples[-1]["options"]) == {"block": 8}
    assert samples[0]["generation"] == " ABCDE. The grass"


def test_first_divergence_is_taken_from_the_tokens(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    tokens = {"dense": [1, 2, 3], "exact_topk": [1, 2, 3], "landmark": [1, 9, 3], "full_scan": [1, 2], "loki": None}
    records = make_records(tasks=("vt",), samples=2)
    for record in records:
        del record["first_divergence"]
        record["token_ids"] = tokens.get(record["method"])
    samples = data(build_report([write_run(records)], tmp_path / "out"), "samples.csv")
    found = {row["method"]: row["first_divergence"] for row in samples}
    assert [found[name] for name in tokens] == ["", "", "1", "2", ""]


def test_report_is_reproducible_to_the_byte(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    run = write_run(make_records(tasks=("vt",), samples=8))
    one, two = build_report([run], tmp_path / "one"), build_report([run], tmp_path / "two")
    assert len(every_file(one)) == len(every_file(two))
    for path in every_file(one):
        assert path.read_bytes() == (two.html.parent / path.relative_to(one.html.parent)).read_bytes(), path.name


def test_page_says_what_was_compared_and_what_separates(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    text = read_page(build_report([write_run(make_records(), model="org/model-1b")], tmp_path / "out")).words
    assert (
        "11 scans of org/model-1b on cpu (2 threads), compared with dense attention and with exact top-k: niah_single, "
        "niah_multikey and vt, in a haystack of wikitext, 24 samples a task and context." in text
    )
    separate, same = re.findall(r"score below it: (.*?)\. Not separated from it by these samples: (.*?)\.", text)[0]
    assert "landmark block=8 (−" in separate
    assert "full_scan bits=4" in same
    assert "python-docs" not in text
    for fact in ("identity.data_sha256", "versions.torch", "2.13.0", "settings.haystack", "What the columns mean"):
        assert fact in text


def test_the_answer_stands_first_in_a_table_and_figures_say_how_they_are_read(
    make_records: MakeRecords, write_run: WriteRun, tmp_path: Path
) -> None:
    files = build_report([write_run(make_records(ks=(64, 128), samples=6))], tmp_path / "out")
    [first, *_] = table(files, "scores-2048-k64")
    assert [name for name in first if not name.endswith(("error", "low", "high"))] == [
        "method", "all tasks", "minus exact top-k", "bits", "niah_single", "niah_multikey", "vt",
    ]  # fmt: skip
    page = read_page(files)
    # Once, straight before the first figure, in words that need no other page.
    assert page.source.count('class="reading"') == 1
    assert page.source.index('class="reading"') < page.source.index("<figure") < page.source.index("More on the terms") + 2000
    for words in ("Further left is cheaper", "Higher is better: more of what was hidden in the text is found", "on the Pareto front"):
        assert words in page.words
    one = build_report([write_run(make_records(tasks=("vt",), samples=6), name="one")], tmp_path / "one")
    assert list(table(one, "scores-2048-k128")[0])[:2] == ["method", "vt"]


def test_every_table_and_figure_names_run_model_context_k_device_and_samples(make_records: MakeRecords, tmp_path: Path) -> None:
    steps = [
        {**one, "model": "smollm2", "repeats": 5, "task": "x", "sample": 0, "options": {}, "method_version": 1} for one in timing_records()
    ]
    kinds = {
        "tasks": (make_records(tasks=("vt", "fwe"), contexts=(2048, 4096), samples=6), "ruler", "6 samples"),
        "errors": (fidelity_records(windows=6), "fidelity", "6 windows"),
        "agents": (step_records(), "sessions", "8 sessions"),
        "steps": (steps, "bench", "5 timed turns"),
    }
    for name, (records, kind, samples) in kinds.items():
        run = write_plain_run(tmp_path / name, records, kind=kind, settings={"session_tokens": "6000:7500"})
        with ExitStack() as stack:
            loaded, _ = load_runs([run], stack)
            document, _ = build_document(loaded, [])
        items = [*document.tables, *document.drawings]
        assert len(items) >= 3
        for item in items:
            text = f"{item.title} {item.origin}"
            device = "NVIDIA H200" if name == "steps" else "a CPU"
            summary = item.name in ("paper", "step-ratios") or item.name.startswith("ablation")
            for fact in (f"run {name}", "smollm2", device, *(() if summary else ("k = ", " tokens", samples))):
                assert fact in text, (name, item.name, fact, text)


def test_the_heat_map_shows_what_was_found_at_each_depth(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    records = make_records(tasks=("niah_single",), contexts=(2048, 4096), samples=8)
    for record in records:
        # Only what stands in the first half of the shorter context is found.
        depth = (record["sample"] + 0.5) / 8
        record["depths"], record["hits"] = [depth], [depth < 0.5 and record["context"] == 2048]
    files = build_report([write_run(records)], tmp_path / "out")
    [row] = [row for row in table(files, "depth-k128") if row["method"] == "sparq r=8"]
    found = {name: row[name] for name in row if name != "method"}
    assert list(found.values()) == ["1.0", "1.0", "0.5", "0.0", "0.0", *["0.0"] * 5]
    [figure] = [path.read_text(encoding="utf-8") for path in files.figures if path.name == "depth-k128.svg"]
    assert "<title>sparq r=8, 2,048 tokens, depth 0.4–0.6: 1 of 2 gold strings</title>" in figure


def test_python_docs_haystack_is_said_aloud(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    files = build_report([write_run(make_records(tasks=("vt",), samples=2), haystack="python-docs")], tmp_path / "out")
    warning = "The haystack is python-docs"
    assert warning in files.html.read_text()
    assert warning in files.markdown.read_text()


def test_limits_are_said_aloud(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    records = make_records(dense_at_floor=("vt",))
    for record in records:
        if record["label"] == "loki r=16" and record["sample"] < 2:
            record.update(finish="error", error="RuntimeError: out of memory", score=None)
    records = [r for r in records if not (r["label"] == "sparq r=8" and r["task"] == "niah_single")]
    run = write_run(records)
    lines = (run / RECORDS).read_bytes().splitlines(keepends=True)
    (run / RECORDS).write_bytes(b"".join([*lines[:5], b"damaged\n", *lines[6:]]))
    files = build_report([run], tmp_path / "out")
    text = read_page(files).words
    assert "Not discriminative, because dense attention itself is at the floor: vt at 2,048 tokens" in text
    assert "6 records of failed samples are in no mean" in text
    assert "RuntimeError: out of memory" in text
    assert "sparq r=8 on niah_single at 2,048 tokens, k = 128: 0 of 24 samples" in text
    assert "1 damaged line of the records skipped" in text
    assert len(files.warnings) == 1
    assert "line 6" in files.warnings[0]


def test_page_is_self_contained_and_its_anchors_work(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    records = make_records(tasks=("vt",), ks=(64, 128), samples=6)
    page = read_page(build_report([write_run(records)], tmp_path / "out"))
    page.check()
    assert "prefers-color-scheme: dark" in page.source


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_stays_text(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path, text: str) -> None:
    records = make_records(tasks=(text,), samples=2)
    for record in records:
        record["generation"] = text
        if record["method"] == "sparq":
            record.update(label=f"{text}{record['options']['r']}", family=text)
        if record["method"] == "loki":
            record.update(finish="error", error=text)
    files = build_report([write_run(records, haystack=text, model=text)], tmp_path / "out")
    assert all(path.is_file() and path.is_relative_to(tmp_path / "out" / "figures") for path in files.figures)
    samples = tmp_path / "out" / "samples.csv"
    everything = [path.read_text() for path in (files.html, files.csv, samples, files.markdown, files.latex, *files.tables)]
    everything += [path.read_text() for path in files.figures if path.suffix == ".svg"]
    for content in everything:
        assert not set(content) & set("\x1b\x07\u202e\u2066\ufffe")
    page = read_page(files)
    page.check()
    for path in files.figures:
        if path.suffix == ".svg":
            ElementTree.parse(path)
    for path in (files.csv, samples, *files.tables):
        for row in rows_of(path):
            assert not any(str(value).lstrip().startswith(("=", "+", "@")) for value in row.values()), row
    assert "http://evil" not in re.sub(r"\\\[link\\\]\(http://evil\)|HYPERLINK\(\S*\)", "", everything[3])
    if "7 * 7" in text:
        assert "{{ 7 * 7 }}" in page.text


def test_runs_are_shown_side_by_side_and_never_averaged(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    first = write_run(make_records(tasks=("vt",)), name="first", seed=0)
    second = write_run([{**r, "score": 0.0} for r in make_records(tasks=("vt",))], name="second", seed=1)
    files = build_report([first, second, first], tmp_path / "out")
    rows = rows_of(files.csv)
    assert [row["run"] for row in rows] == ["first"] * 13 + ["second"] * 13
    assert {row["score"] for row in rows if row["run"] == "second"} == {"0.0"}
    assert next(float(row["score"]) for row in rows if row["method"] == "dense") > 0.5
    page = read_page(files)
    page.check()
    differences = table(files, "differences")
    assert {"fact": "identity.seed", "first": "0", "second": "1"} in differences
    assert "identity.model" not in {row["fact"] for row in differences}
    assert "The identities of the runs do not match. They differ in seed. Nothing is averaged or paired" in page.words
    assert len(files.figures) == 2 * 2 * 2


def test_runs_of_one_name_are_told_apart(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    records = make_records(tasks=("vt",), samples=6)
    paths = [write_run(records, name="a/run"), write_run(records, name="b/run", seed=1)]
    rows = rows_of(build_report(paths, tmp_path / "out").csv)
    assert {row["run"] for row in rows} == {str(path) for path in paths}


def test_scan_without_bits_still_has_a_row(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    records = make_records(tasks=("vt",), samples=6)
    for record in records:
        if record["method"] == "landmark":
            record.update(bits=0.0, declared_bits=0.0)
        elif not record["control"]:
            record.update(bits=None, declared_bits=None)
    files = build_report([write_run(records)], tmp_path / "out")
    assert [path.name for path in files.figures if path.suffix == ".svg"] == ["score-vt-2048-k128.svg", "depth-k128.svg"]
    assert len(rows_of(files.csv)) == 13


def test_controls_alone_make_a_report(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path) -> None:
    dense_only = [r for r in make_records(tasks=("vt",)) if r["method"] == "dense"]
    files = build_report([write_run(dense_only)], tmp_path / "out")
    assert [path.name for path in files.figures] == ["depth-dense.svg", "depth-dense.png"]
    assert [row["method"] for row in rows_of(files.csv)] == ["dense"]


def test_summary_table(make_records: MakeRecords) -> None:
    frame = summary_table(make_records(ks=(64, 128), dense_at_floor=("vt",)))
    assert list(frame.columns) == ["k", "method", "bits", "niah_single", "niah_multikey", "vt", "all tasks", "minus exact top-k"]
    assert list(frame["method"][:2]) == ["dense", "exact top-k"]
    assert list(frame["k"]) == [""] + ["64"] * 12 + ["128"] * 12
    row = frame[(frame["method"] == "landmark block=8") & (frame["k"] == "64")].iloc[0]
    assert row["niah_single"].endswith("▼")
    assert row["vt"].endswith("≈")
    assert re.fullmatch(r"−\d\.\d\d \[−\d\.\d\d, −\d\.\d\d\]", row["minus exact top-k"])
    assert "standard error" in frame.attrs["note"]
    assert isinstance(summary_table([]), pd.DataFrame)


def test_command_prints_paths(make_records: MakeRecords, write_run: WriteRun, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(make_records(tasks=("vt",), samples=6))
    assert main(["report", str(run)]) == 0
    assert f"page: {run / 'report' / 'report.html'}" in capsys.readouterr().out
    assert main(["report", str(run), "--quiet"]) == 0
    assert capsys.readouterr() == (f"{run / 'report' / 'report.html'}\n", "")
    assert main(["report", str(run), "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert all(Path(document[name]).is_file() for name in ("html", "csv", "markdown", "latex"))
    assert all(Path(path).is_file() for name in ("data", "tables", "figures") for path in document[name])
    assert len(document["figures"]) == 4
    # The report lies within the run and must not make it a foreign folder.
    assert len(Run.load(run)) == 6 * 13


def test_bad_input_is_one_line(make_records: MakeRecords, write_run: WriteRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_run(make_records(tasks=("vt",), samples=1), name="good")
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("")
    (tmp_path / "newer").mkdir()
    (tmp_path / "newer" / MANIFEST).write_text('{"schema": 99, "identity": {}}')
    Run.open(tmp_path / "fresh", identity={}, details={}).close()
    Run.open(tmp_path / "kind", identity={}, details={"kind": "weather"}).close()
    for name, message in (
        ("missing", "there is no such folder"),
        ("empty", "it is empty"),
        ("foreign", "it has no manifest.json"),
        ("newer", "newer fathom-eval (schema 99"),
        ("fresh", "has no records yet"),
        ("kind", "kind 'weather'"),
        (f"good/{MANIFEST}", "it is a file"),
    ):
        assert main(["report", str(tmp_path / name), "--output", str(tmp_path / "out")]) == 2
        out, error = capsys.readouterr()
        assert out == ""
        assert error.startswith("error: ")
        assert message in error
        assert error.count("\n") == 1
    assert main(["report", str(good), str(tmp_path / "fresh")]) == 2
    assert "--output DIR" in capsys.readouterr().err
    assert main(["report", str(good), "--output", str(good / MANIFEST)]) == 2
    assert "is a file" in capsys.readouterr().err
    assert main(["report", str(good), "--output", str(good / MANIFEST / "below")]) == 2
    assert "cannot write" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="at least one run"):
        build_report([], tmp_path)


def test_foreign_record_is_refused(tmp_path: Path) -> None:
    record = {"kind": "other", "task": "vt", "context": "long", "sample": 0, "k": 1, "method": "x", "options": {}, "method_version": 1}
    with Run.open(tmp_path / "run", identity={}, details={}) as run:
        run.append([record])
    with pytest.raises(UserError, match="holds no record of kind 'ruler'"):
        build_report([tmp_path / "run"], tmp_path / "out")


def test_a_scan_below_at_one_k_and_above_at_another_is_in_a_group_of_its_own(
    make_records: MakeRecords, write_run: WriteRun, tmp_path: Path
) -> None:
    scores = {("sparq r=8", 64): 0.2, ("sparq r=8", 128): 0.9, ("sparq r=16", 128): 0.9, ("loki r=16", 64): 0.2}
    records = [
        {**record, "score": 1.0 if record["method"] == "dense" else scores.get((record["label"], record["k"]), 0.5)}
        for record in make_records(tasks=("vt",), ks=(64, 128), samples=8)
    ]
    words = read_page(build_report([write_run(records)], tmp_path / "out")).words
    assert "Below at some, above at others: sparq r=8 (1 below, 1 above of 2)." in words
    assert "Above exact top-k somewhere: sparq r=16 (1 of 2)." in words
    assert "Below it at some: loki r=16 (1 of 2)." in words
