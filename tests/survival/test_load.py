"""Large inputs in bounded memory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sessions.rows import chat_messages, rebench_row

# Peak memory of a process of its own: that of the session may be anything.
READ = """
import resource, sys
from fathom_eval.sessions.reading import read_trajectories
from fathom_eval.sessions.report import ReadReport
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
count = sum(1 for _ in read_trajectories(sys.argv[1], ReadReport()))
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""
RECORDS = """
import resource, sys
from pathlib import Path
from fathom_eval.run import Run
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run = Run.load(Path(sys.argv[1]))
count = sum(1 for _ in run.iter_records())
print(count, (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def measured(code: str, path: Path) -> tuple[int, int]:
    """Items, and MiB by which memory grew at most."""
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    count, grown = done.stdout.split()
    return int(count), int(grown)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["rows.jsonl", "rows.json"])
def test_a_file_of_trajectories_is_streamed(name: str, tmp_path: Path) -> None:
    row = json.dumps(rebench_row([*chat_messages(4), {"role": "user", "content": "word " * 100_000}, *chat_messages(1)[1:]]))
    count = 100_000_000 // len(row)
    with (tmp_path / name).open("w") as handle:
        if name.endswith("l"):
            handle.writelines(f"{row}\n" for _ in range(count))
        else:
            handle.write("[" + ",".join([row] * count) + "]")
    found, grown = measured(READ, tmp_path / name)
    assert found == count
    assert grown < 40, f"{grown} MiB for a file of 100 MB"


@pytest.mark.slow
def test_records_are_read_one_at_a_time(tmp_path: Path) -> None:
    from fathom_eval.run import Run
    from tests.survival.fuzzing import _record

    with Run.open(tmp_path / "run", identity={"seed": 0}, details={}) as run:
        for start in range(0, 10_000, 1000):
            run.append([{**_record(sample), "generation": "x" * 8000} for sample in range(start, start + 1000)])
    found, grown = measured(RECORDS, tmp_path / "run")
    assert found == 10_000
    assert grown < 30, f"{grown} MiB for 80 MB of records"
