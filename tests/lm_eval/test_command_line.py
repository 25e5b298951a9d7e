"""lm-eval's command line and entry point with the model and tasks of this package, and errors in one line."""

from __future__ import annotations

import shutil
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, entry_points
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval", reason="lm-eval is not installed: pip install 'fathom-eval[lm-eval]'")

from lm_eval.tasks import TaskManager

from fathom_eval.lm_eval import FathomLM, compat
from fathom_eval.lm_eval.__main__ import main, with_include_path
from fathom_eval.tasks.lm_eval import PATH


def test_the_entry_point_names_the_model() -> None:
    repository = Path(__file__).resolve().parents[2]
    if not (repository / "pyproject.toml").is_file():
        pytest.skip("needs the repository")
    project = tomllib.loads((repository / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = project["entry-points"]["lm_eval.models"]
    assert declared == {compat.MODEL_NAME: "fathom_eval.lm_eval:FathomLM"}
    for entry in entry_points(group="lm_eval.models", name=compat.MODEL_NAME):
        assert entry.load() is FathomLM


@pytest.mark.parametrize("installed", [None, "0.4.9.2"])
def test_a_missing_or_old_lm_eval_is_one_clear_line(
    installed: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(compat, "version", version)
    assert main() == 2
    what = "is not installed" if installed is None else "0.4.9.2 is too old"
    assert capsys.readouterr().err == f"error: lm-eval {what}: pip install 'fathom-eval[lm-eval]' (lm-eval 0.4.10 or newer)\n"


def test_the_command_line_has_the_tasks_of_this_package() -> None:
    ours = ["--include_path", str(PATH)]
    assert with_include_path(["run", "--tasks", "x"]) == ["run", "--tasks", "x", *ours]
    assert with_include_path(["--tasks", "x"]) == ["--tasks", "x", *ours]
    for untouched in (["--help"], ["run"], ["ls", "tasks"], ["run", "--include_path", "y"], ["--tasks", "x", "--include_path=y"]):
        assert with_include_path(untouched) == untouched


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("fathom_ruler_niah_singel", "unknown task 'fathom_ruler_niah_singel' in --tasks; did you mean 'fathom_ruler_niah_single'?"),
        ("mytsk,fathom_ruler_vt", "unknown task 'mytsk' in --tasks; did you mean 'mytask'?"),
        ("qqq,zzzz", "unknown tasks 'qqq', 'zzzz' in --tasks; 'lm_eval ls tasks' and 'lm_eval ls groups' list them"),
    ],
)
def test_an_unknown_task_is_one_clear_line(
    names: str, message: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def only_this_folder(include_path: Any = None, metadata: Any = None, **_: Any) -> TaskManager:
        return TaskManager(include_path=include_path, include_defaults=False, metadata=metadata)

    monkeypatch.setattr("lm_eval.__main__.setup_logging", lambda: None)
    monkeypatch.setattr("lm_eval.tasks.TaskManager", only_this_folder)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    folder = PATH
    if names.startswith("mytsk"):
        folder = tmp_path / "tasks"
        shutil.copytree(PATH, folder)
        (folder / "mine.yaml").write_text("task: mytask\ndataset_path: nothing\n", encoding="utf-8")
    given = ["--model", "fathom", "--model_args", f"pretrained={model},method=dense", "--include_path", str(folder)]
    monkeypatch.setattr(sys, "argv", ["lm_eval", "run", *given, "--tasks", names])
    assert main() == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"


def test_other_errors_of_lm_eval_stay_its_own() -> None:
    assert compat.unknown_tasks(ValueError("Tasks not found: a, b")) == ["a", "b"]
    assert compat.unknown_tasks(ValueError("Tasks not found: a. Try `lm-eval --tasks {list_groups}` to list them")) == ["a"]
    assert compat.unknown_tasks(ValueError("tasks cannot be empty")) == []


@pytest.mark.slow
@pytest.mark.parametrize("form", [["run"], []])
def test_the_command_line_of_lm_eval_runs_the_model(
    form: list[str], model: Path, haystack: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # lm-eval sets the logging of the process up, and sets a variable of the environment.
    monkeypatch.setattr("lm_eval.__main__.setup_logging", lambda: None)
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    metadata = f'{{"max_seq_lengths": [700], "haystack": "{haystack}"}}'
    given = ["--tasks", "fathom_ruler_niah_single", "--metadata", metadata, "--limit", "1", "--model", "fathom", "--model_args"]
    monkeypatch.setattr(sys, "argv", ["lm_eval", *form, *given, f"pretrained={model},method=fathom,budget=24,k=64"])
    assert main() == 0
    assert "|fathom_ruler_niah_single|" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["lm_eval", *form, *given, f"pretrained={model},method=fathom,buget=24,k=64"])
    assert main() == 2
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: unknown argument 'buget' in model_args")
