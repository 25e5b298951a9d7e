"""``fathom-eval doctor``: what this environment has, and what is missing for a run."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import sys
from dataclasses import dataclass
from typing import Any

from fathom_eval import __version__
from fathom_eval.console import Console

NAME = "doctor"
HELP = "Show versions, devices, caches and what is missing; exit code 1 if no run can work."
EXAMPLE = "fathom-eval doctor --offline"

# What turns the download of the default model into what is cached.
_CONVERTERS = ("accelerate", "gguf")
_HUB_SECONDS = 2.0
_SPARE_BYTES = 500_000_000


@dataclass(frozen=True)
class _Package:
    """A package of interest: its name on the index, whether the main job needs it, and what is missing without it."""

    name: str
    needed: bool
    without: str


_PACKAGES = (
    _Package("torch", True, "nothing runs"),
    _Package("transformers", True, "nothing runs"),
    _Package("tokenizers", True, "nothing runs"),
    _Package("safetensors", True, "nothing runs"),
    _Package("accelerate", True, "no GGUF files, so no default model"),
    _Package("gguf", True, "no GGUF files, so no default model"),
    _Package("pandas", True, "no reports"),
    _Package("jinja2", True, "no reports"),
    _Package("matplotlib", True, "no reports"),
    _Package("datasets", False, "no WikiText haystack; python-docs still works"),
    _Package("triton", False, "no GPU kernels; the torch reference runs instead"),
    _Package("lm-eval", False, "no tasks and model inside lm-eval"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("--offline", action="store_true", help="never touch the network")
    parser.add_argument("--json", action="store_true", help="print one JSON document")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    report = examine(offline=args.offline)
    console = Console(json=args.json)
    if args.json:
        console.document(report)
    else:
        for line in _lines(report):
            console.say(line)
    return 0 if report["ready"] else 1


def examine(*, offline: bool) -> dict[str, Any]:
    """Everything the command reports, as plain values; ``missing`` says what keeps a run from working, ``ready`` whether nothing does."""
    versions: dict[str, str | None] = {"python": platform.python_version(), "fathom-eval": __version__}
    versions |= {package.name: _version(package.name) for package in _PACKAGES}
    model, model_trouble = _default_model(offline)
    unneeded = _CONVERTERS if model["cached"] else ()
    needed = [package.name for package in _PACKAGES if package.needed and package.name not in unneeded]
    torch_report, torch_trouble = _torch_report()
    plug_ins = {} if torch_report["threads"] is None else _plug_ins()
    missing = [f"{name} is not installed" for name in needed if versions[name] is None] + torch_trouble + model_trouble
    return {
        "versions": versions,
        "without": {package.name: package.without for package in _PACKAGES if versions[package.name] is None},
        "system": f"{platform.system()} {platform.machine()}",
        "executable": sys.executable,
        **torch_report,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": _memory_bytes(),
        "plug_ins": plug_ins,
        "default_model": model,
        "hub": _hub_state(offline),
        "missing": missing,
        "ready": not missing,
    }


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _torch_report() -> tuple[dict[str, Any], list[str]]:
    """Devices and threads as torch sees them, and what is wrong with torch or transformers."""
    from fathom_eval.compat import MINIMUM_TRANSFORMERS, version_numbers

    trouble = []
    version = _version("transformers")
    if version is not None and version_numbers(version) < MINIMUM_TRANSFORMERS:
        trouble.append(f"transformers {version} is older than {'.'.join(map(str, MINIMUM_TRANSFORMERS))}")
    try:
        import torch
    # A broken installation fails in its own way: missing libraries, a wrong driver, a binary for another Python.
    except Exception as error:
        if _version("torch") is not None:
            trouble.append(f"torch cannot be imported: {' '.join(str(error).split())[:120]}")
        return {"devices": [], "threads": None}, trouble
    devices = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        capability = f"{properties.major}.{properties.minor}"
        devices.append(
            {"device": f"cuda:{index}", "name": properties.name, "capability": capability, "memory_bytes": total, "free_bytes": free}
        )
    return {"devices": devices, "threads": torch.get_num_threads()}, trouble


def _plug_ins() -> dict[str, str]:
    """The methods that other packages give, each with what is wrong with it. A broken one keeps no other method from running."""
    from fathom_eval.methods import plug_in_problems

    return plug_in_problems()


def _default_model(offline: bool) -> tuple[dict[str, Any], list[str]]:
    from fathom_eval.bundled import BUNDLED, DEFAULT_MODEL
    from fathom_eval.gguf_models import cache_root

    model, root = BUNDLED[DEFAULT_MODEL], cache_root()
    existing = root.absolute()
    while not existing.exists():
        existing = existing.parent
    writable = existing.is_dir() and os.access(existing, os.W_OK)
    free, cached = shutil.disk_usage(existing).free, model.cached() is not None
    report = {
        "name": model.name,
        "cached": cached,
        "path": str(model.path),
        "cache": str(root),
        "cache_writable": writable,
        "cache_free_bytes": free,
    }
    trouble = []
    need = model.download_bytes + model.gguf_bytes + model.disk_bytes + _SPARE_BYTES
    if not cached and offline:
        trouble.append(f"the default model is not cached (fathom-eval models fetch {model.name})")
    elif not cached and writable and free < need:
        trouble.append(f"{root} has {_size(free)} free, fetching the default model takes {_size(need)}")
    return report, trouble


def _hub_state(offline: bool) -> str:
    """``reachable``, ``not reachable`` or why it was not tried. Takes two seconds at most."""
    if offline:
        return "not tried (--offline)"
    try:
        from huggingface_hub import constants, is_offline_mode
    except ImportError:
        return "not tried (huggingface_hub is not installed)"
    if is_offline_mode():
        return "not tried (HF_HUB_OFFLINE is set)"
    return "reachable" if _answers(constants.ENDPOINT) else "not reachable"


def _answers(url: str) -> bool:
    """Whether the address answers. In a thread, because looking up a name heeds no timeout."""
    import threading
    import urllib.request

    answered = threading.Event()

    def ask() -> None:
        try:
            with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_HUB_SECONDS):
                answered.set()
        # A refusal counts as no answer: it mostly comes from a proxy on the way.
        except (OSError, ValueError):
            return

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(_HUB_SECONDS)
    return answered.is_set()


def _memory_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError, AttributeError):
        return None


def _lines(report: dict[str, Any]) -> list[str]:
    lines = []
    for name, version in report["versions"].items():
        state = f"not installed: {report['without'][name]}" if version is None else version
        lines.append(f"{name:<14}{state}")
    lines.append("")
    lines.append(f"{'system':<14}{report['system']}, {report['executable']}")
    memory = "" if report["memory_bytes"] is None else f", {_size(report['memory_bytes'])} of memory"
    lines.append(f"{'cpu':<14}{report['cpus']} cores usable, {report['threads']} threads in torch{memory}")
    for device in report["devices"]:
        free = f"{_size(device['free_bytes'])} of {_size(device['memory_bytes'])} free"
        lines.append(f"{device['device']:<14}{device['name']}, compute capability {device['capability']}, {free}")
    if not report["devices"]:
        lines.append(f"{'gpu':<14}none that torch can use; models run on the CPU in float32")
    model = report["default_model"]
    writable = "" if model["cache_writable"] else ", not writable: fetched models are not kept"
    lines.append(f"{'cache':<14}{model['cache']}, {_size(model['cache_free_bytes'])} free{writable}")
    lines.append(f"{'default model':<14}{model['name']}: {'cached' if model['cached'] else 'not cached, fetched at the first run'}")
    lines.append(f"{'model hub':<14}{report['hub']}")
    for name, problem in report["plug_ins"].items():
        lines.append(f"{'plug-in':<14}{name}: {f'left out of every run: {problem}' if problem else 'can be used'}")
    lines.append("")
    lines.append("ready: a run on the default model can start" if report["ready"] else f"missing: {'; '.join(report['missing'])}")
    return lines


def _size(count: int) -> str:
    return f"{count / 1e9:.1f} GB"
