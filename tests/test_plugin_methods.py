"""The worked example of CONTRIBUTING.md, installed as another package would be."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from fathom_eval.branches import Branch
from fathom_eval.cli import main
from fathom_eval.decode import decode
from fathom_eval.errors import UserError, raised_at
from fathom_eval.methods import BUILT_IN, EVERY, MethodSpec, parse_method, parse_methods, plug_ins, registry
from fathom_eval.methods.possible import Impossible, Possible
from fathom_eval.methods.sparq import SparQ
from fathom_eval.prefill import prefill
from fathom_eval.run import Run
from fathom_eval.selection import Policy
from tests.key_layers import facts_of
from tests.test_possible import tiny_run
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
    assert plug_ins() == ("weighted_channels",)
    every = [spec.label for spec in parse_methods(",".join(EVERY))]
    assert [spec.label for spec in parse_methods("all")] == [*every, "weighted_channels r=D/8"]
    with pytest.raises(UserError, match=r"must lie in 1\.\.16"):
        parse_method("weighted_channels:r=17").check(tiny.facts, [60])


@pytest.mark.parametrize("command", ["fidelity", "ruler", "sessions"])
def test_it_appears_in_every_command(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FATHOM_EVAL_CACHE", str(tmp_path / "cache"))
    [code], [toml] = blocks("python"), blocks("toml")
    install(tmp_path, monkeypatch, code, next(line for line in toml.splitlines() if "=" in line).replace('"', ""))
    arguments = tiny_run(command, tmp_path)
    assert main([*arguments, "--k=64", "--methods=dense,exact,weighted_channels"]) == 0
    records = Run.load(tmp_path / "run").records()
    [record] = [record for record in records if record["method"] == "weighted_channels"]
    assert record["finish"] != "error"
    assert record["bits"] == 2 * 4.25
    assert "weighted_channels" in (tmp_path / "run" / "report" / "report.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("code", "entry", "message"),
    [
        ("Broken = 3\n", "none = your_package:Broken", r"'none' of group fathom_eval\.methods is not a subclass of Method"),
        ("from fathom_eval.methods.sparq import SparQ\n", "mine = your_package:SparQ", "'sparq', which exists already"),
        (
            "import no_such_module\n",
            "broken = your_package:Broken",
            r"plug-in 'broken' .*cannot be loaded: No module named 'no_such_module'",
        ),
        ("1 / 0\n", "divided = your_package:Broken", r"plug-in 'divided' .*cannot be loaded: division by zero"),
        ("raise SystemExit(3)\n", "ends = your_package:Broken", r"plug-in 'ends' .*cannot be loaded: 3"),
        (
            "from fathom_eval.methods.sparq import SparQ\nclass Mine(SparQ):\n    name = 'mi:ne'\n",
            "mine = your_package:Mine",
            "names a method 'mi:ne', which a list of methods cannot name",
        ),
    ],
)
def test_a_broken_entry_point_is_left_out_with_a_warning_and_an_error_where_it_is_named(
    code: str, entry: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, code, entry)
    assert set(registry()) == {method.name for method in BUILT_IN}
    said = capsys.readouterr().err
    assert re.fullmatch(rf"warning: .*{message}; it is left out\n", said)
    parse_method("sparq")
    assert not capsys.readouterr().err, "once is enough"
    with pytest.raises(UserError, match=message):
        parse_method(entry.split()[0])


MINE = (
    "from dataclasses import dataclass, field\nfrom fathom_eval.methods.sparq import SparQ\n"
    "@dataclass(frozen=True, kw_only=True)\nclass Mine(SparQ):\n    name = 'mine'\n    "
)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("need: int", "method 'mine' cannot be made: TypeError: .*'need'"),
        ("need: 'Nowhere' = 3", "method 'mine': its options failed: NameError: name 'Nowhere' is not defined"),
        ("need: list = field(default_factory=list)", "method 'mine': its hash failed: TypeError: unhashable type: 'list'"),
        ("def policy_defaults(self): return {'nowhere': 1}", "method 'mine': its policy_defaults failed: TypeError: .*'nowhere'"),
    ],
)
def test_a_plug_in_that_cannot_be_made_without_options_is_left_out_of_all(
    body: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(tmp_path, monkeypatch, f"{MINE}{body}\n", "mine = your_package:Mine")
    assert [spec.label for spec in parse_methods("all")] == [spec.label for spec in parse_methods(",".join(EVERY))]
    assert re.fullmatch(rf"warning: {message}.*; it is left out\n", capsys.readouterr().err)
    with pytest.raises(UserError, match=message):
        parse_methods("all,mine")
    assert main(["methods", "--json"]) == 0
    said = capsys.readouterr()
    assert re.search(message, said.err)
    assert "mine" not in json.loads(said.out)["all"]


def test_a_plug_in_whose_label_raises_is_left_out_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, f"{MINE}def label(self): raise KeyError('x')\n", "mine = your_package:Mine")
    possible, said = Possible([spec for spec in parse_methods("all") if spec.method.name in ("sparq", "mine")]), list[str]()
    possible.keep([60, 70], lambda spec, at: spec.check(facts_of(), at), said.append)
    assert {spec.method.name for spec in possible.specs} == {"sparq"}
    reason = "method 'mine': its label failed: KeyError: 'x'"
    assert possible.left_out == [Impossible("mine", None, reason)]
    assert said == [f"left out: {reason}"]


@pytest.mark.parametrize("hook", ["check", "observes", "store", "label", "line", "forced_tokens", "check_k"])
def test_what_a_method_raises_before_a_run_is_an_error_that_names_it(hook: str) -> None:
    def fail(self: Any, *args: Any) -> Any:
        raise KeyError("x")

    spec = MethodSpec(type("Failing", (SparQ,), {"name": "failing", hook: fail})(), Policy())
    with pytest.raises(UserError, match=r"method 'failing': its \w+ failed: KeyError: 'x'"):
        spec.check(facts_of(), [60])


def test_where_a_plug_in_raises_is_named_by_its_file_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "import json\n\n\ndef plan():\n    return json.loads('{')\n", "mine = your_package:plan")
    with pytest.raises(ValueError, match="Expecting") as caught:
        importlib.import_module("your_package").plan()
    assert raised_at(caught.value) == " (your_package.py, line 5)"
    assert raised_at(caught.value.with_traceback(None)) == ""
