"""Run the fast tests at both ends of the supported versions: every Python that is found, the lowest and the newest torch and transformers.

    python3 scripts/test_versions.py                             # all of it; a virtual environment each under build/versions
    python3 scripts/test_versions.py --python 3.11 --ends low --only transformers -- tests/test_models.py

The lower ends are those that pyproject.toml declares. With ``--only transformers``, torch is the newest in both. What cannot be installed
here (no interpreter, no wheel) is said and is no failure; failing tests are.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "build" / "versions"
PYTHONS = ("3.11", "3.12", "3.13")
BOUNDED = ("torch", "transformers")
FAST = ("-m", "not slow and not model", "-q", "-p", "no:cacheprovider")
VERSIONS = "import importlib.metadata as m; print(*(f'{n} {m.version(n)}' for n in ('torch', 'transformers', 'numpy')), sep=', ')"


def lower_bounds(pyproject: str) -> dict[str, str]:
    """The lowest version of each bounded package that the project declares."""
    bounds = {}
    for requirement in tomllib.loads(pyproject)["project"]["dependencies"]:
        if (match := re.match(r"([\w-]+)\s*>=\s*([\d.]+)", requirement)) and match[1] in BOUNDED:
            bounds[match[1]] = match[2]
    missing = set(BOUNDED) - set(bounds)
    if missing:
        raise SystemExit(f"error: pyproject.toml declares no lower bound of {', '.join(sorted(missing))}")
    return bounds


def find_python(version: str) -> str | None:
    """An interpreter of this version that runs here: on the path, or of pyenv."""
    candidates = [shutil.which(f"python{version}")]
    candidates += [str(path) for path in sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}*/bin/python"))]
    for candidate in candidates:
        if candidate is None:
            continue
        shown = subprocess.run(
            [candidate, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"], capture_output=True, text=True, check=False
        )
        if shown.stdout.strip() == version:
            return candidate
    return None


def pins(end: str, only: Sequence[str], bounds: dict[str, str]) -> list[str]:
    """What holds an end: the first release series of each bounded package, or nothing."""
    return [f"{name}=={bounds[name]}.*" for name in only] if end == "low" else []


def install(python: str, folder: Path, pinned: Sequence[str], torch_index: str | None) -> str | None:
    """A virtual environment with this package; in one line why it cannot be had."""
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    torch = next((pin for pin in pinned if pin.startswith("torch")), "torch")
    steps = [[*pip, "--index-url", torch_index, torch]] if torch_index else []
    steps.append([*pip, *pinned, "--editable", f"{ROOT}[test]"])
    for step in steps:
        done = subprocess.run(step, capture_output=True, text=True, check=False)
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
            return (errors or done.stderr.splitlines() or ["pip failed"])[-1]
    return None


def main() -> int:
    """Print a line for every combination; 1 if tests failed in one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--python", default=",".join(PYTHONS), metavar="X,Y", help=f"default: {','.join(PYTHONS)}")
    add("--ends", default="low,new", metavar="A,B", help="low, new or both (default)")
    add("--only", default=",".join(BOUNDED), metavar="A,B", help="packages that the low end holds (default: torch,transformers)")
    add("--torch-index", default=os.environ.get("TORCH_INDEX"), metavar="URL", help="package index to take torch from ($TORCH_INDEX)")
    add("--keep", action="store_true", help="keep the environments")
    add("tests", nargs="*", help="arguments of pytest (default: the fast tests)")
    args = parser.parse_args()
    bounds = lower_bounds((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    only = args.only.split(",")
    if unknown := sorted({*only} - {*BOUNDED}):
        parser.error(f"--only: {unknown[0]} is none of {', '.join(BOUNDED)}")
    status = 0
    for version in args.python.split(","):
        python = find_python(version)
        for end in args.ends.split(","):
            name = f"Python {version}, {end}"
            if python is None:
                print(f"{name}: not run: no such interpreter here", flush=True)
                continue
            folder = ENVIRONMENTS / f"{version}-{end}"
            began = time.monotonic()
            problem = install(python, folder, pins(end, only, bounds), args.torch_index)
            if problem is not None:
                print(f"{name}: not run: {problem}", flush=True)
                continue
            inner = str(folder / "bin" / "python")
            versions = subprocess.run([inner, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.strip()
            code = subprocess.run([inner, "-P", "-m", "pytest", *FAST, *args.tests], cwd=ROOT, check=False).returncode
            print(
                f"{name} ({versions}): {'passed' if code == 0 else f'failed, exit code {code}'}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
            status = status or int(code != 0)
            if not args.keep:
                shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
