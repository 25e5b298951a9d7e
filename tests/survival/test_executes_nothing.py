"""Nothing that the packages read can be executed."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGES = ("fathom_eval", "kernels", "reports", "sessions", "tasks")
FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve"}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {
    ("torch", "load"),
    ("os", "system"),
    ("os", "popen"),
    ("yaml", "load"),
    ("tarfile", "open"),
    ("shutil", "unpack_archive"),
}


def test_nothing_that_is_read_can_be_executed() -> None:
    root = Path(__file__).resolve().parents[2]
    found = [
        f"{file.relative_to(root)}:{node.lineno}: {problem}"
        for package in PACKAGES
        for file in sorted((root / package).rglob("*.py"))
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if (problem := _executes(node))
    ]
    assert not found, found


def _executes(node: ast.AST) -> str | None:
    if isinstance(node, ast.Import | ast.ImportFrom):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
        return next((f"imports {name}" for name in names if name.partition(".")[0] in FORBIDDEN_MODULES), None)
    if not isinstance(node, ast.Call):
        return None
    function = node.func
    if isinstance(function, ast.Name) and function.id in FORBIDDEN_CALLS:
        return f"calls {function.id}"
    if isinstance(function, ast.Attribute):
        holder = function.value.id if isinstance(function.value, ast.Name) else ""
        if (holder, function.attr) in FORBIDDEN_METHODS or function.attr in {"extractall", "extract"}:
            return f"calls {holder}.{function.attr}"
    for keyword in node.keywords:
        if (
            keyword.arg in {"trust_remote_code", "allow_pickle", "shell"}
            and isinstance(keyword.value, ast.Constant)
            and keyword.value.value
        ):
            return f"passes {keyword.arg}"
    return None


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from torch import load; torch.load(f)",
        "eval(text)",
        "np.load(f, allow_pickle=True)",
        "run(c, shell=True)",
        "z.extractall()",
    ],
)
def test_the_search_for_what_executes_finds_it(code: str) -> None:
    assert any(_executes(node) for node in ast.walk(ast.parse(code)))
