"""Run the fast tests at both ends of the supported versions: every Python that is found, the lowest and the newest torch and transformers.

    python3 scripts/test_versions.py                             # all of it; a virtual environment each under build/versions
    python3 scripts/test_versions.py --python 3.11 --ends low --only transformers -- tests/test_models.py
    python3 scripts/test_versions.py --here --json reports/published/versions/runs.jsonl    # the interpreter that runs this, as it is
    python3 scripts/test_versions.py --page docs/durability.md   # put the table of the recorded runs there, and run nothing

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
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ROOT / "build" / "versions"
PYTHONS = ("3.11", "3.12", "3.13")
BOUNDED = ("torch", "transformers")
FAST = ("-m", "not slow and not model", "-q", "-p", "no:cacheprovider")
HOW = ("-n", "--dist", "-o", "-p")
"""Options of pytest that say how tests are run and not which; each in one word with its value."""
RECORDED = ROOT / "reports" / "published" / "versions" / "runs.jsonl"
VERSIONS = """
import importlib.metadata, json, platform, torch
found = {"python": platform.python_version(), "torch": torch.__version__}
found |= {name: importlib.metadata.version(name) for name in ("transformers", "numpy")}
gpus = sorted({torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())})
print(json.dumps({**found, "device": ", ".join(gpus) or "CPU"}))
"""


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
    """A virtual environment with this package, one that is there brought up to date; in one line why it cannot be had."""
    if not (folder / "bin" / "python").exists():
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


def run_tests(python: str, arguments: Sequence[str], junit: Path | None) -> dict[str, Any]:
    """Run pytest, and say with what and what came of it: versions, ``tests``, ``counts``, ``passed`` and ``seconds``.

    Args:
        junit: Where pytest's report is kept.
    """
    shown = subprocess.run([python, "-P", "-c", VERSIONS], capture_output=True, text=True, check=True).stdout
    with tempfile.TemporaryDirectory(prefix="fathom-eval-versions-") as folder:
        report = junit or Path(folder) / "junit.xml"
        began = time.monotonic()
        command = [python, "-P", "-m", "pytest", *FAST, f"--junitxml={report}", *arguments]
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        counts = read_counts(report.read_text(encoding="utf-8")) if report.exists() else {}
    return {
        **json.loads(shown.splitlines()[-1]),
        "commit": commit(),
        "tests": [argument for argument in arguments if not argument.startswith(HOW)],
        "counts": counts,
        "passed": code == 0,
        "seconds": round(time.monotonic() - began),
    }


def read_counts(xml: str) -> dict[str, int]:
    """Tests passed, failed and skipped, of pytest's report in JUnit's form."""
    totals = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in ElementTree.fromstring(xml).iter("testsuite"):
        for name in totals:
            totals[name] += int(suite.get(name, 0))
    failed = totals["failures"] + totals["errors"]
    return {"passed": totals["tests"] - failed - totals["skipped"], "failed": failed, "skipped": totals["skipped"]}


def commit() -> str | None:
    """The commit of this code, marked where it was changed since; None where there is no repository."""
    try:
        shown = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"], cwd=ROOT, capture_output=True, text=True, check=False
        )
    except OSError:
        return None
    return shown.stdout.strip() or None


def latest(lines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of every combination of versions, device and tests what was recorded last, in the order of the versions."""
    names = ("python", "torch", "transformers", "device", "tests")
    found = {json.dumps([line[name] for name in names]): line for line in lines}
    return sorted(found.values(), key=lambda line: [[int(part) for part in re.findall(r"\d+", line[name])] for name in names[:3]])


def table(lines: Iterable[dict[str, Any]]) -> list[str]:
    """A Markdown table of recorded runs, and what was not run."""
    runs = latest(lines)
    head = ["Python", "torch", "transformers", "device", "tests", "passed", "failed", "skipped"]
    rows = []
    for line in runs:
        named, counts = line["tests"], line["counts"]
        which = f"{len(named)} modules" if len(named) > 2 else " ".join(f"`{name}`" for name in named) or "all fast ones"
        rows.append([*(line[name.lower()] for name in head[:4]), which, *(str(counts.get(name, "")) for name in head[5:])])
    shown = [f"| {' | '.join(row)} |" for row in (head, ["---"] * 5 + ["---:"] * 3, *rows)]
    whole = {".".join(line["python"].split(".")[:2]) for line in runs if line["passed"] and not line["tests"]}
    if missing := [version for version in PYTHONS if version not in whole]:
        shown += ["", f"Not passed as a whole: Python {', '.join(missing)}."]
    return shown


START, END = "<!-- versions: printed by scripts/test_versions.py --page -->", "<!-- end of versions -->"


def with_table(page: str, lines: Iterable[dict[str, Any]]) -> str:
    """The page with the table between its marks."""
    before, _, rest = page.partition(START)
    _, found, after = rest.partition(END)
    if not found:
        raise SystemExit(f"error: the page has no lines '{START}' and '{END}'")
    return "\n".join((before + START, "", *table(lines), "", END)) + after


def read_runs(path: Path = RECORDED) -> list[dict[str, Any]]:
    """Recorded runs, in the order in which they were made."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> int:
    """Print a line for every combination; 1 if tests failed in one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--python", default=",".join(PYTHONS), metavar="X,Y", help=f"default: {','.join(PYTHONS)}")
    add("--ends", default="low,new", metavar="A,B", help="low, new or both (default)")
    add("--only", default=",".join(BOUNDED), metavar="A,B", help="packages that the low end holds (default: torch,transformers)")
    add("--torch-index", default=os.environ.get("TORCH_INDEX"), metavar="URL", help="package index to take torch from ($TORCH_INDEX)")
    add("--keep", action="store_true", help="keep the environments; one that is there is used")
    add("--here", action="store_true", help="run the tests with this interpreter and what it has, and install nothing")
    add("--without-torch", action="store_true", help="compile and import only")
    add("--json", type=Path, metavar="FILE", help="add what was run to this file")
    add("--junit", type=Path, metavar="FILE", help="keep pytest's report here (of the last combination)")
    add("--page", type=Path, metavar="FILE", help=f"put the table of {RECORDED.relative_to(ROOT)} into this page; runs nothing")
    add("tests", nargs="*", help="arguments of pytest (default: the fast tests)")
    args = parser.parse_args()
    if args.page is not None:
        args.page.write_text(with_table(args.page.read_text(encoding="utf-8"), read_runs()), encoding="utf-8")
        return 0
    bounds = lower_bounds((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    only = args.only.split(",")
    if unknown := sorted({*only} - {*BOUNDED}):
        parser.error(f"--only: {unknown[0]} is none of {', '.join(BOUNDED)}")
    status = 0

    def ran(name: str, python: str) -> int:
        found = run_tests(python, args.tests, args.junit)
        print(f"{name}: {json.dumps(found)}", flush=True)
        if args.json is not None:
            args.json.parent.mkdir(parents=True, exist_ok=True)
            with args.json.open("a", encoding="utf-8") as out:
                out.write(json.dumps(found) + "\n")
        return int(not found["passed"])

    if args.here:
        return ran("here", sys.executable)
    for version in args.python.split(","):
        python = find_python(version)
        for end in ["without torch"] if args.without_torch else args.ends.split(","):
            name = f"Python {version}, {end}"
            folder = ENVIRONMENTS / f"{version}-{end.replace(' ', '-')}"
            if python is None:
                print(f"{name}: not run: no such interpreter here", flush=True)
                continue
            if args.without_torch:
                found = try_without_torch(python, folder)
                print(f"{name}: {found}", flush=True)
                status = status or int(not found["passed"])
            elif (problem := install(python, folder, pins(end, only, bounds), args.torch_index)) is not None:
                print(f"{name}: not run: {problem}", flush=True)
                continue
            else:
                status = ran(name, str(folder / "bin" / "python")) or status
            if not args.keep:
                shutil.rmtree(folder)
    return status


if __name__ == "__main__":
    sys.exit(main())
