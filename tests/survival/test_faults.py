"""What can go wrong around a run: each is one clear message, and nothing that was finished is lost."""

from __future__ import annotations

import errno
import itertools
import json
import os
import random
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import fathom_eval.ruler as ruler_module
from fathom_eval.cli import main
from fathom_eval.errors import UserError
from fathom_eval.models import load_model
from fathom_eval.run import RECORDS, Run
from fathom_eval.sessions.reading import read_trajectories
from fathom_eval.sessions.report import ReadReport
from fathom_eval.stores import LandmarkStore
from tests.survival.conftest import Arguments, Capture, errors_of
from tests.survival.kills import records


def test_a_method_that_gives_no_numbers_is_recorded_and_the_rest_goes_on(
    ruler: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    assert main(ruler("whole")) == 0
    scan = LandmarkStore.scan

    def broken(self: LandmarkStore, *args: Any) -> Any:
        scores, reads = scan(self, *args)
        return torch.full_like(scores, float("nan")), reads

    with monkeypatch.context() as patch:
        patch.setattr(LandmarkStore, "scan", broken)
        assert main([argument for argument in ruler("without") if argument != "--quiet"]) == 0
    whole, without = records(tmp_path / "whole"), records(tmp_path / "without")
    assert {record["method"] for record in without if record["finish"] == "error"} == {"landmark"}
    assert {record["error"] for record in without if record["method"] == "landmark"} == {
        "layer 0: landmark size=8 gives scores that are not numbers"
    }
    assert [record for record in without if record["method"] != "landmark"] == [
        record for record in whole if record["method"] != "landmark"
    ]
    said = [line for line in capsys.readouterr().err.splitlines() if " failed in " in line]
    assert len(said) == len({(record["label"], record["k"]) for record in without if record["finish"] == "error"})
    reason = "layer 0: landmark size=8 gives scores that are not numbers"
    assert all(re.fullmatch(rf"warning: landmark size=8 at k=\d+ failed in \d samples?: {reason}", line) for line in said)


def test_a_file_that_may_not_grow_keeps_what_is_finished(ruler: Arguments, tmp_path: Path, capsys: Capture) -> None:
    assert main(ruler("whole")) == 0
    size = (tmp_path / "whole" / RECORDS).stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # The kernel writes as much as fits and refuses the rest: a torn unit.
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size * 0.6), hard))
    try:
        assert main(ruler("small")) == 2
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    [line] = errors_of(capsys)
    assert f"cannot write {tmp_path / 'small'}: File too large" in line
    assert {record["sample"] for record in records(tmp_path / "small")} == {0, 1}
    assert main(ruler("small")) == 0
    assert records(tmp_path / "small") == records(tmp_path / "whole")


FILL_THE_DISK = """
import os, sys
from pathlib import Path
from fathom_eval.run import Run
append, calls = Run.append, []
def fill(self, records):
    calls.append(1)
    if len(calls) == 3:
        with open(Path(sys.argv[1]) / "filler", "wb", buffering=0) as handle:
            try:
                while handle.write(bytes(1 << 12)):
                    pass
            except OSError:
                pass
    append(self, records)
Run.append = fill
from fathom_eval.cli import main
code = main(sys.argv[2:])
os.unlink(Path(sys.argv[1]) / "filler")
Run.append = append
print("codes", code, main(sys.argv[2:]), len(Run.load(Path(sys.argv[1]) / "run")), flush=True)
"""


@pytest.mark.slow
def test_a_full_disk_keeps_what_is_finished(ruler: Arguments, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["unshare", "-rm", "sh", "-c", f'mount -t tmpfs -o size=40m none {disk} && exec "$@"', "sh"]
    if not _works([*mount, "true"]):
        pytest.skip("no file system may be mounted here")
    done = subprocess.run(
        [*mount, sys.executable, "-c", FILL_THE_DISK, str(disk), *ruler("disk/run")], capture_output=True, text=True, check=False
    )
    assert "Traceback" not in done.stderr
    assert f"error: no disk space left for {disk / 'run'}: free some and run the same command again; finished work is kept" in done.stderr
    assert "codes 2 0 20" in done.stdout


def _works(command: list[str]) -> bool:
    try:
        return subprocess.run(command, capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def test_a_report_that_cannot_be_written_leaves_the_records(
    ruler: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    def full(self: Path, *args: Any, **named: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        patch.setattr(Path, "write_bytes", full)
        assert main(ruler()) == 2
    assert "no disk space left" in errors_of(capsys)[0]
    before = (tmp_path / "run" / RECORDS).read_bytes()
    assert main(ruler()) == 0
    assert (tmp_path / "run" / RECORDS).read_bytes() == before


def test_a_read_only_output_is_told_before_any_prefill(ruler: Arguments, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def refuse(self: Path, *args: Any, **named: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(ruler_module, "prefill", lambda *_: pytest.fail("a prefill was started"))
    monkeypatch.setattr(Path, "mkdir", refuse)
    assert main(ruler()) == 2
    [line] = errors_of(capsys)
    assert line.endswith("Read-only file system")


@pytest.mark.parametrize("kind", ["ruler", "sessions"])
def test_prompts_that_cannot_be_written_are_one_line(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    arguments: Arguments = request.getfixturevalue(kind)
    write = Path.write_text

    def refuse(self: Path, *args: Any, **named: Any) -> int:
        if self.parent.name == "samples":
            raise OSError(errno.EROFS, "Read-only file system")
        return write(self, *args, **named)

    monkeypatch.setattr(Path, "write_text", refuse)
    assert main([*arguments(), "--log-samples"]) == 2
    assert f"cannot write {tmp_path / 'run' / 'samples'}: Read-only file system" in errors_of(capsys)[0]


@pytest.mark.parametrize("content", [None, "a file where the cache should be"], ids=["absent", "no folder"])
def test_caches_that_are_absent_or_cannot_be_written_do_not_matter(
    sessions: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: str | None
) -> None:
    cache = tmp_path / "no-cache"
    if content is not None:
        cache.write_text(content)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(cache / "hub"))
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(cache / "own"))
    assert main(sessions()) == 0
    assert content is None or cache.read_text() == content


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The hub's clients think they are online, and no answer ever comes."""
    from huggingface_hub.utils import get_session

    pytest.importorskip("datasets")
    never = threading.Event()
    for name in ("huggingface_hub.constants.HF_HUB_OFFLINE", "datasets.config.HF_HUB_OFFLINE"):
        monkeypatch.setattr(name, False)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name)

    def wait(*args: Any, **named: Any) -> None:
        never.wait(60)
        raise OSError("no answer")

    for name in ("head", "get", "request", "send"):
        monkeypatch.setattr(type(get_session()), name, wait)
    return never


def test_without_a_network_nothing_waits_for_the_hub(silence: threading.Event, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    try:
        for ask, message in (
            (lambda: load_model("nobody/nothing"), "the model hub did not answer within 2 s, and what was fetched .* holds no such model"),
            (lambda: next(read_trajectories("nobody/nothing", ReadReport())), "cannot be streamed: the hub did not answer within 2 s"),
        ):
            began = time.perf_counter()
            with pytest.raises(UserError, match=message):
                ask()
            assert time.perf_counter() - began < 4
    finally:
        silence.set()


def test_a_model_file_that_vanishes_is_named(ruler: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    from transformers import AutoModelForCausalLM

    auto_model: Any = AutoModelForCausalLM
    load = auto_model.from_pretrained

    def vanish(folder: Path, **named: Any) -> Any:
        monkeypatch.setattr(Path, "is_file", lambda self: self.suffix != ".safetensors")
        return load(Path(folder) / "gone", **named)

    monkeypatch.setattr(auto_model, "from_pretrained", vanish)
    assert main(ruler()) == 2
    [line] = errors_of(capsys)
    assert "the weights of 'model' cannot be loaded" in line
    assert not (tmp_path / "run").exists()


def test_sigterm_is_like_an_interrupt(ruler: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    decode, calls = ruler_module.decode, itertools.count()

    def ended(*args: Any, **named: Any) -> Any:
        if next(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return decode(*args, **named)

    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(ruler_module, "decode", ended)
        assert main(ruler()) == 143
    assert signal.getsignal(signal.SIGTERM) is before
    printed = capsys.readouterr().err
    assert "ended by a signal; finished work is kept, run the same command again to go on" in printed
    assert "Traceback" not in printed
    assert {record["sample"] for record in records(tmp_path / "run")} == {0, 1}
    assert main(ruler()) == 0


def test_a_clock_that_jumps_changes_nothing(sessions: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert main(sessions("whole")) == 0
    now = itertools.cycle([2e9, 0.0, 1.7e9])
    monkeypatch.setattr(time, "time", lambda: next(now))
    assert main(sessions("jumps")) == 0
    assert records(tmp_path / "jumps") == records(tmp_path / "whole")
    assert all(0 <= record["seconds"] < 60 and 0 <= record["prefill_seconds"] < 60 for record in Run.load(tmp_path / "jumps").records())


def test_two_processes_on_one_run_are_told_apart(ruler: Arguments, tmp_path: Path, capsys: Capture) -> None:
    assert main(ruler(limit=1)) == 0
    identity = json.loads((tmp_path / "run" / "manifest.json").read_text())["identity"]
    with Run.open(tmp_path / "run", identity=identity, details={"kind": "ruler"}):
        assert main(ruler()) == 2
    [line] = errors_of(capsys)
    assert f"{tmp_path / 'run'} is in use by process {os.getpid()} on" in line
    assert "wait for it to end, or give another folder" in line


def test_a_damaged_record_is_named_and_measured_again(ruler: Arguments, tmp_path: Path, capsys: Capture) -> None:
    assert main(ruler()) == 0
    whole = records(tmp_path / "run")
    lines = (tmp_path / "run" / RECORDS).read_bytes().splitlines(keepends=True)
    lines[7] = lines[7][:40] + b"\x00\xff\n"
    (tmp_path / "run" / RECORDS).write_bytes(b"".join(lines))
    capsys.readouterr()
    assert main([argument for argument in ruler() if argument != "--quiet"]) == 0
    assert "line 8 is damaged" in capsys.readouterr().err
    again = records(tmp_path / "run")
    assert len(again) == len(whole)
    assert sorted(map(str, again)) == sorted(map(str, whole))


def test_records_of_random_bytes_are_told_by_both_commands(ruler: Arguments, tmp_path: Path, capsys: Capture) -> None:
    assert main(ruler(limit=1)) == 0
    whole = records(tmp_path / "run")
    (tmp_path / "run" / RECORDS).write_bytes(random.Random(1).randbytes(300).replace(b"\n", b"-"))
    capsys.readouterr()
    assert main(["report", str(tmp_path / "run")]) == 2
    [error] = errors_of(capsys)
    assert "has no records, only 1 damaged line: run 'fathom-eval ruler" in error
    assert main([argument for argument in ruler(limit=1) if argument != "--quiet"]) == 0
    assert re.search(r"^warning: \S+records\.jsonl: line 1 is damaged and is skipped", capsys.readouterr().err, re.MULTILINE)
    assert records(tmp_path / "run") == whole


def test_a_record_of_a_wrong_type_is_told_listed_and_measured_again(ruler: Arguments, tmp_path: Path, capsys: Capture) -> None:
    assert main(ruler(limit=2)) == 0
    file = tmp_path / "run" / RECORDS
    whole = records(tmp_path / "run")
    lines = file.read_bytes().splitlines(keepends=True)
    [changed, *_] = [at for at, line in enumerate(lines) if b'"method": "landmark"' in line]
    lines[changed] = re.sub(rb'"score": [\d.]+', b'"score": "x"', lines[changed])
    file.write_bytes(b"".join(lines))
    capsys.readouterr()
    for command in (["report", str(tmp_path / "run")], [argument for argument in ruler(limit=2) if argument != "--quiet"]):
        assert main(command) == 0
        assert f"line {changed + 1} is damaged and is skipped (the field 'score' must be a number, not str)" in capsys.readouterr().err
        if command[0] == "report":
            assert "landmark" in (tmp_path / "run" / "report" / "missing.csv").read_text(encoding="utf-8")
    # Measured again, it is no warning any more.
    for command in (["report", str(tmp_path / "run")], [argument for argument in ruler(limit=2) if argument != "--quiet"]):
        assert main(command) == 0
        assert "damaged" not in capsys.readouterr().err
    assert sorted(records(tmp_path / "run"), key=str) == sorted(whole, key=str)
