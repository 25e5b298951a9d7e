"""The worked example of CONTRIBUTING.md, installed as another package would be."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from fathom_eval.branches import Branch
from fathom_eval.cli import main
from fathom_eval.decode import decode
from fathom_eval.errors import UserError
from fathom_eval.methods import parse_method, registry
from fathom_eval.prefill import prefill
from tests.tiny import tiny_model

GUIDE = Path(__file__).parents[1] / "CONTRIBUTING.md"


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str, entry: str) -> None:
    """What pip would leave in site-packages: a module and the metadata that names its entry point."""
    (folder / "your_package.py").write_text(code, encoding="utf-8")
    metadata = folder / "your_package-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: your-package\nVersion: 1.0\n", encoding="utf-8")
    (metadata / "entry_points.txt").write_text(f"[fathom_eval.methods]\n{entry}\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "your_package", raising=False)


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_example_of_the_guide_runs_from_another_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    [code], [toml] = blocks("python"), blocks("toml")
    entry = next(line for line in toml.splitlines() if "=" in line).replace('"', "")
    install(tmp_path, monkeypatch, code, entry)
    assert "weighted_channels" in registry()
    assert main(["methods", "--head-dim", "64"]) == 0
    assert "weighted_channels" in capsys.readouterr().out

    tiny = tiny_model("llama", layers=2, query_heads=6, kv_heads=2, head_dim=16)
    spec = parse_method("weighted_channels:r=D/4:rerank=2")
    spec.check(tiny.facts, [60])
    prefix = prefill(tiny, list(range(2, 250)))
    [result] = decode(tiny, prefix, [Branch(spec, 60)], 5)
    assert result.bits == result.declared_bits == 4 * 4.25
    assert result.fired == result.steps * 2
    with pytest.raises(UserError, match=r"must lie in 1\.\.16"):
        parse_method("weighted_channels:r=17").check(tiny.facts, [60])


def test_an_entry_point_that_is_no_method_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "Broken = 3\n", "broken = your_package:Broken")
    with pytest.raises(UserError, match=r"'broken' of group fathom_eval\.methods is not a subclass of Method"):
        registry()


def test_an_entry_point_cannot_replace_a_built_in_method(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "from fathom_eval.methods.sparq import SparQ\n", "mine = your_package:SparQ")
    with pytest.raises(UserError, match="'sparq', which exists already"):
        registry()


def test_an_entry_point_that_cannot_be_loaded_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "import no_such_module\n", "broken = your_package:Broken")
    with pytest.raises(UserError, match=r"plug-in 'broken' .*cannot be loaded: No module named 'no_such_module'"):
        registry()
