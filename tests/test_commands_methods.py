"""``fathom-eval methods NAME``, and what stands between the commas of ``--methods``."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fathom_eval.cli import main
from fathom_eval.commands.methods import _described
from fathom_eval.errors import UserError
from fathom_eval.methods import BUILT_IN, parse_method, parse_methods, plug_in_problems
from tests.test_plugin_methods import MINE, install


def test_a_named_method_is_shown_with_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "fathom"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[:2] == [
        "fathom budget=48 basis=auto",
        "Reverse water-filling of a bit budget over the channels of a bit-plane store (paper §3).",
    ]
    for words in ("source: Fathom (", "at head_dim 128: 48 + scales", "    basis: auto, raw, klt (default: auto)", "layer_plan: text"):
        assert words in text
    assert lines[lines.index("    scales: fp16, fp8 (default: fp16)") + 1].strip().startswith("fp16, or fp8, which takes 8")
    assert "    dense_layers: whole numbers, as in 0+1, or none (default: none)" in lines
    assert "sparq" not in text
    assert "``" not in text
    assert ":class:" not in text


def test_options_that_are_given_show_and_count(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "sparq:r=D/4:rerank=2", "--head-dim", "64"]) == 0
    text = capsys.readouterr().out
    assert "head_dim 64: 68" in text
    assert "r: text (default: D/8; here D/4)" in text
    assert "rerank: a number (default: 1.0; here 2.0)" in text


def test_the_document_of_one_method(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", "quest_published", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["name"], document["bits"], document["published"]) == ("quest_published", "256", True)
    assert document["options"]["page"] == {
        "type": "a whole number",
        "default": "16",
        "value": "16",
        "meaning": "Tokens a page; divides 64, and head_dim where the bounds are coded.",
    }
    assert document["common_options"]["dense_layers"]["default"] == "0+1", "its own default, not the protocol's"


@pytest.mark.parametrize("name", [method.name for method in BUILT_IN])
def test_every_option_says_what_it_does(name: str) -> None:
    spec = parse_method(name)
    for part in (spec.method, spec.policy):
        for option, described in _described(part, {}).items():
            assert described["meaning"], f"{name}: {option}"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sprq", "unknown method 'sprq'; did you mean 'sparq'?"),
        ("stream", "unknown method 'stream'; did you mean 'streaming_llm'?"),
        ("all", "'all' is a list of methods: name one of them"),
        ("sparq,quest", "'sparq,quest' is a list of methods: name one of them"),
        ("sparq:s=3", "method 'sparq' has no option 's'"),
    ],
)
def test_a_method_that_is_none(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["methods", name]) == 2
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.startswith(f"error: {message}")


def test_nothing_between_two_commas_is_no_method() -> None:
    assert parse_methods("fathom,, sparq,") == parse_methods("fathom,sparq")
    with pytest.raises(UserError, match="the list of methods is empty"):
        parse_methods(", ,")


def test_doctor_tells_of_plug_ins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert plug_in_problems() == {}
    install(tmp_path, monkeypatch, f"{MINE}pass\n", "mine = your_package:Mine\nbroken = your_package:Absent")
    main(["doctor", "--offline"])
    lines = capsys.readouterr().out.splitlines()
    assert "plug-in       mine: can be used" in lines
    [broken] = [line for line in lines if line.startswith("plug-in       broken")]
    assert re.search(r"left out of every run: the method plug-in 'broken' .* cannot be loaded: .*Absent", broken)
    main(["doctor", "--offline", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert list(report["plug_ins"]) == ["broken", "mine"] or list(report["plug_ins"]) == ["mine", "broken"]
    assert report["plug_ins"]["mine"] == ""
    assert not any("plug-in" in line for line in report["missing"]), "other methods run"


def test_doctor_tells_of_a_plug_in_that_cannot_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, f"{MINE}need: int\n", "mine = your_package:Mine")
    assert re.match("method 'mine' cannot be made: TypeError", plug_in_problems()["mine"])
