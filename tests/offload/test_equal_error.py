"""Errors of a fidelity run beside times of steps."""

from __future__ import annotations

import gzip
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.cli import main
from fathom_eval.errors import UserError
from fathom_eval.offload.bench.equal_error import equal_error, find_label, read_table, table_name, tables_of, write_table
from fathom_eval.run import PACKED, RECORDS, Run


def fidelity(method: str, label: str, bits: float, error: float, **options: object) -> dict[str, Any]:
    cell = {"kind": "fidelity", "finish": "complete", "context": 8192, "k": 512, "head_dim": 64}
    return {**cell, "method": method, "label": label, "options": options, "bits": bits, "error_dense": error}


def step(method: str, label: str, bits: float, milliseconds: float, **changes: object) -> dict[str, Any]:
    cell = {"kind": "step", "context": 2**20, "k": 512, "head_dim": 128, "model": "shape", "index": "host", "batch": 1, "sessions": 1}
    times = {"rerank": 1.0, "void": False, "gpu_ms": milliseconds, "wall_ms": 2 * milliseconds}
    return {**cell, **times, "method": method, "label": label, "scan_bits": bits, **changes}


def test_each_method_is_timed_where_it_reaches_the_error(tmp_path: Path) -> None:
    errors = [
        fidelity("double_sparsity", "double_sparsity c=D/4", 68, 0.2),
        fidelity("fathom", "fathom budget=48", 28, 0.25),
        fidelity("fathom", "fathom budget=48", 28, 0.13),  # two windows, whose mean is 0.19
        fidelity("fathom", "fathom budget=64", 38, 0.1),
        fidelity("fathom", "fathom budget=32 rerank=2", 19, 0.18, rerank=2.0),
        fidelity("fathom", "fathom budget=32 basis=klt attend=union", 19, 0.05, basis="klt", attend="union"),
        fidelity("fathom", "fathom budget=64 basis=klt", 38, 0.09, basis="klt"),
        fidelity("sparq", "sparq r=D/8", 34, 0.21),
        fidelity("landmark", "landmark size=8", 128, 0.01),
    ]
    steps = [
        step("double_sparsity", "double_sparsity c=32", 136, 120),
        step("double_sparsity", "double_sparsity c=32", 136, 110, lanes=2),
        step("double_sparsity", "double_sparsity c=32", 136, 50, batch=2),
        step("fathom", "fathom budget=48 basis=raw", 57, 55),
        step("fathom", "fathom budget=64 basis=raw", 75, 70),
        step("fathom", "fathom budget=32 rerank=2", 38, 44, rerank=2.0),
        step("fathom", "fathom budget=32", 38, 40),
        step("sparq", "sparq r=16", 68, 60),
        step("landmark", "landmark size=8", 256, 10, void=True),
    ]
    rows = equal_error(errors, steps, "double_sparsity c=D/4")
    assert [(row.step_label, row.step_ms, row.ratio) for row in rows] == [
        ("double_sparsity c=32", 110, 1.0),
        ("fathom budget=32 rerank=2", 44, 2.5),
        ("fathom budget=64 basis=raw", 70, 110 / 70),
    ]
    assert [(row.windows, row.basis) for row in rows] == [(1, ""), (1, ""), (1, "klt")]
    write_table(tmp_path / "table.csv", rows)
    assert (tmp_path / "table.csv").read_text().splitlines()[2].startswith("8192,512,1,fathom,,fathom budget=32 rerank=2,0.18,")
    joint = step("fathom", "fathom budget=32 attend=union", 38, 30, options={"attend": "union"})
    assert equal_error(errors, [*steps, joint], "double_sparsity c=D/4")[2].step_label == "fathom budget=32 attend=union"
    with pytest.raises(UserError, match="did you mean"):
        equal_error(errors, steps, "double_sparsity c=D/3")
    with pytest.raises(UserError, match="no step of the run"):
        equal_error(errors, steps[3:], "double_sparsity c=D/4")


KLT_ERRORS = [
    fidelity("double_sparsity", "double_sparsity c=D/4", 68, 0.2),
    fidelity("loki", "loki r=D/4", 68, 0.15),
    fidelity("fathom", "fathom budget=48 basis=klt", 28, 0.18, basis="klt"),
    fidelity("fathom", "fathom budget=64 basis=auto", 38, 0.1, budget=64),
    fidelity("fathom", "fathom budget=48 basis=raw", 28, 0.19, basis="raw"),
    fidelity("fathom", "fathom budget=24 basis=klt attend=union", 14, 0.14, basis="klt", attend="union"),
]
KLT_STEPS = [
    step("double_sparsity", "double_sparsity c=32", 136, 110, round="a"),
    step("loki", "loki r=D/4", 136, 115, round="a", scan_basis="klt"),
    step("fathom", "fathom budget=48 basis=klt", 56, 56, round="a", scan_basis="klt", options={"basis": "klt"}),
    step("fathom", "fathom budget=48 basis=raw", 56, 55, round="a", scan_basis="raw", options={"basis": "raw"}),
]


def test_a_step_of_the_same_basis_is_preferred(tmp_path: Path) -> None:
    rows = equal_error(KLT_ERRORS, KLT_STEPS, "double_sparsity c=D/4")
    assert [(row.method, row.basis, row.step_label, row.step_basis) for row in rows] == [
        ("double_sparsity", "", "double_sparsity c=32", "raw"),
        ("loki", "", "loki r=D/4", "klt"),
        ("fathom", "klt", "fathom budget=48 basis=klt", "klt"),
        ("fathom", "raw", "fathom budget=48 basis=raw", "raw"),
    ]
    assert all(row.same_round for row in rows)
    # Only one in raw channels was timed: it stands for both; one in a basis stands for no raw one.
    instead = {row.basis: row for row in equal_error(KLT_ERRORS, [*KLT_STEPS[:2], KLT_STEPS[3]], "double_sparsity c=D/4")}
    assert (instead["klt"].step_label, instead["klt"].step_basis) == ("fathom budget=48 basis=raw", "raw")
    assert "raw" not in {row.basis for row in equal_error(KLT_ERRORS, KLT_STEPS[:3], "double_sparsity c=D/4")}
    # What ``auto`` was is not in the record: the step that does more stands for it.
    both = [{**KLT_STEPS[at], "label": f"{at}", "scan_bits": 76.0} for at in (2, 3)]
    (auto,) = (row for row in equal_error(KLT_ERRORS, [*KLT_STEPS[:2], *both], "double_sparsity c=D/4") if row.method == "fathom")
    assert (auto.basis, auto.step_label, auto.step_basis) == ("", "2", "klt")
    # Records from before the field.
    old = [{name: value for name, value in one.items() if name != "scan_basis"} for one in KLT_STEPS]
    assert equal_error(KLT_ERRORS, old, "double_sparsity c=D/4") == rows
    write_table(tmp_path / "table.csv", rows)
    last = "step_wall_ms,reference_wall_ms,windows_shared,windows_below,errors_run,errors_model,errors_text"
    assert (tmp_path / "table.csv").read_text().splitlines()[0].endswith(f"reference_ms,ratio,step_basis,same_round,{last}")


def test_several_references_each_have_their_lines() -> None:
    rows = equal_error(KLT_ERRORS, KLT_STEPS, ["loki r=D/4", "double_sparsity c=D/4", "loki r=D/4"])
    assert [(row.reference, row.method) for row in rows] == [
        ("loki r=D/4", "loki"),
        *(("double_sparsity c=D/4", method) for method in ("double_sparsity", "loki", "fathom", "fathom")),
    ]
    assert rows[0].reference_ms == 115
    joint = step("fathom", "fathom budget=24 basis=klt attend=union", 28, 40, round="a", options={"basis": "klt", "attend": "union"})
    rows = equal_error(KLT_ERRORS, [*KLT_STEPS, joint], ["loki r=D/4", "double_sparsity c=D/4"])
    assert [(row.label, row.ratio) for row in rows if row.basis == "klt"] == [
        ("fathom budget=24 basis=klt attend=union", 115 / 40),
        ("fathom budget=24 basis=klt attend=union", 110 / 40),
    ]
    with pytest.raises(UserError, match="no step of the run stands for 'loki r=D/4'"):
        equal_error(KLT_ERRORS, [KLT_STEPS[0]], ["double_sparsity c=D/4", "loki r=D/4"])
    with pytest.raises(UserError, match="the fidelity run has no 'loki r=D/8'"):
        equal_error(KLT_ERRORS, KLT_STEPS, ["double_sparsity c=D/4", "loki r=D/8"])


UNION = "double_sparsity c=D/4 attend=union"
UNION_ERROR = fidelity("double_sparsity", UNION, 68, 0.17, attend="union")
UNION_STEP = step("double_sparsity", "double_sparsity c=32 attend=union", 136, 112, round="a", options={"attend": "union"})


def test_a_reference_is_named_as_a_method_or_by_its_label() -> None:
    known = {one["label"] for one in KLT_ERRORS} | {UNION, "sparq r=D/4", "sparq r=D/8"}
    for text, label in (
        ("sparq r=D/4", "sparq r=D/4"),
        ("sparq:r=D/4", "sparq r=D/4"),
        ("sparq", "sparq r=D/8"),
        ("double_sparsity:attend=union:c=D/4", UNION),
        ("fathom:basis=klt", "fathom budget=48 basis=klt"),
    ):
        assert find_label(text, known) == label
    for text, hint in (
        ("sprq", "did you mean one of sparq r=D/4, sparq r=D/8?"),
        ("sprq:r=D/4", "did you mean one of sparq r=D/4, sparq r=D/8?"),
        ("sparq:r=D/3", "did you mean 'sparq r=D/[48]'?"),
        ("landmark", f"choose from {', '.join(sorted(known))}"),
    ):
        with pytest.raises(UserError, match=re.escape(f"the fidelity run has no '{text}'; ") + hint.replace("?", r"\?")):
            find_label(text, known)
    rows = equal_error(KLT_ERRORS, KLT_STEPS, ["loki:r=D/4", "loki r=D/4"])
    assert [row.reference for row in rows] == ["loki r=D/4"]


def test_times_of_one_round_are_compared_first() -> None:
    def fathom(steps: list[dict[str, Any]]) -> tuple[float, float, bool]:
        (row,) = (row for row in equal_error(KLT_ERRORS, steps, "double_sparsity c=D/4") if row.basis == "klt")
        return row.step_ms, row.reference_ms, row.same_round

    own, base = KLT_STEPS[2], KLT_STEPS[0]
    faster = [{**own, "round": "b", "gpu_ms": 50.0}, {**base, "round": "c", "gpu_ms": 100.0}]
    assert fathom([*faster, own, base]) == (56, 110, True)
    assert fathom([faster[0], faster[1], base]) == (50, 100, False)
    assert fathom([{**own, "round": None}, {**base, "round": None}]) == (56, 110, False), "unknown is not in turn"


def test_the_reference_picks_the_round() -> None:
    def pair(*steps: dict[str, Any]) -> tuple[float, float, bool]:
        (row,) = (row for row in equal_error(KLT_ERRORS, steps, "double_sparsity c=D/4") if row.basis == "klt")
        return row.step_ms, row.reference_ms, row.same_round

    own, base = KLT_STEPS[2], KLT_STEPS[0]
    lucky = [{**own, "round": "b", "gpu_ms": 50.0}, {**base, "round": "b", "gpu_ms": 120.0}]
    assert pair(own, base, *lucky) == (56, 110, True), "not the round in which the configuration was fast and the reference slow"
    assert pair(*lucky, base) == (50, 120, True), "only one round timed both"
    gathered = [{**own, "rows_by": "both", "gpu_ms": 54.0}, {**base, "rows_by": "both", "gpu_ms": 105.0}]
    assert pair(own, base, gathered[0], *lucky) == (54, 110, True), "either side has its best of that round"
    assert pair(own, base, gathered[1], *lucky) == (56, 105, True)


def test_a_named_budget_or_number_of_channels_must_agree_before_the_bits() -> None:
    target = fidelity("double_sparsity", "double_sparsity c=D/4", 68, 0.2)
    base = step("double_sparsity", "double_sparsity c=32", 136, 110)

    def stand_in(one: dict[str, Any], *steps: dict[str, Any]) -> list[str]:
        return [row.step_label for row in equal_error([target, one], [base, *steps], "double_sparsity c=D/4") if row.label == one["label"]]

    # 28.3 and 30.6 bits of 128 channels: either is within 6 % of 14.7 of 64.
    between = fidelity("fathom", "fathom budget=26 basis=raw", 14.7, 0.1, basis="raw")
    near, same = step("fathom", "fathom budget=24 basis=raw", 28.3, 35), step("fathom", "fathom budget=26 basis=raw", 30.6, 37)
    assert stand_in(between, near) == []
    assert stand_in(between, near, same) == ["fathom budget=26 basis=raw"]
    assert stand_in(between, {**near, "label": "fathom 24"}) == ["fathom 24"], "where only one side names a budget, bits decide"
    # 13 of 64 and 26 of 128 are the same; 25 makes 12 at 64 channels, as 24 does.
    assert stand_in({**between, "label": "fathom budget=25 basis=raw"}, near) == ["fathom budget=24 basis=raw"]
    assert stand_in({**between, "label": "fathom budget=30 basis=raw depths=measured"}, near) == ["fathom budget=24 basis=raw"]
    assert (
        stand_in({**between, "label": "fathom budget=30 basis=raw depths=measured"}, {**near, "label": "fathom budget=24 depths=measured"})
        == []
    )
    sparq = fidelity("sparq", "sparq r=D/8", 34, 0.1)
    assert stand_in(sparq, step("sparq", "sparq r=16", 68, 60)) == ["sparq r=16"]
    assert stand_in(sparq, step("sparq", "sparq r=15", 66, 60)) == []
    assert stand_in({**sparq, "label": "sparq r=some"}, step("sparq", "sparq r=15", 66, 60)) == ["sparq r=15"]


def test_errors_and_steps_of_another_k_are_not_paired() -> None:
    other = [{**one, "k": 256} for one in KLT_ERRORS]
    said: list[str] = []
    rows = equal_error([*other, *KLT_ERRORS], KLT_STEPS, "double_sparsity c=D/4", said.append)
    assert rows == equal_error(KLT_ERRORS, KLT_STEPS, "double_sparsity c=D/4")
    assert {(row.error_k, row.step_k) for row in rows} == {(512, 512)}
    assert said == ["left out: errors at k = 256; steps were timed at k = 512"]
    with pytest.raises(UserError, match=r"at the same k and bits a channel \(errors at k = 256; steps were timed at k = 512\)$"):
        equal_error(other, KLT_STEPS, "double_sparsity c=D/4")


def made(tmp_path: Path, errors: list[dict[str, Any]], timed: list[dict[str, Any]]) -> list[str]:
    """Arguments for the folders ``errors`` and ``steps``; ``ruler`` is a run beside them."""
    steps = [{**one, "options": one.get("options", {})} for one in timed]
    ruler = [{**KLT_ERRORS[0], "kind": "ruler"}]
    for name, kind, records in (("errors", "fidelity", errors), ("steps", "bench", steps), ("ruler", "ruler", ruler)):
        with Run.open(tmp_path / name, identity={"benchmark": "step"}, details={"kind": kind}) as opened:
            opened.append([{"task": "t", "sample": 0, "method_version": 1, **one} for one in records])
    return ["bench", "equal-error", "--errors", str(tmp_path / "errors"), "--output", str(tmp_path / "steps")]


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    return made(tmp_path, KLT_ERRORS, KLT_STEPS)


def test_the_reference_of_the_default_with_union_is_one_where_it_was_timed(tmp_path: Path) -> None:
    for name, errors, timed, references in (
        ("both", [*KLT_ERRORS, UNION_ERROR], [*KLT_STEPS, UNION_STEP], ["double_sparsity c=D/4", UNION]),
        ("untimed", [*KLT_ERRORS, UNION_ERROR], KLT_STEPS, ["double_sparsity c=D/4"]),
        ("unmeasured", KLT_ERRORS, [*KLT_STEPS, UNION_STEP], ["double_sparsity c=D/4"]),
    ):
        assert main(made(tmp_path / name, errors, timed)) == 0
        rows = read_table(tmp_path / name / "steps/equal-error-errors.csv")
        assert list(dict.fromkeys(row.reference for row in rows)) == references


def test_a_run_without_the_reference_of_the_default_names_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = made(tmp_path, KLT_ERRORS[1:3], KLT_STEPS)
    assert main(command) == 2
    assert capsys.readouterr().err == (
        "error: the fidelity run has no 'double_sparsity c=D/4', whose error is the one to reach unless --reference names another of its "
        "methods: fathom budget=48 basis=klt, loki r=D/4\n"
    )
    assert main([*command, "--reference", "loki"]) == 0


def test_what_goes_with_a_table_that_is_replaced_is_said(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = [*command, "--reference", "loki:r=D/4,double_sparsity"]
    for flags, warning in (
        (both, ""),
        (both, ""),
        (command, "without lines at the error of loki r=D/4: a table holds the --reference of one call"),
        (both, ""),
    ):
        assert main(flags) == 0
        assert capsys.readouterr().err == (warning and f"warning: equal-error-errors.csv is replaced, {warning}\n")
    (tmp_path / "steps/equal-error-errors.csv").write_text("mine\n1\n")
    assert main(command) == 0
    said = "warning: equal-error-errors.csv is replaced; what was there is no table of this version\n"
    assert capsys.readouterr().err == said


def test_a_line_says_in_how_many_windows_the_error_is_smaller(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = [{**one, "error_dense": one["error_dense"] + 0.03 * at, "sample": at} for one in KLT_ERRORS[:2] for at in (0, 1)]
    assert main(made(tmp_path, [*errors[:3], {**errors[3], "error_dense": 0.24}], KLT_STEPS)) == 0
    own, other, *_ = capsys.readouterr().out.splitlines()
    assert "below" not in own, "the reference is not compared with itself"
    assert other.endswith("the speed of double_sparsity c=D/4 (error 0.2150), below in 1 of 2 windows")


def test_the_command_reads_packed_records(command: list[str], tmp_path: Path) -> None:
    assert main(command) == 0
    made = (tmp_path / "steps/equal-error-errors.csv").read_bytes()
    (tmp_path / "steps/equal-error-errors.csv").unlink()
    for name in ("errors", "steps"):
        file = tmp_path / name / RECORDS
        file.with_name(PACKED).write_bytes(gzip.compress(file.read_bytes()))
        file.unlink()
    assert main(command) == 0
    assert (tmp_path / "steps/equal-error-errors.csv").read_bytes() == made
    assert not (tmp_path / "steps" / RECORDS).exists()


def test_the_command_says_what_it_was_not_given(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "whole.jsonl").write_text('{"kind": "step", "model": "m", "tokens": 9}\n')
    bare = tmp_path / "bare.jsonl"
    bare.write_bytes((tmp_path / "steps" / RECORDS).read_bytes())
    for flags, said in (
        (["--errors", f"{tmp_path}/ruler"], f"--errors {tmp_path}/ruler is a ruler run, not a fidelity run"),
        (["--errors", f"{tmp_path}/steps"], f"--errors {tmp_path}/steps is a run of 'bench step', not a fidelity run"),
        (["--output", f"{tmp_path}/errors"], f"--output {tmp_path}/errors is a fidelity run, not a run of 'bench step'"),
        (["--output", f"{tmp_path}/whole.jsonl"], "is a run of other timings, not a run of 'bench step'"),
        (["--output", str(bare)], "is a file: equal-error needs the folder of the run"),
        (["--errors", f"{tmp_path}/none"], f"no run at {tmp_path}/none"),
        (["--lanes", "2"], "--lanes: no meaning in 'equal-error'; --lanes is of 'bench step'"),
    ):
        assert main([*command, *flags]) == 2
        error = capsys.readouterr().err.strip()
        assert said in error
        assert "\n" not in error
    (tmp_path / "steps/equal-error-errors.csv").mkdir()  # as where the folder cannot be written
    assert main(command) == 2
    assert f"cannot write {tmp_path}/steps/equal-error-errors.csv" in capsys.readouterr().err


def test_the_table_says_what_it_is_made_of(command: list[str], tmp_path: Path) -> None:
    assert main(command) == 0
    other = tmp_path / "another errors-run"
    (tmp_path / "errors").rename(other)
    assert main([str(other) if one == str(tmp_path / "errors") else one for one in command]) == 0
    first, second = (tmp_path / "steps" / table_name(name) for name in ("errors", other.name))
    assert [path.name for path in tables_of(tmp_path / "steps")] == ["equal-error-another-errors-run.csv", "equal-error-errors.csv"]
    before, after = read_table(first), read_table(second)
    assert {(row.errors_run, row.errors_model, row.errors_text) for row in before} == {("errors", "an unnamed model", "")}
    assert {row.errors_run for row in after} == {other.name}
    assert [replace(row, errors_run="errors") for row in after] == before


def test_windows_are_compared_one_by_one() -> None:
    target = [fidelity("double_sparsity", "double_sparsity c=D/4", 68, error) | {"sample": at} for at, error in enumerate((0.2, 0.3, 0.1))]
    own = [fidelity("sparq", "sparq r=D/8", 34, error) | {"sample": at} for at, error in ((0, 0.1), (1, 0.31), (5, 0.0))]
    steps = [step("double_sparsity", "double_sparsity c=32", 136, 110), step("sparq", "sparq r=16", 68, 60, wall_ms=66.0)]
    same, below = equal_error([*target, *own], steps, "double_sparsity c=D/4")
    assert (same.windows_shared, same.windows_below) == (3, 0)
    assert (below.windows, below.windows_shared, below.windows_below) == (3, 2, 1)
    assert (below.step_wall_ms, below.reference_wall_ms) == (66.0, 220.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text.replace(",windows_below", ",other"), "lacks windows_below, as of an earlier version"),
        (lambda text: text.replace(",True,", ",maybe,", 1), "row 1: 'maybe' is no value of its column"),
        (lambda text: text.replace(",512,", ",half,", 1), "row 1: .*'half' is no value"),
        (lambda text: text.replace(",0.2,", ",nan,", 1), "row 1: 'nan' is no value"),
        (lambda text: text[:-30], "row 4|lacks"),
        (lambda text: "\udc80" + text, "cannot be read"),
    ],
)
def test_a_table_that_was_changed_is_refused(change: Callable[[str], str], said: str, tmp_path: Path) -> None:
    path, rows = tmp_path / "table.csv", equal_error(KLT_ERRORS, KLT_STEPS, "double_sparsity c=D/4")
    write_table(path, rows)
    assert read_table(path) == rows
    path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8", errors="surrogateescape")
    with pytest.raises(UserError, match=said) as error:
        read_table(path)
    assert "'fathom-eval bench equal-error' writes it anew" in str(error.value)
    with pytest.raises(UserError, match="No such file"):
        read_table(tmp_path / "none.csv")


def test_the_command_takes_several_references(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for flags, references in (
        ([], ["double_sparsity c=D/4"]),
        (["--reference", "loki r=D/4, double_sparsity c=D/4"], ["loki r=D/4", "double_sparsity c=D/4"]),
        (["--reference", "loki r=D/4", "--reference", "double_sparsity c=D/4"], ["loki r=D/4", "double_sparsity c=D/4"]),
    ):
        assert main([*command, *flags]) == 0
        lines = (tmp_path / "steps/equal-error-errors.csv").read_text().splitlines()[1:]
        assert list(dict.fromkeys(line.split(",")[7] for line in lines)) == references
    assert "another round" not in capsys.readouterr().out
    assert main([*command, "--reference", " , "]) == 2
    assert "--reference is empty" in capsys.readouterr().err
