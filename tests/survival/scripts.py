"""Scripts and benchmarks of the repository, loaded as modules."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]


def script(name: str, folder: str = "scripts") -> ModuleType:
    path = list(sys.path)
    specification = importlib.util.spec_from_file_location(f"{folder}_{name}", ROOT / folder / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    try:
        specification.loader.exec_module(module)
    finally:
        sys.path[:] = path
    return module
