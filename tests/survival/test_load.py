"""Large inputs in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sessions.rows import chat_messages, rebench_row

# Peak memory of a process of its own, since its start: what getrusage gives includes the peak of the one that started it.
PEAK = """
import sys
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
"""
READ = """
from fathom_eval.sessions.reading import read_trajectories
from fathom_eval.sessions.report import ReadReport
before = peak()
count = sum(1 for _ in read_trajectories(sys.argv[1], ReadReport()))
print(count, (peak() - before) // 1024)
"""
RECORDS = """
from pathlib import Path
from fathom_eval.run import Run
before = peak()
run = Run.load(Path(sys.argv[1]))
count = sum(1 for _ in run.iter_records())
print(count, (peak() - before) // 1024)
"""
HELD = """
before = peak()
held = bytes(range(256)) * (4096 * int(sys.argv[1]))
print(1, (peak() - before) // 1024)
"""


def measured(code: str, path: Path | str) -> tuple[int, int]:
    """Items, and MiB by which memory grew at most."""
    done = subprocess.run([sys.executable, "-c", PEAK + code, str(path)], capture_output=True, text=True, check=True)
    count, grown = done.stdout.split()
    return int(count), int(grown)


def test_what_is_held_is_measured() -> None:
    ballast = bytes(range(256)) * (4096 * 300)  # of this process, and not of the measured one
    assert 99 <= measured(HELD, "100")[1] <= 110
    assert len(ballast) == 300 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_file_of_trajectories_is_streamed(name: str, tmp_path: Path) -> None:
    row = json.dumps(rebench_row([*chat_messages(4), {"role": "user", "content": "word " * 100_000}, *chat_messages(1)[1:]]))
    count = 500_000_000 // len(row)
    with (tmp_path / name).open("w") as handle:
        if name.endswith("l"):
            handle.writelines(f"{row}\n" for _ in range(count))
        else:
            handle.write("[")
            handle.writelines(f"{',' * (number > 0)}{row}" for number in range(count))
            handle.write("]")
    found, grown = measured(READ, tmp_path / name)
    assert found == count
    assert grown < 40, f"{grown} MiB for a file of 500 MB"


@pytest.mark.slow
def test_records_are_read_one_at_a_time(tmp_path: Path) -> None:
    from fathom_eval.run import Run
    from tests.survival.fuzz_targets import valid_record

    with Run.open(tmp_path / "run", identity={"seed": 0}, details={}) as run:
        for start in range(0, 10_000, 1000):
            run.append([{**valid_record(sample), "generation": "x" * 8000} for sample in range(start, start + 1000)])
    found, grown = measured(RECORDS, tmp_path / "run")
    assert found == 10_000
    assert grown < 30, f"{grown} MiB for 80 MB of records"
