"""The script that holds runs on several devices against one another, and the published runs that it compared."""

from __future__ import annotations

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.cli import main
from fathom_eval.run import PACKED, RECORDS
from tests.survival.conftest import Arguments
from tests.survival.scripts import ROOT, script


def test_the_published_runs_on_several_gpus_are_what_the_script_and_the_page_say(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module, published = script("several_devices"), ROOT / "reports" / "published" / "several-gpus"
    for packed in published.glob("runs/*/records.jsonl.gz"):
        folder = tmp_path / packed.parent.name
        folder.mkdir()
        shutil.copy(packed.with_name("manifest.json"), folder)
        (folder / RECORDS).write_bytes(gzip.decompress(packed.read_bytes()))
    assert module.main([f"--compare-only={tmp_path}"]) == 0
    found, recorded = json.loads(capsys.readouterr().out), json.loads((published / "several-gpus.json").read_text(encoding="utf-8"))
    assert [found["records_equal"], found["finished"], recorded["records_equal"]] == [True] * 3
    assert found["versions"] == recorded["versions"]
    tests = recorded["tests"]
    assert {test["outcome"] for test in tests} == {"passed"}
    runs = {run["name"]: run for run in recorded["runs"]}
    compared = {run["name"]: run for run in found["runs"]}
    assert list(runs) == list(compared) == list(module.cases("", "", ""))
    for name, run in compared.items():
        # The runs' tables are not published.
        shared = {key for key in run.keys() & runs[name].keys() if not key.startswith("tables")}
        assert {"records", "equal", "missing", "differing_fields", "device", "arguments"} <= shared
        assert {key: run[key] for key in shared} == {key: runs[name][key] for key in shared}
        assert (run["samples"], run["of"]) == (4, 4)
    readme, page = ((path).read_text(encoding="utf-8") for path in (published / "README.md", ROOT / "docs" / "durability.md"))
    said = {"each": "each process seen on one GPU", "split": "seen on both", "split, two copies": "each seen on both"}
    for name, run in runs.items():
        assert (run["exit_code"], run["missing"], run["tables"], run["tables_equal"]) == (0, 0, 7, True)
        assert set(run["gpus_of_processes"]) == {2 if name.startswith("split") else 1}
        [line] = [line for line in readme.splitlines() if line.startswith(f"| {name} |")]
        equal, seen = f"{run['equal']} of {run['records']}", ", ".join(map(str, run["gpus_of_processes"]))
        assert re.search(rf"\| {equal}(, itself)? \| all 7\b.* \| {seen} \| {run['seconds']} \|", line)
        assert ("in another order" in line) == (run["tables_in_another_order"] == ["samples.csv"]) == ("2 workers" in line)
        if name in said:
            assert f"| {equal} records and all tables equal to one GPU's; {said[name]} |" in page
    assert f"all {len(tests)} passed" in readme
    logits = {line["how"]: line for line in recorded["logits"]}
    assert set(logits) == {"again", "split", "device_map=auto"}
    assert {(line["steps"], line["branches"], line["bit_equal"]) for line in logits.values()} == {(12, 10, True)}
    assert logits["split"]["layers"] == logits["device_map=auto"]["layers"] == {"cuda:0": 11, "cuda:1": 19}
    logits_said = 'logits of 12 steps of 10 branches, split by `--device` and by transformers\' `device_map="auto"`'
    assert f"| {logits_said} | bit-equal to one GPU's, both |" in page
    assert "11 and 19 layers both times" in readme
    for path in (published / "several-gpus.json", *published.glob("runs/*/manifest.json")):
        assert not re.search(r"/tmp|/root|/opt|/home|/work\b", path.read_text(encoding="utf-8")), path


def test_what_is_no_complete_run_to_compare_with_is_said(ruler: Arguments, tmp_path: Path) -> None:
    module = script("several_devices")
    with pytest.raises(SystemExit, match="holds no run named 'one'"):
        module.main([f"--compare-only={tmp_path}"])
    assert main(ruler("one", limit=2)) == 0
    path = tmp_path / "one" / RECORDS
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if json.loads(line)["sample"] == 0))
    with pytest.raises(SystemExit, match="is unfinished: it has 1 of 2 samples"):
        module.main([f"--compare-only={tmp_path}"])
    path.with_name(PACKED).write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    with pytest.raises(SystemExit, match=r"one are packed: unpack them first \(gunzip -k .*/one/records\.jsonl\.gz\)"):
        module.main([f"--compare-only={tmp_path}"])


def test_runs_that_lack_records_or_tables_are_not_called_equal(
    ruler: Arguments, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = script("several_devices")
    assert main(ruler("one", limit=1)) == 0
    capsys.readouterr()

    def compared() -> tuple[int, dict[str, Any], str]:
        code, printed = module.main([f"--compare-only={tmp_path}"]), capsys.readouterr()
        return code, json.loads(printed.out), printed.err

    code, found, _ = compared()
    assert (code, found["records_equal"], found["finished"]) == (1, False, False), "a run alone equals no other"
    for name in module.cases("", "", "").keys() - {module.ONE}:
        shutil.copytree(tmp_path / "one", tmp_path / name)
    code, found, said = compared()
    assert (code, found["records_equal"], found["finished"], said) == (0, True, True, "")
    table = tmp_path / "split" / "report" / "samples.csv"
    kept = table.read_text()
    table.write_text(kept.partition("\n")[0] + "\n")
    code, found, _ = compared()
    assert (code, found["records_equal"], [run["tables_equal"] for run in found["runs"]].count(False)) == (1, True, 1)
    table.write_text(kept)
    shutil.rmtree(tmp_path / "again" / "report")
    code, found, said = compared()
    assert (code, [run["tables_equal"] for run in found["runs"]]) == (0, [True, None, True, True, True])
    assert said == f"no tables of 'again' to compare: fathom-eval report {tmp_path}/again makes them\n"
    shutil.rmtree(tmp_path / "one" / "report")
    assert {run["tables_equal"] for run in compared()[1]["runs"]} == {None}
    path = tmp_path / "each" / RECORDS
    whole = path.read_text().splitlines(keepends=True)
    for lines in (whole[:-1], []):
        path.write_text("".join(lines))
        code, found, _ = compared()
        assert (code, found["records_equal"], found["finished"]) == (1, False, False)
    assert not module.same_records({"exit_code": 1})


def test_runs_on_several_devices_are_held_together(ruler: Arguments, tmp_path: Path) -> None:
    module = script("several_devices")
    assert main(ruler("one", limit=1)) == 0
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    found = module.compare(tmp_path / "one", tmp_path / "other")
    assert (found["records"], found["equal"], found["missing"], found["tables_equal"]) == (5, 5, 0, True)
    table = tmp_path / "other" / "report" / "samples.csv"
    head, first, *rest = table.read_text().splitlines(keepends=True)
    table.write_text("".join([head, *rest, first]))
    found = module.compare(tmp_path / "one", tmp_path / "other")
    assert (found["tables_equal"], found["tables_in_another_order"]) == (True, ["samples.csv"])
    table.write_text("".join([head, *rest]))
    found = module.compare(tmp_path / "one", tmp_path / "other")
    assert (found["tables_equal"], found["tables_in_another_order"]) == (False, [])
    path = tmp_path / "other" / RECORDS
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    changed = next(line for line in lines if line.get("method") == "sparq")
    changed |= {"generation": "another", "rows": changed["rows"] + 2}
    gone = next(line for line in lines if line.get("method") == "landmark")
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines if line is not gone))
    found = module.compare(tmp_path / "one", tmp_path / "other")
    assert (found["records"], found["equal"], found["missing"]) == (4, 3, 1)
    assert found["differing_fields"] == {"generation": 1, "rows": 1}
    assert found["largest_differences"] == {"rows": 2}
