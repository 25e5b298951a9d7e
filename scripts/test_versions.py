"""Run the fast tests at both ends of the supported versions: every Python that is found, the lowest and the newest torch and transformers.

    python3 scripts/test_versions.py                             # all of it; a virtual environment each under build/versions
    python3 scripts/test_versions.py --python 3.11 --ends low --only transformers -- tests/test_models.py

The lower ends are those that pyproject.toml declares. With ``--only transformers``, torch is the newest in both. What cannot be installed
here (no interpreter, no wheel) is said and is no failure; failing tests are. ``--without-torch`` compiles everything and imports what needs
no torch instead: for a Python whose only torch would be one of several gigabytes. ``--json FILE`` adds a line for each combination.
"""

from __future__ import annotations

import argparse
import json
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


LIGHT = ("jinja2", "numpy", "rich", "safetensors")
IMPORTS = """
import compileall, importlib, json, pkgutil, sys, tempfile
root = sys.argv[1]
sys.path.insert(0, root)
sys.pycache_prefix = tempfile.mkdtemp()
folders = ("fathom_eval", "kernels", "reports", "sessions", "tasks", "scripts", "benchmarks", "tests")
if not all(compileall.compile_dir(f"{root}/{folder}", quiet=1) for folder in folders):
    raise SystemExit("does not compile")
import fathom_eval
from fathom_eval.errors import UserError
imported, wanting = [], []
for module in pkgutil.walk_packages(fathom_eval.__path__, "fathom_eval.", onerror=lambda name: None):
    if module.name.endswith("__main__"):
        continue
    try:
        importlib.import_module(module.name)
        imported.append(module.name)
    except ModuleNotFoundError as error:
        if error.name.split(".")[0] == "fathom_eval":
            raise
        wanting.append(module.name)
    except UserError:  # says that an optional package is missing
        wanting.append(module.name)
print(json.dumps({"imported": len(imported), "need_more": len(wanting)}))
"""


def try_without_torch(python: str, folder: Path) -> dict[str, object]:
    """Compile everything, import what can be, and print the help, with no torch."""
    subprocess.run([python, "-m", "venv", "--clear", str(folder)], check=True)
    inner = str(folder / "bin" / "python")
    subprocess.run([inner, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *LIGHT], check=True)
    done = subprocess.run([inner, "-P", "-c", IMPORTS, str(ROOT)], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"passed": False, "problem": (done.stderr.splitlines() or ["failed"])[-1]}
    shown = subprocess.run([inner, "-m", "fathom_eval", "--help"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {"passed": shown.returncode == 0, **json.loads(done.stdout.splitlines()[-1])}


def main() -> int:
    """Print a line for every combination; 1 if tests failed in one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--python", default=",".join(PYTHONS), metavar="X,Y", help=f"default: {','.join(PYTHONS)}")
    add("--ends", default="low,new", metavar="A,B", help="low, new or both (default)")
    add("--only", default=",".join(BOUNDED), metavar="A,B", help="packages that the low end holds (default: torch,transformers)")
    add("--torch-index", default=os.environ.get("TORCH_INDEX"), metavar="URL", help="package index to take torch from ($TORCH_INDEX)")
    add("--keep", action="store_true", help="keep the environments")
    add("--without-torch", action="store_true", help="compile and import only")
    add("--json", type=Path, metavar="FILE", help="add what was run to this file")
    add("tests", nargs="*", help="arguments of pytest (default: the fast tests)")
    args = parser.parse_args()
    bounds = lower_bounds((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    only = args.only.split(",")
    if unknown := sorted({*only} - {*BOUNDED}):
        parser.error(f"--only: {unknown[0]} is none of {', '.join(BOUNDED)}")
    status = 0

    def note(version: str, end: str, **found: object) -> None:
        if args.json is not None:
            with args.json.open("a", encoding="utf-8") as out:
                out.write(json.dumps({"python": version, "end": end, **found}) + "\n")

    for version in args.python.split(","):
        python = find_python(version)
        if args.without_torch and python is not None:
            folder = ENVIRONMENTS / f"{version}-without-torch"
            found = try_without_torch(python, folder)
            print(f"Python {version}, without torch: {found}", flush=True)
            note(version, "without torch", **found)
            status = status or int(not found["passed"])
            shutil.rmtree(folder)
            continue
        for end in args.ends.split(","):
            name = f"Python {version}, {end}"
            if python is None:
                print(f"{name}: not run: no such interpreter here", flush=True)
                note(version, end, passed=None, problem="no such interpreter")
                continue
            folder = ENVIRONMENTS / f"{version}-{end}"
            began = time.monotonic()
            problem = install(python, folder, pins(end, only, bounds), args.torch_index)
            if problem is not None:
                print(f"{name}: not run: {problem}", flush=True)
                note(version, end, passed=None, problem=problem)
                continue
            inner = str(folder / "bin" / "python")
            versions = subprocess.run([inner, "-c", VERSIONS], capture_output=True, text=True, check=True).stdout.strip()
            code = subprocess.run([inner, "-P", "-m", "pytest", *FAST, *args.tests], cwd=ROOT, check=False).returncode
            print(
                f"{name} ({versions}): {'passed' if code == 0 else f'failed, exit code {code}'}, {time.monotonic() - began:.0f} s",
                flush=True,
            )
            note(version, end, passed=code == 0, versions=versions, tests=args.tests or "all fast ones")
            status = status or int(code != 0)
            if not args.keep:
                shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
