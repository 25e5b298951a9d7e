"""The Triton kernels against their references: in Triton's interpreter on small shapes, and on a GPU where there is one.

Triton chooses between interpreter and compiler when it is imported, from an environment variable that would reach every other test of this
process. The interpreter's checks therefore run in one process of their own, and each is reported here as a test.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

ROOT = Path(__file__).parents[2]
PACKAGE = Path(__file__).with_name("kernel_checks")


def load_checks() -> ModuleType:
    spec = importlib.util.spec_from_file_location(PACKAGE.name, PACKAGE / "__init__.py", submodule_search_locations=[str(PACKAGE)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE.name] = module
    spec.loader.exec_module(module)
    return module


checks = load_checks()
SMALL = [checks.case_name(name, case) for name, (_, small, _) in checks.CHECKS.items() for case in small]
FULL = [
    pytest.param(function, case, id=checks.case_name(name, case)) for name, (function, _, full) in checks.CHECKS.items() for case in full
]


@pytest.fixture(scope="module")
def outcomes() -> dict[str, str]:
    """The error of every check in the interpreter, empty where it passed."""
    triton = pytest.importorskip("triton", reason="needs triton")
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7) and np.lib.NumpyVersion(np.__version__) >= "2.4.0":
        pytest.skip("the interpreter of triton before 3.7 cannot take a loop's bounds from memory with numpy 2.4 and later")
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": f"{ROOT}{os.pathsep}{PACKAGE.parent}"}
    command = [sys.executable, "-P", "-W", "ignore::RuntimeWarning", "-m", PACKAGE.name]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {line["name"]: line["error"] for line in lines}


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_interpreted_kernel_equals_its_reference(outcomes: dict[str, str], name: str) -> None:
    assert outcomes[name] == ""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("function", "case"), FULL)
def test_compiled_kernel_equals_its_reference(function: Any, case: dict[str, Any]) -> None:
    """At the shapes of a decode step, from host memory too, and beyond 2^31 elements."""
    function("cuda", **case)
    torch.cuda.empty_cache()


def test_importing_the_packages_needs_no_triton() -> None:
    code = (
        "import sys, fathom_eval.kernels.scan, fathom_eval.kernels.nibble, fathom_eval.kernels.topk, fathom_eval.kernels.attend\n"
        "sys.exit('triton' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": str(ROOT)}, check=True, timeout=120)
