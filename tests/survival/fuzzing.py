"""Targets that take any bytes and must neither crash nor hang: readers, rendering, records, manifest, plane store, calls, command line.

The bytes decide what is made: raw content, or a valid input with changes. So a coverage-guided fuzzer can steer them, a random generator
can feed them, and a failing input can be repeated from its bytes alone. A UserError is the right answer to bad input; anything else that
is raised is a finding.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.survival.fuzz_targets import TARGETS

HANG_SECONDS = 10


def random_inputs(seed: int) -> Iterator[bytes]:
    """Bytes of all lengths up to 400, short ones more often."""
    rng = random.Random(seed)
    while True:
        yield rng.randbytes(int(400 * rng.random() ** 2))


@contextlib.contextmanager
def scratch() -> Iterator[Path]:
    """A folder for the files of a target, in memory where there is such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="fathom-eval-fuzz-", dir=memory if os.access(memory, os.W_OK) else None) as folder:
        yield Path(folder)


def fuzz_randomly(name: str, count: int, seed: int, folder: Path) -> dict[str, Any]:
    """Feed random inputs. A finding is raised with its bytes; one that takes :data:`HANG_SECONDS` is a TimeoutError."""
    target = TARGETS[name][0]

    def hang(number: int, frame: Any) -> None:
        raise TimeoutError(f"more than {HANG_SECONDS} s")

    target(b"", folder)  # imports take their time once
    before = signal.signal(signal.SIGALRM, hang)
    began, slowest = time.perf_counter(), 0.0
    try:
        for _, data in zip(range(count), random_inputs(seed), strict=False):
            signal.alarm(HANG_SECONDS)
            start = time.perf_counter()
            try:
                target(data, folder)
            except Exception as error:
                raise AssertionError(f"{name} fails on bytes.fromhex('{data.hex()}'): {type(error).__name__}: {error}") from error
            slowest = max(slowest, time.perf_counter() - start)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    seconds = time.perf_counter() - began
    return {"target": name, "engine": "random", "inputs": count, "slowest_ms": round(slowest * 1e3, 1), "seconds": round(seconds, 1)}


def fuzz_with_coverage(name: str, count: int, seed: int) -> None:
    """Let Atheris (libFuzzer) steer the inputs by the branches they reach. It ends the process itself, with exit code 0 if all is well."""
    import atheris  # type: ignore[import-not-found]

    with atheris.instrument_imports(include=["fathom_eval"], enable_loader_override=False):
        for module in ("sessions.reading", "sessions.rendering", "tool_calls", "run", "cli", "console"):
            __import__(f"fathom_eval.{module}")
    target = TARGETS[name][0]
    with scratch() as folder:

        def one(data: bytes) -> None:
            target(data, folder)

        atheris.Setup(
            [sys.argv[0], f"-runs={count}", f"-seed={seed + 1}", f"-timeout={HANG_SECONDS}", "-max_len=400", "-print_final_stats=1"], one
        )
        atheris.Fuzz()


def main(argv: Sequence[str] | None = None) -> int:
    """Fuzz all targets and say how many inputs each has taken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=100_000, metavar="N", help="of all targets together (default: 100000)")
    parser.add_argument("--targets", default=",".join(TARGETS), metavar="A,B", help="default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--coverage", action="store_true", help="guided by coverage, with Atheris (pip install 'fathom-eval[fuzz]'); one target"
    )
    args = parser.parse_args(argv)
    names = args.targets.split(",")
    if args.coverage:
        if len(names) != 1:
            parser.error("--coverage takes one target: libFuzzer ends the process")
        fuzz_with_coverage(names[0], args.inputs, args.seed)
        return 0
    total = sum(TARGETS[name][1] for name in names)
    with scratch() as folder:
        for name in names:
            print(json.dumps(fuzz_randomly(name, args.inputs * TARGETS[name][1] // total, args.seed, folder)), flush=True)
    return 0
