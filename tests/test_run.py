"""The run directory: identity, resuming, torn and damaged records, locks, full disks."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fathom_eval.errors import UserError
from fathom_eval.run import MANIFEST, RECORDS, SCHEMA_VERSION, Run, default_run_path, identity_sha256, record_key
from fathom_eval.run_files import LOCK, check_free_space
from tests.made_records import DETAILS, IDENTITY, open_run, record, unit


def test_records_come_back_as_they_were_given(tmp_path: Path) -> None:
    given_records = unit(0) + unit(1)
    given_records[0]["generation"] = 'a "quoted" \u2028 line\nand \ud800 a lone surrogate, \x1b[31m, é'
    with open_run(tmp_path / "run") as run:
        run.append(given_records[:3])
        run.append(given_records[3:])
        assert run.records() == given_records
    loaded = Run.load(tmp_path / "run")
    assert loaded.records() == given_records
    assert loaded.keys() == {record_key(one) for one in given_records}
    assert len(loaded) == 6
    assert loaded.problems == []


def test_manifest_is_whole_before_any_record(tmp_path: Path) -> None:
    with open_run(tmp_path / "deep" / "run") as run:
        manifest = json.loads((run.path / MANIFEST).read_text())
        assert not (run.path / RECORDS).exists()
    assert manifest["schema"] == SCHEMA_VERSION
    assert manifest["kind"] == "ruler"
    assert manifest["identity"] == IDENTITY
    assert manifest["identity_sha256"] == identity_sha256(IDENTITY)
    assert (manifest["versions"], manifest["device"], manifest["settings"]) == ({"torch": "2.13"}, "cpu", {"limit": 4})
    assert len(manifest["invocations"]) == 1


def test_resuming_adds_an_invocation_and_keeps_records(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.append(unit(0))
    with Run.open(tmp_path, identity=IDENTITY, details={**DETAILS, "device": "cuda:0"}) as run:
        assert run.keys() == {record_key(one) for one in unit(0)}
        run.append(unit(1))
    manifest = Run.load(tmp_path).manifest
    assert [start["device"] for start in manifest["invocations"]] == ["cpu", "cuda:0"]
    assert manifest["device"] == "cpu"
    assert len(Run.load(tmp_path)) == 6


def test_identity_with_tuples_resumes(tmp_path: Path) -> None:
    open_run(tmp_path, layers=(1, 2)).close()
    open_run(tmp_path, layers=[1, 2]).close()


def test_another_identity_is_refused_and_every_difference_named(tmp_path: Path) -> None:
    open_run(tmp_path, old="x").close()
    before = (tmp_path / MANIFEST).read_bytes()
    with pytest.raises(UserError) as refusal:
        open_run(tmp_path, seed=7, dtype="bfloat16")
    message = str(refusal.value)
    assert "--seed 0 there, --seed 7 now" in message
    assert "no --dtype there, --dtype bfloat16 now" in message
    assert 'old is "x" there and absent now' in message
    assert "tokenizer" not in message
    assert "\n" not in message
    assert (tmp_path / MANIFEST).read_bytes() == before
    with pytest.raises(UserError, match="is a ruler run; give sessions another folder"):
        Run.open(tmp_path, identity={**IDENTITY, "old": "x"}, details={"kind": "sessions"})
    open_run(tmp_path, old="x").close()


@pytest.mark.parametrize("leftover", [(), (LOCK,), (LOCK, f"{MANIFEST}.tmp")])
def test_leftover_of_an_aborted_start_is_used(tmp_path: Path, leftover: tuple[str, ...]) -> None:
    for name in leftover:
        (tmp_path / name).write_text('{"schema": 1, "iden')
    with open_run(tmp_path) as run:
        run.append(unit(0))
    assert len(Run.load(tmp_path)) == 3


@pytest.mark.parametrize("name", ["notes.txt", RECORDS, "model.safetensors"])
def test_foreign_content_is_refused_and_untouched(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"holds something else than a run \\({name}\\)"):
        open_run(tmp_path)
    assert [entry.name for entry in tmp_path.iterdir()] == [name]


def test_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("")
    with pytest.raises(UserError, match="is a file"):
        open_run(tmp_path / "run")
    with pytest.raises(UserError, match="cannot write"):
        open_run(tmp_path / "run" / "below")
    with pytest.raises(UserError, match="it is a file"):
        Run.load(tmp_path / "run")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is damaged"),
        (b"\xff\xfe", "is damaged"),
        (b"[" * 100_000, "is damaged"),
        (b"[]", "is not the manifest of a run"),
        (b'{"name": "another program"}', "is not the manifest of a run"),
        (b'{"schema": 99, "identity": {}}', "newer fathom-eval \\(schema 99; this version reads up to 1\\)"),
    ],
)
def test_bad_manifest_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / MANIFEST).write_bytes(content)
    with pytest.raises(UserError, match=message):
        Run.load(tmp_path)
    with pytest.raises(UserError, match=message):
        open_run(tmp_path)
    assert (tmp_path / MANIFEST).read_bytes() == content


def test_load_names_what_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such folder"):
        Run.load(tmp_path / "missing")
    with pytest.raises(UserError, match="it is empty"):
        Run.load(tmp_path)
    (tmp_path / LOCK).write_text("")
    with pytest.raises(UserError, match="stopped there before it wrote its manifest"):
        Run.load(tmp_path)
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="it has no manifest"):
        Run.load(tmp_path)


def test_torn_unit_is_dropped_whole_and_repaired(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.append(unit(0))
        run.append(unit(1))
    whole = (tmp_path / RECORDS).read_bytes()
    first_unit = len(b"".join(whole.splitlines(keepends=True)[:3]))
    for size in {*range(first_unit, len(whole), 17), len(whole) - 1}:
        (tmp_path / RECORDS).write_bytes(whole[:size])
        loaded = Run.load(tmp_path)
        assert loaded.keys() == {record_key(one) for one in unit(0)}, size
        assert loaded.problems == []
    with open_run(tmp_path) as run:
        run.append(unit(1))
        assert run.records() == unit(0) + unit(1)
    assert (tmp_path / RECORDS).read_bytes() == whole


def test_damaged_middle_line_is_reported_and_the_rest_kept(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.append(unit(0))
        run.append(unit(1))
    lines = (tmp_path / RECORDS).read_bytes().splitlines(keepends=True)
    lines[1] = b'{"kind": "ruler", "task\x00\xff\n'
    lines[4] = (
        b'{"kind": "ruler", "task": ["a list"], "context": 1, "sample": 1, "k": 1, "method": "x", "options": {}, "method_version": 1}\n'
    )
    (tmp_path / RECORDS).write_bytes(b"".join(lines))
    with open_run(tmp_path) as run:
        kept = [unit(0)[0], unit(0)[2], unit(1)[0], unit(1)[2]]
        assert run.records() == kept
        assert [problem.split(": ")[1].split(" is ")[0] for problem in run.problems] == ["line 2", "line 5"]
        run.append([unit(0)[1]])
        assert run.records() == [*kept, unit(0)[1]]


def test_overlong_line_is_skipped_without_being_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_run(tmp_path) as run:
        run.append([record(0)])
        with (tmp_path / RECORDS).open("ab") as handle:
            handle.write(b"x" * 5000 + b"\n")
    monkeypatch.setattr("fathom_eval.run._MAX_LINE_BYTES", 1000)
    with open_run(tmp_path) as run:
        assert run.records() == [record(0)]
        assert "line 2 is damaged and is skipped (longer than" in run.problems[0]
        run.append([record(1)])
        assert run.records() == [record(0), record(1)]
        with pytest.raises(ValueError, match="a record takes more than"):
            run.append([record(2, generation="x" * 2000)])


def test_last_of_equal_keys_wins(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.append([record(0, score=0.0), record(1)])
        run.append([record(0, score=1.0)])
        assert [one["score"] for one in run.records() if one["sample"] == 0] == [1.0]
    assert [one["score"] for one in Run.load(tmp_path).records() if one["sample"] == 0] == [1.0]
    assert len(Run.load(tmp_path)) == 2


def test_record_key_tells_options_apart_but_not_their_order() -> None:
    assert record_key(record(options={"a": 1, "b": 2})) == record_key(record(options={"b": 2, "a": 1}))
    assert record_key(record(options={"a": 1})) != record_key(record(options={"a": 2}))
    assert record_key(record(method_version=1)) != record_key(record(method_version=2))
    assert record_key(record(k=None)) != record_key(record(k=0))
    with pytest.raises(ValueError, match="needs the field 'sample'"):
        record_key({name: value for name, value in record().items() if name != "sample"})
    with pytest.raises(ValueError, match="'task' of a record must be"):
        record_key(record(task=["niah"]))


def test_bad_record_writes_nothing(tmp_path: Path) -> None:
    with open_run(tmp_path) as run:
        run.append(unit(0))
        before = (tmp_path / RECORDS).read_bytes()
        for bad in ({"score": float("nan")}, {"options": {"budget": float("inf")}}, {"task": None, "k": 1.5}):
            with pytest.raises(ValueError, match=r"JSON|must be"):
                run.append([record(1), record(2, **bad)])
        run.append([])
        assert (tmp_path / RECORDS).read_bytes() == before


def test_a_run_opened_to_read_cannot_be_written(tmp_path: Path) -> None:
    run = open_run(tmp_path)
    run.close()
    run.close()
    for reader in (run, Run.load(tmp_path)):
        with pytest.raises(RuntimeError, match="opened to be read"):
            reader.append([record()])


HOLD_THE_RUN = """
import sys
from pathlib import Path
from fathom_eval.run import Run
run = Run.open(Path(sys.argv[1]), identity={"seed": 0}, details={})
print("held", flush=True)
sys.stdin.read()
"""


def test_second_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    command = [sys.executable, "-c", HOLD_THE_RUN, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"is in use by process {holder.pid} on .* since "):
            Run.open(tmp_path, identity={"seed": 0}, details={})
        assert len(Run.load(tmp_path)) == 0
        # Killed, not closed: the lock must not outlive the process.
        holder.kill()
        holder.wait()
    Run.open(tmp_path, identity={"seed": 0}, details={}).close()


def test_same_process_cannot_open_a_run_twice(tmp_path: Path) -> None:
    with open_run(tmp_path), pytest.raises(UserError, match=f"in use by process {os.getpid()}"):
        open_run(tmp_path)
    open_run(tmp_path).close()


def test_check_refuses_what_open_would_and_leaves_no_trace(tmp_path: Path) -> None:
    Run.check(tmp_path / "new")
    assert not (tmp_path / "new").exists()
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(UserError, match="holds something else"):
        Run.check(tmp_path)
    assert len(list(tmp_path.iterdir())) == 1
    with open_run(tmp_path / "run"), pytest.raises(UserError, match="in use by"):
        Run.check(tmp_path / "run")
    Run.check(tmp_path / "run")
    (tmp_path / "run" / MANIFEST).write_text('{"schema": 99, "identity": {}}')
    with pytest.raises(UserError, match="newer"):
        Run.check(tmp_path / "run")


def test_refused_start_releases_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, content: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("fathom_eval.run.write_atomically", fail)
        with pytest.raises(UserError, match="no disk space left"):
            open_run(tmp_path)
    open_run(tmp_path).close()


@pytest.mark.parametrize("written", [0, 1, 150, 450])
def test_full_disk_keeps_finished_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: int) -> None:
    write = os.write
    left = written

    def full(descriptor: int, content: memoryview) -> int:
        nonlocal left
        if left == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        count = write(descriptor, content[:left])
        left -= count
        return count

    with open_run(tmp_path) as run:
        run.append(unit(0))
        with monkeypatch.context() as patch:
            patch.setattr("fathom_eval.run.os.write", full)
            with pytest.raises(UserError, match=r"no disk space left for .*finished work is kept"):
                run.append(unit(1))
        assert run.records() == unit(0)
        run.append(unit(1))
    assert Run.load(tmp_path).records() == unit(0) + unit(1)


def test_torn_write_that_cannot_be_undone_is_repaired_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with open_run(tmp_path) as run:
        run.append(unit(0))
        with monkeypatch.context() as patch:
            patch.setattr("fathom_eval.run.os.fsync", fail)
            patch.setattr("fathom_eval.run.os.ftruncate", fail)
            with pytest.raises(UserError, match=r"cannot write .*Input/output error"):
                run.append(unit(1))
        run.append(unit(2))
    assert Run.load(tmp_path).records() == unit(0) + unit(2)


def test_records_are_on_the_disk_when_append_returns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    write, fsync = os.write, os.fsync
    with open_run(tmp_path) as run:
        run.append(unit(0))
        monkeypatch.setattr("fathom_eval.run.os.write", lambda *args: calls.append("write") or write(*args))
        monkeypatch.setattr("fathom_eval.run.os.fsync", lambda *args: calls.append("fsync") or fsync(*args))
        run.append(unit(1))
    assert calls == ["write", "fsync"]


def test_free_space_is_checked_before_work(tmp_path: Path) -> None:
    check_free_space(tmp_path / "not" / "yet" / "there", 1)
    with pytest.raises(UserError, match=r"not enough disk space for .*: about 1048576\.0 TiB are needed and .* are free"):
        check_free_space(tmp_path / "not" / "yet" / "there", 1 << 60)


@pytest.mark.parametrize(
    ("model", "folder"),
    [("smollm2", "ruler-smollm2"), ("org/Name-1.7B", "ruler-Name-1.7B"), ("a b/../ü", "ruler-model"), ("/x/y.gguf", "ruler-y.gguf")],
)
def test_default_path_names_kind_model_and_identity(model: str, folder: str) -> None:
    path = default_run_path("ruler", model, IDENTITY)
    assert str(path) == f"runs/{folder}-{identity_sha256(IDENTITY)[:8]}"
    assert default_run_path("ruler", model, {**IDENTITY, "seed": 1}) != path


@settings(max_examples=20, deadline=None)
@given(st.binary(max_size=200))
def test_any_tail_is_survived(tmp_path_factory: pytest.TempPathFactory, tail: bytes) -> None:
    path = tmp_path_factory.mktemp("tail")
    with open_run(path) as run:
        run.append(unit(0))
    with (path / RECORDS).open("ab") as handle:
        handle.write(tail)
    with open_run(path) as run:
        assert run.records() == unit(0)
        run.append(unit(1))
    assert Run.load(path).records() == unit(0) + unit(1)
