"""Several copies of the model: the records of one process, and what a death costs."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.cli import main
from fathom_eval.console import Console
from fathom_eval.errors import UserError
from fathom_eval.run import Run
from fathom_eval.workers import ATTEMPTS, Measured, spread
from tests.survival.conftest import Arguments
from tests.survival.kills import records

IDENTITY = {"model_fingerprint": "aa", "dtype": "float32"}


class DeathError(Exception):
    """A worker is gone."""


class FakeSlot:
    """A worker that answers at once: with the unit, or as ``script`` says for it."""

    def __init__(self, script: Callable[[str, Any], None], identity: dict[str, Any] | None = None) -> None:
        self.script, self.identity = script, IDENTITY if identity is None else identity
        self.starts = self.closed = 0

    def start(self) -> Future[dict[str, Any]]:
        self.starts += 1
        return self._answer("start", None, {"identity": self.identity, "pid": 1, "host": "here"})

    def measure(self, unit: Any) -> Future[Measured]:
        return self._answer("measure", unit, Measured([{"unit": unit}]))

    def has_died(self, error: BaseException) -> bool:
        return isinstance(error, DeathError)

    def close(self) -> None:
        self.closed += 1

    def _answer(self, what: str, unit: Any, value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            self.script(what, unit)
        except Exception as error:
            future.set_exception(error)
        else:
            future.set_result(value)
        return future


def results(units: list[int], slots: list[FakeSlot], said: list[str] | None = None) -> dict[int, list[dict[str, Any]]]:
    say = (said if said is not None else []).append
    found = spread(units, slots, identity=IDENTITY, failed=lambda unit, reason: [{"unit": unit, "error": reason}], say=say)
    return {unit: measured.records for unit, measured in found}


def test_every_unit_is_measured_once_and_workers_are_closed() -> None:
    slots = [FakeSlot(lambda what, unit: None) for _ in range(3)]
    assert results(list(range(10)), slots) == {unit: [{"unit": unit}] for unit in range(10)}
    assert all(slot.closed for slot in slots)
    assert results([1], slots) == {1: [{"unit": 1}]}
    assert sum(slot.starts for slot in slots) == 3 + 1, "no more workers than units"


def test_a_death_costs_only_the_unit_in_flight_which_is_done_elsewhere() -> None:
    deaths: list[Any] = []

    def dies_once(what: str, unit: Any) -> None:
        if unit == 4 and not deaths:
            deaths.append(unit)
            raise DeathError("killed")

    said: list[str] = []
    slots = [FakeSlot(dies_once), FakeSlot(lambda what, unit: None)]
    assert results(list(range(8)), slots, said) == {unit: [{"unit": unit}] for unit in range(8)}
    assert sum(slot.starts for slot in slots) == 2 + len(deaths)
    assert any("died: killed" in line for line in said) == bool(deaths)


def test_a_worker_that_died_at_rest_is_started_anew() -> None:
    class DeadAtRest(FakeSlot):
        def measure(self, unit: Any) -> Future[Measured]:
            if self.starts == 1 and unit == 3:
                raise DeathError("killed")
            return super().measure(unit)

    slot = DeadAtRest(lambda what, unit: None)
    assert results(list(range(5)), [slot]) == {unit: [{"unit": unit}] for unit in range(5)}
    assert slot.starts == 2


def test_a_unit_that_kills_its_workers_is_recorded_as_failed() -> None:
    tries: list[Any] = []

    def poison(what: str, unit: Any) -> None:
        if unit == 2:
            tries.append(unit)
            raise DeathError("killed by signal 9\nmore")

    found = results(list(range(5)), [FakeSlot(poison), FakeSlot(poison)])
    assert len(tries) == ATTEMPTS
    assert found.pop(2) == [{"unit": 2, "error": f"{ATTEMPTS} workers died of it, the last one thus: killed by signal 9"}]
    assert found == {unit: [{"unit": unit}] for unit in (0, 1, 3, 4)}


def test_workers_that_never_load_the_model_end_the_run() -> None:
    def cannot_load(what: str, unit: Any) -> None:
        if what == "start":
            raise DeathError("no memory")

    slots = [FakeSlot(cannot_load), FakeSlot(cannot_load)]
    with pytest.raises(UserError, match=r"every worker died while it loaded the model \(no memory\)"):
        results([1, 2], slots)
    assert [slot.starts for slot in slots] == [ATTEMPTS, ATTEMPTS]
    assert results([1, 2], [FakeSlot(cannot_load), FakeSlot(lambda what, unit: None)]).keys() == {1, 2}, "one is enough"


def test_a_worker_of_another_model_or_version_is_refused() -> None:
    slots = [FakeSlot(lambda what, unit: None, {**IDENTITY, "dtype": "bfloat16"})]
    with pytest.raises(UserError, match="the worker on here measures something else: dtype is bfloat16 there and float32 here"):
        results([1], slots)
    assert slots[0].closed


def test_what_the_user_can_act_on_comes_through_and_the_rest_as_it_is() -> None:
    class WrappedError(Exception):
        def __init__(self, cause: Exception) -> None:
            super().__init__("a long remote traceback")
            self.cause = cause

    def fails(error: Exception) -> Callable[[str, Any], None]:
        def script(what: str, unit: Any) -> None:
            if unit is not None:
                raise error

        return script

    with pytest.raises(UserError, match=r"^too little memory$"):
        results([1], [FakeSlot(fails(WrappedError(UserError("too little memory"))))])
    with pytest.raises(ZeroDivisionError):
        results([1], [FakeSlot(fails(ZeroDivisionError()))])


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sessions", "fidelity"])
def test_two_processes_give_the_records_of_one(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    arguments: Arguments = request.getfixturevalue(kind)
    assert main(arguments("one")) == 0
    assert main(arguments("two", workers=2)) == 0
    assert ordered(tmp_path / "two") == ordered(tmp_path / "one")
    assert not multiprocessing.active_children()
    assert main(arguments("two", workers=2)) == 0, "a finished run starts no worker"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ruler", "sessions"])
def test_two_processes_decode_by_the_timed_step(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    arguments: Arguments = request.getfixturevalue(kind)
    assert main(arguments("one", runtime="hbm")) == 0
    assert main(arguments("two", runtime="hbm", workers=2)) == 0
    assert ordered(tmp_path / "two") == ordered(tmp_path / "one")
    assert {record["decoded_by"] for record in records(tmp_path / "two")} == {"runtime", "lock-step"}


@pytest.mark.slow
def test_a_killed_process_loses_nothing(
    ruler: Arguments, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(ruler("one", limit=10)) == 0
    victims = kill_one_of_two(monkeypatch)
    assert main([argument for argument in ruler("two", limit=10, workers=2) if argument != "--quiet"]) == 0
    assert ordered(tmp_path / "two") == ordered(tmp_path / "one")
    printed = capsys.readouterr()
    assert re.search(rf"worker \d \(process {victims[0]} on .*\) died", printed.out)
    assert printed.err.count("samples: 10/10 (100 %)") == 1, "the progress of all workers is one"


@pytest.mark.slow
@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_their_parent(ruler: Arguments, tmp_path: Path, ending: signal.Signals) -> None:
    command = [argument for argument in ruler(workers=2, limit=200) if argument != "--quiet"]
    run = [sys.executable, "-m", "fathom_eval", *command]
    with subprocess.Popen(run, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        workers: list[int] = []
        for line in process.stdout:
            workers += [int(number) for number in re.findall(r"worker \d \(process (\d+) on .* has the model", line)]
            if len(workers) == 2:
                break
        assert all(is_alive(worker) for worker in workers)
        process.send_signal(ending)
        _, error = process.communicate(timeout=120)
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGKILL: -9}[ending]
    assert "Traceback" not in error
    assert ("finished work is kept" in error) == (ending != signal.SIGKILL)
    until = time.perf_counter() + 60
    while any(is_alive(worker) for worker in workers) and time.perf_counter() < until:
        time.sleep(0.1)
    assert not any(is_alive(worker) for worker in workers)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    pytest.importorskip("ray")
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "num_gpus": 0, "object_store_memory": 100 << 20, "include_dashboard": False}
    made = Cluster(initialize_head=True, head_node_args=node)
    made.add_node(**node)
    made.wait_for_nodes()
    yield made
    made.shutdown()


@pytest.mark.slow
def test_a_killed_actor_of_a_ray_cluster_loses_nothing(
    ruler: Arguments, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(ruler("one", limit=10)) == 0
    victims = kill_one_of_two(monkeypatch)
    arguments = [argument for argument in ruler("ray", limit=10, ray=cluster.address) if argument != "--quiet"]
    assert main(arguments) == 0
    output = capsys.readouterr().out
    assert len(set(re.findall(r"(worker \d) \(process \d+ on .*\) has the model", output))) == 2, "an actor a node"
    assert re.search(rf"worker \d \(process {victims[0]} on .*\) died", output)
    assert ordered(tmp_path / "ray") == ordered(tmp_path / "one")


@pytest.mark.slow
def test_a_node_that_leaves_the_cluster_loses_nothing(
    sessions: Arguments, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(sessions("one")) == 0
    left: list[Any] = []
    append = Run.append

    def leave(self: Run, new: Any) -> None:
        append(self, new)
        if not left:
            left.append(cluster.worker_nodes.copy().pop())
            cluster.remove_node(left[0], allow_graceful=False)

    monkeypatch.setattr(Run, "append", leave)
    assert main(sessions("ray", ray=cluster.address)) == 0
    assert left
    assert ordered(tmp_path / "ray") == ordered(tmp_path / "one")


def test_a_ray_cluster_that_is_not_there_is_one_line(ruler: Arguments, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("ray")
    assert main(ruler(ray="nowhere")) == 2
    assert "the Ray cluster 'nowhere' cannot be used" in capsys.readouterr().err


def test_without_ray_the_message_names_the_extra(
    ruler: Arguments, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(ruler(ray="local")) == 2
    assert "pip install 'fathom-eval[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize("count", [0, -1, 10**12])
def test_a_number_of_workers_that_is_none(ruler: Arguments, capsys: pytest.CaptureFixture[str], count: int) -> None:
    assert main(ruler(workers=count)) == 2
    assert f"--workers {count} must be at least 1" in capsys.readouterr().err


def ordered(path: Path) -> list[dict[str, Any]]:
    return sorted(records(path), key=lambda record: (record["task"], record["sample"], record["label"]))


def kill_one_of_two(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Kill a worker when both have the model and records come. The list tells which."""
    said: list[str] = []
    victims: list[int] = []
    say, append = Console.say, Run.append

    def listen(self: Console, line: str) -> None:
        said.append(line)
        say(self, line)

    def strike(self: Run, new: Any) -> None:
        append(self, new)
        ready = re.findall(r"\(process (\d+) on .* has the model", "\n".join(said))
        if len(ready) < 2:
            time.sleep(2)  # a worker gets no further unit meanwhile, so that some are left for the other
        elif not victims:
            victims.append(int(ready[-1]))
            os.kill(victims[0], signal.SIGKILL)

    monkeypatch.setattr(Console, "say", listen)
    monkeypatch.setattr(Run, "append", strike)
    return victims


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
