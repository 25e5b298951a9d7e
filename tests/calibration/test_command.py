"""The calibrate command, and the trajectories that it takes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fathom_eval import cli
from fathom_eval.calibrate import TokenSource, trajectory_source
from fathom_eval.calibration_file import calibration_path, load_calibration
from fathom_eval.errors import UserError
from fathom_eval.models import LoadedModel
from fathom_eval.run import Run
from fathom_eval.sessions import builtin
from fathom_eval.tasks import haystack
from tests.calibration.made import prose
from tests.tiny import save_tiny


@pytest.fixture
def arguments(tmp_path: Path) -> Callable[..., list[str]]:
    model = save_tiny(tmp_path / "model", layers=2, query_heads=4, kv_heads=2, head_dim=16, max_positions=2048)
    text = tmp_path / "prose.txt"
    text.write_text(prose(150).text, encoding="utf-8")

    def build(*flags: str, **changes: Any) -> list[str]:
        options = {"model": model, "text": text, "tokens": 600, "context": 300, "name": "prose", **changes}
        given = [f"--{name.replace('_', '-')}={value}" for name, value in options.items() if value is not None]
        return ["calibrate", "--offline", *given, *flags]

    return build


def test_the_command_saves_what_methods_take_by_name(
    arguments: Callable[..., list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = {"plan": "48,64", "plan_context": 400, "plan_k": 64, "plan_positions": 8}
    assert cli.main(arguments("--json", **plan)) == 0
    document = json.loads(capsys.readouterr().out)
    made = document["provenance"]
    assert (made["tokens"], made["context"], made["text"], made["model"]) == (600, 300, "file", "model")
    assert made["plan"]["context"] == 400
    assert sum(document["plans"]["64"]) == 128
    assert str(tmp_path) not in json.dumps(made)

    assert cli.main(arguments()) == 2
    assert "exists: give another --name or --output, or --overwrite" in capsys.readouterr().err
    assert cli.main(arguments("--overwrite", **plan)) == 0
    assert load_calibration(calibration_path("prose")).sha256 == document["sha256"], "the same input gives the same content"
    assert cli.main(["calibrate", "--list"]) == 0
    shown = capsys.readouterr().out
    assert f"prose@{document['sha256'][:12]}" in shown
    assert "prose.txt" in shown, "a text is known by the name of its file"
    torn = calibration_path("torn")
    torn.write_bytes(calibration_path("prose").read_bytes()[:500])
    assert cli.main(["calibrate", "--list"]) == 0
    assert re.search(r"^torn +unreadable", capsys.readouterr().out, re.MULTILINE)
    assert cli.main(["calibrate", "--list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["name"] for one in listed["calibrations"]] == ["prose"]
    assert [one["name"] for one in listed["unreadable"]] == ["torn"]
    torn.unlink()

    run = tmp_path / "run"
    methods = "fathom,fathom:statistics=prose,fathom:layer_plan=prose,loki:statistics=prose"
    fidelity = ["fidelity", "--offline", f"--model={tmp_path / 'model'}", f"--haystack={tmp_path / 'prose.txt'}", "--context=300", "--k=64"]
    assert cli.main([*fidelity, f"--methods={methods}", "--windows=1", "--positions=4", f"--output={run}"]) == 0
    error = capsys.readouterr().err
    assert "was made on the text that is evaluated" in error
    records = Run.load(run).records()
    assert all(record["finish"] == "complete" for record in records)
    assert len({record["error_dense"] for record in records}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"plan": "20"}, "--plan 20 must lie in 24..128"),
        ({"plan": "48", "plan_k": 300}, "--plan-k 300 is no selection from 300 tokens"),
        ({"plan": "48", "plan_k": 30}, "must be above sink"),
        ({"plan": "48", "plan_positions": 200}, "must be at most half of the window"),
        ({"plan_basis": "kl"}, "did you mean 'klt'"),
        ({"tokens": 200}, "--tokens 200 is less than a window"),
        ({"name": "a:b"}, "'a:b' cannot name a calibration"),
        ({"name": None, "output": "x.pt"}, "must end in .safetensors"),
        ({"repo": "a/b"}, "go with --trajectories"),
        ({"text": None, "dtype": "int8"}, "unknown dtype 'int8'"),
        ({"text": None, "device": "tpu"}, "unknown device 'tpu'"),
        ({"text": None, "rope_scaling": "foo:4"}, "unknown rope scaling 'foo:4'"),
        ({"trajectories": "builtin"}, "give one of them"),
        ({"tokens": 90000}, "tokens, 90,000 are needed|tokens, 89,"),
        ({"context": 4000, "tokens": 4000}, "exceeds the 2048 positions"),
    ],
)
def test_bad_arguments_are_told_in_one_line(
    arguments: Callable[..., list[str]],
    changes: dict[str, Any],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(haystack, "_automatic", lambda *_: pytest.fail("a text was looked for first"))
    assert cli.main(arguments("--quiet", **changes)) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error), error


def test_what_needs_no_model_is_told_before_torch_is_imported(tmp_path: Path) -> None:
    commands = {
        "--tokens 0": "--tokens 0 must be at least 1",
        "--name a/b": "'a/b' cannot name a calibration",
        f"--text {tmp_path}/missing.txt": f"haystack file '{tmp_path}/missing.txt' does not exist",
        "--plan-basis kl": "unknown --plan-basis 'kl'",
        "--model /no/such/model": "there is no model folder or file",
    }
    program = "import sys; from fathom_eval.cli import main; codes = [main(['calibrate', *line.split()]) for line in sys.argv[1:]]"
    told = subprocess.run(
        [sys.executable, "-c", f"{program}; print(set(codes), 'torch' in sys.modules)", *commands],
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "{2} False\n"
    for line, said in zip(told.stderr.splitlines(), commands.values(), strict=True):
        assert line.startswith(f"error: {said}")


def test_trajectories_of_chosen_repositories(tiny: LoadedModel) -> None:
    def source(**options: Any) -> TokenSource:
        return trajectory_source(tiny.tokenizer, str(builtin.PATH), 10**9, name="built-in", **options)

    whole = source()
    assert len(whole.repositories) == 3
    left = source(exclude=[whole.repositories[0]])
    assert left.repositories == whole.repositories[1:]
    only = source(repo=whole.repositories[0])
    assert only.repositories == whole.repositories[:1]
    assert len(only.ids) + len(left.ids) == len(whole.ids)
    assert len({whole.sha256, left.sha256, only.sha256}) == 3
    few = trajectory_source(tiny.tokenizer, str(builtin.PATH), 1, name="built-in")
    assert len(few.repositories) == 1
    three = trajectory_source(tiny.tokenizer, str(builtin.PATH), len(whole.ids) // 4, name="built-in")
    assert three.repositories == whole.repositories, "repositories take turns"
    assert len(three.ids) < len(whole.ids) // 2
    with pytest.raises(UserError, match="all are of repositories that were left out"):
        source(exclude=whole.repositories)
