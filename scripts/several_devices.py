"""Run RULER on one GPU, with the model split over two, and with one model a GPU, all at the same time, and hold the results together.

    python3 -P scripts/several_devices.py --model smollm2 --haystack wiki.test.raw --output runs/several > several.json
    python3 -P scripts/several_devices.py --compare-only runs/several --tests devices.xml > several.json

Records are compared without what tells of the hour and the machine, tables without the order of their rows, which is that in which workers
end. Logits of every step of every branch are compared as well, also with the model as transformers splits it by ``device_map="auto"``.
``--compare-only`` starts nothing and holds together what a folder of such runs has, unfinished ones too. ``tables_equal`` is null where a
run has no tables. The exit code is 1 where something differs or is missing, or a run fails.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

# At the end, so that the folder `kernels` of the repository passes for no installed package.
sys.path.append(str(Path(__file__).resolve().parents[1]))

from fathom_eval.run import PACKED, RECORDS
from tests.survival.kills import records, tables_of

if TYPE_CHECKING:
    import torch

    from fathom_eval.models import LoadedModel

METHODS = "fathom:basis=raw,fathom:basis=klt,sparq,double_sparsity,loki,quest,h2o,streaming_llm"
ONE = "one"
_LOGIT_TOKENS = 12


def cases(one: str, split: str, each: str) -> dict[str, list[str]]:
    """Arguments that differ between the runs, by the run's name."""
    return {
        ONE: [f"--device={one}"],
        "again": [f"--device={one}"],
        "split": [f"--device={split}"],
        "each": [f"--device={each}", "--workers=2"],
        "split, two copies": [f"--device={split}", "--workers=2"],
    }


def start(name: str, arguments: Sequence[str], output: Path) -> subprocess.Popen[bytes]:
    """A run in a process of its own, what it says in a file beside its folder."""
    command = [sys.executable, "-P", "-m", "fathom_eval", "ruler", *arguments, f"--output={output / name}"]
    with (output / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)


def gpus_of_processes() -> dict[str, set[str]]:
    """The GPUs that each process is seen on; empty where there is no ``nvidia-smi``."""
    command = ["nvidia-smi", "--query-compute-apps=pid,gpu_uuid", "--format=csv,noheader"]
    found: dict[str, set[str]] = defaultdict(set)
    try:
        shown = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired):
        return found
    for line in shown.splitlines():
        process, _, gpu = line.partition(", ")
        found[process].add(gpu)
    return found


def difference(mine: Any, theirs: Any) -> float | None:
    """How far two numbers are apart; None for what is no number."""
    numbers = all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in (mine, theirs))
    return abs(mine - theirs) if numbers else None


def compare(reference: Path, other: Path) -> dict[str, Any]:
    """What differs between the records and the tables of two runs."""

    def by_key(path: Path) -> dict[str, dict[str, Any]]:
        names = ("task", "context", "sample", "k", "label")
        return {json.dumps([record[name] for name in names]): record for record in records(path)}

    first, second = by_key(reference), by_key(other)
    differing: Counter[str] = Counter()
    largest: dict[str, float] = {}
    equal = 0
    for key in first.keys() & second.keys():
        mine, theirs = first[key], second[key]
        names = [name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)]
        equal += not names
        differing.update(names)
        for name in names:
            if (apart := difference(mine.get(name), theirs.get(name))) is not None:
                largest[name] = max(apart, largest.get(name, 0.0))
    tables, others = tables_of(reference / "report"), tables_of(other / "report")
    shared = sorted(tables.keys() & others.keys())
    same_tables = tables.keys() == others.keys() and all(sorted(tables[name]) == sorted(others[name]) for name in shared)
    return {
        "records": len(second),
        "missing": len(first.keys() ^ second.keys()),
        "equal": equal,
        "differing_fields": dict(sorted(differing.items())),
        "largest_differences": dict(sorted(largest.items())),
        "tables": len(others),
        "tables_equal": same_tables if tables and others else None,
        "tables_in_another_order": [
            name for name in shared if tables[name] != others[name] and sorted(tables[name]) == sorted(others[name])
        ],
    }


def same_records(run: dict[str, Any]) -> bool:
    """Whether a run has records, and the reference's, each of them equal; one that was not compared has not."""
    return bool(run.get("records")) and run["equal"] == run["records"] and not run["missing"]


def tables_differ(run: dict[str, Any]) -> bool:
    """Whether both runs have tables, and not the same ones."""
    return run.get("tables_equal") is False


def compare_only(folder: Path, different: dict[str, list[str]]) -> dict[str, Any]:
    """What the runs in a folder hold against the first of them, also where they were stopped.

    Args:
        different: As :func:`cases` gives it.

    Raises:
        SystemExit: The run on one device is missing or unfinished, or the records of a run are packed.
    """
    for path in (folder / name for name in different):
        if (path / PACKED).exists() and not (path / RECORDS).exists():
            raise SystemExit(f"the records of {path} are packed: unpack them first (gunzip -k {shlex.quote(str(path / PACKED))})")

    def samples(path: Path) -> int:
        return len({(record["task"], record["context"], record["sample"]) for record in records(path)})

    if not (folder / ONE / "manifest.json").exists():
        raise SystemExit(f"{folder} holds no run named {ONE!r} to compare with")
    manifest = json.loads((folder / ONE / "manifest.json").read_text(encoding="utf-8"))
    settings = manifest["settings"]
    asked = settings["limit"] * len(settings["tasks"]) * len(settings["context"])
    if samples(folder / ONE) < asked:
        raise SystemExit(f"{folder / ONE} is unfinished: it has {samples(folder / ONE)} of {asked} samples")
    runs: list[dict[str, Any]] = []
    for name, arguments in different.items():
        path = folder / name
        if (path / "manifest.json").exists():
            device = json.loads((path / "manifest.json").read_text(encoding="utf-8"))["device"]
            held = {"name": name, "arguments": arguments, "device": device, "samples": samples(path), "of": asked}
            runs.append(held | compare(folder / ONE, path))
    return {
        "versions": manifest["versions"],
        "model": manifest["model"],
        "dtype": manifest["dtype"],
        "settings": settings,
        "runs": runs,
        "logits": [],
        "records_equal": len(runs) > 1 and all(map(same_records, runs)),
        "finished": len(runs) == len(different) and not any(run["missing"] for run in runs),
    }


def tests_of(junit: Path) -> list[dict[str, Any]]:
    """Name, outcome and seconds of each test of a report of pytest."""
    found = []
    for case in ElementTree.parse(junit).iter("testcase"):
        bad = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        found.append({"test": case.get("name"), "outcome": bad, "seconds": round(float(case.get("time", 0)), 1)})
    return found


def logits_of(loaded: LoadedModel, methods: str, k: int, prompt: Sequence[int]) -> torch.Tensor:
    """Logits of the steps of all branches, ``(steps, branches, vocabulary)``, on the CPU."""
    import torch

    from fathom_eval.decode import decode
    from fathom_eval.methods import parse_methods
    from fathom_eval.observations import needed_observations
    from fathom_eval.prefill import prefill
    from fathom_eval.ruler import all_branches

    branches = all_branches(parse_methods(f"dense,exact,{methods}"), [k], loaded.facts)
    seen: list[torch.Tensor] = []
    with torch.inference_mode():
        prefix = prefill(loaded, prompt, observations=needed_observations((branch.spec.method for branch in branches), loaded.facts))
        hook = loaded.model.register_forward_hook(lambda module, args, output: seen.append(output.logits[:, -1].cpu()))
        try:
            decode(loaded, prefix, branches, _LOGIT_TOKENS)
        finally:
            hook.remove()
    return torch.stack(seen)


def compare_logits(args: argparse.Namespace) -> list[dict[str, Any]]:
    """The logits of the model on one device against those of the model on several, each way of splitting it."""
    import torch
    from transformers import AutoModelForCausalLM

    from fathom_eval import compat
    from fathom_eval.checkpoints import open_checkpoint
    from fathom_eval.models import describe_model, load_model
    from fathom_eval.tasks.haystack import load_haystack
    from fathom_eval.tasks.samples import SampleBuilder

    def quiet(line: str) -> None:
        pass

    def load(device: str) -> LoadedModel:
        return load_model(args.model, dtype="float32", device=device, offline=True, say=quiet)

    one = load(args.one)
    builder = SampleBuilder(one.tokenizer, load_haystack(args.haystack, offline=True), seed=0)
    prompt = builder.build("niah_single", args.context, 0).prompt_ids
    expected = logits_of(one, args.methods, args.k, prompt)
    with open_checkpoint(args.model, say=quiet, offline=True) as checkpoint, compat.quiet_transformers():
        auto: Any = AutoModelForCausalLM
        model = auto.from_pretrained(
            checkpoint.folder, dtype=torch.float32, attn_implementation="sdpa", device_map=args.auto, local_files_only=True
        )
    ways = {
        "again": one,
        "split": load(args.split),
        f"device_map={args.auto}": describe_model(model.eval().requires_grad_(False), one.tokenizer, "auto"),
    }
    results = []
    for way, loaded in ways.items():
        found = logits_of(loaded, args.methods, args.k, prompt)
        same = found.shape == expected.shape
        results.append(
            {
                "how": way,
                "layers": dict(Counter(loaded.facts.layer_devices or [loaded.facts.device] * loaded.facts.layers)),
                "steps": found.shape[0],
                "branches": found.shape[1],
                "bit_equal": torch.equal(found, expected),
                "largest_difference": (found - expected).abs().max().item() if same else None,
            }
        )
    return results


def main(argv: Sequence[str] | None = None) -> int:
    """Print JSON; 1 if a run failed or something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--model", default="smollm2", help="as fathom-eval takes it (default: smollm2)")
    add("--haystack", default="python-docs", help="as fathom-eval takes it (default: python-docs)")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--output", type=Path, metavar="DIR", help="new folder for the runs")
    where.add_argument("--compare-only", type=Path, metavar="DIR", help="start nothing, and compare the runs that this folder has")
    add("--tests", type=Path, metavar="XML", help="with --compare-only: pytest's report of tests/test_devices.py on that machine")
    add("--tasks", default="niah_single,vt", metavar="A,B")
    add("--methods", default=METHODS, metavar="A,B")
    add("--context", type=int, default=2048, metavar="N")
    add("--k", type=int, default=64, metavar="K")
    add("--limit", type=int, default=2, metavar="N", help="samples of each task (default: 2)")
    add("--one", default="cuda:0", metavar="DEVICE", help="the single one (default: cuda:0)")
    add("--split", default="cuda:0+cuda:1", metavar="DEVICES", help="those that one model is split over (default: cuda:0+cuda:1)")
    add("--each", default="cuda", metavar="DEVICE", help="what two workers are given (default: cuda, one each)")
    add("--auto", default="auto", metavar="MAP", help="device_map of transformers (default: auto)")
    args = parser.parse_args(argv)
    different = cases(args.one, args.split, args.each)
    if args.compare_only is not None:
        found = compare_only(args.compare_only, different)
        for run in found["runs"]:
            if not run["tables"]:
                path = shlex.quote(str(args.compare_only / run["name"]))
                print(f"no tables of {run['name']!r} to compare: fathom-eval report {path} makes them", file=sys.stderr)
        print(json.dumps(found | ({"tests": tests_of(args.tests)} if args.tests else {}), indent=2, ensure_ascii=False))
        return int(not found["records_equal"] or not found["finished"] or any(map(tables_differ, found["runs"])))
    os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
    args.output.mkdir(parents=True)
    names = ("model", "haystack", "tasks", "methods", "context", "k", "limit")
    common = ["--offline", "--dtype=float32", *(f"--{name}={getattr(args, name)}" for name in names)]
    began = time.monotonic()
    processes = {name: start(name, [*common, *arguments], args.output) for name, arguments in different.items()}
    logits = compare_logits(args)
    seen: dict[str, set[str]] = defaultdict(set)
    seconds: dict[str, float] = {}
    while len(seconds) < len(processes):
        for process, gpus in gpus_of_processes().items():
            seen[process] |= gpus
        for name, process in processes.items():
            if name not in seconds and process.poll() is not None:
                seconds[name] = round(time.monotonic() - began, 1)
        time.sleep(0.5)
    runs = []
    for name, process in processes.items():
        ran: dict[str, Any] = {"name": name, "arguments": different[name], "exit_code": process.returncode, "seconds": seconds[name]}
        log = (args.output / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        if process.returncode or processes[ONE].returncode:
            ran["said"] = log.splitlines()[-3:]
        else:
            ran["device"] = json.loads((args.output / name / "manifest.json").read_text(encoding="utf-8"))["device"]
            ran |= compare(args.output / ONE, args.output / name)
        pids = sorted({str(process.pid), *re.findall(r"worker \d+ \(process (\d+)", log)})
        ran["gpus_of_processes"] = [len(seen[pid]) for pid in pids if pid in seen]
        runs.append(ran)
    equal = all(not run["exit_code"] and same_records(run) for run in runs)
    print(json.dumps({**machine(), "settings": common, "runs": runs, "logits": logits, "records_equal": equal}, indent=2))
    return int(not equal or any(map(tables_differ, runs)) or not all(line["bit_equal"] for line in logits))


def machine() -> dict[str, Any]:
    """Versions, and the GPUs that this process sees."""
    import torch

    from fathom_eval.ruler import versions

    return {"versions": dict(versions()), "gpus": [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]}


if __name__ == "__main__":
    sys.exit(main())
