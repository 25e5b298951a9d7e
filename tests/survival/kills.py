"""Kill a run at random moments, resume it each time, and hold the end against a run that nobody disturbed.

Every start is a process of its own, forked from one that has the libraries imported, and ended by SIGKILL. The seed decides the moments
up to what the machine's load adds.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import importlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HOST_FACTS = frozenset({"seconds", "prefill_seconds", "memory"})
"""Fields of a record that tell of the machine and the hour."""
_LEAST_SECONDS = 0.02


def prepare(kind: str, units: int, folder: Path) -> list[str]:
    """Make a tiny model and its data in ``folder``; the command's arguments without ``--output``. A unit takes part of a second."""
    from tests.tiny import save_tiny

    model = save_tiny(folder / "model", layers=2, query_heads=4, kv_heads=2, head_dim=16, max_positions=2048, seed=1)
    common = [f"--model={model}", "--offline", "--quiet"]
    if kind == "ruler":
        prose = folder / "prose.txt"
        lines = (f"The boat number {word} left the old harbour early. Nobody saw it go." for word in range(400))
        prose.write_text("\n".join(lines), encoding="utf-8")
        options = {"haystack": prose, "context": 500, "k": 64, "tasks": "niah_single", "limit": units, "methods": "fathom,sparq,landmark"}
    else:
        from tests.sessions.rows import TOKENS, some_rows, write_jsonl

        options = {
            "trajectories": write_jsonl(folder / "rows.jsonl", some_rows(4 * units)),
            "sessions": units,
            "session_tokens": TOKENS,
            "k": 400,
            "max_new_tokens": 12,
            "methods": "fathom,sparq",
        }
    return [kind, *common, *(f"--{name.replace('_', '-')}={value}" for name, value in options.items())]


def kill_and_resume(kind: str, kills: int, seed: int, folder: Path) -> dict[str, Any]:
    """Run the experiment and say what came of it.

    Raises:
        AssertionError: A record or a table differs from the undisturbed run's, or a finished unit was computed again.
    """
    for name in ("cli", "ruler", "agent_sessions", "session_data", "tasks.haystack", "reports.build", "reports.sessions"):
        importlib.import_module(f"fathom_eval.{name}")
    arguments = prepare(kind, 2 * kills, folder)
    rng = random.Random(f"{kind} {seed}")
    began = time.perf_counter()
    log = folder / "whole.log"
    assert _wait(_start(kind, [*arguments, f"--output={folder / 'whole'}"], log)) == 0, "the undisturbed run failed"
    units = len(_logged(log))
    begun = [float(line.partition("\t")[2]) for line in log.read_text().splitlines()]
    start, pace = begun[0] - began, (begun[-1] - begun[0]) / (units - 1)
    log = folder / "killed.log"
    log.touch()
    in_flight: list[str] = []
    early = done = 0
    command = [*arguments, f"--output={folder / 'killed'}"]
    while done < kills:
        before = len(_logged(log))
        process = _start(kind, command, log)
        if rng.random() < 0.3:  # somewhere between the first import and the first samples
            _sleep(rng.uniform(0, start + pace), process)
        else:  # within the first or second sample of this start
            wanted = before + rng.choice((1, 1, 2))
            while len(_logged(log)) < wanted and _alive(process):
                time.sleep(_LEAST_SECONDS / 4)
            _sleep(rng.uniform(0, pace), process)
        assert _alive(process), f"the run ended after {done} of {kills} kills"
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        done += 1
        started = _logged(log)[before:]
        early += not started
        in_flight += started[-1:]
    assert _wait(_start(kind, command, log)) == 0, "the last start failed"
    computed = _logged(log)
    repeated = list(computed)
    for unit in dict.fromkeys(computed):
        repeated.remove(unit)
    extra = [unit for unit in repeated if repeated.count(unit) > in_flight.count(unit)]
    assert not extra, f"computed again although finished: {extra}"
    whole, killed = (records(folder / name) for name in ("whole", "killed"))
    assert killed == whole, f"records differ: {sum(a != b for a, b in zip(whole, killed, strict=False))} of {len(whole)}"
    tables = [tables_of(folder / name / "report") for name in ("whole", "killed")]
    assert tables[0] == tables[1], "tables differ"
    return {
        "kind": kind,
        "seed": seed,
        "kills": done,
        "before_the_first_sample": early,
        "units": units,
        "records": len(whole),
        "computed": len(computed),
        "computed_again": len(repeated),
        "records_equal": True,
        "tables_equal": sorted(tables[0]),
        "seconds": round(time.perf_counter() - began, 1),
    }


def records(path: Path) -> list[dict[str, Any]]:
    """The records of a run without what tells of the machine."""
    from fathom_eval.run import Run

    return [{name: value for name, value in record.items() if name not in HOST_FACTS} for record in Run.load(path).records()]


def tables_of(folder: Path) -> dict[str, list[list[str]]]:
    """Every table of a report, without columns of times and of memory and without the run's name."""
    tables = {}
    for file in sorted(folder.rglob("*.csv")):
        with file.open(encoding="utf-8", newline="") as handle:
            rows = list(csv.reader(handle))
        kept = [at for at, name in enumerate(rows[0]) if name != "run" and not any(word in name for word in ("second", "memory", "byte"))]
        tables[file.name] = [[row[at] for at in kept] for row in rows]
    return tables


def _start(kind: str, arguments: Sequence[str], log: Path) -> int:
    process = os.fork()
    if process:
        return process
    try:
        with (log.with_suffix(".output")).open("a") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        _log_units(kind, log)
        from fathom_eval.cli import main

        code = main(arguments)
    except BaseException:
        import traceback

        traceback.print_exc()
        code = 1
    os._exit(code)


def _log_units(kind: str, log: Path) -> None:
    """Let this process write down every unit that it begins."""
    module: Any = importlib.import_module("fathom_eval.ruler" if kind == "ruler" else "fathom_eval.agent_sessions")
    measure: Callable[..., Any] = module._measure
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def logged(loaded: Any, data: Any, unit: Any, *rest: Any) -> Any:
        name = f"{unit.task} {unit.index}" if kind == "ruler" else unit.unit.index
        os.write(descriptor, f"{name}\t{time.perf_counter()}\n".encode())
        return measure(loaded, data, unit, *rest)

    module._measure = logged


def _logged(log: Path) -> list[str]:
    """The units that were begun, in their order."""
    return [line.partition("\t")[0] for line in log.read_text().splitlines()]


def _alive(process: int) -> bool:
    return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None


def _sleep(seconds: float, process: int) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end and _alive(process):
        time.sleep(_LEAST_SECONDS / 4)


def _wait(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Print one line a kind of run, or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, metavar="N", help="of each kind of run (default: 30)")
    parser.add_argument("--kinds", default="ruler,sessions", metavar="A,B", help="default: ruler,sessions")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the moments (default: 0)")
    parser.add_argument("--folder", metavar="DIR", help="keep the runs here (default: a temporary folder)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    args = parser.parse_args(argv)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"
    results = []
    with contextlib.ExitStack() as stack:
        root = Path(args.folder or stack.enter_context(tempfile.TemporaryDirectory(prefix="fathom-eval-kills-")))
        os.environ["FATHOM_EVAL_CACHE"] = str(root / "cache")
        for kind in args.kinds.split(","):
            (root / kind).mkdir(parents=True, exist_ok=True)
            try:
                results.append(kill_and_resume(kind, args.kills, args.seed, root / kind))
            except AssertionError as error:
                print(f"{kind}: {error}", file=sys.stderr)
                for output in sorted((root / kind).glob("*.output")):
                    print("".join(output.read_text().splitlines(keepends=True)[-20:]), file=sys.stderr)
                return 1
    if args.json:
        print(json.dumps(results, indent=2))
    else:
        print("| run | kills | before the first sample | samples | computed | again | records | equal | tables equal |")
        print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |")
        for result in results:
            names = ("kind", "kills", "before_the_first_sample", "units", "computed", "computed_again", "records")
            print(f"| {' | '.join(str(result[name]) for name in names)} | all | {', '.join(result['tables_equal'])} |")
    return 0
